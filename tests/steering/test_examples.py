"""The examples run as their first lines say, each in a process of its own, and say what they measured."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from guard.data import data_folder
from guard.machine import vllm_build
from guard.models import pull
from guard.policy.cases import cases_beside, run_cases
from guard.policy.lint import lint

CHECKOUT = Path(__file__).parents[2]
POLICIES = sorted(
    path for path in (CHECKOUT / "examples" / "policies").glob("*.yaml") if not path.name.endswith(".tests.yaml")
)
LIMIT_S = 600
"""On a machine with a lot else to do; alone they take half a minute."""


def run(example: str) -> str:
    if vllm_build() is None:
        pytest.skip("needs vLLM: make install")
    pull("smollm2-135m")
    # The engine in the example's own process: three processes that import vLLM take most of a minute more.
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    command = [sys.executable, str(CHECKOUT / "examples" / example)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.engine
def test_the_vector_makes_answers_french() -> None:
    told = run("steering_language.py")
    shares = [int(share) for share in re.findall(r"French (\d+)% of function words", told)]
    assert len(shares) == 3
    assert shares[0] <= 5
    assert shares[-1] >= shares[0] + 25, told


@pytest.mark.engine
def test_the_vector_does_what_the_instruction_in_words_does() -> None:
    told = run("instruction_following.py")
    counts = dict(re.findall(r"^(nothing said|in words|as a vector): (\d+) of 8", told, re.MULTILINE))
    assert int(counts["as a vector"]) > int(counts["nothing said"]), told


@pytest.mark.engine
def test_every_shipped_detector_that_reads_the_model_scores() -> None:
    told = run("detectors_offline.py")
    rows = re.findall(r"^(\w+) +(\w+) (\S+)(?: \(fpr_1pct: [\d.]+\))? +(\S.*)$", told, re.MULTILINE)
    values = {(kind, text[:5]): (status, float(value)) for kind, status, value, text in rows if value != "none"}
    shipped = {path.parent.name for path in data_folder("model_configs").glob("*/SmolLM2-135M-Instruct.json")}
    # The others read texts alone, or the scores of these, or rank documents.
    assert {kind for kind, _ in values} == shipped - {"text_baseline", "combination", "core_reranker"}
    assert {status for status, _ in values.values()} == {"scored"}
    for kind in ("probe", "attention_tracker", "tool_call_risk"):
        assert values[kind, "Ignor"] > values[kind, "Which"], told
    # Whole answers to harmless questions: cut off, one of them is a hit.
    assert values["h_node", "Which"][1] < 0.5, told
    assert values["science_hallucination", "The l"] > values["science_hallucination", "There"], told


@pytest.mark.parametrize("path", POLICIES, ids=lambda path: path.name)
def test_a_policy_of_the_examples_fits_the_shipped_model_and_passes_its_tests(path: Path) -> None:
    said: list[str] = []
    key = "SmolLM2-135M-Instruct"
    assert lint([path], said.append, config_key=key, model_configs=data_folder("model_configs")) == 0, said
    report = run_cases(cases_beside(path))
    assert report.outcomes
    assert [outcome for outcome in report.outcomes if outcome.failure] == []
