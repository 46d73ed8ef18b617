"""Files that change become the policies that judge, whole or not at all, while readers keep what they took."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from guard.policy import BoundPolicy, LoadedPolicy, PolicyError
from guard.policy.store import PolicyStore
from tests.policy.test_policy_set import bind_fakes, configmap, folder, policy

SINGLE = "version: 1\ndefault: base\n"


def threshold(store: PolicyStore) -> float:
    return store.current.default.live.rules[0].rule.when.at_least  # type: ignore[union-attr, return-value]


@asynccontextmanager
async def watching(path: Path) -> AsyncIterator[tuple[PolicyStore, Counter[str]]]:
    results = Counter[str]()
    store = PolicyStore(path, bind_fakes, lambda result, _: results.update([result]))
    task = asyncio.create_task(store.watch())
    try:
        yield store, results
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(condition: Callable[[], bool], limit_s: float = 8.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.01)


def write_at(path: Path, at: float) -> None:
    path.write_text(policy("base", at))


def replace_at(path: Path, at: float) -> None:
    """As editors do: a new file takes the old one's name."""
    path.with_suffix(".new").write_text(policy("base", at))
    os.replace(path.with_suffix(".new"), path)


@pytest.mark.parametrize("change", [write_at, replace_at])
@pytest.mark.parametrize("single", [True, False], ids=["file", "folder"])
async def test_a_change_is_noticed_and_readers_keep_what_they_took(
    tmp_path: Path, change: Callable[[Path, float], None], single: bool
) -> None:
    path = folder(tmp_path / "p", SINGLE, base=policy("base"))
    async with watching(path / "base.yaml" if single else path) as (store, results):
        taken = store.current
        change(path / "base.yaml", 0.75)
        await until(lambda: threshold(store) == 0.75)
        assert taken.default.live.rules[0].rule.when.at_least == 0.5  # type: ignore[union-attr]
        assert results["success"] == 1
        assert store.error is None


@pytest.mark.parametrize("mounted", ["p", "p/base.yaml"])
async def test_a_configmap_swap_is_noticed(tmp_path: Path, mounted: str) -> None:
    configmap(tmp_path / "p", "v1", {"base.yaml": policy("base"), "selection.yaml": SINGLE})
    async with watching(tmp_path / mounted) as (store, _):
        for i, at in enumerate((0.6, 0.7)):
            configmap(tmp_path / "p", f"v{i + 2}", {"base.yaml": policy("base", at), "selection.yaml": SINGLE})
            shutil.rmtree(tmp_path / "p" / f"..v{i + 1}")
            await until(lambda at=at: threshold(store) == at)  # type: ignore[misc]


async def test_a_broken_file_changes_nothing_and_is_told_until_it_is_repaired(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder(tmp_path / "p", SINGLE, base=policy("base"))
    async with watching(path) as (store, results):
        before = store.current
        (path / "base.yaml").write_text(policy("base").replace("block", "blok"))
        await until(lambda: results["failure"] == 1)
        assert store.current is before
        assert store.error is not None
        assert "base.yaml:6: rules.0.action" in store.error
        assert "base.yaml:6: rules.0.action" in caplog.text
        write_at(path / "base.yaml", 0.5)
        await until(lambda: results["noop"] == 1)
        assert (store.current, store.error) == (before, None)
        write_at(path / "base.yaml", 0.9)
        await until(lambda: threshold(store) == 0.9)


async def test_a_folder_that_goes_and_comes_back_is_found_again(tmp_path: Path) -> None:
    path = folder(tmp_path / "p", SINGLE, base=policy("base"))
    async with watching(path) as (store, results):
        shutil.rmtree(path)
        await until(lambda: results["failure"] >= 1)
        assert threshold(store) == 0.5
        folder(path, SINGLE, base=policy("base", 0.8))
        await until(lambda: threshold(store) == 0.8)
        write_at(path / "base.yaml", 0.9)
        await until(lambda: threshold(store) == 0.9)


async def test_a_file_that_a_policy_extends_is_watched_where_it_lies(tmp_path: Path) -> None:
    bases = folder(tmp_path / "bases", None, base=policy("base"))
    path = folder(tmp_path / "p", None, mine="version: 1\nname: mine\nextends: ../bases/base.yaml\n")
    async with watching(path / "mine.yaml") as (store, _):
        write_at(bases / "base.yaml", 0.7)
        await until(lambda: threshold(store) == 0.7)


async def test_readers_under_a_storm_of_changes_see_whole_versions_only(tmp_path: Path) -> None:
    """Two files that say the same number in every version: nobody ever sees two numbers."""
    both = {"selection.yaml": "version: 1\ndefault: base\nshadow: other\n"}
    path, seen = tmp_path / "p", set()

    def version(i: int) -> dict[str, str]:
        at = 0.1 + i / 100
        return both | {"base.yaml": policy("base", at), "other.yaml": policy("other", at)}

    configmap(path, "v0", version(0))
    async with watching(path) as (store, _):
        for i in range(1, 21):
            configmap(path, f"v{i}", version(i))
            for _ in range(5):
                judges = store.current.default
                assert judges.shadow is not None
                live, shadow = (one.rules[0].rule.when for one in (judges.live, judges.shadow))
                assert live.at_least == shadow.at_least  # type: ignore[union-attr]
                seen.add(live.at_least)  # type: ignore[union-attr]
                await asyncio.sleep(0.01)
        await until(lambda: threshold(store) == pytest.approx(0.3))
    assert len(seen) > 1


async def test_a_detector_that_cannot_be_built_changes_nothing_and_the_watch_goes_on(tmp_path: Path) -> None:
    path = folder(tmp_path / "p", SINGLE, base=policy("base"))

    def bind_or_fail(loaded: LoadedPolicy) -> BoundPolicy:
        if "broken" in loaded.policy.description:
            raise ZeroDivisionError("private words")
        return bind_fakes(loaded)

    store = PolicyStore(path, bind_or_fail)
    task = asyncio.create_task(store.watch())
    await asyncio.sleep(0.2)
    (path / "base.yaml").write_text(policy("base", 0.6) + "description: broken\n")
    await until(lambda: store.error is not None)
    assert store.error == "a detector cannot be built (ZeroDivisionError)"
    assert threshold(store) == 0.5
    write_at(path / "base.yaml", 0.7)
    await until(lambda: threshold(store) == 0.7)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_nothing_starts_without_policies(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="cannot be read"):
        PolicyStore(tmp_path / "nowhere", bind_fakes)
