"""Policy files: read, checked against the schema, and named by a hash of their content.

Owns the way from a file to a ``Policy``, and error messages that point at file, line and field.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from guard.policy.schema import Policy

MAX_FILE_BYTES = 1024 * 1024


class PolicyError(ValueError):
    """A policy that cannot be used; the message reads ``FILE:LINE: FIELD: WHAT``."""


@dataclass(frozen=True)
class LoadedPolicy:
    """A policy that fits the schema. ``hash``: SHA-256 of its content, the same for any spelling of the same policy."""

    policy: Policy
    path: Path
    hash: str
    root: yaml.Node

    def error(self, location: Sequence[str | int], message: str) -> PolicyError:
        """An error at a field of this file, as the schema's own errors are shown."""
        return PolicyError(_message(self.path, self.root, location, message))


def load_policy(path: Path) -> LoadedPolicy:
    """Read and check one file. Raises ``PolicyError``, never anything else."""
    root = _compose(path, _read(path))
    data = _construct(path, root)
    try:
        policy = Policy.model_validate(data)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False)
        raise PolicyError("\n".join(_message(path, root, one["loc"], one["msg"]) for one in errors)) from None
    content = policy.model_dump_json(exclude_defaults=True)
    return LoadedPolicy(policy, path, hashlib.sha256(content.encode()).hexdigest(), root)


def _read(path: Path) -> str:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise PolicyError(f"{path}: cannot be read: {error.strerror}") from None
    if len(raw) > MAX_FILE_BYTES:
        raise PolicyError(f"{path}: larger than {MAX_FILE_BYTES} bytes")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PolicyError(f"{path}: byte {error.start} is not UTF-8") from None


def _compose(path: Path, text: str) -> yaml.Node:
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise PolicyError(f"{path}:{line}: not YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise PolicyError(f"{path}: not YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(root, yaml.MappingNode):
        raise PolicyError(f"{path}:1: a policy is a mapping with version, name, detectors and rules")
    return root


def _construct(path: Path, root: yaml.Node) -> Any:
    """Plain data from the nodes. A key that is written twice would silently lose the first, so it is refused."""
    _refuse_twice(path, root, set())
    try:
        return yaml.constructor.SafeConstructor().construct_document(root)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else 1
        raise PolicyError(f"{path}:{line}: not YAML: {getattr(error, 'problem', None) or error}") from None


def _refuse_twice(path: Path, node: yaml.Node, seen_nodes: set[int]) -> None:
    if id(node) in seen_nodes:
        return
    seen_nodes.add(id(node))
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise PolicyError(f"{path}:{key.start_mark.line + 1}: {key.value!r} is written twice")
                seen.add(key.value)
            _refuse_twice(path, value, seen_nodes)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _refuse_twice(path, value, seen_nodes)


def _message(path: Path, root: yaml.Node, location: Sequence[str | int], message: str) -> str:
    line, field = _locate(root, location)
    return f"{path}:{line}: {field or 'the policy'}: {message.removeprefix('Value error, ')}"


def _locate(root: yaml.Node, location: Sequence[str | int]) -> tuple[int, str]:
    """Line and dotted name of a field. Parts that are not in the file, as a missing field or a form's tag, keep the
    line of what contains them; a tag is left out of the name."""
    node: yaml.Node = root
    line, names = root.start_mark.line, []
    for depth, part in enumerate(location):
        found = _child(node, part)
        if found is not None:
            line, node = found
            names.append(str(part))
        elif depth == len(location) - 1:
            names.append(str(part))
    return line + 1, ".".join(names)


def _child(node: yaml.Node, part: str | int) -> tuple[int, yaml.Node] | None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value == str(part):
                return key.start_mark.line, value
    elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        return node.value[part].start_mark.line, node.value[part]
    return None
