"""What is taken out of captured text before it is written: secrets, e-mail addresses, card numbers, the policy's own
patterns.

Owns the forms of these. Each is found by how it is usually written, so this keeps accidents out of a file, and nobody
who tries. Forms of keys are those that the services publish for secret scanning.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

SECRETS = re.compile(
    r"""
      -----BEGIN[ ](?:[A-Z0-9]+[ ]){0,3}PRIVATE[ ]KEY-----[\s\S]*?(?:-----END[ ][A-Z0-9 ]{0,40}-----|\Z)
    | \b(?:sk|pk|rk)[-_][A-Za-z0-9_\-]{16,}                # OpenAI, Anthropic, Stripe
    | \bgh[pousr]_[A-Za-z0-9]{30,} | \bgithub_pat_\w{22,}
    | \bglpat-[\w\-]{20,}
    | \b(?:AKIA|ASIA)[0-9A-Z]{16}\b                         # AWS
    | \bAIza[0-9A-Za-z_\-]{35}                              # Google
    | \bxox[abeoprs]-[A-Za-z0-9\-]{10,}                     # Slack
    | \bhf_[A-Za-z0-9]{30,} | \bnpm_[A-Za-z0-9]{36} | \bpypi-[\w\-]{32,}
    | \bmg_[A-Za-z0-9_\-]{43}                               # the guard's own keys
    | \beyJ[\w\-]{8,}\.[\w\-]{8,}\.[\w\-]*                  # JSON web tokens
    """,
    re.VERBOSE,
)
NAMED_SECRETS = re.compile(
    r"""(?ix)
    ( \b(?:bearer|basic)[ ]+(?=[\w.~+/=\-]{16})
    | [\w\-]{0,32}(?:password|passwd|passphrase|secret|api[_\-]?key|access[_\-]?key|token)["']?\s{0,3}[:=]\s{0,3}["']?
    | ://[^\s/:@]{0,64}:
    )
    ([^\s"',;@]{6,})
    """
)
"""A value behind what says that it is one."""

EMAILS = re.compile(r"[\w.+%\-]{1,64}@[\w\-]{1,63}(?:\.[\w\-]{1,63}){1,8}")
CARDS = re.compile(r"(?<![\d])\d(?:[ \-]?\d){12,18}(?![\d])")

Redact = Callable[[str, Counter[str]], str]
"""A text without what is to be taken out; how often is counted by what it was."""


def redaction(names: Sequence[str], patterns: Mapping[str, str]) -> Redact:
    """``names``: of ``secrets``, ``emails`` and ``cards``; ``patterns``: name to regular expression."""
    own = [(name, re.compile(pattern)) for name, pattern in patterns.items()]

    def redact(text: str, counted: Counter[str]) -> str:
        if "secrets" in names:
            text = _each(SECRETS, "secret", text, counted)
            text = NAMED_SECRETS.sub(lambda found: found[1] + _count("secret", counted), text)
        if "emails" in names:
            text = _each(EMAILS, "email", text, counted)
        if "cards" in names:
            text = CARDS.sub(lambda found: _count("card", counted) if _checks(found[0]) else found[0], text)
        for name, pattern in own:
            text = _each(pattern, name, text, counted)
        return text

    return redact


def _each(pattern: re.Pattern[str], name: str, text: str, counted: Counter[str]) -> str:
    return pattern.sub(lambda _found: _count(name, counted), text)


def _count(name: str, counted: Counter[str]) -> str:
    counted[name] += 1
    return f"[{name}]"


def _checks(number: str) -> bool:
    """Whether the check digit of a card's number is right (Luhn; ISO/IEC 7812-1, annex B)."""
    digits = [int(one) for one in number if one.isdecimal()]
    doubled = [digit if i % 2 == 0 else sum(divmod(2 * digit, 10)) for i, digit in enumerate(reversed(digits))]
    return sum(doubled) % 10 == 0
