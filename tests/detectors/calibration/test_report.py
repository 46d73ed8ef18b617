"""The table in the documentation is the one that the recorded figures give."""

from __future__ import annotations

from pathlib import Path

import pytest

from detectors.calibration.report import BEGIN, END, markdown, renew

ROOT = Path(__file__).parents[3]


def test_the_documents_table_is_not_stale() -> None:
    document = (ROOT / "docs" / "detectors.md").read_text(encoding="utf-8")
    fresh = renew(document, markdown(ROOT / "model_configs", "SmolLM2-135M-Instruct"))
    assert document == fresh, "run: python -m detectors.calibration.report docs/detectors.md model_configs"


def test_only_what_is_between_the_markers_changes() -> None:
    assert renew(f"before {BEGIN}old{END} after", "new") == f"before {BEGIN}\nnew\n{END} after"


def test_a_document_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="lacks the markers"):
        renew("nothing here", "table")
