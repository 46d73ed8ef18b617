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
from guard.policy.capture import Capture
from guard.policy.cases import Case, Cases, Expectation
from guard.policy.conditions import AllCondition, AnyCondition, NotCondition, ScoreCondition, StatusCondition
from guard.policy.inheritance import Inheritance, Removal
from guard.policy.schema import DetectorUse, Policy, Redaction, Routing, Rule, SteeringGate
from guard.policy.selection import Assignment, Match, Selection

SECTIONS: tuple[tuple[str, type[BaseModel]], ...] = (
    ("The file", Policy),
    ("The file: inheritance", Inheritance),
    ("`remove`", Removal),
    ("`capture`", Capture),
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
    ("`selection.yaml`", Selection),
    ("`selection.yaml`: `assignments[]`", Assignment),
    ("`selection.yaml`: `assignments[].match`", Match),
    ("`NAME.tests.yaml`", Cases),
    ("`NAME.tests.yaml`: `tests[]`", Case),
    ("`NAME.tests.yaml`: `tests[].expect`", Expectation),
)

THE_RULES: dict[type[BaseModel], tuple[str, ...]] = {Steer: ("gate",)}
"""Fields that a request may have there and a policy may not: the rule has them."""


HEAD = """# Policy reference

Generated from `guard/policy/schema.py` and its neighbours by `python -m guard.policy.reference`; do not edit. Unknown
keys are errors.

A policy is a YAML file; `guard serve --policy` takes one, or a folder of them with a `selection.yaml` that says which
judges which requests. Files are watched: what changes is checked as a whole and judges from then on, and while anything
in it is wrong the policies before it stay. Shipped: `default`, `strict`, `observe`, `rag` and `agent`.

| command | what it does |
| --- | --- |
| `guard policy lint FILE...` | checks files and folders; with `--model` all their detectors' files and vectors |
| `guard policy test FILE...` | runs the tables in `NAME.tests.yaml` beside `NAME.yaml` |
| `guard policy explain FILE --request ID` | what every rule makes of a request of the ledger, and which one decides |
| `guard policy diff FILE FILE` | what one says that the other does not |
| `guard policy replay FILE` | decides the ledger's requests again on their recorded scores; the exit code is for CI |
| `guard policy schema` | the JSON schema, for editors: first line `# yaml-language-server: $schema=PATH` |
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
