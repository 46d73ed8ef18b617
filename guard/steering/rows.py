"""Files of examples in JSON lines: contrast pairs to learn from, and prompts to try vectors on.

Owns the two formats. A file is checked whole before anything starts; a mistake is told with file, row and field, and no
row is ever quoted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from guard.blank_text import readable
from guard.json_lines import LinesError, json_lines
from guard.mistakes import first_mistake

LEAST_PAIRS = 2
Conversation = tuple[Mapping[str, str], ...]


class RowsError(ValueError):
    """A file of examples that cannot be used; the message names file, row and field."""


class _Row(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Message(_Row):
    role: Literal["system", "user", "assistant", "tool"]
    content: Annotated[str, Field(min_length=1), AfterValidator(readable)]


def _messages(value: Any) -> Any:
    """A text alone is what a user says."""
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


_Side = Annotated[tuple[_Message, ...], Field(min_length=1), BeforeValidator(_messages)]


class _Pair(_Row):
    positive: _Side
    negative: _Side


class _Prompt(_Row):
    prompt: _Side


@dataclass(frozen=True)
class Pairs:
    """``positive[i]`` and ``negative[i]`` belong together. ``sha256``: of the file's bytes."""

    positive: tuple[Conversation, ...]
    negative: tuple[Conversation, ...]
    sha256: str


@dataclass(frozen=True)
class Prompts:
    conversations: tuple[Conversation, ...]
    sha256: str


def read_pairs(path: Path) -> Pairs:
    """Rows of ``{"positive": ..., "negative": ...}``, each a user's text or messages. Raises ``RowsError``."""
    rows, digest = _read(path, _Pair)
    if len(rows) < LEAST_PAIRS:
        raise RowsError(f"{path}: has {len(rows)} pairs; a vector needs at least {LEAST_PAIRS}")
    return Pairs(tuple(_plain(row.positive) for row in rows), tuple(_plain(row.negative) for row in rows), digest)


def read_prompts(path: Path) -> Prompts:
    """Rows of ``{"prompt": ...}``, a user's text or messages. Raises ``RowsError``."""
    rows, digest = _read(path, _Prompt)
    if not rows:
        raise RowsError(f"{path}: has no rows")
    return Prompts(tuple(_plain(row.prompt) for row in rows), digest)


def _plain(messages: tuple[_Message, ...]) -> Conversation:
    return tuple({"role": message.role, "content": message.content} for message in messages)


_R = TypeVar("_R", bound=_Row)


def _read(path: Path, kind: type[_R]) -> tuple[list[_R], str]:
    try:
        rows = [_checked(path, number, raw, kind) for number, raw in json_lines(path)]
    except LinesError as error:
        raise RowsError(str(error)) from None
    return rows, hashlib.sha256(path.read_bytes()).hexdigest()


def _checked(path: Path, number: int, raw: Any, kind: type[_R]) -> _R:
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        location, what = first_mistake(error)
        raise RowsError(f"{path}: row {number}: {'.'.join(map(str, location)) or 'the row'}: {what}") from None
