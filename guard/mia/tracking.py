"""The state of one request that asked for something, from its admission to its end, as far as routing needs it.

Owns what of it has been through the taps, what failed and why, its keys where they are gathered, and its gates.
``routing`` says what a step gathers; what comes of it is ``assembly``'s.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch

from guard.mia.spec import AttentionCapture, Capture, MiaSpec, QKCapture, generates
from guard.mia.windows import ENDLESS, intervals, reach

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
class Tracked:
    """One request that asked for something.

    ``seen``: its tokens below this one have been through the taps, so that a re-computation after preemption delivers
    nothing twice. ``keys`` is None when it gathers none. ``gates``: place in ``opened_at`` by steering. ``failed``:
    captures that cannot become complete any more, and why; ``shut``: the same of steerings whose gate cannot open.
    ``judged``: steerings whose gate has seen a part of an averaged readout. ``intervals``: what each capture reads, and
    ``reaches``: what each steering may change, see ``windows``. ``with_heads``: captures of attention, queries and
    keys. ``edges``: tokens from which on other captures or steerings act than before, in order.
    """

    spec: MiaSpec
    prompt_len: int
    captures: dict[str, Capture]
    keys: KeyStore | None = None
    reserved_bytes: int = 0
    seen: int = 0
    sent_keys: dict[str, int] = field(default_factory=dict)
    gates: dict[int, int] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    shut: dict[int, str] = field(default_factory=dict)
    judged: set[int] = field(default_factory=set)
    intervals: dict[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    reaches: tuple[tuple[tuple[int, int], ...], ...] = ()
    with_heads: dict[str, AttentionCapture | QKCapture] = field(default_factory=dict)
    edges: tuple[int, ...] = ()

    @classmethod
    def start(cls, spec: MiaSpec, prompt_len: int) -> Tracked:
        captures = spec.captures
        read = {name: tuple(intervals(capture, spec, prompt_len)) for name, capture in captures.items()}
        reaches = tuple(
            tuple((window.start, window.end) for window in reach(steer, prompt_len)) for steer in spec.steer
        )
        edges = {edge for pairs in (*read.values(), *reaches) for pair in pairs for edge in pair}
        return cls(
            spec,
            prompt_len,
            captures,
            intervals=read,
            reaches=reaches,
            with_heads={**spec.attention, **spec.qk},
            edges=tuple(sorted({prompt_len, *edges})),
        )

    @cached_property
    def needs_keys_until(self) -> int:
        """The token from which on no more keys are needed; 0 where none of generated tokens are."""
        grown = [name for name, capture in self.with_heads.items() if generates(capture)]
        return max((end for name in grown for _, end in self.intervals[name]), default=0)

    def is_over(self, position: int) -> bool:
        """Whether nothing is read or steered from ``position`` on."""
        return position >= self.edges[-1]

    def next_edge(self, position: int) -> int:
        """The first edge from ``position`` on."""
        return next((edge for edge in self.edges if edge >= position), ENDLESS)
