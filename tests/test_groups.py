"""Tests that share an engine run in one process: without it, a suite starts each engine twice and fills the memory."""

from __future__ import annotations

import os

import pytest


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="needs pytest -n")
def test_the_group_that_conftest_gave_has_reached_the_scheduler(request: pytest.FixtureRequest) -> None:
    # pytest 9.2 gives names to tests that pytest-xdist 3.8 cannot extend: its issue 1386.
    assert request.node.nodeid.endswith(f"@{__file__}")
