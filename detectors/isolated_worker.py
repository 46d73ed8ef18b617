"""The process that an isolated detector of texts runs in: ``python -m detectors.isolated_worker KIND FILE``.

Owns what crosses: a length in four bytes, then a text in UTF-8 one way and a score in msgpack the other. It ends when
its input does. What the detector prints goes to standard error, as nothing else may stand between the scores.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import IO, cast

import msgspec

from detectors.base import Score, TextDetector
from detectors.registry import build_detector

READY = b"ready"


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """``failed``: the type of what the detector raised; a score otherwise."""

    status: str = "unavailable"
    value: float | None = None
    reason: str = ""
    spans: tuple[tuple[int, int], ...] = ()
    details: tuple[tuple[str, float], ...] = ()
    failed: str = ""


def write_frame(pipe: IO[bytes], payload: bytes) -> None:
    pipe.write(len(payload).to_bytes(4, "little"))
    pipe.write(payload)
    pipe.flush()


def read_frame(pipe: IO[bytes]) -> bytes | None:
    """None at the end of what comes."""
    head = pipe.read(4)
    if len(head) < 4:
        return None
    payload = pipe.read(size := int.from_bytes(head, "little"))
    return payload if len(payload) == size else None


def text_of(payload: bytes) -> str:
    return payload.decode("utf-8", "surrogatepass")


def bytes_of(text: str) -> bytes:
    """Texts of requests may have halves of characters."""
    return text.encode("utf-8", "surrogatepass")


def reply_of(detector: TextDetector, text: str) -> Reply:
    try:
        score = detector.score_text(text)
        # Numbers may be numpy's.
        return Reply(
            score.status,
            None if score.value is None else float(score.value),
            score.reason.encode("utf-8", "backslashreplace").decode(),
            tuple((int(start), int(end)) for start, end in score.spans),
            tuple((str(name), float(value)) for name, value in score.details),
        )
    except Exception as error:
        return Reply(failed=type(error).__name__)


def score_of(reply: Reply) -> Score:
    """Raises ``ValueError`` for no score."""
    if reply.status not in ("scored", "unavailable", "not_applicable"):
        raise ValueError(f"no status is called {reply.status}")
    if reply.failed:
        return Score("unavailable", reason=f"the detector failed ({reply.failed})")
    return Score(reply.status, reply.value, reply.reason, spans=reply.spans, details=reply.details)  # type: ignore[arg-type]


def main(kind: str, path: str) -> None:
    # Ctrl-C and SIGTERM are for the guard, which ends this process when it needs no more scores.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    scores = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    detector = cast(TextDetector, build_detector(kind, Path(path)))
    write_frame(scores, READY)
    while (payload := read_frame(sys.stdin.buffer)) is not None:
        write_frame(scores, msgspec.msgpack.encode(reply_of(detector, text_of(payload))))


if __name__ == "__main__":
    main(*sys.argv[1:])
