"""Who may ask: API keys, and without keys nobody but this machine's own programs.

Owns the checks of a request's headers. Keys are known as SHA-256 only, and never logged or passed on.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from guard.proxy.errors import ForbiddenHostError, InvalidKeyError, MediaTypeError
from guard.proxy.key_store import KeyStore
from guard.proxy.keys import Caller, hash_of
from guard.settings import is_loopback

HOST = re.compile(r"(\[(?P<address>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9.\-]+))(:[0-9]{1,5})?|(?P<bare>[0-9A-Fa-f:.]+)")
REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_\-]{0,63}")


NOBODY = Caller()
"""Whoever asks when no key is asked for."""


@dataclass(frozen=True)
class Access:
    """``keys``: those that are accepted, at any moment."""

    keys: KeyStore

    def check(self, headers: Mapping[str, str]) -> Caller:
        """Who asks. Raises ``InvalidKeyError`` or ``ForbiddenHostError``."""
        if not self.keys.current.asked_for:
            self.check_host(headers)
            return NOBODY
        return _confirmed(self.keys.current.caller, headers)

    def check_admin(self, headers: Mapping[str, str]) -> Caller:
        """Which administrator asks. Raises ``InvalidKeyError``."""
        return _confirmed(self.keys.current.admin, headers)

    def check_host(self, headers: Mapping[str, str]) -> None:
        """Raises ``ForbiddenHostError``."""
        if not self.keys.current.asked_for and not is_loopback(_host_name(headers.get("host", ""))):
            # A web page may reach a loopback port under a name of its own (DNS rebinding), but not under ours.
            raise ForbiddenHostError("without API keys the guard answers to localhost only; set GUARD_KEYS")


def _confirmed(find: Callable[[str], Caller | None], headers: Mapping[str, str]) -> Caller:
    given = _given_hash(headers)
    found = find(given)
    # Looked up by hash, then compared in constant time whether anything was found or not.
    same = hmac.compare_digest(given, (found.key_hash if found is not None else None) or "")
    if found is None or not same:
        raise InvalidKeyError("a valid API key is needed: Authorization: Bearer KEY")
    return found


def _given_hash(headers: Mapping[str, str]) -> str:
    """Of the bearer's key, else of ``x-api-key``, as Anthropic's clients send it; empty when there is neither."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if "authorization" not in headers:
        key = headers.get("x-api-key", "")
    elif scheme.lower() != "bearer":
        return ""
    # Headers are read as latin-1; so these are the bytes that were sent.
    return hash_of(key.strip().encode("latin-1"))


def check_media_type(headers: Mapping[str, str]) -> None:
    """A web page of another origin cannot send JSON without being asked first, but it can send text."""
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise MediaTypeError("content-type must be application/json")


def client_request_id(headers: Mapping[str, str]) -> str | None:
    """The client's own id when it is short and plain. Several requests may have the same."""
    given = headers.get("x-request-id", "")
    return given if REQUEST_ID.fullmatch(given) else None


def _host_name(host: str) -> str:
    """``Host`` without its port; empty when it is not a name with at most a port."""
    match = HOST.fullmatch(host)
    return (match["address"] or match["name"] or match["bare"]) if match else ""
