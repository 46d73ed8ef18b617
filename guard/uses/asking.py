"""The one way in which the uses ask a model: conversations with specs in, readouts of their prompts out.

Owns the two doors, an engine in this process and a server. Never scores anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from guard.mia.results import Readouts
from guard.mia.spec import MiaSpec

if TYPE_CHECKING:
    from guard.mia.client import MiaClient
    from guard.mia.llm import MiaLLM

Messages = list[dict[str, Any]]
Ask = Callable[[Sequence[tuple[Messages, MiaSpec]]], list[Readouts]]
"""Readouts of each conversation's prompt, in order."""

MOST_AT_ONCE = 16
"""Requests that ``served`` has under way; vLLM puts them into one batch."""


def offline(llm: MiaLLM) -> Ask:
    """Ask an engine in this process; all conversations are in flight at once."""

    def ask(asked: Sequence[tuple[Messages, MiaSpec]]) -> list[Readouts]:
        answers = llm.chat([messages for messages, _ in asked], [spec for _, spec in asked], max_tokens=1)
        return [answer.readouts[0] for answer in answers]

    return ask


def served(client: MiaClient, model: str) -> Ask:
    """Ask a server with taps. ``model``: as it calls it."""

    def ask(asked: Sequence[tuple[Messages, MiaSpec]]) -> list[Readouts]:
        with ThreadPoolExecutor(MOST_AT_ONCE) as pool:
            return list(pool.map(lambda one: client.read(one[0], one[1], model), asked))

    return ask
