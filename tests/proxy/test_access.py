"""Keys and host names, without a server."""

from __future__ import annotations

import hashlib

import pytest

from guard.proxy.access import Access
from guard.proxy.errors import ForbiddenHostError, InvalidKeyError
from guard.proxy.key_store import KeyStore


def holder_of(key: str) -> Access:
    return Access(KeyStore(hashes=(hashlib.sha256(key.encode()).hexdigest(),)))


def test_a_key_beyond_ascii_is_compared_as_the_bytes_that_were_sent() -> None:
    as_servers_read_headers = "schlüssel".encode().decode("latin-1")
    holder_of("schlüssel").check({"authorization": f"Bearer {as_servers_read_headers}"})
    with pytest.raises(InvalidKeyError):
        holder_of("schlüssel").check({"authorization": "Bearer schlussel"})


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", "key", "bearer  key2"])
def test_a_header_without_a_valid_key_is_refused(header: str) -> None:
    with pytest.raises(InvalidKeyError):
        holder_of("key").check({"authorization": header})


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8080", "127.0.0.1:8080", "127.9.9.9", "[::1]:8080", "::1"])
def test_without_keys_this_machine_is_answered(host: str) -> None:
    Access(KeyStore()).check({"host": host})


@pytest.mark.parametrize(
    "host",
    [
        "",
        "example.com",
        "localhost.example.com",
        "10.0.0.1:8080",
        "[fe80::1]",
        "a:b:c",
        "127.0.0.1:8080@evil",
        "[::1]x",
    ],
)
def test_without_keys_any_other_name_is_refused(host: str) -> None:
    with pytest.raises(ForbiddenHostError):
        Access(KeyStore()).check({"host": host})
