"""What grows with an answer comes while it grows, over HTTP, where a stream asks for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from guard.mia.results import Readouts, RowsReadout
from tests.engine.server import Server

pytestmark = pytest.mark.engine

SPEC: dict[str, Any] = {
    "spans": {"start": {"tokens": [[0, 4]]}},
    "hidden": {"last": {"layer": 2}, "answer": {"layer": 1, "positions": "generated"}},
    "attention": {"early": {"heads": [[1, 0]], "spans": ["start"], "positions": {"generated": 2}}},
    "progress_tokens": 3,
}
TOKENS = 12


async def readouts(server: Server, **fields: Any) -> list[Readouts]:
    event = await server.event(spec=SPEC, max_tokens=TOKENS, **fields)
    return [Readouts.from_wire(wire) for wire in event["readouts"]]


async def test_a_stream_shows_rows_as_they_come_and_all_of_them_at_its_end(server: Server) -> None:
    prompt, *progress, final = await readouts(server, stream=True)
    assert [one.stage for one in (prompt, final)] == ["prompt", "final"]
    assert {one.stage for one in progress} == {"progress"}
    whole = final.items["answer"]
    assert isinstance(whole, RowsReadout)
    assert len(whole.positions) == TOKENS - 1
    parts = [item for one in progress if isinstance(item := one.items.get("answer"), RowsReadout)]
    assert len(parts) >= 2, "every three tokens"
    positions = [position for part in parts for position in part.positions]
    assert positions == list(whole.positions[: len(positions)])
    token_ids = [token for part in parts for token in part.token_ids]
    assert token_ids == list(whole.token_ids[: len(token_ids)])
    rows = np.concatenate([part.values for part in parts])  # type: ignore[misc]
    assert np.array_equal(rows, whole.values[: len(rows)])  # type: ignore[index]
    assert all(one.prompt_tokens == prompt.prompt_tokens for one in progress)
    early = final.items["early"]
    assert early.positions == whole.positions[:2]  # type: ignore[union-attr]


async def test_an_answer_that_is_no_stream_has_no_progress(server: Server) -> None:
    assert [one.stage for one in await readouts(server)] == ["prompt", "final"]
