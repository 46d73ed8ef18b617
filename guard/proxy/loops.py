"""Requests that come back to the guard that sent them, directly or through others like it: each would go round until
some limit ends it, and take a place at every turn.

Owns the entries of the header ``Via`` by which guards know their own requests, and which addresses are a guard's own.
Other entries are not ours, and are not passed on.
"""

from __future__ import annotations

import ipaddress
import re
import secrets
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from yarl import URL

from guard.proxy.errors import LoopError

VIA = "via"
ENTRY = re.compile(r"1\.1 mia-guard-[0-9a-f]{16}")

MOST_GUARDS = 16
"""Guards that a request may come through; one that was started again in a loop has another name each time."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True)
class Hops:
    """``own``: the entry of this guard, the same in all its processes."""

    own: str = field(default_factory=lambda: named(secrets.token_hex(8)))

    def via(self, headers: Headers) -> str:
        """The guards that a request came through and this one, for whoever is asked next. Raises ``LoopError``."""
        before = ENTRY.findall(", ".join(headers.getlist(VIA))) if VIA in headers else []
        if self.own in before:
            raise LoopError("this request has come through this guard before: the address of a model server is wrong")
        if len(before) >= MOST_GUARDS:
            raise LoopError(f"this request has come through {len(before)} guards already")
        return ", ".join([*before, self.own])


def named(digits: str) -> str:
    """The entry of a guard. digits: 16 of hex."""
    return f"1.1 mia-guard-{digits}"


def own_among(urls: Iterable[str], host: str, port: int) -> str | None:
    """The first of ``urls`` at which who listens on ``host`` and ``port`` would ask itself, as far as can be told from
    here; None without one."""
    return next((url for url in urls if _port_of(url) == port and _reaches(URL(url).host or "", host)), None)


def _port_of(url: str) -> int | None:
    try:
        return URL(url).port
    except ValueError:
        return None


def _reaches(name: str, host: str) -> bool:
    listening = _addresses(host)
    return any(address in listening or _is_taken(address, listening) for address in map(_sent_to, _addresses(name)))


def _is_taken(address: Address, listening: frozenset[Address]) -> bool:
    """Whether who listens on all addresses of this machine has this one."""
    everywhere = any(one.is_unspecified and one.version in (address.version, 6) for one in listening)
    return everywhere and (address.is_loopback or _is_of_this_machine(address))


def _sent_to(address: Address) -> Address:
    """Where a connection to it goes: to no address in particular is to this machine."""
    if address.is_unspecified:
        return ipaddress.ip_address("127.0.0.1" if address.version == 4 else "::1")
    return address


def _addresses(name: str) -> frozenset[Address]:
    """Empty for a name that is not known here."""
    try:
        found = socket.getaddrinfo(name.strip("[]"), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return frozenset()
    return frozenset(_plain(ipaddress.ip_address(str(one[4][0]).partition("%")[0])) for one in found)


def _plain(address: Address) -> Address:
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _is_of_this_machine(address: Address) -> bool:
    """Whether the kernel would speak to it from itself. Sends nothing."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect((str(address), 9))
        except OSError:
            return False
        return ipaddress.ip_address(asking.getsockname()[0]) == address
