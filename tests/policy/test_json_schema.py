"""Editors are told what the loader accepts: the shipped schemas are the types', and judge files as the types do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from guard.data import data_folder
from guard.policy.json_schema import KINDS, json_schema
from tests.policy.test_inheritance import BASE
from tests.policy.test_loading import GOOD
from tests.policy.test_policy_set import SELECTION

SHIPPED = sorted(data_folder("policies").glob("*.yaml"))


def valid(kind: str, text: str) -> bool:
    schema: dict[str, Any] = json.loads(json_schema(kind))  # type: ignore[arg-type]
    jsonschema.Draft202012Validator.check_schema(schema)
    return bool(jsonschema.Draft202012Validator(schema).is_valid(yaml.safe_load(text)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_shipped_schemas_are_up_to_date(kind: str) -> None:
    shipped = data_folder("policies") / "schema" / f"{kind}.schema.json"
    assert shipped.read_text() == json_schema(kind), "run: python -m guard.policy.json_schema policies/schema"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "text", "good"),
    [
        ("policy", GOOD, True),
        ("policy", BASE, True),
        ("policy", GOOD.replace("action: block", "action: blok"), False),
        ("policy", GOOD.replace("    kind: probe", "    config: x"), False),
        ("policy", GOOD.replace("    action: block\n", ""), False),
        ("policy", GOOD.replace("at_least: 0.9", "at_leest: 0.9"), False),
        ("policy", "version: 1\nname: c\nextends: base.yaml\nrules: [{name: stop, on_error: block}]\n", True),
        ("policy", "version: 1\nname: c\nextends: base.yaml\nrules: [{on_error: block}]\n", False),
        ("policy", "version: 1\nname: c\nextends: base.yaml\ndetectors: {a: {spans: {data: [tool]}}}\n", True),
        ("selection", SELECTION, True),
        ("selection", SELECTION.replace("policy: strict", "polizy: strict"), False),
        ("tests", "version: 1\ntests: [{name: x, scores: {a: 1, b: high}, expect: {action: block}}]\n", True),
        ("tests", "version: 1\ntests: [{name: x, expect: block}]\n", True),
        ("tests", "version: 1\ntests: [{name: x, expect: blok}]\n", False),
    ],
)
def test_a_schema_accepts_and_refuses_what_the_loader_does(kind: str, text: str, good: bool) -> None:
    assert valid(kind, text) == good


def test_every_field_has_a_meaning_for_the_editor_to_show() -> None:
    schema = json.loads(json_schema("policy"))
    without = [
        f"{name}.{field}"
        for name, one in [("Policy", schema), *schema["$defs"].items()]
        for field, what in one.get("properties", {}).items()
        if "description" not in what and "tokens" not in field
    ]
    assert without == []


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_files_are_what_editors_are_told(path: Path) -> None:
    kind = "tests" if path.name.endswith(".tests.yaml") else "policy"
    assert valid(kind, path.read_text())
