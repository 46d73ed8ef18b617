"""A detector of texts in a process of its own: one call into C that holds Python's lock stops that process, and not the
one that serves everybody.

Owns that process. It reads one text at a time, is killed when it still reads one that nobody waits for any more, and is
started again at once. What crosses is in ``isolated_worker``.
"""

from __future__ import annotations

import logging
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import IO

import msgspec

from detectors.base import Score, TextDetector
from detectors.deadline import TooLateError, check_deadline
from detectors.isolated_worker import READY, Reply, bytes_of, read_frame, score_of, write_frame

log = logging.getLogger("guard.detectors")

LOOK_S = 0.02
"""How often whoever waits looks whether it still has to."""

START_LIMIT_S = 120.0
"""Longest time that loading a detector may take."""

RETIRED_S = 60.0
"""How long the process of a detector that new requests do not ask stays for those that still do."""

START_AGAIN_S = 5.0
"""After a start that failed, how long none is tried."""


class IsolatedError(Exception):
    """The process ended, or does not start."""


def wants_isolation(detector: object) -> bool:
    """Whether a detector's class says ``isolated = True``."""
    return getattr(detector, "isolated", False) is True


class _Child:
    """One process. ``begun_s``: on the clock of ``time.monotonic``. Raises ``IsolatedError``."""

    def __init__(self, kind: str, path: Path) -> None:
        # Without the folder that one happens to be in among those that modules come from.
        command = [sys.executable, "-P", "-m", "detectors.isolated_worker", kind, str(path)]
        try:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        except OSError as error:
            raise IsolatedError(f"no process can be started: {error.strerror}") from error
        self.begun_s = time.monotonic()
        self.ready = False
        self._answers = select.poll()
        self._answers.register(_pipe(self.process.stdout), select.POLLIN)

    def wait_ready(self) -> None:
        """Raises ``IsolatedError``, and ``TooLateError``, which leaves it starting."""
        while not self.ready:
            if time.monotonic() - self.begun_s > START_LIMIT_S:
                raise IsolatedError("its process does not start")
            if self._has_answered():
                self.ready = self._frame() == READY

    def score(self, text: str) -> Reply:
        """Raises ``IsolatedError`` and ``TooLateError``: then it is of no more use."""
        try:
            write_frame(_pipe(self.process.stdin), bytes_of(text))
        except OSError as error:
            raise IsolatedError("its process ended") from error
        while not self._has_answered():
            pass
        return msgspec.msgpack.decode(self._frame(), type=Reply)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            try:
                _pipe(pipe).close()
            except OSError:
                continue  # what was not read by it any more

    def _has_answered(self) -> bool:
        """Looks for a moment. Raises ``TooLateError``."""
        check_deadline()
        return bool(self._answers.poll(LOOK_S * 1000))

    def _frame(self) -> bytes:
        frame = read_frame(_pipe(self.process.stdout))
        if frame is None:
            raise IsolatedError("its process ended")
        return frame


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None, "asked for when the process was started"
    return pipe


class _Turns:
    """The process of one detector, which those who ask take turns at."""

    def __init__(self, kind: str, path: Path) -> None:
        self._kind, self._path = kind, path
        self._turn = threading.Lock()
        self._child: _Child | None = None
        self._closed = threading.Event()
        self._failed_s = self._used_s = -inf

    def start(self) -> None:
        with self._turn:
            self._started()

    def reply(self, text: str) -> Reply:
        """Raises ``IsolatedError`` and ``TooLateError``."""
        with self._my_turn():
            child = self._started()
            self._used_s = time.monotonic()
            try:
                child.wait_ready()
            except IsolatedError:
                self._failed_s = time.monotonic()
                self._end()
                raise
            try:
                return child.score(text)
            except BaseException:
                # It may be at this text for ever, and the next one is wanted soon.
                self._end()
                self._started()
                raise

    def retire(self) -> None:
        threading.Thread(target=self._end_when_idle, name="retired-detector", daemon=True).start()

    def _end_when_idle(self) -> None:
        while not self._closed.wait(RETIRED_S):
            with self._turn:
                if time.monotonic() - self._used_s >= RETIRED_S:
                    self._end()

    def close(self) -> None:
        """Whoever waits for a score has none."""
        self._closed.set()
        if (child := self._child) is not None:
            child.process.kill()
        with self._turn:
            self._end()

    @contextmanager
    def _my_turn(self) -> Iterator[None]:
        while not self._turn.acquire(timeout=LOOK_S):
            check_deadline()
        try:
            yield
        finally:
            self._turn.release()

    def _started(self) -> _Child:
        if self._closed.is_set():
            raise IsolatedError("it is not needed any more")
        if self._child is None:
            if time.monotonic() - self._failed_s < START_AGAIN_S:
                raise IsolatedError("its process does not start")
            self._child = _Child(self._kind, self._path)
        return self._child

    def _end(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None


class IsolatedText:
    """Stands for ``detector``, which was built from ``path``, in another process. Ends with this object."""

    def __init__(self, detector: TextDetector, path: Path) -> None:
        self.kind = detector.kind
        self.thresholds: Mapping[str, float] = detector.thresholds
        self.config = getattr(detector, "config", None)
        self._turns = _Turns(detector.kind, path)
        self.close = weakref.finalize(self, self._turns.close)
        self.retire = self._turns.retire
        """To be called once new requests do not ask any more; those under way still may."""

    def start(self) -> None:
        """Load it now. Without this it is loaded when the first text comes."""
        try:
            self._turns.start()
        except IsolatedError as error:
            log.warning("detector %s: %s", self.kind, error)

    def score_text(self, text: str) -> Score:
        """As of ``TextDetector``. Raises ``TooLateError``, after which the text is not read on."""
        try:
            return score_of(self._turns.reply(text))
        except TooLateError:
            log.warning("detector %s: no score came in time", self.kind)
            raise
        except (IsolatedError, msgspec.MsgspecError, ValueError) as error:
            why = str(error) if isinstance(error, IsolatedError) else "its process says what is no score"
            log.warning("detector %s: %s", self.kind, why)
            return Score("unavailable", reason=f"the detector failed ({why})")
