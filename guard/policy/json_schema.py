"""JSON schemas of policies, selections and tests, for editors: ``python -m guard.policy.json_schema FOLDER``.

Owns what a file may say before it is merged with the one that it extends: then most fields may be left out. A test
fails when the shipped schemas are not these.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any, Literal

from guard.policy.cases import Cases
from guard.policy.inheritance import Inheritance
from guard.policy.schema import Policy
from guard.policy.selection import Selection

Kind = Literal["policy", "selection", "tests"]
KINDS: tuple[Kind, ...] = ("policy", "selection", "tests")
TITLES = {"policy": "mia-guard policy", "selection": "mia-guard policy selection", "tests": "mia-guard policy tests"}


def json_schema(kind: Kind) -> str:
    """JSON text that ends with a line break."""
    made = {"policy": _policy, "selection": Selection.model_json_schema, "tests": Cases.model_json_schema}[kind]()
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return json.dumps({**head, **made, "title": TITLES[kind]}, indent=1) + "\n"


def _policy() -> dict[str, Any]:
    schema, how = Policy.model_json_schema(), Inheritance.model_json_schema()
    definitions = {**schema.pop("$defs"), **how["$defs"]}
    schema["properties"] |= how["properties"]
    # The gate of a policy is the rule's; the type is shared with requests, where it is the vector's.
    del definitions["Steer"]["properties"]["gate"], definitions["Gate"]
    whole = {key: copy.deepcopy(definitions[key]) for key in ("Rule", "DetectorUse")}
    # Fields that are not written are the other file's; only a name says which rule is meant.
    definitions["Rule"]["required"] = ["name"]
    definitions["DetectorUse"].pop("required")
    definitions |= {f"Whole{name}": one for name, one in whole.items()}
    alone = {
        "properties": {
            "rules": {"items": {"$ref": "#/$defs/WholeRule"}},
            "detectors": {"additionalProperties": {"$ref": "#/$defs/WholeDetectorUse"}},
        }
    }
    return {**schema, "$defs": definitions, "if": {"not": {"required": ["extends"]}}, "then": alone}


def write(folder: Path) -> None:
    """One file for each kind."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind in KINDS:
        (folder / f"{kind}.schema.json").write_text(json_schema(kind), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
