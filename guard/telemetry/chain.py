"""The ledger's chain: every entry has a number, and a hash of itself and of the entry before it.

A line is the entry's JSON with one more field at its end::

    {"time": …, "chain": {"n": 17, "hash": "<64 hex>"}}

``hash`` is SHA-256, or HMAC-SHA-256 (RFC 2104) with the operator's secret, of the hash before it, a line end, and every
byte of the file from the end of the entry before up to the hash itself. So half a line that a crash or a full disk left
behind is vouched for by the entry after it, and one that somebody puts there is not. The first entry of a file also has
``prev``, the hash before it, so that a file can be checked when older ones are deleted. ``key`` names the secret.
``head`` is ``lost`` where the writer found no head file, or not its own, and could not know whether entries are gone.

Owns the form of these fields and the hash. Never does I/O.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

GENESIS = "0" * 64
"""The hash before the first entry."""

HASH_AND_END = len(GENESIS) + len('"}}')

FORM = re.compile(
    rb'[{,]"chain":\{"n":(?P<n>[1-9][0-9]{0,17})(?:,"prev":"(?P<prev>[0-9a-f]{64})")?'
    rb'(?:,"key":"(?P<key>[0-9a-f]{8})")?(?P<lost>,"head":"lost")?,"hash":"(?P<hash>[0-9a-f]{64})"\}\}\Z'
)
"""The end of a line. Inside a JSON string its quotation marks would have backslashes."""

LONGEST_END = 300
"""No line's end that fits ``FORM`` is longer, in bytes."""


@dataclass(frozen=True)
class Secret:
    """What an entry's hash is keyed with. ``name``: eight digits that tell secrets apart and tell nothing of them."""

    value: bytes = field(repr=False)
    name: str

    @classmethod
    def of(cls, value: str) -> Secret:
        key = value.encode()
        return cls(key, hmac.digest(key, b"mia-guard ledger key", "sha256").hex()[:8])


@dataclass(frozen=True)
class Link:
    """What a line says of its place in the chain."""

    n: int
    hash: str
    prev: str | None
    key: str | None
    head_lost: bool


class Hash:
    """The hash of one entry, fed with the bytes of the file. ``before``: the hash of the entry before."""

    def __init__(self, before: str, secret: Secret | None) -> None:
        self._sum = hmac.new(secret.value, digestmod="sha256") if secret else hashlib.sha256()
        self._sum.update(before.encode() + b"\n")

    def update(self, data: bytes) -> None:
        self._sum.update(data)

    def hex(self) -> str:
        return self._sum.hexdigest()


def link_of(line: bytes) -> Link | None:
    """Of a line without its end; None when it is no entry of a chain."""
    found = FORM.search(line[-LONGEST_END:])
    if found is None:
        return None
    prev, key = found["prev"], found["key"]
    return Link(
        int(found["n"]),
        found["hash"].decode(),
        prev.decode() if prev else None,
        key.decode() if key else None,
        found["lost"] is not None,
    )


def hashed_part(line: bytes) -> bytes:
    """What of a line with a link its hash is of."""
    return line[:-HASH_AND_END]


def linked(entry: bytes, head: Head, hash_: Hash, secret: Secret | None) -> tuple[bytes, Head]:
    """The line, without its end, of the entry after ``head``, and the head that it makes but for ``end``.

    ``entry``: a JSON object. ``hash_``: fed with what stands between the entry before and this one.
    """
    n = head.n + 1
    parts = [entry[:-1], b"," if len(entry) > len(b"{}") else b"", f'"chain":{{"n":{n}'.encode()]
    if n == head.first:
        parts.append(f',"prev":"{head.hash}"'.encode())
    if secret is not None:
        parts.append(f',"key":"{secret.name}"'.encode())
    if head.lost:
        parts.append(b',"head":"lost"')
    parts.append(b',"hash":"')
    start = b"".join(parts)
    hash_.update(start)
    own = hash_.hex()
    return start + own.encode() + b'"}}', replace(head, n=n, hash=own, lost=False)


@dataclass(frozen=True)
class Head:
    """The chain's end, in a small file beside the ledger. ``n`` and ``hash``: of the last entry. ``end``: where its
    line ends in the file with the inode ``file``. ``first``: number of that file's first entry, and ``since`` when that
    was written, in seconds since 1970. ``oldest``: number of the first entry that retention has left. ``lost``: there
    was no head, and no entry says so yet."""

    n: int = 0
    hash: str = GENESIS
    end: int = 0
    file: int = 0
    first: int = 1
    since: float = 0.0
    oldest: int = 1
    lost: bool = False

    def to_bytes(self, secret: Secret | None) -> bytes:
        """As the file has it, always of the same length."""
        fields = _compact({"version": 1, **vars(self)})
        return _compact({"head": fields, "mac": _mac(fields, secret)}).encode().ljust(HEAD_BYTES - 1) + b"\n"


HEAD_BYTES = 512
"""Small enough that overwriting it in place is one step."""


def read_head(data: bytes, secret: Secret | None) -> Head | None:
    """None when it is not a head that a writer with this secret wrote."""
    try:
        outer: Mapping[str, Any] = json.loads(data)
        fields, mac = outer["head"], outer["mac"]
        if not hmac.compare_digest(mac.encode(), _mac(fields, secret).encode()):
            return None
        inner = dict(json.loads(fields))
        if inner.pop("version") != 1:
            return None
        return Head(**inner)
    except (ValueError, LookupError, TypeError, AttributeError):
        return None


def _mac(fields: str, secret: Secret | None) -> str:
    return hmac.digest(secret.value, fields.encode(), "sha256").hex() if secret else "none"


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
