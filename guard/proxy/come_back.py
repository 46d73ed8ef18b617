"""When a server that is busy wants to be asked again: a number or a date, or it is not passed on.

Owns what is one. Anything else in these headers would leave unread.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_NUMBER = r"\d{1,9}(?:\.\d{1,9})?"
_DATE = r"[A-Z][a-z]{2}, \d{2} [A-Z][a-z]{2} \d{4} \d{2}:\d{2}:\d{2} GMT"

WHEN = {"retry-after": re.compile(f"{_NUMBER}|{_DATE}", re.ASCII), "retry-after-ms": re.compile(_NUMBER, re.ASCII)}


def when_to_come_back(headers: Mapping[str, str]) -> dict[str, str]:
    """``headers``: of any case, as HTTP clients have them."""
    return {
        name.lower(): value
        for name, value in headers.items()
        if (form := WHEN.get(name.lower())) is not None and form.fullmatch(value)
    }
