"""What is wrong with a value, in words that need no knowledge of pydantic.

Owns these words. Where a value stands is for whoever read it to say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

TEXT, LIST, MAPPING = "must be text", "must be a list", "must be a mapping"
WHOLE, NUMBER, TRUTH = "must be a whole number", "must be a number", "must be true or false"

WORDS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "missing": lambda ctx: "is missing",
    "extra_forbidden": lambda ctx: "there is no such field",
    **dict.fromkeys(("string_type", "string_unicode"), lambda ctx: TEXT),
    **dict.fromkeys(("list_type", "tuple_type", "set_type", "frozen_set_type"), lambda ctx: LIST),
    **dict.fromkeys(("dict_type", "mapping_type", "model_type", "model_attributes_type"), lambda ctx: MAPPING),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), lambda ctx: WHOLE),
    **dict.fromkeys(("float_type", "float_parsing"), lambda ctx: NUMBER),
    **dict.fromkeys(("bool_type", "bool_parsing"), lambda ctx: TRUTH),
    "finite_number": lambda ctx: "must be a finite number",
    "literal_error": lambda ctx: f"must be {ctx['expected']}",
    "string_pattern_mismatch": lambda ctx: f"must match {ctx['pattern']}",
    "string_too_short": lambda ctx: f"must have at least {_counted(ctx['min_length'], 'character')}",
    "string_too_long": lambda ctx: f"must have at most {_counted(ctx['max_length'], 'character')}",
    "too_short": lambda ctx: f"must have at least {_counted(ctx['min_length'], 'item')}, not {ctx['actual_length']}",
    "too_long": lambda ctx: f"must have at most {_counted(ctx['max_length'], 'item')}, not {ctx['actual_length']}",
    "greater_than": lambda ctx: f"must be greater than {ctx['gt']}",
    "greater_than_equal": lambda ctx: f"must be at least {ctx['ge']}",
    "less_than": lambda ctx: f"must be less than {ctx['lt']}",
    "less_than_equal": lambda ctx: f"must be at most {ctx['le']}",
    "path_not_file": lambda ctx: "is no file",
}
"""By pydantic's type of error. Those of our own validators, and whatever is not here, keep their message."""


def told(error: ErrorDetails) -> str:
    """One mistake; never the value itself, which may be a secret or a prompt."""
    words = WORDS.get(error["type"])
    if words is not None:
        return words(error.get("ctx", {}))
    return error["msg"].removeprefix("Value error, ")


def first_mistake(error: ValidationError) -> tuple[tuple[str | int, ...], str]:
    """Where the first mistake is, and what it is."""
    first = error.errors(include_url=False, include_input=False)[0]
    return first["loc"], told(first)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
