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
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from guard.mia.results import FloatArray

HEAD_BYTES = 64
"""Before the first row stands how many rows were ever handed out."""

BFLOAT16_BITS = np.dtype(np.uint16)
"""numpy has no bfloat16; its bits are the upper half of a float32's."""

NUMPY_TYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": BFLOAT16_BITS,
}
"""By torch's names, those that a model's residual stream can have."""

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
    """The front end's end of one ring, which is opened when rows are first taken out of it."""

    def __init__(self, address: RingAddress) -> None:
        self.address = address

    @cached_property
    def _opened(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
        """How many rows were ever handed out, and the rows."""
        link, _, inode = self.address.path.partition("#")
        file = os.open(link, os.O_RDONLY)
        try:
            if os.fstat(file).st_ino != int(inode):
                raise OSError(errno.ESTALE, "it is another process's by now")
            memory = mmap.mmap(file, 0, prot=mmap.PROT_READ)
        finally:
            os.close(file)
        return np.frombuffer(memory, np.int64, 1), _rows_in(memory, self.address)

    def take(self, places: Places, out: FloatArray) -> None:
        """Copy the rows at ``places`` to ``out``, ``[len(places), width]`` float32. Raises ``OverwrittenError``, and
        ``OSError`` when the worker is not on this machine, or gone."""
        if not len(places):
            return
        head, rows = self._opened
        capacity = len(rows)
        at = places % capacity
        apart = int(at[1] - at[0]) if len(at) > 1 else 1
        if apart > 0 and (np.diff(at) == apart).all():
            # As most do.
            _widen(rows[int(at[0]) : int(at[-1]) + 1 : apart], out)
        else:
            _widen(rows[at], out)
        if int(head[0]) - int(places.min()) > capacity:
            raise OverwrittenError("these rows were read too late (max_shared_bytes)")


def _rows_in(memory: mmap.mmap, address: RingAddress) -> npt.NDArray[Any]:
    """``[capacity, width]``, read alone."""
    values: npt.NDArray[Any] = np.frombuffer(memory, NUMPY_TYPES[address.dtype], offset=HEAD_BYTES)
    return values.reshape(address.rows, address.width)


def _widen(rows: npt.NDArray[Any], out: FloatArray) -> None:
    """Not by torch, which shares such a copy among as many threads as there are processors: they would take them from
    the engine, and a copy would last until the last of them was given one."""
    if rows.dtype == BFLOAT16_BITS:
        np.left_shift(rows, 16, out=out.view(np.uint32), dtype=np.uint32)
    else:
        np.copyto(out, rows)
