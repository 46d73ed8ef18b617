"""API keys: the file that lists them, as hashes, and who holds which.

Owns the file's format, and making and revoking keys. A key is 256 random bits, so one SHA-256 is enough: a slow hash
(bcrypt, argon2) protects what can be guessed, and this cannot; it would only cost every request the same time again.
The key itself is shown once, when it is made, and is kept nowhere.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Self

import yaml
from pydantic import Field, ValidationError, model_validator

from guard.mistakes import first_mistake
from guard.policy.conditions import Section, Version
from guard.policy.schema import PolicyName
from guard.policy.selection import KeyHash
from guard.policy.yaml_file import PolicyError, read_mapping, validated

KEY_BITS = 256
KEY_PREFIX = "mg_"
"""What every key begins with, so that scanners for leaked secrets can find it."""

HEAD = "# Written by `guard keys`; comments are lost at the next change. It holds no key, only hashes.\n"

TenantName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.\-]{0,63}$")]
KeyId = Annotated[str, Field(pattern=r"^[a-z0-9]{4,32}$")]


class KeysError(ValueError):
    """A file of keys that cannot be used, or a change of it that makes no sense."""


class Limits(Section):
    """What may be used at most. A field that is not given has no limit."""

    requests_per_s: Annotated[float | None, Field(gt=0)] = None
    """Requests a second. One second's worth may come at once, and at least one request."""

    tokens_per_min: Annotated[int | None, Field(gt=0)] = None
    """Tokens of prompts and answers a minute. They are counted when known, after the answer: a request is admitted
    while any are left, and what it uses beyond is taken from what comes next."""

    concurrent: Annotated[int | None, Field(gt=0)] = None
    """Requests under way at once."""

    @property
    def any(self) -> bool:
        return self != NO_LIMITS


NO_LIMITS = Limits()


class Key(Section):
    """One key. ``sha256`` is of the key's UTF-8 bytes."""

    id: KeyId
    """Names the key in ledger and commands; it is no secret."""

    sha256: KeyHash
    """SHA-256 of the key, in hex."""

    name: Annotated[str, Field(max_length=128)] = ""
    """For people: who or what uses it."""

    tenant: TenantName | None = None
    """Whom it belongs to. Tenants select policies, and share limits."""

    policy: PolicyName | None = None
    """The policy that judges its requests, before any assignment; `selection.yaml` lists it under `for_keys`."""

    limits: Limits = NO_LIMITS
    """Of this key alone."""

    admin: bool = False
    """For the admin API, and for nothing else."""

    created: datetime
    """When it was made."""

    @model_validator(mode="after")
    def _admins_ask_no_model(self) -> Self:
        if self.admin and (self.tenant or self.policy or self.limits.any):
            raise ValueError("an admin key has no tenant, policy or limits: it opens the admin API alone")
        return self


class Tenant(Section):
    """What all keys of one tenant share."""

    limits: Limits = NO_LIMITS
    """Of all its keys together."""


class KeysFile(Section):
    """The file. Keys without a tenant's entry under ``tenants`` have a tenant without limits."""

    version: Version = 1
    """Version of this format."""

    tenants: dict[TenantName, Tenant] = {}  # noqa: RUF012
    """Tenants by name."""

    keys: tuple[Key, ...] = ()
    """Keys that are accepted."""

    @model_validator(mode="after")
    def _ids_and_hashes_are_unique(self) -> Self:
        for field in ("id", "sha256"):
            values = [getattr(key, field) for key in self.keys]
            if len(set(values)) != len(values):
                raise ValueError(f"two keys have the same {field}")
        return self


@dataclass(frozen=True)
class Caller:
    """Who asks. Everything is None or without limits when no key is asked for."""

    key_id: str | None = None
    key_hash: str | None = None
    tenant: str | None = None
    policy: str | None = None
    limits: Limits = NO_LIMITS
    tenant_limits: Limits = NO_LIMITS


@dataclass(frozen=True)
class KeyRing:
    """All keys at one moment, by SHA-256 in hex. ``asked_for`` stays true when the last key is revoked."""

    asked_for: bool = False
    callers: Mapping[str, Caller] | None = None
    admins: Mapping[str, Caller] | None = None

    def caller(self, key_hash: str) -> Caller | None:
        """The lookup's time depends on the hash alone, which nobody can choose without trying 2^n keys for n bits."""
        return (self.callers or {}).get(key_hash)

    def admin(self, key_hash: str) -> Caller | None:
        return (self.admins or {}).get(key_hash)

    @property
    def policies(self) -> dict[str, str]:
        """By key's id, of those that have a policy of their own."""
        callers = (self.callers or {}).values()
        return {one.key_id: one.policy for one in callers if one.key_id is not None and one.policy is not None}


def hash_of(key: bytes) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(key).hexdigest()


def read_keys(path: Path) -> KeysFile:
    """Raises ``KeysError`` with file, line and field."""
    try:
        return validated(read_mapping(path), KeysFile)
    except PolicyError as error:
        raise KeysError(str(error)) from None


def key_ring(file: KeysFile | None, hashes: tuple[str, ...] = ()) -> KeyRing:
    """Keys of the file, and those given by hash alone, which have no tenant and no limits; their id is their place,
    since a part of the hash would let whoever reads the ledger try out keys that people made up."""
    callers = {one: Caller(f"listed{i}", one) for i, one in enumerate(hashes, start=1)}
    admins: dict[str, Caller] = {}
    for key in file.keys if file is not None else ():
        tenant = file.tenants.get(key.tenant) if file is not None and key.tenant is not None else None
        shared = tenant.limits if tenant is not None else NO_LIMITS
        caller = Caller(key.id, key.sha256, key.tenant, key.policy, key.limits, shared)
        (admins if key.admin else callers)[key.sha256] = caller
    return KeyRing(file is not None or bool(hashes), callers, admins)


@dataclass(frozen=True)
class NewKey:
    """What a key is made for."""

    name: str = ""
    tenant: str | None = None
    policy: str | None = None
    limits: Limits = NO_LIMITS
    admin: bool = False


def create_key(path: Path, wanted: NewKey) -> tuple[str, Key]:
    """Add a key to the file, which is made if need be. Returns the key, this once, and its entry.

    Raises ``KeysError``.
    """
    secret = KEY_PREFIX + secrets.token_urlsafe(KEY_BITS // 8)

    def add(file: KeysFile) -> tuple[KeysFile, Key]:
        key = _made(
            lambda: Key(
                id=secrets.token_hex(4),
                sha256=hash_of(secret.encode()),
                name=wanted.name,
                tenant=wanted.tenant,
                policy=wanted.policy,
                limits=wanted.limits,
                admin=wanted.admin,
                created=datetime.now(UTC).replace(microsecond=0),
            )
        )
        return file.model_copy(update={"keys": (*file.keys, key)}), key

    return secret, _change(path, add, create=True)


def revoke_key(path: Path, key_id: str) -> Key:
    """Take a key out of the file. Raises ``KeysError``."""

    def remove(file: KeysFile) -> tuple[KeysFile, Key]:
        found = next((key for key in file.keys if key.id == key_id), None)
        if found is None:
            raise KeysError(f"{path}: no key has the id {key_id!r}; guard keys list shows them")
        return file.model_copy(update={"keys": tuple(key for key in file.keys if key.id != key_id)}), found

    return _change(path, remove, create=False)


def _made(make: Callable[[], Key]) -> Key:
    try:
        return make()
    except ValidationError as error:
        location, what = first_mistake(error)
        where = ".".join(map(str, location))
        raise KeysError(f"{where}: {what}" if where else what) from None


def _change(path: Path, change: Callable[[KeysFile], tuple[KeysFile, Key]], *, create: bool) -> Key:
    try:
        with _locked(path):
            file, key = change(read_keys(path) if path.exists() or not create else KeysFile())
            _replace(path, HEAD + yaml.safe_dump(_plain(file), sort_keys=False, allow_unicode=True))
    except OSError as error:
        raise KeysError(f"{path}: cannot be changed: {error.strerror}") from None
    return key


def _plain(file: KeysFile) -> dict[str, object]:
    """Without what is a default, which would hide what was said; and with the version."""
    return {"version": file.version, **file.model_dump(mode="json", exclude_defaults=True, exclude_none=True)}


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Two commands at once change the file one after the other."""
    with (path.parent / f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _replace(path: Path, text: str) -> None:
    """At once and as a whole: who reads meanwhile sees the old file or the new one. Readable by its owner, and by
    whom it was readable before."""
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
        with os.fdopen(file, "w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        new.chmod(mode)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
