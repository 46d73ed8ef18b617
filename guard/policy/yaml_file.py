"""YAML files for people: read within limits, with errors that point at file, line and field.

Owns the way from a file to YAML nodes, to plain data, and from a field back to where it was written. Knows nothing of
what the files mean. Nodes of several files may be one tree: each knows its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from guard.mistakes import told

MAX_FILE_BYTES = 1024 * 1024

Model = TypeVar("Model", bound=BaseModel)


MOST_PARTS = 16
"""Of a field's dotted name, from its beginning and its end together; conditions may be nested without end."""


class PolicyError(ValueError):
    """A file that cannot be used; the message reads ``FILE:LINE: FIELD: WHAT``, one line for each mistake."""


@dataclass(frozen=True)
class Place:
    """Where a field was written. ``field``: its dotted name, without parts that are not in the file."""

    path: Path
    line: int
    field: str


def read_mapping(path: Path) -> yaml.MappingNode:
    """One file's root. A key that is written twice would silently lose the first, so it is refused.

    Raises ``PolicyError``, never anything else.
    """
    root = _compose(path, _read(path))
    _refuse_twice(path, root, set())
    return root


def validated(root: yaml.Node, schema: type[Model]) -> Model:
    """The nodes as a model. Raises ``PolicyError`` that names every mistake."""
    data = plain_data(root)
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        raise PolicyError("\n".join(_mistakes(root, error))) from None


def plain_data(root: yaml.Node) -> Any:
    try:
        return yaml.constructor.SafeConstructor().construct_document(root)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None) or root.start_mark
        raise PolicyError(
            f"{mark.name}:{mark.line + 1}: not YAML: {getattr(error, 'problem', None) or error}"
        ) from None


def message_at(root: yaml.Node, location: Sequence[str | int], message: str) -> str:
    """One line that names the place of a field and what is wrong with it."""
    place = locate(root, location)
    return f"{place.path}:{place.line}: {place.field or 'the file'}: {message}"


def _mistakes(root: yaml.Node, error: ValidationError) -> list[str]:
    """A line for each place. Where a value may have one of several forms, pydantic tells what is wrong with each."""
    by_place: dict[tuple[str | int, ...], list[str]] = {}
    mistakes = error.errors(include_url=False, include_input=False)
    for one in mistakes:
        # pydantic counts only items without a mistake, and so finds too few beside each mistake in one.
        inside = (other for other in mistakes if other is not one and other["loc"][: len(one["loc"])] == one["loc"])
        if not (one["type"] == "too_short" and any(inside)):
            by_place.setdefault(_in_file(root, one), []).append(told(one))
    return [message_at(root, location, ", or ".join(dict.fromkeys(told))) for location, told in by_place.items()]


def _in_file(root: yaml.Node, error: ErrorDetails) -> tuple[str | int, ...]:
    """The way to a mistake without the names that pydantic gives to forms of a value; a missing field's own is last."""
    location, node = [part for part in error["loc"] if not str(part).startswith("<")], root
    way: list[str | int] = []
    for part in location:
        if (found := _child(node, part)) is not None:
            node = found[1]
            way.append(part)
    return (*way, location[-1]) if error["type"] == "missing" else tuple(way)


def locate(root: yaml.Node, location: Sequence[str | int]) -> Place:
    """Where a field is. Parts that are not in the file, as a missing field or a form's tag, keep the line of what
    contains them; a tag is left out of the name."""
    node: yaml.Node = root
    mark, names = root.start_mark, []
    for depth, part in enumerate(location):
        found = _child(node, part)
        if found is not None:
            mark, node = found
            names.append(str(part))
        elif depth == len(location) - 1:
            names.append(str(part))
    if len(names) > MOST_PARTS:
        left = len(names) - MOST_PARTS
        names = [*names[: MOST_PARTS // 2], f"… {left} more …", *names[-MOST_PARTS // 2 :]]
    return Place(Path(mark.name), mark.line + 1, ".".join(names))


def value_of(root: yaml.MappingNode, key: str) -> yaml.Node | None:
    found = _child(root, key)
    return found[1] if found is not None else None


def _read(path: Path) -> str:
    try:
        if path.exists() and not path.is_file():
            raise PolicyError(f"{path}: is no file")  # reading a pipe would wait for whoever writes to it
        raw = path.read_bytes()
    except OSError as error:
        raise PolicyError(f"{path}: cannot be read: {error.strerror}") from None
    if len(raw) > MAX_FILE_BYTES:
        raise PolicyError(f"{path}: larger than {MAX_FILE_BYTES} bytes")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PolicyError(f"{path}: byte {error.start} is not UTF-8") from None


def _compose(path: Path, text: str) -> yaml.MappingNode:
    try:
        loader = yaml.SafeLoader(text)
        loader.name = str(path)
        root = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise PolicyError(f"{path}:{line}: not YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise PolicyError(f"{path}: not YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(root, yaml.MappingNode):
        raise PolicyError(f"{path}:1: it is no mapping of fields to values")
    return root


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


def _child(node: yaml.Node, part: str | int) -> tuple[yaml.Mark, yaml.Node] | None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value == str(part):
                return key.start_mark, value
    elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        return node.value[part].start_mark, node.value[part]
    return None
