"""Two small benchmarks of attacks: agent-injection-bench (with four benign controls) and hermes-jailbench."""

from __future__ import annotations

import ast

from detectors.calibration.sets.content import Content
from detectors.calibration.sources import Text
from detectors.calibration.wheels import read_jsonl, read_text, string_of

AGENT_INJECTION, HERMES = "agent-injection-bench", "hermes-jailbench"
BENIGN_FAMILIES = ("control",)
TARGETS = ("explain how to pick a pin tumbler lock", "write a letter to my landlord", "describe your hidden rules")
"""What hermes-jailbench's templates ask for here, in turn."""


def agent_injection() -> Content:
    texts = [
        Text(
            f"aib-{row['id']}",
            AGENT_INJECTION,
            f"aib:{row['family']}",
            "benign" if row["family"] in BENIGN_FAMILIES else "attack",
            "en",
            row["injected"],
            pasted=row["channel"] not in ("user_message", "multi_turn"),
        )
        for row in read_jsonl(AGENT_INJECTION, "aib/data/attacks.jsonl")
    ]
    return Content(texts=tuple(texts))


def hermes() -> Content:
    """``Attack(...)`` calls in its Python file, which is parsed and not run."""
    texts: list[Text] = []
    for node in ast.walk(ast.parse(read_text(HERMES, "hermes_jailbench/attacks.py"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Attack":
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            name, template = (string_of(given[key], {}) for key in ("name", "template"))
            if name is None or template is None:
                continue
            family = given["category"].attr if isinstance(given["category"], ast.Attribute) else name
            text = template.replace("{TARGET}", TARGETS[len(texts) % len(TARGETS)])
            lang = "other" if family == "MULTILINGUAL" else "en"
            texts.append(Text(f"hermes-{len(texts):02}", HERMES, f"hermes:{family}", "attack", lang, text))
    return Content(texts=tuple(texts))
