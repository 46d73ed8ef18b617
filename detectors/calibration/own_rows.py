"""The user's own rows: JSON lines or CSV, checked whole before any engine starts.

Owns the file format. A row has ``text``, or ``messages`` in JSON lines, and ``label``; everything else is optional. An
error names file, row and field, and never quotes a row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from detectors.calibration.rows import Message, Place, Row
from detectors.calibration.sources import DataError, Label, own_frames
from detectors.calibration.split import SPLITS, Split, assign_splits, merge_beside
from guard.blank_text import readable
from guard.csv_rows import csv_rows
from guard.json_lines import LinesError, json_lines
from guard.mistakes import TRUTH, first_mistake

CSV = ".csv"
SUFFIXES = (".jsonl", CSV)


Words = Annotated[str, Field(min_length=1), AfterValidator(readable)]


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid")
    role: Literal["system", "user", "assistant", "tool"]
    content: Words


class _Row(BaseModel):
    model_config = ConfigDict(extra="forbid")

    label: Label
    text: Words | None = None
    """What a user said; stands behind a system message of ours."""
    messages: Annotated[tuple[_Message, ...], Field(min_length=1)] | None = None
    """The whole conversation, its last message the one that is judged."""
    id: Annotated[str, Field(min_length=1)] | None = None
    lang: Annotated[str, Field(min_length=1)] = "en"
    group: Annotated[str, Field(min_length=1)] | None = None
    """Rows that are one idea share it, and so share a split."""
    hard: bool = False
    """Benign, and made to look like an attack."""
    place: Place | None = None
    """Where not given, what the last message's role says."""

    @field_validator("hard", mode="before")
    @classmethod
    def _words_only_where_all_are_words(cls, value: Any, info: ValidationInfo) -> Any:
        """JSON has true and false; a field of CSV is a word."""
        if isinstance(value, bool) or (info.context == CSV and isinstance(value, str)):
            return value
        raise ValueError(TRUTH)

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.text is None) == (self.messages is None):
            raise ValueError("a row has either text or messages")
        if self.messages is not None and self.messages[-1].role not in ("user", "tool"):
            raise ValueError("the last of the messages is of the role user or tool")
        if self.hard and self.label == "attack":
            raise ValueError("hard marks benign rows that look like attacks, and the label is attack")
        return self


def is_own(name: str) -> bool:
    """Whether a value of ``--data`` is a file and not a named set."""
    return name.lower().endswith(SUFFIXES)


@dataclass(frozen=True)
class Own:
    """A row as it stands in its file, not divided yet. source: what its file is called here; its name, if not given."""

    path: Path
    number: int
    checked: _Row
    source: str = ""
    id: str = ""
    """Its own; where it has none, of file and number."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "source", self.source or self.path.name)
        object.__setattr__(self, "id", self.id or self.checked.id or f"{self.source}-{self.number}")

    @property
    def text(self) -> str:
        return self.checked.text or (self.checked.messages or ())[-1].content

    @property
    def conversation(self) -> tuple[tuple[str, str], ...]:
        """Role and content of each message as it was given; of a text alone, of the user who said it."""
        given = self.checked.messages
        return (("user", self.text),) if given is None else tuple((one.role, one.content) for one in given)

    @property
    def family(self) -> str:
        return self.checked.group or f"{self.source}:{self.checked.id or self.number}"

    @property
    def named(self) -> str:
        return f"{self.path}: row {self.number}"

    def row(self, group: str, split: Split) -> Row:
        row = self.checked
        tool = row.messages is not None and row.messages[-1].role == "tool"
        return Row(
            id=self.id,
            source=self.source,
            group=group,
            split=split,
            label=row.label,
            lang=row.lang,
            text=self.text,
            messages=_messages(row, own_frames().systems[1]),
            hard=row.hard,
            place=row.place or ("tool" if tool else "user"),
            origin=self.named,
        )


def read_files(paths: Sequence[Path]) -> list[Own]:
    """Rows of all files, no two with one id. Raises ``DataError`` for the first malformed row."""
    rows = [one for path, source in zip(paths, names_apart(paths), strict=True) for one in read_own(path, source)]
    shared = Counter(one.id for one in rows)
    return [replace(one, id=f"{one.source}:{one.id}") if shared[one.id] > 1 else one for one in rows]


def names_apart(paths: Sequence[Path]) -> list[str]:
    """What each of several files is called: its name, behind as many of its folders' as tell it from the others."""
    parts = [path.absolute().parts for path in paths]
    names = []
    for own in parts:
        alike = sum(other[-1:] == own[-1:] for other in parts)
        depth = 1
        while alike > 1 and depth < len(own):
            depth += 1
            alike = sum(other[-depth:] == own[-depth:] for other in parts)
        names.append("/".join(own[-depth:]))
    return names


def read_own(path: Path, source: str = "") -> list[Own]:
    """The file's rows. Raises ``DataError`` for its first malformed row."""
    rows = [Own(path, number, _checked(path, number, raw), source) for number, raw in _raw_rows(path)]
    if not rows:
        raise DataError(f"{path}: has no rows")
    seen: set[str] = set()
    for one in rows:
        if one.id in seen:
            raise DataError(f"{path}: row {one.number}: id: {one.id!r} is there twice")
        seen.add(one.id)
    return rows


def divided_own(
    own: Sequence[Own], named: Sequence[Row], seed: int, say: Callable[[str], None] = lambda _: None
) -> list[Row]:
    """Rows of all files, grouped and split as the named sets' are, and beside them.

    The splits of named sets are what they are without these rows: a group of which a text is nearly the same as some of
    theirs goes where most of those are, and joins their group. A row of it that is nearly the same as one in another
    split would be in both, and is left out.
    """
    groups, near = merge_beside([one.text for one in own], [one.family for one in own], [row.text for row in named])
    where: dict[str, Counter[Split]] = {}
    for group, alike in zip(groups, near, strict=True):
        where.setdefault(group, Counter()).update(named[i].split for i in alike)
    free = [i for i, group in enumerate(groups) if not where[group]]
    strata = [f"{own[i].source}:{own[i].checked.label}" for i in free]
    splits = assign_splits([groups[i] for i in free], strata, seed)
    splits |= {group: max(SPLITS, key=lambda split: found[split]) for group, found in where.items() if found}
    joined: dict[str, Counter[str]] = {}
    for group, alike in zip(groups, near, strict=True):
        there = [named[i].group for i in alike if named[i].split == splits[group]]
        joined.setdefault(group, Counter()).update(there)
    taken = {row.group for row in named}
    names = {
        group: min(found, key=lambda name: (-found[name], name))
        if found
        # Somebody's own name for a group may be one that a named set has for another.
        else (f"{group} of your own" if group in taken else group)
        for group, found in joined.items()
    }
    lost = [
        one
        for one, group, alike in zip(own, groups, near, strict=True)
        if any(named[i].split != splits[group] for i in alike)
    ]
    if lost:
        say(
            f"left out {len(lost)} of {len(own)} rows of your own, which are nearly the same as rows of named sets in "
            f"other splits than their group's (the first: {lost[0].named})"
        )
    left = {id(one) for one in lost}
    return [one.row(names[group], splits[group]) for one, group in zip(own, groups, strict=True) if id(one) not in left]


def contradiction(own: Sequence[Own]) -> str:
    """Which conversations are labelled both benign and attack; empty where none is. One label of the two is wrong."""
    labelled: dict[tuple[tuple[str, str], ...], dict[Label, Own]] = {}
    for one in own:
        labelled.setdefault(one.conversation, {}).setdefault(one.checked.label, one)
    both = [labels for labels in labelled.values() if len(labels) > 1]
    if not both:
        return ""
    first = " and ".join(f"{one.named} ({label})" for label, one in both[0].items())
    count = "1 conversation is" if len(both) == 1 else f"{len(both)} conversations are"
    return f"warning: {count} labelled both benign and attack, the first: {first}; one label of each is wrong"


def own_rows(path: Path, seed: int) -> list[Row]:
    """One file's rows by themselves."""
    return divided_own(read_own(path), (), seed)


def _messages(row: _Row, system: str) -> tuple[Message, ...]:
    if row.messages is None:
        return ({"role": "system", "content": system}, {"role": "user", "content": row.text or ""})
    return tuple({"role": message.role, "content": message.content} for message in row.messages)


def _raw_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Rows with their numbers: lines in JSON lines, records below the header in CSV, both counted from 1."""
    try:
        yield from csv_rows(path) if path.suffix.lower() == CSV else json_lines(path)
    except LinesError as error:
        raise DataError(str(error)) from None


def _checked(path: Path, number: int, raw: Any) -> _Row:
    try:
        return _Row.model_validate(raw, context=path.suffix.lower())
    except ValidationError as error:
        location, what = first_mistake(error)
        raise DataError(f"{path}: row {number}: {'.'.join(map(str, location)) or 'the row'}: {what}") from None
