"""The example of one's own detector in the documentation works as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from guard.mia.results import HiddenReadout

DOCUMENT = Path(__file__).parents[2] / "docs" / "detectors.md"


def test_the_example_detector_scores_and_says_when_it_cannot() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), flags=re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(code, namespace)  # noqa: S102
    detector = namespace["build"](Path("unused.json"))
    name, capture = next(iter(detector.plan().hidden.items()))
    state = HiddenReadout("complete", capture.layer, values=np.array([3.0, 4.0], np.float32))
    assert detector.score({name: state}).value == 5.0
    assert detector.score({}).status == "unavailable"
