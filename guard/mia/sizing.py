"""What an engine's taps take of memory: from the taps, the model's sizes and what a step can hold, before anything is
allocated.

Owns the formulas and their words, which the engine's start log and ``guard doctor`` share. Pure arithmetic: loads
neither torch nor vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from guard.mia.engine_config import EngineConfig
from guard.mia.spec import MAX_VECTORS_PER_LAYER

GATES_PER_REQUEST = 4
"""Gates that there is room for, for each request that a step can hold."""

WORD_BYTES = 4
"""Of an entry's words, and of a dose, a gate and a sum."""

HEADER_WORDS, GATHER_WORDS, STEER_ROW_WORDS, STEER_PASS_WORDS = 2, 2, 3, 8
"""Words that the control block has for a tap, a copied row, a steered row and one vector on it: those of ``ops``."""

REMEDIES = {
    "hidden-state taps": 'lower max_hidden_rows_per_step, or without it vLLM\'s --max-num-seqs, with "tokens" its '
    "--max-num-batched-tokens, or tap fewer layers",
    "attention taps": 'lower max_query_rows_per_step, or without it vLLM\'s --max-num-seqs, with "tokens" its '
    "--max-num-batched-tokens, or tap fewer heads",
    "keys": "lower vLLM's --max-num-batched-tokens, or tap heads in fewer layers",
    "steering taps": "lower vLLM's --max-num-batched-tokens, or steer at fewer layers",
    "steering vectors": "lower max_steering_vectors, or name fewer steering_vectors",
    "gates": "lower vLLM's --max-num-seqs",
}
"""By what device memory is for: the settings that it follows from."""


class BuffersTooLargeError(ValueError):
    """The taps' buffers do not fit; the message names the setting to lower."""


@dataclass(frozen=True)
class StepLimits:
    """What one engine step can hold: requests and tokens."""

    requests: int
    tokens: int


@dataclass(frozen=True)
class LayerHeads:
    """One layer's attention on one rank. ``tapped``: query heads that requests may read."""

    tapped: int
    key_heads: int
    head_size: int

    @property
    def key_width(self) -> int:
        """Elements of one token's keys."""
        return self.key_heads * self.head_size


@dataclass(frozen=True)
class Sizing:
    """One rank's buffers. ``element_bytes``: of the model's dtype. ``heads``: by layer with attention taps.

    ``gathers_keys``: keys pass taps, where they are not read from vLLM's cache. Slots are rows of the two pools, which
    the taps of a kind share: rows of the stream for hidden-state taps, queries of one head for attention taps.
    """

    config: EngineConfig
    limits: StepLimits
    hidden_size: int
    element_bytes: int
    heads: Mapping[int, LayerHeads]
    gathers_keys: bool

    @property
    def hidden_slots(self) -> int:
        return self._rows(self.config.max_hidden_rows_per_step) * len(self.config.tapped_layers)

    @property
    def query_slots(self) -> int:
        return self._rows(self.config.max_query_rows_per_step) * self._tapped_heads

    @property
    def query_width(self) -> int:
        """Elements of a query's slot: of the largest head."""
        return max((layer.head_size for layer in self.heads.values()), default=1)

    @property
    def key_rows(self) -> int:
        return self.limits.tokens * len(self.heads) if self.gathers_keys else 0

    @property
    def steered_rows(self) -> int:
        return self.limits.tokens * len(self.config.steering_layers)

    @property
    def doses(self) -> int:
        return self.steered_rows * MAX_VECTORS_PER_LAYER

    @property
    def gates(self) -> int:
        return GATES_PER_REQUEST * self.limits.requests

    @property
    def taps(self) -> int:
        """Numbers in the control block; those of key taps are there without key taps, too."""
        return len(self.config.tapped_layers) + 2 * len(self.heads) + len(self.config.steering_layers)

    @property
    def entry_words(self) -> int:
        """Of the control block, behind its header."""
        gathered = GATHER_WORDS * (self.hidden_slots + self.query_slots + self.key_rows)
        return gathered + self.steered_rows * (STEER_ROW_WORDS + MAX_VECTORS_PER_LAYER * STEER_PASS_WORDS)

    @property
    def device_bytes(self) -> dict[str, int]:
        """By what it is for, the entries of each kind of tap with it."""
        keys = sum(self._key_row_bytes(layer) for layer in self.heads.values()) * self.limits.tokens
        return {
            "hidden-state taps": self.hidden_slots * self._hidden_slot_bytes,
            "attention taps": self.query_slots * self._query_slot_bytes,
            "keys": keys if self.gathers_keys else 0,
            "steering taps": self.steered_rows * self._steered_row_bytes,
            "steering vectors": self.vector_bytes,
            # With the limit of the dose, and the control block's header.
            "gates": WORD_BYTES * (2 * self.gates + 1 + HEADER_WORDS * self.taps),
        }

    @property
    def vector_bytes(self) -> int:
        """The bank: float32."""
        return self.config.bank_capacity * self.hidden_size * 4

    @property
    def tap_bytes(self) -> dict[str, int]:
        """What one tap of each kind takes of ``device_bytes``; of attention and keys the largest layer's."""
        heads = max((layer.tapped for layer in self.heads.values()), default=0)
        queries = self._rows(self.config.max_query_rows_per_step) * heads * self._query_slot_bytes
        keys = max((self._key_row_bytes(layer) for layer in self.heads.values()), default=0)
        return {
            "hidden-state tap": self.hidden_slots * self._hidden_slot_bytes // max(1, len(self.config.tapped_layers)),
            "attention tap of a layer": queries + (keys * self.limits.tokens if self.gathers_keys else 0),
            "steering tap": self.limits.tokens * self._steered_row_bytes if self.config.steering_layers else 0,
        }

    @property
    def request_bytes(self) -> int:
        """Of ``device_bytes`` what one request takes in a step in which it is read at every tap, from one token."""
        read = len(self.config.tapped_layers) * self._hidden_slot_bytes + self._tapped_heads * self._query_slot_bytes
        return read + GATES_PER_REQUEST * 2 * WORD_BYTES

    @property
    def shared_bytes(self) -> int:
        """Host memory, pinned on CUDA: the ring through which rows reach the API server. One rank has it."""
        return self.config.max_shared_bytes if self.config.hidden_layers else 0

    @property
    def shared_token_bytes(self) -> int:
        """What one token that is read at all layers takes of the ring."""
        return len(set(self.config.hidden_layers)) * self.hidden_size * self.element_bytes

    @property
    def shared_step_bytes(self) -> int:
        """Most that one step puts into the ring."""
        return self.hidden_slots * self.hidden_size * self.element_bytes if self.config.hidden_layers else 0

    @property
    def key_token_bytes(self) -> int:
        """Host memory of the keys of one token, as long as attention from later ones may be asked for: float32."""
        return sum(4 * layer.key_width for layer in self.heads.values()) if self.gathers_keys else 0

    @property
    def device_text(self) -> str:
        parts = ", ".join(f"{name} {in_units(size)}" for name, size in self.device_bytes.items() if size)
        return f"{in_units(sum(self.device_bytes.values()))} on the device ({parts})"

    @property
    def taps_text(self) -> str:
        return ", ".join(f"one {name} {in_units(size)}" for name, size in self.tap_bytes.items() if size) or "no taps"

    @property
    def host_text(self) -> str:
        return (
            f"{in_units(self.shared_bytes)} shared with the API server (max_shared_bytes), up to "
            f"{in_units(self.config.max_host_bytes)} for what is gathered (max_host_bytes)"
        )

    @property
    def request_text(self) -> str:
        text = f"{in_units(self.request_bytes)} on the device for a token read at every tap"
        if self.shared_token_bytes:
            text += f", {in_units(self.shared_token_bytes)} shared for each token whose hidden states it reads"
        if self.key_token_bytes:
            text += f", {in_units(self.key_token_bytes)} on the host for the keys of each token"
        return text

    def check_device(self, available_bytes: int, taken_bytes: int = 0) -> None:
        """Raise ``BuffersTooLargeError`` where they need more than there is.

        ``taken_bytes``: of them, what is allocated already and so missing in ``available_bytes``.
        """
        needed = sum(self.device_bytes.values()) - taken_bytes
        if needed > available_bytes:
            largest = max(self.device_bytes, key=lambda name: self.device_bytes[name])
            raise BuffersTooLargeError(
                f"mia's taps need {in_units(needed)} on the device, where {in_units(available_bytes)} are free; "
                f"{in_units(self.device_bytes[largest])} are {largest}: {REMEDIES[largest]}"
            )

    def check_host(self, available_bytes: int) -> None:
        """Raise ``BuffersTooLargeError`` where the shared memory alone is more than there is."""
        if self.shared_bytes > available_bytes:
            raise BuffersTooLargeError(
                f"mia shares {in_units(self.shared_bytes)} of host memory with the API server, where "
                f"{in_units(available_bytes)} are free: lower max_shared_bytes"
            )

    def _rows(self, asked: int | Literal["tokens"] | None) -> int:
        """Of one step, for one layer or head."""
        return self.limits.tokens if asked == "tokens" else asked or self.limits.requests

    @property
    def _tapped_heads(self) -> int:
        return sum(layer.tapped for layer in self.heads.values())

    @property
    def _hidden_slot_bytes(self) -> int:
        return self.hidden_size * self.element_bytes + GATHER_WORDS * WORD_BYTES

    @property
    def _query_slot_bytes(self) -> int:
        return self.query_width * self.element_bytes + GATHER_WORDS * WORD_BYTES

    @property
    def _steered_row_bytes(self) -> int:
        passes = MAX_VECTORS_PER_LAYER * (STEER_PASS_WORDS + 1)
        return WORD_BYTES * (STEER_ROW_WORDS + passes)

    def _key_row_bytes(self, layer: LayerHeads) -> int:
        return layer.key_width * self.element_bytes + GATHER_WORDS * WORD_BYTES


def in_units(size_bytes: int) -> str:
    """Bytes for a person: three digits and a unit of 1024."""
    power = 3 if size_bytes >= 1000 * 2**20 else 2 if size_bytes >= 1000 * 2**10 else 1 if size_bytes >= 1000 else 0
    size, unit = size_bytes / 1024**power, ("B", "KiB", "MiB", "GiB")[power]
    return f"{size:.0f} {unit}" if size >= 100 else f"{size:.3g} {unit}"
