"""Readouts as files: both formats and back, limits that hold across processes, and no way out of the folder."""

from __future__ import annotations

import itertools
import math
import os
import resource
import shutil
import stat
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch

from guard.mia.artifact_store import (
    ArtifactFolderError,
    ArtifactNotFoundError,
    ArtifactStore,
    NoSpaceError,
)
from guard.mia.artifacts import CHUNK_BYTES, FileFormat, dropped, encode, load_artifact, without_values
from guard.mia.results import (
    AttentionReadout,
    AttentionRowsReadout,
    HiddenMeanReadout,
    HiddenReadout,
    ProbeReadout,
    QKReadout,
    Readouts,
    RowsReadout,
    SteeringReport,
)

FORMATS: tuple[FileFormat, ...] = ("safetensors", "pt")
DAY_S = 86400.0


def rows(count: int, width: int = 64) -> np.ndarray:
    return np.random.default_rng(count).standard_normal((count, width), dtype=np.float32)


def readouts(count: int = 3, choice: int = 0) -> Readouts:
    """One of each kind, and some that hold nothing."""
    return Readouts(
        items={
            "h": HiddenReadout("complete", 2, 5, 17, rows(1)[0]),
            "r": RowsReadout("complete", 1, tuple(range(count)), tuple(range(count)), rows(count)),
            "m": HiddenMeanReadout("complete", 2, ((1, 4), (6, 9)), rows(1)[0]),
            "none": RowsReadout("complete", 1, (), (), np.zeros((0, 64), np.float32)),
            "a": AttentionReadout(
                "complete",
                ((1, 0), (2, 3)),
                mass={"x": rows(2, 1)[:, 0], "y.values": rows(3, 1)[:2, 0]},
                weights=rows(2, 9),
            ),
            "p": ProbeReadout("complete", "danger", (4, 5), (7, 8), rows(2, 1)),
            "g": AttentionRowsReadout("complete", ((1, 0),), (5,), (8,), {"x": rows(1, 1)}, rows(1, 6)[:, None]),
            "q": QKReadout(
                "complete",
                ((12, 0),),
                (5,),
                (8,),
                {12: rows(1, 4)[:, None]},
                {12: rows(6, 4)[:, None]},
                kv_heads={12: (0,)},
                scale={12: 0.5},
            ),
            "full": RowsReadout("dropped", 1, reason='no "space" {"tensor": "0/0/prompt/h/values"}'),
            "lost": AttentionReadout("unavailable", ((1, 0),), reason="no system message"),
        },
        span_tokens={"x": ((0, 2),)},
        prompt_tokens=9,
        prompt_index=1,
        choice_index=choice,
        steering=(SteeringReport(3, 0.5, 1, 6),),
    )


def assert_equal(a: Readouts, b: Readouts) -> None:
    assert a.to_wire() == b.to_wire()


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    store = ArtifactStore(tmp_path / "artifacts", 10**7, DAY_S)
    store.prepare()
    return store


def artifacts_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".account")


def blocks(sizes: Iterable[int]) -> int:
    """What files of these sizes and their folder take on a disk with blocks of 4 KiB."""
    return 4096 * (1 + sum(math.ceil(size / 4096) for size in sizes))


def age(store: ArtifactStore, name: str, age_s: float) -> None:
    then = time.time() - age_s
    os.utime(store.folder / name, (then, then))


@pytest.mark.parametrize("file_format", FORMATS)
def test_readouts_survive_the_files_bit_for_bit_whatever_their_status(
    store: ArtifactStore, file_format: FileFormat
) -> None:
    written = [readouts(), readouts(choice=1), readouts(CHUNK_BYTES // 256 + 7, choice=2)]
    artifact = store.write(written, file_format)
    assert artifact.files.keys() == {"readouts.json", f"readouts.{file_format}"}
    for expected, got in zip(written, load_artifact(store.folder / artifact.id), strict=True):
        assert_equal(got, expected)


def test_the_tensor_files_are_plain_and_named_after_prompt_choice_stage_and_capture(store: ArtifactStore) -> None:
    one, folders = readouts(), {file_format: store.write([readouts()], file_format).id for file_format in FORMATS}
    plain = safetensors.numpy.load_file(store.folder / folders["safetensors"] / "readouts.safetensors")
    pickled = torch.load(store.folder / folders["pt"] / "readouts.pt", weights_only=True)
    assert plain.keys() == pickled.keys()
    assert {name for name in plain if "/a/" in name} == {
        "1/0/prompt/a/mass/x", "1/0/prompt/a/mass/y.values", "1/0/prompt/a/weights",
    }  # fmt: skip
    assert {name for name in plain if "/q/" in name} == {"1/0/prompt/q/queries/12", "1/0/prompt/q/keys/12"}
    np.testing.assert_array_equal(plain["1/0/prompt/r/values"], one.items["r"].values)
    np.testing.assert_array_equal(pickled["1/0/prompt/r/values"], one.items["r"].values)


def test_two_readouts_of_one_name_are_an_error_and_never_one_of_them() -> None:
    with pytest.raises(ValueError, match="1/0/prompt/h"):
        encode([readouts(), readouts()], "safetensors")


def test_without_values_and_dropped_keep_positions_and_the_reasons_that_were_there() -> None:
    bare, lost = without_values(readouts()), dropped(readouts(), "no room")
    assert bare.items["r"].token_ids == lost.items["r"].token_ids == (0, 1, 2)
    assert (bare.items["r"].status, lost.items["r"].status, lost.items["r"].reason) == (
        "complete",
        "dropped",
        "no room",
    )
    assert lost.items["lost"].reason == "no system message"
    assert "data" not in str(bare.to_wire()["items"]) + str(lost.to_wire()["items"])


@pytest.mark.parametrize("tensor_file", ["../secret.safetensors", "/etc/passwd", "readouts.json"])
def test_an_artifacts_json_cannot_name_another_file(store: ArtifactStore, tensor_file: str) -> None:
    folder = store.folder / store.write([readouts()], "safetensors").id
    text = (folder / "readouts.json").read_text().replace("readouts.safetensors", tensor_file)
    (folder / "readouts.json").write_text(text)
    with pytest.raises(ValueError, match="no tensor file"):
        load_artifact(folder)


def test_only_the_owner_may_look(store: ArtifactStore) -> None:
    folder = store.folder / store.write([readouts()], "pt").id
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (store.folder, folder, *folder.iterdir())}
    assert modes == {store.folder.name: 0o700, folder.name: 0o700, "readouts.json": 0o600, "readouts.pt": 0o600}


def test_ids_cannot_be_guessed_and_differ(store: ArtifactStore) -> None:
    ids = {store.write([readouts()], "safetensors").id for _ in range(20)}
    assert len(ids) == 20
    assert {len(one) for one in ids} == {43}


def test_a_full_folder_refuses_and_removes_nothing_that_is_younger_than_the_retention(store: ArtifactStore) -> None:
    first = store.write([readouts()], "safetensors")
    store.max_bytes = 2 * blocks(first.files.values()) - 1
    before = artifacts_in(store.folder)
    with pytest.raises(NoSpaceError, match="max_artifact_bytes"):
        store.write([readouts()], "safetensors")
    assert artifacts_in(store.folder) == before == [first.id]


def test_what_is_older_than_the_retention_cannot_be_read_and_makes_room(store: ArtifactStore) -> None:
    old, young = (store.write([readouts()], "safetensors").id for _ in range(2))
    store.max_bytes = 2 * blocks(one.stat().st_size for one in (store.folder / old).iterdir())
    age(store, old, DAY_S + 1)
    age(store, young, DAY_S - 60)
    with pytest.raises(ArtifactNotFoundError):
        b"".join(store.json_with_values(old))
    assert b"".join(store.json_with_values(young))
    with pytest.raises(NoSpaceError):
        store.write([readouts()], "safetensors")  # the last count was just now
    (store.folder / ".account").unlink()
    new = store.write([readouts()], "safetensors").id
    assert artifacts_in(store.folder) == sorted([young, new])


def test_cleaning_removes_old_artifacts_and_dead_writes_and_touches_nothing_else(store: ArtifactStore) -> None:
    old, young = (store.write([readouts()], "safetensors").id for _ in range(2))
    dead, alive = (f".writing-4096-{letter * 43}" for letter in "da")
    for name in (dead, alive, "somebody's folder"):
        (store.folder / name).mkdir()
    for name, age_s in ((old, DAY_S + 1), (dead, 3600), ("somebody's folder", 2 * DAY_S)):
        age(store, name, age_s)
    store.retention_s = DAY_S
    store.clean()
    assert old in artifacts_in(store.folder)  # counted just now, by prepare
    (store.folder / ".account").unlink()
    store.clean()
    assert artifacts_in(store.folder) == sorted([alive, young, "somebody's folder"])


def _write_many(folder: Path, max_bytes: int) -> int:
    """Eight threads write until nothing fits; returns how many they wrote."""
    store = ArtifactStore(folder, max_bytes, DAY_S)

    def write(_: int) -> int:
        for written in itertools.count():
            try:
                store.write([readouts()], "safetensors")
            except NoSpaceError:
                return written
        raise AssertionError

    sys.setswitchinterval(1e-6)
    with ThreadPoolExecutor(8) as threads:
        return sum(threads.map(write, range(8)))


def test_the_limit_holds_exactly_when_processes_and_threads_write_at_once(tmp_path: Path) -> None:
    room = 100
    ArtifactStore(tmp_path, 10**9, DAY_S).prepare()
    first = ArtifactStore(tmp_path, 10**9, DAY_S).write([readouts()], "safetensors")
    max_bytes = room * blocks(first.files.values())
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as processes:
        written = [processes.submit(_write_many, tmp_path, max_bytes) for _ in range(2)]
        assert sum(one.result() for one in written) == room - 1
    assert len(artifacts_in(tmp_path)) == room
    assert all(load_artifact(tmp_path / name) for name in artifacts_in(tmp_path))


def _write_with_a_limit_on_file_size(folder: Path) -> str:
    """Write what is too large, and at once what fits only into its room; returns the second's id."""
    large = encode([readouts(1000)], "safetensors")
    store = ArtifactStore(folder, blocks(map(len, large.values())), DAY_S)
    store.prepare()
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, 64 * 1024))
    with pytest.raises(OSError, match="File too large"):
        store.write([readouts(1000)], "safetensors")
    assert artifacts_in(folder) == []
    return store.write([readouts()], "safetensors").id


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the limit ends the process")
def test_a_write_that_breaks_off_leaves_nothing_and_gives_its_room_back(store: ArtifactStore) -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        written = pool.submit(_write_with_a_limit_on_file_size, store.folder).result()
    assert artifacts_in(store.folder) == [written]


def test_removing_gives_the_room_back_and_works_once(store: ArtifactStore) -> None:
    for _ in range(3):
        artifact = store.write([readouts()], "safetensors")
        store.max_bytes = blocks(artifact.files.values())
        store.remove(artifact.id)
        with pytest.raises(ArtifactNotFoundError):
            store.remove(artifact.id)
    assert artifacts_in(store.folder) == []


@pytest.mark.parametrize(
    ("artifact_id", "name"),
    [
        ("..", "readouts.json"), (".", ".account"), ("", "readouts.json"), ("../" * 14 + "x", "readouts.json"),
        ("\0" * 43, "readouts.json"), ("é" * 43, "readouts.json"), ("A" * 43, "readouts.json"),
        ("A" * 43 + "\n", "readouts.json"), ("ID", "../secret"), ("ID", "secret"), ("ID", ""), ("ID", "readouts.pt\0"),
        ("ID", "readouts.pt"), ("link", "readouts.json"), ("file", "readouts.json"), ("ID-with-link", "readouts.json"),
    ],
)  # fmt: skip
def test_no_id_and_no_name_leads_anywhere_else(store: ArtifactStore, artifact_id: str, name: str) -> None:
    one, other = (store.write([readouts()], "safetensors").id for _ in range(2))
    (store.folder / "secret").write_text("secret")
    (store.folder.parent / "secret").write_text("secret")
    outside = store.folder.parent / "outside"
    shutil.copytree(store.folder / one, outside)
    (store.folder / ("L" * 43)).symlink_to(outside, target_is_directory=True)
    (store.folder / ("F" * 43)).write_text("a file")
    (store.folder / other / "readouts.json").unlink()
    (store.folder / other / "readouts.json").symlink_to(outside / "readouts.json")
    artifact_id = {"ID": one, "link": "L" * 43, "file": "F" * 43, "ID-with-link": other}.get(artifact_id, artifact_id)
    with pytest.raises(ArtifactNotFoundError):
        store.open_file(artifact_id, name)
    with pytest.raises(ArtifactNotFoundError):
        store.remove(artifact_id) if name == "readouts.json" else store.open_file(artifact_id, name)
    assert (outside / "readouts.json").exists()
    store.open_file(one, "readouts.json")[0].close()


def test_cleaning_follows_no_links(store: ArtifactStore, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    shutil.copytree(store.folder / store.write([readouts()], "safetensors").id, outside)
    link = store.folder / ("L" * 43)
    link.symlink_to(outside, target_is_directory=True)
    os.utime(outside, (0, 0))
    os.utime(link, (0, 0), follow_symlinks=False)
    (store.folder / ".account").unlink()
    store.clean()
    assert (outside / "readouts.json").exists()


@pytest.mark.parametrize("kind", ["a file", "below a file", "read-only"])
async def test_a_folder_that_cannot_be_written_stops_the_server_before_it_serves(tmp_path: Path, kind: str) -> None:
    from guard.mia.server import MiaMiddleware

    (tmp_path / "file").write_text("")
    folder = {"a file": tmp_path / "file", "below a file": tmp_path / "file" / "x", "read-only": Path("/proc/x")}[kind]
    with pytest.raises(ArtifactFolderError, match="artifact_folder"):
        ArtifactStore(folder, 10**7, DAY_S).prepare()

    async def never(*_: Any) -> None:
        raise AssertionError("the application was started")

    async def receive() -> dict[str, Any]:
        return {"type": "lifespan.startup"}

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    config = SimpleNamespace(additional_config={"mia": {"artifact_folder": str(folder)}})
    app = SimpleNamespace(state=SimpleNamespace(vllm_config=config))
    await MiaMiddleware(never)({"type": "lifespan", "app": app}, receive, send)
    assert [message["type"] for message in sent] == ["lifespan.startup.failed"]
    assert str(folder) in sent[0]["message"]
