"""Rows in shared memory: what was put in comes out, in this process or another, or it is said why not."""

from __future__ import annotations

import gc
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from guard.mia.row_ring import OverwrittenError, RingAddress, RingReader, RowRing

WIDTH = 24
ROW_BYTES = WIDTH * 2


def ring(rows: int) -> RowRing:
    return RowRing(rows * ROW_BYTES, WIDTH, torch.bfloat16, pinned=False)


def taken(address: RingAddress, places: list[int]) -> torch.Tensor:
    out = torch.full((len(places), address.width), float("nan"))
    RingReader(address).take(np.asarray(places, np.int64), out)
    return out


def rows(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed)).bfloat16()


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30))
def test_rows_are_what_was_put_in_as_long_as_there_is_room_for_all_since(counts: list[int]) -> None:
    """Whatever was overwritten is refused, and nothing else."""
    memory = ring(20)
    put = [(rows(count, i).float(), memory.put(rows(count, i))) for i, count in enumerate(counts)]
    end = put[-1][1] + len(put[-1][0])
    for values, begin in put:
        places = list(range(begin, begin + len(values)))
        if not places or end - begin <= 20:
            assert torch.equal(taken(memory.address, places), values)
            assert torch.equal(taken(memory.address, places[::-1]), values.flip(0))
        else:
            with pytest.raises(OverwrittenError):
                taken(memory.address, places)


def test_rows_that_were_overwritten_are_refused() -> None:
    memory = ring(20)
    first = memory.put(rows(10, 0))
    for i in range(3):
        memory.put(rows(10, i))
    with pytest.raises(OverwrittenError, match="max_shared_bytes"):
        taken(memory.address, list(range(first, first + 10)))


def test_rows_that_the_ring_could_never_hold_are_not_put_in() -> None:
    memory = ring(20)
    assert memory.put(rows(21, 0)) is None
    assert memory.put(rows(3, 0)) is not None
    assert ring(0).put(rows(1, 0)) is None


def test_another_process_reads_them_and_nobody_once_the_worker_has_let_go() -> None:
    memory = ring(20)
    begin = memory.put(rows(5, 7))
    program = (
        "import sys, numpy, torch; from guard.mia.row_ring import RingAddress, RingReader; "
        "path, dtype, width, rows, begin = sys.argv[1:]; out = torch.empty(3, int(width)); "
        "address = RingAddress(path, dtype, int(width), int(rows)); "
        "RingReader(address).take(numpy.arange(3) + int(begin) + 1, out); print(out.tolist())"
    )
    address = memory.address
    command = [
        sys.executable,
        "-c",
        program,
        address.path,
        address.dtype,
        *map(str, (address.width, address.rows, begin)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == str(rows(5, 7)[1:4].float().tolist())
    with pytest.raises(OSError, match="another process"):
        RingReader(replace(address, path=address.path.partition("#")[0] + "#1"))
    del memory
    gc.collect()
    with pytest.raises(OSError, match=r"No such file|another process"):
        RingReader(address)
