"""The state of one request that asked for something, from its admission to its end.

Owns what was gathered and not yet sent, what failed and why, and the gates. ``routing`` says what a step gathers,
``readouts`` turns it into parts of readouts that are kept here.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from guard.mia.results import (
    AttentionReadout,
    AttentionRowsReadout,
    FloatArray,
    ProbeReadout,
    Readout,
    SteeringReport,
)
from guard.mia.spec import Capture, MiaSpec, generates

KEY_BLOCK_TOKENS = 256
"""Keys of generated tokens are made room for in steps of so many."""


@dataclass
class KeyStore:
    """Keys of one request, gathered chunk by chunk.

    keys[layer]: ``[room, key_heads, head_size]`` float32, host; ``filled`` counts the tokens from the start without a
    gap.
    """

    keys: dict[int, torch.Tensor]
    filled: int = 0

    @property
    def room(self) -> int:
        return next((len(keys) for keys in self.keys.values()), 0)

    @property
    def size_bytes(self) -> int:
        return sum(keys.nbytes for keys in self.keys.values())

    def grow(self, tokens: int) -> None:
        for layer, keys in self.keys.items():
            grown = keys.new_empty(len(keys) + tokens, *keys.shape[1:])
            grown[: len(keys)] = keys
            self.keys[layer] = grown


@dataclass
class AttentionSum:
    """Attention from several tokens, added up: ``mass[span]`` ``[heads]``, weights ``[heads, prompt tokens]``."""

    positions: list[int] = field(default_factory=list)
    mass: dict[str, FloatArray] = field(default_factory=dict)
    weights: FloatArray | None = None


@dataclass
class Tracked:
    """One request that asked for something.

    ``seen``: its tokens below this one have been through the taps, so that a re-computation after preemption delivers
    nothing twice. ``keys`` is None when it reads no attention, or there was no space. ``parts``: what was gathered and
    not yet sent, by capture; ``sums``: the same of attention that is averaged. ``sent_keys``: keys already sent, by
    capture. ``failed``: captures that cannot become complete any more, and why; ``told``: those among them that go on
    through the answer and whose failure was sent.
    """

    spec: MiaSpec
    prompt_len: int
    captures: dict[str, Capture]
    keys: KeyStore | None = None
    reserved_bytes: int = 0
    seen: int = 0
    parts: dict[str, list[Readout]] = field(default_factory=lambda: defaultdict(list))
    sums: dict[str, AttentionSum] = field(default_factory=lambda: defaultdict(AttentionSum))
    sent_keys: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    failed: dict[str, str] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)
    steering: list[SteeringReport] = field(default_factory=list)

    @classmethod
    def start(cls, spec: MiaSpec, prompt_len: int) -> Tracked:
        return cls(spec, prompt_len, spec.captures, steering=[SteeringReport() for _ in spec.steer])

    @property
    def needs_keys_to_the_end(self) -> bool:
        return any(generates(self.captures[name]) for name in (*self.spec.attention, *self.spec.qk))

    def fail(self, capture: str, reason: str) -> None:
        """A capture cannot become complete any more, and neither can what waits for it."""
        self.failed.setdefault(capture, reason)
        self.parts.pop(capture, None)
        self.sums.pop(capture, None)
        for i, steer in enumerate(self.spec.steer):
            if steer.gate is not None and steer.gate.readout == capture and self.steering[i].opened_at is None:
                self.steering[i] = replace(self.steering[i], reason=f"readout {capture!r}: {reason}")

    def judge_gates(self, capture: str, part: Readout, next_token: int) -> None:
        """Open the gates that the new rows of a capture cross; steering may then act from ``next_token`` on."""
        for i, steer in enumerate(self.spec.steer):
            gate = steer.gate
            if gate is None or gate.readout != capture or self.steering[i].opened_at is not None:
                continue
            values = gate_values(part, gate.span)
            if any(gate.opens(float(value)) for value in values):
                opened_at = max(next_token, self.prompt_len)
                self.steering[i] = replace(self.steering[i], opened_at=opened_at)


def gate_values(part: Readout, span: str | None) -> FloatArray:
    """One value a row: a probe's first logit, or the mean over heads of the attention mass on a span."""
    if isinstance(part, ProbeReadout) and part.logits is not None:
        return part.logits[:, 0]
    assert isinstance(part, AttentionReadout | AttentionRowsReadout)
    assert span is not None
    means: FloatArray = np.atleast_2d(part.mass[span]).mean(axis=1)
    return means
