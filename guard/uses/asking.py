"""The one way in which the uses ask a model: conversations with specs in, answers with their readouts out.

Owns the two doors, an engine in this process and a server. Never scores anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from guard.mia.results import Readout, Readouts
from guard.mia.spec import MiaSpec

if TYPE_CHECKING:
    from guard.mia.client import MiaClient
    from guard.mia.llm import MiaLLM

Messages = list[dict[str, Any]]

MOST_AT_ONCE = 16
"""Requests that ``served`` has under way; vLLM puts them into one batch."""


@dataclass(frozen=True)
class Told:
    """One answer's text, its readouts by stage, first those of the prompt, and the tokens of both."""

    text: str
    readouts: tuple[Readouts, ...]
    prompt_token_ids: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()

    @property
    def prompt(self) -> Readouts:
        return next(one for one in self.readouts if one.stage == "prompt")

    @property
    def items(self) -> dict[str, Readout]:
        """Every readout by capture name, of all stages."""
        return {name: item for readouts in self.readouts for name, item in readouts.items.items()}


class Ask(Protocol):
    """Asks all at once and answers in order, greedily. ``ignore_eos``: every answer has ``max_tokens``."""

    def __call__(
        self, asked: Sequence[tuple[Messages, MiaSpec]], max_tokens: int = 1, ignore_eos: bool = False
    ) -> list[Told]: ...


def offline(llm: MiaLLM) -> Ask:
    """Ask an engine in this process."""

    def ask(asked: Sequence[tuple[Messages, MiaSpec]], max_tokens: int = 1, ignore_eos: bool = False) -> list[Told]:
        conversations, specs = [messages for messages, _ in asked], [spec for _, spec in asked]
        answers = llm.chat(conversations, specs, max_tokens=max_tokens, ignore_eos=ignore_eos)
        return [Told(one.text, one.readouts, one.prompt_token_ids, one.token_ids) for one in answers]

    return ask


def served(client: MiaClient, model: str) -> Ask:
    """Ask a server with taps. ``model``: as it calls it."""

    def ask(asked: Sequence[tuple[Messages, MiaSpec]], max_tokens: int = 1, ignore_eos: bool = False) -> list[Told]:
        def one(pair: tuple[Messages, MiaSpec]) -> Told:
            messages, spec = pair
            options: dict[str, Any] = {
                "max_tokens": max_tokens,
                "extra_body": {"return_token_ids": True, "ignore_eos": ignore_eos},
            }
            answer: Any
            if spec.asks:
                answer, readouts = client.chat(messages, spec, model, **options)
            else:
                create: Any = client.client.chat.completions.create
                answer, readouts = create(messages=messages, model=model, temperature=0.0, **options), ()
            choice = answer.choices[0]
            ids = tuple(answer.prompt_token_ids), tuple(choice.token_ids)
            return Told(choice.message.content or "", readouts, *ids)

        with ThreadPoolExecutor(MOST_AT_ONCE) as pool:
            return list(pool.map(one, asked))

    return ask
