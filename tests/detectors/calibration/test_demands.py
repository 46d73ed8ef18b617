"""What a detector reads of which rows: calibrate and eval as commands, on planted readings, with no engine."""

from __future__ import annotations

import json
import resource
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from detectors.calibration.claims import Claim
from detectors.calibration.data import Use, load_rows, template_of
from detectors.calibration.evaluation import bucket_of
from detectors.calibration.seen_rows import seen_digests
from guard.cli import app
from guard.data import data_folder
from tests.detectors.calibration.tiny_model import make_model, plant, write_rows

KINDS = ("probe", "attention_tracker", "text_baseline", "combination", "tool_call_risk")


@dataclass(frozen=True)
class Calibrated:
    """A model calibrated, with probes of means, on what users said, what tools returned, and rows without an
    instruction; 70 of either label each."""

    model: Path
    users: Path
    tools: Path
    without: Path
    outcome: Result


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Calibrated]:
    # Longer than a line of 80 columns: what is told of a path must stay whole, to be copied.
    folder = tmp_path_factory.mktemp("calibrated") / "-".join(["of-a-long-name"] * 6)
    folder.mkdir()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        model = make_model(folder / "tiny")
        users = write_rows(folder / "users.jsonl", 70)
        tools = write_rows(
            folder / "tools.jsonl",
            70,
            messages=lambda text: [{"role": "system", "content": "Help."}, {"role": "tool", "content": text}],
        )
        without = write_rows(folder / "without.jsonl", 70, messages=lambda text: [{"role": "user", "content": text}])
        files = (without, users, tools)
        plant(model, load_rows([str(path) for path in files], 0, None, True))
        outcome = calibrate(model, *files, kinds=KINDS)
        yield Calibrated(model, users, tools, without, outcome)


def calibrate(model: Path, *data: Path, kinds: tuple[str, ...]) -> Result:
    out = ("--out", str(model.parent / "configs"), *(("--pooling", "mean") if "probe" in kinds else ()))
    return CliRunner().invoke(app, ["calibrate", *kinds, *_options(model, data), *out])


def evaluate(model: Path, configs: Path, *data: Path, more: tuple[str, ...] = ("--no-leave-one-out",)) -> Result:
    out = ("--model-configs", str(configs), "--out", str(model.parent / "report"))
    return CliRunner().invoke(app, ["eval", *_options(model, data), *out, *more])


def _options(model: Path, data: tuple[Path, ...]) -> list[str]:
    return ["--model", str(model), "--rows", "0", *(word for path in data for word in ("--data", str(path)))]


def report(model: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((model.parent / "report" / "report.json").read_text(encoding="utf-8"))
    return content


def test_the_tracker_is_fitted_to_the_rows_with_an_instruction(calibrated: Calibrated) -> None:
    assert calibrated.outcome.exit_code == 0, calibrated.outcome.output
    told = f"attention_tracker leaves out 140 of 420 rows (the first: {calibrated.without}: row 1: messages:"
    assert told in calibrated.outcome.output
    for kind, sources in (("attention_tracker", ["tools", "users"]), ("probe", ["tools", "users", "without"])):
        path = calibrated.model.parent / "configs" / kind / "tiny.json"
        data = json.loads(path.read_text(encoding="utf-8"))["calibration"]["data"]
        assert [source["name"] for source in data] == [f"{source}.jsonl" for source in sources]


@pytest.mark.parametrize("kind", KINDS)
def test_thresholds_that_the_rows_do_not_support_are_told_with_what_they_need(
    calibrated: Calibrated, kind: str
) -> None:
    path = calibrated.model.parent / "configs" / kind / "tiny.json"
    points = json.loads(path.read_text(encoding="utf-8"))["calibration"]["thresholds"]
    different = points["balanced"]["validation_benign_groups"]
    needed = {"fpr_0_1pct": 3000, "fpr_1pct": 300, "fpr_5pct": 60}
    told = {
        name: f"{kind}: no {name}: it needs {rows} different benign rows to be set on, and there are {different};"
        for name, rows in needed.items()
    }
    assert {name for name, line in told.items() if line in calibrated.outcome.output} == needed.keys() - points.keys()
    assert "fpr_1pct" not in points
    share = points["balanced"]["held_out_tpr_interval"]
    assert f"[{share['low']:.1%}," in calibrated.outcome.output


def test_every_detector_is_measured_on_the_rows_that_it_reads_a_probe_of_means_among_them(
    calibrated: Calibrated,
) -> None:
    files = (calibrated.without, calibrated.users, calibrated.tools)
    outcome = evaluate(calibrated.model, calibrated.model.parent / "configs", *files)
    assert outcome.exit_code == 0, outcome.output
    held_out = [row for row in load_rows([str(path) for path in files], 0, None, True) if row.split == "held_out"]
    counts = Counter(row.source for row in held_out)
    pooled = {kind: one["pooled"] for kind, one in report(calibrated.model)["detectors"].items()}
    assert {kind: one["benign"] + one["attack"] for kind, one in pooled.items()} == {
        "probe": len(held_out),
        "attention_tracker": counts["users.jsonl"] + counts["tools.jsonl"],
        "text_baseline": len(held_out),
        "combination": len(held_out),
        "tool_call_risk": counts["tools.jsonl"],
    }
    written = json.loads((calibrated.model.parent / "configs/probe/tiny.json").read_text(encoding="utf-8"))
    assert written["params"]["pooling"] == "mean"
    assert pooled["probe"]["auroc"] == pytest.approx(written["calibration"]["quality"]["auroc"], abs=1e-4)


def test_rows_that_no_tool_returned_are_evaluated_and_the_detector_of_tool_calls_is_told(
    calibrated: Calibrated,
) -> None:
    outcome = evaluate(calibrated.model, calibrated.model.parent / "configs", calibrated.users, more=())
    assert outcome.exit_code == 0, outcome.output
    told = "tool_call_risk is not evaluated: of the held-out rows that end with a message of the role tool 0 are benign"
    assert told in outcome.output
    assert set(report(calibrated.model)["detectors"]) == set(KINDS) - {"tool_call_risk"}
    assert list(report(calibrated.model)["about"]["not_evaluated"]) == ["tool_call_risk"]
    assert "not_evaluated" in (calibrated.model.parent / "report" / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("with_digests", [True, False], ids=["with digests", "of an older version"])
def test_of_detectors_of_statements_is_told_what_they_have_seen(
    calibrated: Calibrated, tmp_path: Path, with_digests: bool
) -> None:
    configs = tmp_path / "configs"
    shutil.copytree(calibrated.model.parent / "configs", configs)
    (configs / "h_node").mkdir()
    for path in (data_folder("model_configs") / "h_node").iterdir():
        shutil.copy(path, configs / "h_node")
    content = json.loads((configs / "h_node" / "SmolLM2-135M-Instruct.json").read_text(encoding="utf-8"))
    statements = [Claim(str(i), "r", "s", "g", "train", False, "Which?", f"Number {i}.") for i in range(12)]
    content["calibration"]["seen_rows"] = seen_digests(statements) if with_digests else ""
    (configs / "h_node" / "tiny.json").write_text(json.dumps(content), encoding="utf-8")
    outcome = evaluate(calibrated.model, configs, calibrated.users)
    assert outcome.exit_code == 0, outcome.output
    told = report(calibrated.model)["about"]["not_evaluated"]["h_node"]
    assert told in outcome.output
    assert ("has seen 12; " if with_digests else "has seen some and does not say which") in told


@pytest.mark.parametrize("command", [["calibrate", "probe"], ["eval"]])
def test_a_folder_that_cannot_be_written_to_is_told_before_anything_is_read(
    calibrated: Calibrated, tmp_path: Path, command: list[str]
) -> None:
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "out"
    # The rows' file is not there, which would be told as soon as it was looked for.
    options = _options(calibrated.model, (tmp_path / "none.jsonl",))
    outcome = CliRunner().invoke(app, [*command, *options, "--out", str(out)])
    assert outcome.exit_code == 1
    assert outcome.output.startswith(f"guard: {out}")
    assert "cannot be written to: Not a directory" in outcome.output


def test_nothing_to_evaluate_is_one_line_and_leaves_no_folder(calibrated: Calibrated, tmp_path: Path) -> None:
    out = tmp_path / "new" / "report"
    options = [*_options(calibrated.model, (calibrated.users,)), "--model-configs", str(tmp_path), "--out", str(out)]
    outcome = CliRunner().invoke(app, ["eval", *options])
    assert (outcome.exit_code, "has no detector of tiny" in outcome.output) == (1, True)
    assert list(tmp_path.iterdir()) == []


def test_a_text_baseline_alone_needs_no_engine(calibrated: Calibrated, tmp_path: Path) -> None:
    # Nothing of these is planted: an engine would start, and fail at a model without weights.
    outcome = calibrate(calibrated.model, write_rows(tmp_path / "new.jsonl", 70), kinds=("text_baseline",))
    assert outcome.exit_code == 0, outcome.output
    assert "starting an engine" not in outcome.output


def test_a_text_baseline_alone_is_measured_without_an_engine_and_with_lengths(
    calibrated: Calibrated, tmp_path: Path
) -> None:
    configs = tmp_path / "configs"
    shutil.copytree(calibrated.model.parent / "configs" / "text_baseline", configs / "text_baseline")
    instructed = [{"role": "system", "content": "Help."}, {"role": "user", "content": "An earlier question."}]
    rows = write_rows(
        tmp_path / "new.jsonl",
        70,
        messages=lambda text: [
            *instructed,
            {"role": "assistant", "content": "Yes."},
            {"role": "user", "content": (text + " ") * 20},
        ],
    )
    outcome = evaluate(calibrated.model, configs, rows, more=())
    assert outcome.exit_code == 0, outcome.output
    assert "starting an engine" not in outcome.output
    (text,) = report(calibrated.model)["detectors"].values()
    lengths = {
        name: one["rows"] for name, one in text["thresholds"]["balanced"]["caught_of"].items() if "length" in name
    }
    assert sum(lengths.values()) == text["pooled"]["attack"]
    tokenizer = template_of(calibrated.model)
    held_out = [row for row in load_rows([str(rows)], 0, None, True) if row.split == "held_out"]
    counts = [len(tokenizer(row.messages[-1]["content"].strip())["input_ids"]) for row in held_out]
    assert {name.removeprefix("length ") for name in lengths} == {bucket_of(count) for count in counts}
    assert "length 0 to 63 tokens" not in lengths


def test_rows_that_no_detector_was_fitted_to_are_measured_all_and_need_no_training_rows(
    calibrated: Calibrated, tmp_path: Path
) -> None:
    configs = tmp_path / "configs"
    shutil.copytree(calibrated.model.parent / "configs" / "probe", configs / "probe")
    rows = write_rows(tmp_path / "mine.jsonl", 20)
    outcome = evaluate(calibrated.model, configs, rows, more=())
    assert (outcome.exit_code, "benign rows for held_out, at least 10" in outcome.output) == (1, True)
    assert "or --all-rows" in outcome.output
    plant(calibrated.model, load_rows([str(rows)], 0, None, True, use=Use.measure_all))
    outcome = evaluate(calibrated.model, configs, rows, more=("--all-rows",))
    assert outcome.exit_code == 0, outcome.output
    assert "measured on 40 of 40 rows" in outcome.output
    (probe,) = report(calibrated.model)["detectors"].values()
    assert (probe["pooled"]["benign"], probe["pooled"]["attack"], probe["remarks"]) == (20, 20, [])
    assert report(calibrated.model)["about"]["command"].endswith("--all-rows")
    outcome = evaluate(calibrated.model, configs, calibrated.users, more=("--all-rows",))
    assert "of the 140 rows measured are among those that it was fitted to" in outcome.output


@contextmanager
def full_disk() -> Iterator[None]:
    """No file can be longer than a few bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    ("command", "file"),
    [
        (["eval", "--no-leave-one-out"], "report.json"),
        (["calibrate", "text_baseline"], "text_baseline/tiny.vocabulary.json"),
    ],
)
def test_a_full_disk_is_one_line_and_leaves_what_was_there(
    calibrated: Calibrated, tmp_path: Path, command: list[str], file: str
) -> None:
    configs, out = tmp_path / "configs", tmp_path / "out"
    shutil.copytree(calibrated.model.parent / "configs" / "text_baseline", configs / "text_baseline")
    there = [out / file, out / "text_baseline" / "tiny.json"]
    for path in there:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("of a run before")
    of_eval = ["--model-configs", str(configs)] if command[0] == "eval" else []
    options = [*_options(calibrated.model, (calibrated.users,)), *of_eval, "--out", str(out)]
    with full_disk():
        outcome = CliRunner().invoke(app, [*command, *options])
    assert outcome.exit_code == 1
    assert outcome.output.endswith("cannot be written: File too large\n")
    assert f"guard: {out}" in outcome.output
    assert sorted(path for path in out.rglob("*") if path.is_file()) == sorted(there)
    assert {path.read_text() for path in there} == {"of a run before"}


def test_rows_that_no_kind_asked_for_can_read_are_told_before_an_engine_starts(calibrated: Calibrated) -> None:
    rows = write_rows(
        calibrated.model.parent / "unread.jsonl", 70, messages=lambda text: [{"role": "user", "content": text}]
    )
    # Nothing of these is planted: an engine would start, and fail at a model without weights.
    outcome = calibrate(calibrated.model, rows, kinds=("attention_tracker", "tool_call_risk"))
    assert outcome.exit_code == 1
    assert f"{rows}: row 1: messages: none of the role system" in outcome.output
    assert "tool_call_risk: it needs 20 rows" in outcome.output


def test_a_row_that_is_too_long_for_the_model_is_told_before_an_engine_starts(calibrated: Calibrated) -> None:
    model = make_model(calibrated.model.parent / "short")
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 16}), encoding="utf-8")
    outcome = calibrate(model, calibrated.users, kinds=("probe",))
    assert outcome.exit_code == 1
    assert f"{calibrated.users}: row 1: has " in outcome.output
    assert "tokens, at most 15 can be read" in outcome.output


def test_a_row_that_the_template_refuses_is_told_before_an_engine_starts(calibrated: Calibrated) -> None:
    model = make_model(calibrated.model.parent / "strict", "{{ raise_exception('roles must alternate') }}")
    outcome = calibrate(model, calibrated.users, kinds=("probe",))
    assert outcome.exit_code == 1
    assert f"{calibrated.users}: row 1: messages: the model's template refuses them: roles must" in outcome.output
