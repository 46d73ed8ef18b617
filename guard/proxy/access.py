"""Who may ask: API keys, and without keys nobody but this machine's own programs.

Owns the checks of a request's headers. Keys are known as SHA-256 only, and never logged or passed on.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from guard.proxy.errors import ForbiddenHostError, InvalidKeyError, MediaTypeError
from guard.settings import is_loopback

HOST = re.compile(r"(\[(?P<address>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9.\-]+))(:[0-9]{1,5})?|(?P<bare>[0-9A-Fa-f:.]+)")
REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_\-]{0,63}")


@dataclass(frozen=True)
class Access:
    """``key_hashes``: SHA-256 in hex of every accepted key; none means that no key is asked for."""

    key_hashes: tuple[str, ...]

    def check(self, headers: Mapping[str, str]) -> None:
        """Raises ``InvalidKeyError`` or ``ForbiddenHostError``."""
        if self.key_hashes:
            self._check_key(headers.get("authorization", ""))
        self.check_host(headers)

    def key_hash(self, headers: Mapping[str, str]) -> str | None:
        """SHA-256 in hex of the key that was checked; None when no key is asked for."""
        if not self.key_hashes:
            return None
        return _given_hash(headers.get("authorization", ""))

    def check_host(self, headers: Mapping[str, str]) -> None:
        """Raises ``ForbiddenHostError``."""
        if not self.key_hashes and not is_loopback(_host_name(headers.get("host", ""))):
            # A web page may reach a loopback port under a name of its own (DNS rebinding), but not under ours.
            raise ForbiddenHostError("without API keys the guard answers to localhost only; set GUARD_API_KEY_HASHES")

    def _check_key(self, authorization: str) -> None:
        scheme, given = authorization.partition(" ")[0], _given_hash(authorization)
        # All are compared, so that the time tells nothing about which one is near.
        matches = [hmac.compare_digest(given, known) for known in self.key_hashes]
        if scheme.lower() != "bearer" or not any(matches):
            raise InvalidKeyError("a valid API key is needed: Authorization: Bearer KEY")


def _given_hash(authorization: str) -> str:
    key = authorization.partition(" ")[2]
    # Headers are read as latin-1; so these are the bytes that were sent.
    return hashlib.sha256(key.strip().encode("latin-1")).hexdigest()


def check_media_type(headers: Mapping[str, str]) -> None:
    """A web page of another origin cannot send JSON without being asked first, but it can send text."""
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise MediaTypeError("content-type must be application/json")


def request_id(headers: Mapping[str, str]) -> str:
    """The client's own id when it is short and plain, else a fresh one."""
    given = headers.get("x-request-id", "")
    return given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _host_name(host: str) -> str:
    """``Host`` without its port; empty when it is not a name with at most a port."""
    match = HOST.fullmatch(host)
    return (match["address"] or match["name"] or match["bare"]) if match else ""
