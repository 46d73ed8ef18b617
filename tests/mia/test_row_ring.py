"""Rows in shared memory: what was put in comes out, in this process or another, or it is said why not."""

from __future__ import annotations

import gc
import pickle
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from guard.mia.row_ring import OverwrittenError, RingReader, RowRing, Slab
from guard.mia.step_reading import RingRows

WIDTH = 24
ROW_BYTES = WIDTH * 2


def ring(rows: int) -> RowRing:
    return RowRing(rows * ROW_BYTES, WIDTH, torch.bfloat16, pinned=False)


def named(slab: Slab, *segments: tuple[int, int]) -> RingRows:
    return RingRows(slab.path, slab.dtype, slab.width, [slab.segment(first, count) for first, count in segments])


def rows(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed)).bfloat16()


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30))
def test_rows_are_what_was_put_in_as_long_as_there_is_room_for_all_since(counts: list[int]) -> None:
    """Whatever was overwritten is refused, and nothing else."""
    memory = ring(20)
    put = [(rows(count, i), memory.put(rows(count, i))) for i, count in enumerate(counts)]
    reader = RingReader(put[0][1].path)
    newest = put[-1][1]
    for values, slab in put:
        if not len(values):
            continue
        asked = named(slab, *[(i, 1) for i in range(len(values))])
        end = newest.begin + len(put[-1][0]) * ROW_BYTES
        if end - slab.begin <= 20 * ROW_BYTES - 64:
            assert torch.equal(reader.take(asked), values)
            assert torch.equal(reader.take(named(slab, (0, len(values)))), values)
        else:
            try:
                assert torch.equal(reader.take(asked), values)
            except OverwrittenError:
                continue


def test_rows_that_were_overwritten_are_refused() -> None:
    memory = ring(20)
    first = memory.put(rows(10, 0))
    for i in range(3):
        memory.put(rows(10, i))
    with pytest.raises(OverwrittenError, match="max_shared_bytes"):
        RingReader(first.path).take(named(first, (0, 10)))


def test_rows_that_the_ring_could_never_hold_are_not_put_in() -> None:
    memory = ring(20)
    assert memory.put(rows(21, 0)) is None
    assert memory.put(rows(3, 0)) is not None


def test_another_process_reads_them_and_nobody_once_the_worker_has_let_go() -> None:
    memory = ring(20)
    slab = memory.put(rows(5, 7))
    program = (
        "import pickle, sys, torch; from guard.mia.row_ring import RingReader; "
        "asked = pickle.loads(bytes.fromhex(sys.argv[1])); "
        "print(RingReader(asked.path).take(asked).float().tolist())"
    )
    asked = named(slab, (1, 3))
    command = [sys.executable, "-c", program, pickle.dumps(asked).hex()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == str(rows(5, 7)[1:4].float().tolist())
    with pytest.raises(OSError, match="another process"):
        RingReader(replace(asked, path=asked.path.partition("#")[0] + "#1").path)
    del memory
    gc.collect()
    with pytest.raises(OSError, match=r"No such file|another process"):
        RingReader(asked.path)
