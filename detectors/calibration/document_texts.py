"""What a distribution says of itself: its README and its docstrings, as text. Reads nothing; no code of it is run."""

from __future__ import annotations

import ast
import re

TAG = re.compile(r"<[^>]{1,300}>")


def readme_in(metadata: str) -> str:
    """The description in a distribution's ``METADATA``, without HTML's tags."""
    return TAG.sub("", metadata.partition("\n\n")[2]).strip()


def docstrings_in(source: str) -> str:
    """All docstrings of a Python file; empty for what is none."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):
        return ""
    documented = [node for node in nodes if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef)]
    return "\n\n".join(text for node in documented if (text := ast.get_docstring(node)))
