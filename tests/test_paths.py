"""Where the guard's own files go."""

from __future__ import annotations

from pathlib import Path

import pytest

from guard.paths import cache_folder, state_folder


def test_the_xdg_variables_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/some/cache")
    monkeypatch.setenv("XDG_STATE_HOME", "/some/state")
    assert cache_folder() == Path("/some/cache/mia-guard")
    assert state_folder() == Path("/some/state/mia-guard")


@pytest.mark.parametrize("value", ["", "relative/path"])
def test_unset_or_relative_variables_mean_the_home_folder(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    monkeypatch.setenv("XDG_STATE_HOME", value)
    assert cache_folder() == Path("/home/someone/.cache/mia-guard")
    assert state_folder() == Path("/home/someone/.local/state/mia-guard")
