"""Secrets, e-mail addresses and card numbers are taken out of captured text, and little else is."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guard.telemetry.redaction import redaction

ALL = ("secrets", "emails", "cards")


def redacted(text: str, names: tuple[str, ...] = ALL, **patterns: str) -> tuple[str, dict[str, int]]:
    counted: Counter[str] = Counter()
    return redaction(names, patterns)(text, counted), dict(counted)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mail me at jo.doe+x@mail.example.org, please", "mail me at [email], please"),
        ("card 4111 1111 1111 1111 ok", "card [card] ok"),
        ("card 4111-1111-1111-1111", "card [card]"),
        ("amex 378282246310005.", "amex [card]."),
        ("my key is sk-proj-abcdefghijklmnop0123456789", "my key is [secret]"),
        ("AKIAIOSFODNN7EXAMPLE", "[secret]"),
        ("ghp_" + "a1" * 18, "[secret]"),
        ("Authorization: Bearer abcdef0123456789", "Authorization: Bearer [secret]"),
        ('{"password": "hunter2hunter2"}', '{"password": "[secret]"}'),
        ("DB_PASSWORD=correct-horse", "DB_PASSWORD=[secret]"),
        ("postgres://app:s3cr3tpw@db/x", "postgres://app:[secret]@db/x"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NSJ9.c2lnbmF0dXJl", "[secret]"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabc\n-----END RSA PRIVATE KEY-----\nrest", "[secret]\nrest"),
        ("-----BEGIN PRIVATE KEY-----\nMIIE cut off", "[secret]"),
    ],
)
def test_what_is_written_as_usual_is_taken_out(text: str, expected: str) -> None:
    assert redacted(text)[0] == expected


@pytest.mark.parametrize(
    "text",
    [
        "order 4111 1111 1111 1112 has no right check digit",
        "2026-11-30 12:00:00, 1234567890123",
        "the token of the day: yes",
        "user@localhost and a@b",
        "a task-force, basic income, risk-averse",
    ],
)
def test_what_only_looks_a_little_like_it_stays(text: str) -> None:
    assert redacted(text) == (text, {})


def test_only_what_was_asked_for_is_taken_out_and_is_counted_by_what_it_was() -> None:
    text = "ACME-123456 and ACME-654321 of a@b.example, 4111111111111111"
    assert redacted(text, ("emails",), ticket="ACME-[0-9]{6}") == (
        "[ticket] and [ticket] of [email], 4111111111111111",
        {"email": 1, "ticket": 2},
    )
    assert redacted(text, ()) == (text, {})


@given(st.text(max_size=300))
def test_any_text_can_be_redacted_and_a_second_time_changes_no_card_or_address(text: str) -> None:
    once, _ = redacted(text, ("emails", "cards"))
    assert redacted(once, ("emails", "cards"))[0] == once


@pytest.mark.parametrize("text", ["1 " * 50_000, "a" * 100_000, "-----BEGIN A B C " * 5000, "://" + "x" * 50_000])
def test_long_texts_that_nearly_match_take_time_in_proportion(text: str) -> None:
    """What backtracks would not come back within the hour."""
    assert len(redacted(text)[0]) <= len(text)
