"""Regular expressions that operators write and clients' texts are matched with. Owns that none can backtrack."""

from __future__ import annotations

import re
from typing import cast

import re2


def linear_pattern(pattern: str) -> re.Pattern[str]:
    """RE2's pattern, which has the methods of Python's and takes time in proportion to the text, whatever the text.

    Raises:
        ValueError: the pattern is none, or has what RE2 leaves out for that: look-around, back-references, repetition
            more than 1,000 times.
    """
    options = re2.Options()
    options.log_errors = False
    try:
        return cast("re.Pattern[str]", re2.compile(pattern, options))
    except re2.error as error:
        (reason,) = error.args
        raise ValueError(reason.decode() if isinstance(reason, bytes) else str(reason)) from None
