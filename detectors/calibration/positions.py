"""Rows that say where an attack may stand: in a document or a tool's output, at start, middle or end, short to long.

Owns these rows. They are measured and never fitted to: attacks are held-out ones, documents come from files that no
other row is made of.
"""

from __future__ import annotations

from collections.abc import Iterator

from detectors.calibration.rows import POSITIONS, Composer, Place, Row, divided, insert
from detectors.calibration.sets import agentdojo
from detectors.calibration.sets.benign_requests import long_document
from detectors.calibration.sets.content import pick
from detectors.calibration.sources import own_frames, spikee_instructions, spikee_jailbreaks

SOURCE = "positions"
CASES = ((1200, 6), (5000, 2), (12500, 2), (17500, 2))
"""Characters of a document, about 300, 1,200, 2,600 and 3,500 tokens, and how many documents, each with its attack."""
PLACES: tuple[Place, ...] = ("document", "tool")


def position_rows(seed: int, tool_role: bool) -> list[Row]:
    """For each length and place: every document without an attack, and with its attack at each position."""
    composer = Composer(seed, own_frames(), tool_role)
    places = PLACES if tool_role else PLACES[:1]
    return [row for place in places for row in _rows(composer, place)]


def _rows(composer: Composer, place: Place) -> Iterator[Row]:
    attacks = attacks_of_positions(composer.seed)
    for characters, count in CASES:
        for number in range(count):
            document = long_document(number, characters)
            start = Row(f"{SOURCE}-{place}-{characters}-{number}", SOURCE, f"{SOURCE}:{number}", "held_out", "benign")
            yield composer.brought_by(place, start, document)
            for position in POSITIONS:
                attacked = start.with_attack(position)
                yield composer.brought_by(place, attacked, insert(document, attacks[number], position))


def attacks_of_positions(seed: int) -> list[str]:
    """Held-out attacks, of AgentDojo and of spikee in turn."""
    content = agentdojo.content()
    templates, goals = (divided(seeds, seed)["held_out"] for seeds in (content.templates, content.goals))
    jailbreaks = divided(spikee_jailbreaks(), seed)["held_out"]
    (instruction,) = pick(divided(spikee_instructions(), seed)["held_out"], 1, f"{seed}|{SOURCE}")
    count = max(count for _, count in CASES)
    dojo = [template.text.replace("{goal}", goal.text) for goal in goals for template in templates]
    said = [one.text.replace("<INSTRUCTION>", instruction.text) for one in jailbreaks]
    return [pick(dojo if i % 2 else said, count, f"{seed}|{SOURCE}")[i // 2] for i in range(count)]
