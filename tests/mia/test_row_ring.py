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


def ring(rows: int, dtype: torch.dtype = torch.bfloat16) -> RowRing:
    return RowRing(rows * WIDTH * dtype.itemsize, WIDTH, dtype, pinned=False)


def taken(address: RingAddress, places: list[int]) -> torch.Tensor:
    out = np.full((len(places), address.width), np.nan, np.float32)
    RingReader(address).take(np.asarray(places, np.int64), out)
    return torch.from_numpy(out)


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("places", [[2], [1, 3, 5], [4, 4], [7, 0, 3, 2]], ids=str)
def test_every_value_of_every_type_comes_out_as_what_it_is(dtype: torch.dtype, places: list[int]) -> None:
    memory = ring(8, dtype)
    kinds = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, torch.finfo(dtype).max, torch.finfo(dtype).tiny])
    values = torch.cat([kinds, kinds * 0.37]).repeat(14)[: 8 * WIDTH].view(8, WIDTH).to(dtype)
    begin = memory.put(values)
    out = taken(memory.address, [begin + place for place in places])
    torch.testing.assert_close(out, values[places].float(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(out.signbit(), values[places].float().signbit())


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
        "import sys, numpy; from guard.mia.row_ring import RingAddress, RingReader; "
        "path, dtype, width, rows, begin = sys.argv[1:]; out = numpy.empty((3, int(width)), numpy.float32); "
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
        taken(replace(address, path=address.path.partition("#")[0] + "#1"), [begin])
    del memory
    gc.collect()
    with pytest.raises(OSError, match=r"No such file|another process"):
        taken(address, [begin])
