"""The control block: what the taps shall do in one step, in one tensor at one address.

Owns the layout: a header with the begin and the number of each tap's entries, then the entries, in the words that
``ops`` reads. Written on the host, sent to the device with one copy, and only when something has changed. Captured
graphs read it when they are replayed, so nothing else may depend on a step.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

Words = npt.NDArray[np.int32]

BLOCKS_IN_TURN = 4
"""Pinned blocks on the host: more than steps that the device can be behind, so that none is waited for."""

OWNER_ATTRIBUTE = "mia_control"
"""Name under which a control block's tensor keeps its ``Control``, for kernels that are handed the tensor alone."""


def bits(values: npt.NDArray[np.float32]) -> Words:
    """float32 as the words that hold them."""
    return values.view(np.int32)


class _Block:
    """One step's words on the host. ``sent`` has passed once the device has read them."""

    def __init__(self, words: int, *, on_cuda: bool) -> None:
        self.tensor = torch.zeros(words, dtype=torch.int32, pin_memory=on_cuda)
        self.words: Words = self.tensor.numpy()
        self.sent = torch.cuda.Event() if on_cuda else None  # type: ignore[no-untyped-call]


class Control:
    """tensor: ``[capacity]`` int32 on the model's device; words ``2 t`` and ``2 t + 1`` are tap t's begin and count.
    ``entry_words``: room behind the header. ``acts``: whether the one on the device may have any entry. ``serves``:
    whether forward passes are of requests, and not of vLLM's warm-up, in which every kernel has to be compiled."""

    def __init__(self, taps: int, entry_words: int, device: torch.device) -> None:
        self._header = 2 * taps
        self.entry_words = entry_words
        self.tensor = torch.zeros(self._header + entry_words, dtype=torch.int32, device=device)
        on_cuda = device.type == "cuda"
        self._blocks = [_Block(len(self.tensor), on_cuda=on_cuda) for _ in range(BLOCKS_IN_TURN if on_cuda else 1)]
        self._turn = 0
        self._words = self._blocks[0].words
        self._used = self._header
        self.acts = False
        self.serves = False
        if on_cuda:
            setattr(self.tensor, OWNER_ATTRIBUTE, self)

    def begin(self) -> None:
        """Start a step's entries."""
        self._turn = (self._turn + 1) % len(self._blocks)
        block = self._blocks[self._turn]
        if block.sent is not None:
            block.sent.synchronize()
        self._words = block.words
        self._words[: self._header] = 0
        self._used = self._header

    def append(self, words: Words) -> int:
        """Put words that entries refer to; returns where they begin."""
        begin = self._used
        self._used += words.size
        self._words[begin : self._used] = words.reshape(-1)
        return begin

    def put(self, tap: int, entries: Words) -> None:
        """entries: ``[count, words of one]``."""
        self._words[2 * tap : 2 * tap + 2] = self.append(entries), len(entries)

    def upload(self) -> None:
        """In the order of the device's stream, and without waiting for it."""
        block = self._blocks[self._turn]
        self.tensor[: self._used].copy_(block.tensor[: self._used], non_blocking=True)
        if block.sent is not None:
            block.sent.record()
        self.acts = True

    def clear(self) -> None:
        """No tap does anything until the next ``upload``."""
        if self.acts:
            self.begin()
            self.upload()
            self.acts = False

    def spares(self, tap: int) -> bool:
        """Whether the forward pass under way can do without a launch for the tap."""
        return self.serves and not self._words[2 * tap + 1]


def spared(control: torch.Tensor, tap: int) -> bool:
    """Whether a kernel need not be launched, since the host knows that it would find no entry. One that is being
    captured must be: it is replayed in steps that have some."""
    owner: Control | None = getattr(control, OWNER_ATTRIBUTE, None)
    return owner is not None and owner.spares(tap) and not torch.cuda.is_current_stream_capturing()
