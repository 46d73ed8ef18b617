"""Rows of the residual stream on their way from the worker to the front end: a ring in memory that both have mapped.

A step's rows are copied from the device straight into it, and the front end takes them out when it is told where they
are: in between nobody touches them. The memory has no name in any file system; the front end finds it through the
worker's open files, so it is gone when the worker is, however that ends. Never touches vLLM.
"""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from guard.mia.step_reading import RingRows

ALIGNMENT_BYTES = 64


class OverwrittenError(RuntimeError):
    """Rows were read so late that others have taken their place."""


@dataclass(frozen=True)
class Slab:
    """One step's rows in a ring. ``begin``: in bytes since the ring was made."""

    path: str
    dtype: str
    width: int
    row_bytes: int
    begin: int

    def segment(self, first: int, count: int) -> tuple[int, int]:
        """Where ``count`` of its rows begin."""
        return self.begin + first * self.row_bytes, count


class RowRing:
    """The worker's end. The first bytes hold how many bytes were ever handed out, then comes the ring itself."""

    def __init__(self, capacity_bytes: int, width: int, dtype: torch.dtype, *, pinned: bool) -> None:
        self._capacity = capacity_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        self._row_bytes = width * dtype.itemsize
        self._width = width
        self._dtype = dtype
        self._file = os.memfd_create("mia-rows")
        os.ftruncate(self._file, ALIGNMENT_BYTES + self._capacity)
        self._memory = mmap.mmap(self._file, ALIGNMENT_BYTES + self._capacity)
        whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        if pinned:
            _pin(whole)
        self._head = np.frombuffer(self._memory, np.uint64, 1)
        self._bytes = whole[ALIGNMENT_BYTES:]
        self._path = f"/proc/{os.getpid()}/fd/{self._file}#{os.fstat(self._file).st_ino}"
        weakref.finalize(self, _release, self._file, whole.data_ptr() if pinned else None)

    def put(self, rows: torch.Tensor) -> Slab | None:
        """Copy rows ``[n, width]`` in, complete once the stream has got there; None when the ring cannot hold them."""
        size = rows.numel() * self._dtype.itemsize
        if size > self._capacity:
            return None
        begin = int(self._head[0])
        if begin % self._capacity + size > self._capacity:
            begin += self._capacity - begin % self._capacity
        # Before the copy starts: who reads what this one is about to overwrite must see it.
        self._head[0] = begin + -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        place = begin % self._capacity
        self._bytes[place : place + size].view(self._dtype).view(rows.shape).copy_(rows, non_blocking=True)
        return Slab(self._path, str(self._dtype).removeprefix("torch."), self._width, self._row_bytes, begin)


def _pin(memory: torch.Tensor) -> None:
    """So that the device copies into it by itself. Raises ``torch.cuda.CudaError``."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(int(runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)))


def _release(file: int, pinned_address: int | None) -> None:
    if pinned_address is not None:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        runtime.cudaHostUnregister(pinned_address)
    os.close(file)


class RingReader:
    """The front end's end of one ring. Raises ``OSError`` when the worker is not on this machine, or gone."""

    def __init__(self, path: str) -> None:
        link, _, inode = path.partition("#")
        file = os.open(link, os.O_RDONLY)
        try:
            if os.fstat(file).st_ino != int(inode):
                raise OSError(errno.ESTALE, "it is another process's by now")
            self._memory = mmap.mmap(file, 0, prot=mmap.PROT_READ)
        finally:
            os.close(file)
        self._head = np.frombuffer(self._memory, np.uint64, 1)
        self._bytes = np.frombuffer(self._memory, np.uint8, offset=ALIGNMENT_BYTES)

    def take(self, rows: RingRows) -> torch.Tensor:
        """``[rows, width]`` of the ring's dtype, copied. Raises ``OverwrittenError``."""
        dtype: torch.dtype = getattr(torch, rows.dtype)
        row_bytes = rows.width * dtype.itemsize
        out = np.empty((sum(count for _, count in rows.segments), row_bytes), np.uint8)
        at, capacity = 0, len(self._bytes)
        for begin, count in rows.segments:
            place = begin % capacity
            out[at : at + count] = self._bytes[place : place + count * row_bytes].reshape(count, row_bytes)
            at += count
        if any(int(self._head[0]) - begin > capacity for begin, _ in rows.segments):
            raise OverwrittenError("these rows were read too late (max_shared_bytes)")
        return torch.from_numpy(out).view(dtype)
