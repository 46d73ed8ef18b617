"""The operator's folder of artifacts: what is written, how much, for how long, and who may read which file of it.

    ID/                 one artifact, 0700: an unguessable name of our own; its files are 0600 and never change
    .writing-BYTES-ID/  one that is being written; renamed when it is whole and on the disk
    .account            lock, bytes in use, time of the last count

All state is in the folder, so any number of API server processes share it; nothing else should be in it. Every method
blocks: call it from a thread. Limits count what files take on the disk, in blocks. What is younger than the retention
is never removed to make room: a request that finds none is told so.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from guard.mia.artifacts import FILES, JSON_FILE, FileFormat, encode, json_with_values
from guard.mia.engine_config import EngineConfig
from guard.mia.results import Readouts

ID = re.compile(r"[A-Za-z0-9_-]{43}")
WRITING = re.compile(r"\.writing-(\d{1,19})-[A-Za-z0-9_-]{43}")
ACCOUNT_FILE = ".account"
ACCOUNT = struct.Struct("<qd")

BLOCK_BYTES = 4096
WRITING_LIMIT_S = 600.0
"""After this a write that is not done has died with its process."""

MAX_CLEANING_INTERVAL_S = 60.0
RECOUNT_INTERVAL_S = 1.0
"""At most this often a write that finds no space looks at every artifact again."""

NO_SUCH = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


class ArtifactFolderError(RuntimeError):
    """The folder cannot be used; the message says why."""


class NoSpaceError(Exception):
    """The artifact does not fit now. Nothing of it was kept."""


class ArtifactNotFoundError(LookupError):
    """No artifact has that id, it has no such file, or it is older than the retention."""


@dataclass(frozen=True)
class Artifact:
    """One artifact as answers name it. files: size in bytes by name. expires_at_s: Unix time."""

    id: str
    files: dict[str, int]
    expires_at_s: float

    def to_wire(self) -> dict[str, Any]:
        return {"id": self.id, "files": self.files, "expires_at": int(self.expires_at_s)}


@dataclass
class _Account:
    """used_bytes: of whole artifacts and of those being written. counted_s: Unix time of the last count; 0 for none."""

    used_bytes: int = 0
    counted_s: float = 0.0

    @property
    def age_s(self) -> float:
        """Since the last count; a clock that was set back makes it old too."""
        return abs(time.time() - self.counted_s)


class ArtifactStore:
    """Raises nothing until it is used; ``prepare`` says whether it can be."""

    def __init__(self, folder: Path, max_bytes: int, retention_s: float) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        self.retention_s = retention_s

    @property
    def cleaning_interval_s(self) -> float:
        return min(MAX_CLEANING_INTERVAL_S, max(1.0, self.retention_s / 4))

    def prepare(self) -> None:
        """Make the folder, try it, and count what is in it. Raises ``ArtifactFolderError``."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._locked() as account:
                trial = self.folder / f".writing-0-{secrets.token_urlsafe(32)}"
                trial.mkdir(mode=0o700)
                trial.rmdir()
                self._count(account)
        except OSError as error:
            raise ArtifactFolderError(f"artifact_folder {self.folder} cannot be written: {error.strerror}") from error

    def write(self, readouts: Sequence[Readouts], file_format: FileFormat) -> Artifact:
        """Write one request's readouts, all or nothing. Raises ``NoSpaceError``, and ``OSError`` for a broken disk."""
        files = encode(readouts, file_format)
        sizes = {name: len(content) for name, content in files.items()}
        taken = _on_disk(sizes.values())
        artifact_id = secrets.token_urlsafe(32)
        writing, whole = self.folder / f".writing-{taken}-{artifact_id}", self.folder / artifact_id
        self._reserve(taken, writing)
        try:
            for name, content in files.items():
                _write_synced(writing / name, content)
            _sync_folder(writing)
            with self._locked():  # whoever counts sees it once
                writing.rename(whole)
            _sync_folder(self.folder)
            return Artifact(artifact_id, sizes, whole.stat().st_mtime + self.retention_s)
        except BaseException as error:
            with self._locked() as account:
                for left in (writing, whole):
                    shutil.rmtree(left, ignore_errors=True)
                account.used_bytes -= taken
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise NoSpaceError("the artifact folder's disk is full") from error
            raise

    def json_with_values(self, artifact_id: str) -> Iterator[bytes]:
        """As answers have them, in pieces. Raises ``ArtifactNotFoundError`` at the first."""
        return json_with_values(partial(self._read, artifact_id))

    def open_file(self, artifact_id: str, name: str) -> tuple[BinaryIO, int]:
        """One file as it is, which the caller closes, and its size in bytes. Raises ``ArtifactNotFoundError``."""
        if not ID.fullmatch(artifact_id) or name not in FILES:
            raise ArtifactNotFoundError(artifact_id)
        try:
            # Opened step by step and never through a link, so that a path inside the folder cannot lead out of it.
            folder = os.open(self.folder / artifact_id, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if self._expired(os.fstat(folder)):
                    raise ArtifactNotFoundError(artifact_id)
                file = os.fdopen(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder), "rb")
                return file, os.fstat(file.fileno()).st_size
            finally:
                os.close(folder)
        except OSError as error:
            if error.errno in NO_SUCH:
                raise ArtifactNotFoundError(artifact_id) from error
            raise

    def remove(self, artifact_id: str) -> None:
        """Raises ``ArtifactNotFoundError``."""
        with self._locked() as account:
            file, _ = self.open_file(artifact_id, JSON_FILE)
            file.close()
            account.used_bytes -= self._remove(self.folder / artifact_id)

    def clean(self) -> None:
        """Remove what is older than the retention, unless another process just did."""
        with self._locked() as account:
            if account.age_s >= self.cleaning_interval_s / 2:
                self._count(account)

    def _read(self, artifact_id: str, name: str) -> bytes:
        file, _ = self.open_file(artifact_id, name)
        with file:
            return file.read()

    def _reserve(self, taken: int, writing: Path) -> None:
        with self._locked() as account:
            full = account.used_bytes + taken > self.max_bytes
            if not account.counted_s or (full and account.age_s > RECOUNT_INTERVAL_S):
                self._count(account)
            fits = account.used_bytes + taken <= self.max_bytes
            if fits:
                writing.mkdir(mode=0o700)
                account.used_bytes += taken
        if not fits:
            raise NoSpaceError(f"the server's artifact folder has no room for {taken} bytes (max_artifact_bytes)")

    def _count(self, account: _Account) -> None:
        """Look at every artifact: remove the old ones and count the others, which also heals what a crash left."""
        used_bytes = 0
        with os.scandir(self.folder) as entries:
            for entry in entries:
                writing = WRITING.fullmatch(entry.name)
                if not (writing or ID.fullmatch(entry.name)) or not entry.is_dir(follow_symlinks=False):
                    continue
                path, status = self.folder / entry.name, entry.stat(follow_symlinks=False)
                if time.time() - status.st_mtime > WRITING_LIMIT_S if writing else self._expired(status):
                    self._remove(path)
                else:
                    used_bytes += int(writing[1]) if writing else _size_on_disk(path)
        account.used_bytes, account.counted_s = used_bytes, time.time()

    def _expired(self, status: os.stat_result) -> bool:
        return time.time() - status.st_mtime > self.retention_s

    def _remove(self, path: Path) -> int:
        """Returns the bytes that this freed."""
        freed = _size_on_disk(path)
        shutil.rmtree(path)
        return freed

    @contextmanager
    def _locked(self) -> Iterator[_Account]:
        """The account, to read and change while no other thread or process does. Not saved when the caller raises."""
        account_file = self.folder / ACCOUNT_FILE
        descriptor = os.open(account_file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            raw = os.pread(descriptor, ACCOUNT.size, 0)
            account = _Account(*ACCOUNT.unpack(raw)) if len(raw) == ACCOUNT.size else _Account()
            yield account
            os.pwrite(descriptor, ACCOUNT.pack(account.used_bytes, account.counted_s), 0)
        finally:
            os.close(descriptor)


def artifact_store(config: EngineConfig | None) -> ArtifactStore | None:
    """The store of an engine, or None when its operator wants no files."""
    if config is None or config.artifact_folder is None:
        return None
    return ArtifactStore(config.artifact_folder, config.max_artifact_bytes, config.artifact_retention_s)


def _on_disk(sizes: Iterable[int]) -> int:
    """What files of these sizes and their folder take, in whole blocks."""
    return BLOCK_BYTES + sum(-(-size // BLOCK_BYTES) * BLOCK_BYTES for size in sizes)


def _size_on_disk(folder: Path) -> int:
    with os.scandir(folder) as entries:
        return _on_disk([entry.stat(follow_symlinks=False).st_size for entry in entries])


def _write_synced(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
