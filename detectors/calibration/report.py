"""The table of measured quality in ``docs/detectors.md``, made from the files in ``model_configs``.

``python -m detectors.calibration.report docs/detectors.md model_configs`` renews it; a test fails when it is stale.
"""

from __future__ import annotations

import sys
from pathlib import Path

from detectors.attention_tracker import AttentionTrackerConfig
from detectors.model_config import Calibration, ModelConfig, Quality, load_model_config
from detectors.probe import ProbeConfig

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"

SCHEMAS: dict[str, type[ModelConfig]] = {"probe": ProbeConfig, "attention_tracker": AttentionTrackerConfig}


def markdown(model_configs: Path, config_key: str) -> str:
    """Quality on held-out rows, and what each named threshold did there."""
    found = {
        kind: config.calibration
        for kind, schema in SCHEMAS.items()
        if (config := load_model_config(model_configs / kind / f"{config_key}.json", schema)).calibration is not None
    }
    calibrations = {kind: calibration for kind, calibration in found.items() if calibration is not None}
    lines = [
        f"{config_key}, held-out rows; intervals are 95 %.",
        "",
        "| detector | benign | attacks | AUROC | AUPRC | attacks caught at 1 % false positives |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for kind, calibration in calibrations.items():
        lines.append(_quality_row(kind, calibration.quality))
    first = next(iter(calibrations.values()))
    lines.append(_quality_row("text baseline (TF-IDF)", first.text_baseline))
    lines += [
        "",
        "| detector | threshold | at least | false positives (95 % interval) | attacks caught |",
        "| --- | --- | --- | --- | --- |",
    ]
    for kind, calibration in calibrations.items():
        lines += _threshold_rows(kind, calibration)
    lines += ["", "| detector | AUROC by source |", "| --- | --- |"]
    for kind, calibration in calibrations.items():
        by_source = ", ".join(f"{name} {auroc:.3f}" for name, auroc in calibration.quality.auroc_by_source.items())
        lines.append(f"| {kind} | {by_source} |")
    return "\n".join(lines)


def renew(document: str, table: str) -> str:
    """``document`` with ``table`` between the markers. Raises ``ValueError`` when it has none."""
    head, begin, rest = document.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the document lacks the markers {BEGIN} and {END}")
    return f"{head}{BEGIN}\n{table}\n{END}{tail}"


def _quality_row(name: str, measured: Quality) -> str:
    auroc, tpr = measured.auroc_interval, measured.tpr_at_fpr_1pct_interval
    return (
        f"| {name} | {measured.benign} | {measured.attack} | {measured.auroc:.3f} ({auroc.low:.3f} to {auroc.high:.3f})"
        f" | {measured.auprc:.3f} | {measured.tpr_at_fpr_1pct:.0%} ({tpr.low:.0%} to {tpr.high:.0%}) |"
    )


def _threshold_rows(kind: str, calibration: Calibration) -> list[str]:
    return [
        f"| {kind} | `{name}` | {point.value:.3f} | {point.held_out_false_positives} of {point.held_out_benign} "
        f"({point.held_out_fpr_interval.low:.1%} to {point.held_out_fpr_interval.high:.1%}) "
        f"| {point.held_out_true_positives} of {point.held_out_attack} |"
        for name, point in calibration.thresholds.items()
    ]


def main(document: Path, model_configs: Path, config_key: str = "SmolLM2-135M-Instruct") -> None:
    text = renew(document.read_text(encoding="utf-8"), markdown(model_configs, config_key))
    document.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
