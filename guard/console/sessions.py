"""Who is signed in. An admin key is shown once; from then on the browser has a session of its own, not the key.

Owns sessions, in memory, and the cookie that names one. The cookie is HttpOnly, so that no script reads it, and
SameSite=Strict, so that no other site's page sends it. Ports of one host are one site, though: so every question also
needs a header that a page of another origin cannot set (``SAME_PAGE``).
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from guard.proxy.access import Access
from guard.proxy.errors import InvalidKeyError
from guard.proxy.keys import Caller

COOKIE = "guard_console"
SAME_PAGE = ("x-guard-console", "1")
"""Header and value that the console's own script sends. Another origin's page would have to ask first, in a preflight
that nobody here answers."""

LIFE_S = 12 * 3600.0
MAX_SESSIONS = 256
TOKEN_BYTES = 32


@dataclass(frozen=True)
class _Session:
    """``ends_s``: by ``time.monotonic``."""

    key_hash: str
    ends_s: float


@dataclass
class Sessions:
    """Of this process. A session ends with its time, with its key, and when too many others began after it."""

    access: Access
    _open: OrderedDict[str, _Session] = field(default_factory=OrderedDict)

    def begin(self, headers: Mapping[str, str]) -> str:
        """The cookie's value for who shows an admin key as the admin API wants it. Raises ``InvalidKeyError``."""
        caller = self.access.check_admin(headers)
        assert caller.key_hash is not None, "an admin has a key"
        token = secrets.token_urlsafe(TOKEN_BYTES)
        self._open[_hash(token)] = _Session(caller.key_hash, time.monotonic() + LIFE_S)
        while len(self._open) > MAX_SESSIONS:
            self._open.popitem(last=False)
        return token

    def end(self, token: str) -> None:
        self._open.pop(_hash(token), None)

    def admin(self, headers: Mapping[str, str], token: str | None) -> Caller:
        """Which administrator asks, by session or by key. Raises ``InvalidKeyError``."""
        if token is None or headers.get(SAME_PAGE[0]) != SAME_PAGE[1]:
            return self.access.check_admin(headers)
        # Looked up by hash: how long that takes says nothing about tokens that are close.
        session = self._open.get(_hash(token))
        admin = None if session is None else self.access.keys.current.admin(session.key_hash)
        if session is None or admin is None or session.ends_s < time.monotonic():
            self.end(token)
            raise InvalidKeyError("the session is over; sign in again")
        return admin


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
