"""Long benign documents: READMEs, docstrings, manuals, help pages and frequent questions out of pinned wheels.

Owns which stretches of which texts these are. They are no rows of the other calibrations: they are read for probes with
windows alone (``fit_windows``). Of texts that begin alike only the first is taken.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any, Literal

from detectors.calibration.document_texts import docstrings_in, readme_in
from detectors.calibration.sets.content import number_of, shortened
from detectors.calibration.split import near_duplicates
from detectors.calibration.wheels import document_table, members, read_jsonl, read_text, wheel_of

NAME = "long-documents"
Kind = Literal["readme", "docstrings", "pages", "faq"]

LENGTHS = ((1300, 74), (2600, 18), (5500, 6), (11000, 2))
"""Characters of a document, about 300 to 4,000 tokens, and of a hundred documents how many, as far as a text is long
enough."""
LEAST = 1200
"""Characters, below which a text is no long document."""
SHORTEST = 450
"""Characters of a document: more than a window has."""
WIDE = {"zh": 4, "ko": 3}
"""Languages whose characters are so many tokens more than Latin ones."""
MOST_OF_ONE, MOST_OF_PAGES = 2, 11
"""Documents of a wheel; of one that has pages or questions."""
LARGEST = 8
"""Python files of a wheel that are looked through: the one of them with most documentation is read."""


@dataclass(frozen=True)
class LongDocument:
    """``package``: the wheel that it is from. Documents of one package are never in two splits."""

    id: str
    package: str
    kind: Kind
    lang: str
    text: str


def packages() -> list[str]:
    """Names of the wheels."""
    return [one["name"] for one in document_table()]


def long_documents() -> list[LongDocument]:
    """All of them, package by package. Raises ``DataError`` for a wheel that is not there."""
    found = [one for entry in document_table() for one in _of_package(entry)]
    alike = near_duplicates([one.text for one in found])
    return [one for one, earlier in zip(found, alike, strict=True) if not earlier]


def _of_package(entry: Mapping[str, Any]) -> list[LongDocument]:
    """In turn from each of its texts, so that all kinds have their share."""
    name = entry["name"]
    most = MOST_OF_PAGES if {"pages", "faq"} & entry.keys() else MOST_OF_ONE
    by_text = [
        [LongDocument(f"{name}-{kind}-{lang}-{n}-{i}", name, kind, lang, text) for i, text in enumerate(some)]
        for n, (kind, lang, whole) in enumerate(_texts(name, entry))
        if (some := list(_stretches(whole, f"{name}|{n}", WIDE.get(lang, 1))))
    ]
    return [one for one in chain.from_iterable(zip_longest(*by_text)) if one is not None][:most]


def _texts(name: str, entry: Mapping[str, Any]) -> Iterator[tuple[Kind, str, str]]:
    """Kind, language and text."""
    for prefix, lang in entry.get("pages", {}).items():
        pages = [read_text(name, one) for suffix in (".rst", ".md") for one in members(name, prefix, suffix)]
        long, short = (_some(pages, long=long) for long in (True, False))
        yield from (("pages", lang, page) for page in long)
        # Short pages of help are read one behind the other.
        yield "pages", lang, "\n\n".join(short)
    for member, lang in entry.get("faq", {}).items():
        yield "faq", lang, "\n\n".join(f"{one['q']}\n{one['a']}" for one in read_jsonl(name, member))
    if "file" not in entry:
        return
    yield "readme", entry.get("lang", "en"), readme_in(read_text(name, f"{_about(name)}METADATA"))
    code = [one for one in members(name, "", ".py") if "/tests/" not in one]
    sources = sorted((read_text(name, one) for one in code), key=len, reverse=True)[:LARGEST]
    yield "docstrings", "en", max(map(docstrings_in, sources), key=len, default="")


def _about(name: str) -> str:
    """The folder of the wheel's metadata."""
    parts = wheel_of(name).file.split("-")
    return f"{parts[0]}-{parts[1]}.dist-info/"


def _some(pages: Sequence[str], *, long: bool) -> list[str]:
    return [page for page in pages if (len(page) >= 2 * LEAST) == long]


def _stretches(text: str, key: str, wide: int) -> Iterator[str]:
    """One behind the other, each as long as a hash says."""
    at, count = 0, 0
    while len(text) - at >= LEAST / wide:
        wanted = _length(f"{key}|{count}") // wide
        found = shortened(text[at:], wanted)
        at += len(found)
        at += re.match(r"\s*", text[at:]).end()  # type: ignore[union-attr]
        count += 1
        if len(found := found.strip()) >= max(SHORTEST, LEAST * 0.6 / wide):
            yield found


def _length(key: str) -> int:
    drawn = number_of(key) % 100
    for characters, share in LENGTHS:
        drawn -= share
        if drawn < 0:
            return characters
    return LENGTHS[0][0]
