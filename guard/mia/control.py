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


def send(values: npt.NDArray[np.generic], to: torch.Tensor) -> None:
    """Copy to a tensor of the same size on any device, in the order of its stream and without waiting for it."""
    source = torch.from_numpy(values)
    # The allocator of pinned memory keeps the source until the copy has been made.
    to.copy_(source.pin_memory() if to.is_cuda else source, non_blocking=True)


def bits(values: npt.NDArray[np.float32]) -> Words:
    """float32 as the words that hold them."""
    return values.view(np.int32)


class Control:
    """tensor: ``[capacity]`` int32 on the model's device; words ``2 t`` and ``2 t + 1`` are tap t's begin and count.
    ``entry_words``: room behind the header. ``acts``: whether the one on the device may have any entry."""

    def __init__(self, taps: int, entry_words: int, device: torch.device) -> None:
        self._header = 2 * taps
        self.entry_words = entry_words
        self.tensor = torch.zeros(self._header + entry_words, dtype=torch.int32, device=device)
        self._host = np.zeros(len(self.tensor), np.int32)
        self._used = self._header
        self.acts = False

    def begin(self) -> None:
        """Start a step's entries."""
        self._host[: self._header] = 0
        self._used = self._header

    def append(self, words: Words) -> int:
        """Put words that entries refer to; returns where they begin."""
        begin = self._used
        self._used += words.size
        self._host[begin : self._used] = words.reshape(-1)
        return begin

    def put(self, tap: int, entries: Words) -> None:
        """entries: ``[count, words of one]``."""
        self._host[2 * tap : 2 * tap + 2] = self.append(entries), len(entries)

    def upload(self) -> None:
        send(self._host[: self._used], self.tensor[: self._used])
        self.acts = True

    def clear(self) -> None:
        """No tap does anything until the next ``upload``."""
        if self.acts:
            self.begin()
            self.upload()
            self.acts = False
