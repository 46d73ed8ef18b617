"""``docs/policy-reference.md``, written from the schema: ``python -m guard.policy.reference``.

A test fails when the page in the repository is not what this prints.
"""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from guard.mia.spec import Steer
from guard.policy.schema import (
    AllCondition,
    AnyCondition,
    DetectorUse,
    NotCondition,
    Policy,
    Rule,
    ScoreCondition,
    StatusCondition,
)

SECTIONS: tuple[tuple[str, type[BaseModel]], ...] = (
    ("The file", Policy),
    ("`detectors.NAME`", DetectorUse),
    ("`rules[]`", Rule),
    ("Condition: a score", ScoreCondition),
    ("Condition: a detector's status", StatusCondition),
    ("Condition: `all`", AllCondition),
    ("Condition: `any`", AnyCondition),
    ("Condition: `not`", NotCondition),
    ("`rules[].steer[]`", Steer),
)

HEAD = """# Policy reference

Generated from `guard/policy/schema.py` by `python -m guard.policy.reference`; do not edit. Unknown keys are errors.
"""


def reference() -> str:
    """The whole page."""
    return HEAD + "".join(_section(title, model) for title, model in SECTIONS)


def _section(title: str, model: type[BaseModel]) -> str:
    rows = [_row(field.alias or name, field) for name, field in model.model_fields.items()]
    table = "| field | type | default | meaning |\n| --- | --- | --- | --- |\n" + "\n".join(rows)
    return f"\n## {title}\n\n{_prose(model.__doc__ or '')}\n\n{table}\n"


def _row(name: str, field: FieldInfo) -> str:
    default = "required" if field.is_required() else f"`{_default(field)}`"
    meaning = _prose(field.description or "")
    if field.examples:
        meaning += " Example: " + ", ".join(f"`{json.dumps(example)}`" for example in field.examples) + "."
    return f"| `{name}` | {_type(field.annotation)} | {default} | {meaning.replace('|', chr(92) + '|')} |"


def _default(field: FieldInfo) -> str:
    value = field.default if field.default is not PydanticUndefined else None
    return json.dumps(value)


def _type(annotation: Any) -> str:
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    text = re.sub(r"typing\.|guard\.(policy\.schema|mia\.spec)\.|, FieldInfo\(.*?\)|NoneType", "", text)
    text = re.sub(r"Annotated\[(\w+)[^\[\]]*(\[[^\]]*\])*[^\[\]]*\]", r"\1", text)
    plain = {"tuple": "list", "dict": "mapping"}
    for word, replacement in plain.items():
        text = re.sub(rf"\b{word}\b", replacement, text)
    if "Condition" in text or "Tag(" in text:
        text = "list of conditions" if text.startswith("list") else "condition"
    return text.replace(", ...]", "]").replace("|", "or").strip()


def _prose(text: str) -> str:
    return re.sub(r"\s+", " ", text.replace("``", "`")).strip()


if __name__ == "__main__":
    print(reference(), end="")
