"""What all examples share: options within bounds, one line where something is wrong, an orderly end at SIGTERM."""

from __future__ import annotations

import argparse
import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn
from urllib.parse import urlsplit


def refuse(message: str, status: int = 2) -> NoReturn:
    """End the example with one line."""
    print(f"{Path(sys.argv[0]).name}: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(status)


class Terminated(SystemExit):
    """SIGTERM came. No ``KeyboardInterrupt``: vLLM swallows one while an engine starts."""


@contextmanager
def ending_when_told() -> Iterator[None]:
    """SIGTERM raises ``Terminated`` in the block, and tells the processes that were started in it, too: an engine
    outlives a parent that just stops, as at a second SIGTERM."""

    def leave(number: int, _frame: FrameType | None) -> NoReturn:
        signal.signal(number, before)
        for child in multiprocessing.active_children():
            child.terminate()
        raise Terminated

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong with an option, and leaves out how all of them are written: that is ``--help``."""

    def error(self, message: str) -> NoReturn:
        refuse(f"{message}; see --help")


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """The type of an option: a whole number from ``least`` to ``most``."""
    bounds = f"from {least} on" if most is None else f"from {least} to {most}"

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"must be a whole number {bounds}, not {text!r}")
        return value

    return number


def share(text: str) -> float:
    """The type of an option: a number above 0, 1 at most."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be a number above 0 and up to 1, not {text!r}")
    return value


def address(text: str) -> str:
    """The type of an option: where a server is."""
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise argparse.ArgumentTypeError(f"must be an address as http://127.0.0.1:8001/v1, not {text!r}")
    return text
