"""A ledger entry says what was decided about a request, on which scores, and how it ended."""

from __future__ import annotations

import json

from guard.telemetry.record import ENTRY_FIELDS, MAX_MODEL_CHARACTERS
from tests.telemetry.records import blocked, record


def test_every_field_of_an_entry_is_documented_and_no_other() -> None:
    assert list(blocked().to_entry()) == list(ENTRY_FIELDS)


def test_a_decision_is_told_with_its_rules_scores_and_reasons() -> None:
    entry = blocked().to_entry()
    assert (entry["action"], entry["rule"], entry["rules"], entry["would"]) == (
        "block", "injection", ["injection"], "block",
    )  # fmt: skip
    assert entry["scores"] == {"injection": 0.97, "focus": None}
    assert entry["detectors"] == {"injection": "scored", "focus": "unavailable: late"}
    assert [(hit["rule"], hit["mode"], hit["on_error"]) for hit in entry["hits"]] == [
        ("injection", "enforce", False),
        ("distracted", "shadow", True),
    ]


def test_times_are_milliseconds_and_none_when_it_did_not_come_to_it() -> None:
    assert blocked().to_entry()["timings_ms"] == {
        "total": 32.1, "own": 0.4, "verdict": 30.0, "window_passes": None, "upstream_first_byte": 29.0,
        "upstream": 31.0,
    }  # fmt: skip
    assert record().to_entry()["timings_ms"]["verdict"] is None


def test_a_request_that_never_came_to_a_decision_still_has_a_whole_entry() -> None:
    entry = json.loads(json.dumps(record(outcome="client_gone").to_entry()))
    assert (entry["action"], entry["would"], entry["rule"], entry["hits"]) == ("none", "none", None, [])
    assert (entry["outcome"], entry["status"]) == ("client_gone", None)


def test_a_client_cannot_write_a_book_into_the_ledger_through_the_models_name() -> None:
    assert len(record(model="x" * 100_000).to_entry()["model"]) == MAX_MODEL_CHARACTERS
