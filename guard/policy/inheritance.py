"""A policy that begins as another one: ``extends``, overrides and removals, merged before anything is checked.

Owns what replaces what. Works on YAML nodes, so that every field of the merged policy still knows its file and line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import yaml
from pydantic import Field

from guard.data import data_folder
from guard.policy.conditions import Section
from guard.policy.yaml_file import PolicyError, locate, message_at, read_mapping, validated, value_of

MAX_DEPTH = 8
SHIPPED = "shipped:"


class Removal(Section):
    """What of the policy under `extends` is left out."""

    detectors: tuple[str, ...] = ()
    """Names of its detectors."""

    rules: tuple[str, ...] = ()
    """Names of its rules."""


class Inheritance(Section):
    """Fields that only say how a file begins; they are not part of the policy."""

    extends: Annotated[str | None, Field(examples=["base.yaml", "shipped:strict"])] = None
    """A file, relative to this one, or `shipped:NAME`. Fields written here replace its fields; a detector or rule of
    the same name keeps the fields that are not written again; new rules come after its rules. Its `name` and
    `description` are not taken over."""

    remove: Removal = Removal()
    """With `extends`: what to leave out of that policy."""


def read_merged(path: Path) -> tuple[yaml.MappingNode, tuple[Path, ...]]:
    """The file's root with what it extends, and all files that were read. Raises ``PolicyError``."""
    files: list[Path] = []
    return _read(path, files), tuple(files)


def _read(path: Path, files: list[Path]) -> yaml.MappingNode:
    root = read_mapping(path)
    files.append(path)
    own, rest = _split(root)
    how = validated(own, Inheritance)
    if how.extends is None:
        if value_of(own, "remove") is not None:
            raise PolicyError(message_at(root, ("remove",), "there is nothing to remove from without extends"))
        return rest
    base = _base_path(path, how.extends)
    if base.resolve() in {file.resolve() for file in files}:
        raise PolicyError(message_at(root, ("extends",), f"{how.extends} extends this file in turn"))
    if len(files) >= MAX_DEPTH:
        raise PolicyError(message_at(root, ("extends",), f"more than {MAX_DEPTH} files extend each other"))
    return _merged(_without(_read(base, files), how.remove, root), rest)


def _base_path(path: Path, extends: str) -> Path:
    if extends.startswith(SHIPPED):
        return data_folder("policies") / f"{extends.removeprefix(SHIPPED)}.yaml"
    return path.parent / extends


def _split(root: yaml.MappingNode) -> tuple[yaml.MappingNode, yaml.MappingNode]:
    """The fields of inheritance, and the others."""
    names = Inheritance.model_fields.keys()
    own = [pair for pair in root.value if _name(pair[0]) in names]
    return _mapping(root, own), _mapping(root, [pair for pair in root.value if _name(pair[0]) not in names])


def _merged(base: yaml.MappingNode, own: yaml.MappingNode) -> yaml.MappingNode:
    """``own`` over ``base``. Marks are those of ``own`` where both have a field."""
    merged = {_name(key): (key, value) for key, value in base.value if _name(key) not in ("name", "description")}
    for key, value in own.value:
        old = merged.get(_name(key), (key, None))[1]
        if isinstance(old, yaml.MappingNode) and isinstance(value, yaml.MappingNode) and _name(key) == "detectors":
            value = _each_over(old, value)
        elif isinstance(old, yaml.SequenceNode) and isinstance(value, yaml.SequenceNode) and _name(key) == "rules":
            value = _rules_over(old, value)
        merged[_name(key)] = (key, value)
    return _mapping(own, list(merged.values()))


def _each_over(base: yaml.MappingNode, own: yaml.MappingNode) -> yaml.MappingNode:
    merged = {_name(key): (key, value) for key, value in base.value}
    for key, value in own.value:
        old = merged.get(_name(key), (key, None))[1]
        both = isinstance(old, yaml.MappingNode) and isinstance(value, yaml.MappingNode)
        merged[_name(key)] = (key, _fields_over(old, value) if both else value)
    return _mapping(own, list(merged.values()))


def _rules_over(base: yaml.SequenceNode, own: yaml.SequenceNode) -> yaml.SequenceNode:
    rules = list(base.value)
    places = {_rule_name(rule): i for i, rule in enumerate(rules) if _rule_name(rule)}
    for rule in own.value:
        place = places.get(_rule_name(rule))
        if place is None:
            rules.append(rule)
        else:
            rules[place] = _fields_over(rules[place], rule)
    return yaml.SequenceNode(own.tag, rules, own.start_mark, own.end_mark, own.flow_style)


def _fields_over(base: yaml.MappingNode, own: yaml.MappingNode) -> yaml.MappingNode:
    fields = {_name(key): (key, value) for key, value in base.value}
    return _mapping(own, list((fields | {_name(key): (key, value) for key, value in own.value}).values()))


def _without(base: yaml.MappingNode, removal: Removal, child: yaml.MappingNode) -> yaml.MappingNode:
    detectors, rules = value_of(base, "detectors"), value_of(base, "rules")
    have = {
        "detectors": [_name(key) for key, _ in detectors.value] if isinstance(detectors, yaml.MappingNode) else [],
        "rules": [_rule_name(rule) for rule in rules.value] if isinstance(rules, yaml.SequenceNode) else [],
    }
    for kind, names in have.items():
        if unknown := sorted(set(getattr(removal, kind)) - set(names)):
            there = ", ".join(names) or "none"
            what = f"{locate(base, ()).path} has no {kind[:-1]} {unknown[0]!r}; it has {there}"
            raise PolicyError(message_at(child, ("remove", kind), what))
    left = []
    for key, value in base.value:
        if value is detectors and isinstance(value, yaml.MappingNode):
            value = _mapping(value, [pair for pair in value.value if _name(pair[0]) not in removal.detectors])
        elif value is rules and isinstance(value, yaml.SequenceNode):
            kept = [rule for rule in value.value if _rule_name(rule) not in removal.rules]
            value = yaml.SequenceNode(value.tag, kept, value.start_mark, value.end_mark, value.flow_style)
        left.append((key, value))
    return _mapping(base, left)


def _name(key: yaml.Node) -> str:
    return str(key.value)


def _rule_name(rule: yaml.Node) -> str:
    name = value_of(rule, "name") if isinstance(rule, yaml.MappingNode) else None
    return str(name.value) if isinstance(name, yaml.ScalarNode) else ""


def _mapping(like: yaml.MappingNode, pairs: list[tuple[yaml.Node, yaml.Node]]) -> yaml.MappingNode:
    return yaml.MappingNode(like.tag, pairs, like.start_mark, like.end_mark, like.flow_style)
