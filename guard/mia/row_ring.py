"""Rows of the residual stream on their way from the worker to the front end: a ring in memory that both have mapped.

A step's rows are copied from the device straight into it, and the front end takes them out when it is told where they
are: in between nobody touches them. The memory has no name in any file system; the front end finds it through the
worker's open files, so it is gone when the worker is, however that ends. Never touches vLLM.
"""

from __future__ import annotations

import errno
import mmap
import os
import warnings
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

HEAD_BYTES = 64
"""Before the first row stands how many rows were ever handed out."""

Places = npt.NDArray[np.int64]
"""Rows of a ring, counted since it was made."""


class OverwrittenError(RuntimeError):
    """Rows were read so late that others have taken their place."""


@dataclass(frozen=True)
class RingAddress:
    """Where another process finds a ring. ``path``: of the open file, and behind ``#`` its inode. ``dtype``: of the
    rows, as torch calls it; ``width``: elements of one; ``rows``: as many as the ring has."""

    path: str
    dtype: str
    width: int
    rows: int


class RowRing:
    """The worker's end."""

    def __init__(self, capacity_bytes: int, width: int, dtype: torch.dtype, *, pinned: bool) -> None:
        self._capacity = capacity_bytes // (width * dtype.itemsize)
        size = HEAD_BYTES + self._capacity * width * dtype.itemsize
        file = os.memfd_create("mia-rows")
        os.ftruncate(file, size)
        memory = mmap.mmap(file, size)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        if pinned:
            _pin(whole)
        self._head = np.frombuffer(memory, np.int64, 1)
        self._rows = whole[HEAD_BYTES:].view(dtype).view(self._capacity, width)
        path = f"/proc/{os.getpid()}/fd/{file}#{os.fstat(file).st_ino}"
        self.address = RingAddress(path, str(dtype).removeprefix("torch."), width, self._capacity)
        weakref.finalize(self, _release, file, whole.data_ptr() if pinned else None)

    def put(self, rows: torch.Tensor) -> int | None:
        """Copy rows ``[n, width]`` in, complete once the stream has got there. Returns the place of the first; None
        when the ring cannot hold them."""
        if len(rows) > self._capacity:
            return None
        begin = int(self._head[0])
        if begin % self._capacity + len(rows) > self._capacity:
            begin += self._capacity - begin % self._capacity
        # Before the copy starts: who reads what this one is about to overwrite must see it.
        self._head[0] = begin + len(rows)
        place = begin % self._capacity
        self._rows[place : place + len(rows)].copy_(rows, non_blocking=True)
        return begin


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

    def __init__(self, address: RingAddress) -> None:
        link, _, inode = address.path.partition("#")
        file = os.open(link, os.O_RDONLY)
        try:
            if os.fstat(file).st_ino != int(inode):
                raise OSError(errno.ESTALE, "it is another process's by now")
            memory = mmap.mmap(file, 0, prot=mmap.PROT_READ)
        finally:
            os.close(file)
        self._head = np.frombuffer(memory, np.int64, 1)
        self._rows = _rows_in(memory, address)

    def take(self, places: Places, out: torch.Tensor) -> None:
        """Copy the rows at ``places`` to ``out``, ``[len(places), width]`` float32. Raises ``OverwrittenError``."""
        capacity = len(self._rows)
        at = places % max(1, capacity)
        steps = np.diff(at)
        if len(at) and (steps == steps[:1]).all() and (steps[:1] > 0).all():
            # As most do: one copy that changes the type on the way.
            apart = int(steps[0]) if len(steps) else 1
            out.copy_(self._rows[int(at[0]) : int(at[-1]) + 1 : apart])
        elif len(at):
            out.copy_(self._rows[torch.from_numpy(at)])
        if len(places) and int(self._head[0]) - int(places.min()) > capacity:
            raise OverwrittenError("these rows were read too late (max_shared_bytes)")


def _rows_in(memory: mmap.mmap, address: RingAddress) -> torch.Tensor:
    """``[capacity, width]``, read alone."""
    data = np.frombuffer(memory, np.uint8, offset=HEAD_BYTES)
    with warnings.catch_warnings():
        # torch knows no tensors that cannot be written to; nobody here writes.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        bytes_ = torch.from_numpy(data)
    return bytes_.view(getattr(torch, address.dtype)).view(-1, address.width)
