"""Long documents of many kinds, with and without an attack in them, for measuring what a long text does to detectors.

Owns these rows: what installed distributions say of themselves (their READMEs, licences and docstrings), and the
documents of the set ``positions``. Documents and the wordings of attacks are divided into a half to choose on and one
to measure on; of attacks only those are taken that no shipped detector was fitted to. What is installed differs from
machine to machine: ``cases_hash`` says which rows these are.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from itertools import cycle, zip_longest
from pathlib import Path
from typing import Literal

from detectors.calibration.document_texts import docstrings_in, readme_in
from detectors.calibration.positions import SOURCE, attacks_of_positions, position_rows
from detectors.calibration.rows import POSITIONS, Composer, Row, default_rows, divided, insert
from detectors.calibration.sets import agentdojo
from detectors.calibration.sets.catalogue import SETS
from detectors.calibration.sets.content import number_of, shortened
from detectors.calibration.sources import own_frames

Half = Literal["choosing", "held_out"]
Kind = Literal["readme", "docstrings", "licence"]

LENGTHS = ((13500, 2), (7000, 5), (3000, 7), (1200, 10))
"""Characters of a document, and how many of each half: about 300 to 4,000 tokens."""
KINDS: tuple[Kind, ...] = ("readme", "docstrings", "readme", "licence", "docstrings")
"""In turn."""
AT_EVERY_POSITION = 4000
"""Characters up to which a document is attacked at every position, each with another attack; longer ones at one."""
ATTACK_CHARACTERS = (25, 700)
LEAST = 2500
"""Characters of what a distribution says, below which it is no document."""
FILES_READ = 40
"""Python files of a distribution that are looked through for docstrings."""
LICENCE = re.compile(r"(LICENSE|LICENCE|COPYING|NOTICE)[^/]*$", re.IGNORECASE)
OURS = "mia-guard"


@dataclass(frozen=True)
class Case:
    """``document``: cases of one document share it. ``attack``: the text that was put in, empty without."""

    row: Row
    half: str
    document: str
    attack: str = ""

    @property
    def begins(self) -> int:
        """The attack's first character in the row's text."""
        return self.row.text.index(self.attack)


def cases(seed: int) -> list[Case]:
    """Of both halves, then those of ``positions``, which belong to the half that is measured on."""
    composer = Composer(seed, own_frames(), tool_role=True)
    found: list[Case] = []
    attacks = attacks_of(seed)
    for half, documents in documents_of().items():
        wordings = cycle(attacks[half])
        for number, (name, text) in enumerate(documents):
            place: Literal["tool", "document"] = "tool" if number % 2 else "document"
            start = Row(f"long-{half}-{name}", "long", name, "held_out", "benign")
            found.append(Case(composer.brought_by(place, start, text), half, name))
            for position in POSITIONS if len(text) < AT_EVERY_POSITION else POSITIONS[number % 3 : number % 3 + 1]:
                attack = next(wordings)
                row = composer.brought_by(place, start.with_attack(position), insert(text, attack, position))
                found.append(Case(row, half, name, attack))
    return [*found, *_of_positions(seed)]


def cases_hash(found: Sequence[Case]) -> str:
    digest = hashlib.sha256()
    for one in found:
        digest.update(json.dumps([one.half, one.document, one.row.messages]).encode())
    return digest.hexdigest()


def _of_positions(seed: int) -> Iterator[Case]:
    attacks = attacks_of_positions(seed)
    for row in position_rows(seed, tool_role=True):
        if row.place == "document":
            document = row.id.removesuffix(f"-{row.position}")
            number = int(document.rpartition("-")[2])
            yield Case(row, SOURCE, document, attacks[number] if row.label == "attack" else "")


def attacks_of(seed: int) -> dict[Half, list[str]]:
    """Of held-out groups alone, from every set in turn. Those that ``positions`` is made of are in no other half."""
    by_set: dict[Half, dict[str, list[str]]] = {"choosing": {}, "held_out": {}}
    for row in default_rows(seed, sorted(SETS), tool_role=True):
        plain = row.split == "held_out" and row.label == "attack" and not row.position
        if plain and ATTACK_CHARACTERS[0] <= len(row.text) <= ATTACK_CHARACTERS[1]:
            half: Half = "held_out" if row.source == "spikee" or number_of(f"a|{row.group}") % 2 else "choosing"
            by_set[half].setdefault(row.source, []).append(row.text)
    content = agentdojo.content()
    templates, goals = (divided(seeds, seed)["held_out"] for seeds in (content.templates, content.goals))
    by_set["held_out"]["agentdojo"] = [a.text.replace("{goal}", b.text) for a in templates for b in goals]
    return {half: _in_turn(found) for half, found in by_set.items()}


def _in_turn(by_set: Mapping[str, Sequence[str]]) -> list[str]:
    ordered = [sorted(dict.fromkeys(by_set[name]), key=lambda text: number_of(f"o|{text}")) for name in sorted(by_set)]
    return [text for texts in zip_longest(*ordered) for text in texts if text is not None]


def documents_of() -> dict[Half, list[tuple[str, str]]]:
    """Name and text, the longest first; a distribution is in one half, and gives one document of a kind at most."""
    pools: dict[tuple[Half, Kind], list[tuple[str, str]]] = {}
    seen: set[str] = set()
    for name, kind, text in installed_documents():
        # Licences begin alike and are most of them the same.
        sign = re.sub(r"\W+", " ", text[1000:1300] if kind == "licence" else text[:300])
        if sign not in seen:
            seen.add(sign)
            pools.setdefault((_half(f"half|{name}"), kind), []).append((name, text))
    for pool in pools.values():
        pool.sort(key=lambda one: number_of(one[0]))
    halves: tuple[Half, ...] = ("choosing", "held_out")
    return {half: [*_taken(half, pools)] for half in halves}


def _taken(half: Half, pools: Mapping[tuple[Half, Kind], list[tuple[str, str]]]) -> Iterator[tuple[str, str]]:
    kinds = cycle(KINDS)
    for characters, count in LENGTHS:
        for _ in range(count):
            wanted = next(kinds)
            for kind in (wanted, *KINDS):
                pool = pools.get((half, kind), [])
                at = next((i for i, (_, text) in enumerate(pool) if len(text) >= 0.9 * characters), None)
                if at is not None:
                    name, text = pool.pop(at)
                    yield f"{kind}-{name}-{characters}", shortened(text, characters)
                    break


def installed_documents() -> Iterator[tuple[str, Kind, str]]:
    """Name of the distribution, kind and text, in the order of the names."""
    found = {one.metadata["Name"].lower(): one for one in distributions()}
    for name in sorted(found.keys() - {OURS}):
        texts: dict[Kind, str] = {
            "readme": _readme(found[name]),
            "licence": _licence(found[name]),
            "docstrings": _docstrings(found[name]),
        }
        for kind, text in texts.items():
            if len(text) > LEAST:
                yield name, kind, text


def _readme(one: Distribution) -> str:
    return readme_in(one.read_text("METADATA") or "")


def _licence(one: Distribution) -> str:
    paths = [file for file in one.files or () if LICENCE.search(str(file)) and file.suffix != ".py"]
    return next((text for file in paths if len(text := _read(Path(str(one.locate_file(file))))) > LEAST), "")


def _docstrings(one: Distribution) -> str:
    """All docstrings of the file that has most of them."""
    paths = [file for file in one.files or () if file.suffix == ".py" and "tests" not in file.parts]
    texts = [docstrings_in(_read(Path(str(one.locate_file(file))))) for file in paths[:FILES_READ]]
    return max(texts, key=len, default="")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _half(key: str) -> Half:
    return "choosing" if number_of(key) % 2 else "held_out"
