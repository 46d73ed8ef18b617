"""What one process tells of the requests that ended in it: the console's questions, and the answers to them as JSON.

Owns which questions there are. Answers are the same for the process itself and for another one (``peers``); who asks
all processes is ``together``.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from guard.console import views
from guard.console.contents import PROMPT_NOT_ALLOWED, Content, Contents
from guard.console.inspection import inspect
from guard.proxy.errors import ApiError, InvalidRequestError, NotFoundError
from guard.proxy.services import Services
from guard.proxy.wire_choices import chat_form
from guard.telemetry.recent import Finished

MAX_LINES = 250
"""Most requests in one answer; it says whether there are more."""

BINS = 40
"""Of the distribution of recent scores."""

NOT_KEPT = (
    "no request with this id is kept here: it has not ended, or many others have since; once it has ended, "
    "guard ledger show ID has its line"
)


@dataclass(frozen=True)
class Question:
    """``what``: ``lines``, those that ended after what was ``seen``, the oldest first; ``news``, nothing but an answer
    once there is one of these, or after ``wait_s`` seconds; ``has``, whether ``request_id`` is kept; ``page`` and
    ``inspection`` of it; ``scores``, how those that are kept scored; ``state`` of the process.

    ``seen``: by a process' ``run``, the number of the last one that was told of.
    """

    what: Literal["lines", "news", "has", "page", "inspection", "scores", "state"]
    request_id: str = ""
    seen: Mapping[str, int] = field(default_factory=dict)
    wait_s: float = 0.0


@dataclass(frozen=True)
class Answer:
    """``status``: of HTTP; ``body``: JSON, of an error in OpenAI's shape."""

    status: int
    body: Any


class Source(Protocol):
    """A process that can be asked."""

    async def answer(self, question: Question) -> Answer:
        """Raises ``OSError`` and ``ValueError`` where the process is gone, or does not answer in this form."""
        ...


@dataclass(frozen=True)
class Ended:
    """This process. ``run``: no other has the same, nor this one after a new start, when its numbers begin anew."""

    services: Services
    contents: Contents
    run: str = field(default_factory=lambda: secrets.token_hex(8))

    async def answer(self, question: Question) -> Answer:
        try:
            return Answer(200, await self._told(question))
        except ApiError as error:
            return Answer(error.status, error.to_wire())

    async def _told(self, question: Question) -> Any:
        recent, after = self.services.recent, question.seen.get(self.run, 0)
        match question.what:
            case "lines":
                # In a thread: the proxy's own requests do not wait for people who look on.
                return await asyncio.to_thread(self._lines, recent.after(after))
            case "news":
                return await recent.wait(after, question.wait_s)
            case "has":
                return recent.get(question.request_id) is not None
            case "page":
                return await self._page(self._finished(question.request_id))
            case "inspection":
                return await self._inspection(self._finished(question.request_id))
            case "scores":
                return self._scores()
            case "state":
                return {"policies_error": self.services.policies.error}

    def _finished(self, request_id: str) -> Finished:
        found = self.services.recent.get(request_id)
        if found is None:
            raise NotFoundError(NOT_KEPT)
        return found

    def _lines(self, found: list[Finished]) -> dict[str, Any]:
        lines = [
            {"number": one.number, "ended_s": one.ended_s, "line": views.line(one.record)} for one in found[:MAX_LINES]
        ]
        return {"run": self.run, "more": len(found) > MAX_LINES, "lines": lines}

    async def _page(self, finished: Finished) -> dict[str, Any]:
        content = await self.contents.find(finished)
        if isinstance(content, str):
            return {**views.whole(finished), "content": None, "no_content": content}
        return {**views.whole(finished), "content": _content(content)}

    async def _inspection(self, finished: Finished) -> dict[str, Any]:
        if finished.record.route != chat_form.route:
            raise InvalidRequestError(f"only requests of {chat_form.route} can be looked into")
        content = await self.contents.find(finished)
        if isinstance(content, str):
            raise NotFoundError(content)
        if not content.has_prompt or finished.judges is None:
            raise NotFoundError(PROMPT_NOT_ALLOWED)
        return await inspect(self.services, finished.judges.live, content, finished.record.request_id)

    def _scores(self) -> dict[str, dict[str, Any]]:
        """KIND -> ``bins``, how many scores of recent requests lie in each of ``BINS`` equal steps from 0 to 1, and
        ``requests``, how many those were: several detectors of a kind score one request."""
        counts: dict[str, dict[str, Any]] = {}
        for finished in self.services.recent.after(0):
            record = finished.record
            kinds = finished.judges.live.detector_kinds if finished.judges is not None else {}
            scored: set[str] = set()
            for name, score in {**record.scores, **(record.answer.scores if record.answer else {})}.items():
                if score.value is not None and name in kinds:
                    scored.add(kind := kinds[name])
                    bins = counts.setdefault(kind, {"bins": [0] * BINS, "requests": 0})["bins"]
                    bins[min(BINS - 1, max(0, int(score.value * BINS)))] += 1
            for kind in scored:
                counts[kind]["requests"] += 1
        return counts


def _content(content: Content) -> dict[str, Any]:
    messages = content.fields.get("messages")
    return {
        "messages": messages if isinstance(messages, list) else [],
        "answer": content.answer,
        "changes": content.changes,
        "notes": content.notes,
    }
