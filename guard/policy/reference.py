"""``docs/policy-reference.md``, written from the schema: ``python -m guard.policy.reference``.

A test fails when the page in the repository is not what this prints.
"""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from guard.mia.spec import Steer
from guard.policy.conditions import AllCondition, AnyCondition, NotCondition, ScoreCondition, StatusCondition
from guard.policy.inheritance import Inheritance, Removal
from guard.policy.schema import DetectorUse, Policy, Redaction, Routing, Rule, SteeringGate

SECTIONS: tuple[tuple[str, type[BaseModel]], ...] = (
    ("The file", Policy),
    ("The file: inheritance", Inheritance),
    ("`remove`", Removal),
    ("`detectors.NAME`", DetectorUse),
    ("`rules[]`", Rule),
    ("Condition: a score", ScoreCondition),
    ("Condition: a detector's status", StatusCondition),
    ("Condition: `all`", AllCondition),
    ("Condition: `any`", AnyCondition),
    ("Condition: `not`", NotCondition),
    ("`rules[].steer[]`", Steer),
    ("`rules[].gate`", SteeringGate),
    ("`rules[].redact`", Redaction),
    ("`rules[].route`", Routing),
)

THE_RULES: dict[type[BaseModel], tuple[str, ...]] = {Steer: ("gate",)}
"""Fields that a request may have there and a policy may not: the rule has them."""

HEAD = """# Policy reference

Generated from `guard/policy/schema.py` by `python -m guard.policy.reference`; do not edit. Unknown keys are errors.
"""


def reference() -> str:
    """The whole page."""
    return HEAD + "".join(_section(title, model) for title, model in SECTIONS)


def _section(title: str, model: type[BaseModel]) -> str:
    schema = model.model_json_schema()
    schema = schema.get("$defs", {}).get(model.__name__, schema)["properties"]
    fields = {
        field.alias or name: field for name, field in model.model_fields.items() if name not in THE_RULES.get(model, ())
    }
    rows = [_row(name, field, schema[name]) for name, field in fields.items()]
    table = "| field | type | default | meaning |\n| --- | --- | --- | --- |\n" + "\n".join(rows)
    return f"\n## {title}\n\n{_prose(model.__doc__ or '')}\n\n{table}\n"


def _row(name: str, field: FieldInfo, schema: dict[str, Any]) -> str:
    default = "required" if field.is_required() else _default(field.default)
    meaning = _prose(field.description or "")
    if field.examples:
        meaning += " Example: " + ", ".join(f"`{json.dumps(example)}`" for example in field.examples) + "."
    return f"| `{name}` | {_type(schema)} | {default} | {meaning.replace('|', chr(92) + '|')} |"


def _default(value: Any) -> str:
    return "none" if value is None or isinstance(value, BaseModel) else f"`{json.dumps(value)}`"


def _type(schema: dict[str, Any]) -> str:
    """A JSON schema's type in words."""
    if "const" in schema or "enum" in schema:
        return " or ".join(f"`{json.dumps(value)}`" for value in schema.get("enum", [schema.get("const")]))
    if forms := schema.get("anyOf", schema.get("oneOf")):
        names = list(dict.fromkeys(_type(form) for form in forms if form.get("type") != "null"))
        return " or ".join(names)
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[-1]
        return "condition" if name.endswith("Condition") else name
    if schema.get("type") == "array":
        return f"list of {_type(schema['items'])}"
    if schema.get("type") == "object":
        values = schema.get("additionalProperties") or next(iter(schema["patternProperties"].values()))
        return f"mapping to {_type(values)}"
    return str(schema["type"])


def _prose(text: str) -> str:
    return re.sub(r"\s+", " ", text.replace("``", "`")).strip()


if __name__ == "__main__":
    print(reference(), end="")
