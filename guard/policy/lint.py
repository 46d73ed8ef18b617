"""``guard policy lint``: check policies, selections and tests without an engine.

With a model's calibrations at hand, thresholds, spans and steering vectors are checked too; otherwise of these what can
be (``lint_alone``), and the rest is told.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from detectors.registry import BUILT_IN, UnknownDetectorError, detector_kinds
from guard.policy.bound import BoundPolicy, bind, build_detectors
from guard.policy.calibrated import calibration_remarks
from guard.policy.cases import Cases
from guard.policy.conditions import bounds_of
from guard.policy.lint_alone import Alone
from guard.policy.loading import LoadedPolicy, load_policy
from guard.policy.model_fit import misfits
from guard.policy.policy_set import (
    SELECTION_FILE,
    TESTS_SUFFIX,
    load_policies,
    load_selection,
    policy_files,
    read_folder,
)
from guard.policy.routing import check_routes
from guard.policy.schema import Policy, detectors_in
from guard.policy.selection import keys_without_policy
from guard.policy.yaml_file import PolicyError, read_mapping, validated


def lint(
    paths: Sequence[Path],
    say: Callable[[str], None] = print,
    *,
    config_key: str | None = None,
    model_configs: Path | None = None,
    model: Path | None = None,
    elsewhere: Collection[str] = (),
    keys: Mapping[str, str] | None = None,
) -> int:
    """Check every file, and every folder as a whole, and report each; returns 1 when any cannot be used, else 0.

    config_key, model_configs: the model's files; without the first the folder is looked into for what needs no model,
    and what is left is told at the end. model: its folder, where it is on this machine; calibrations on other weights
    are then said. elsewhere: models of other providers. keys: policies of API keys by the keys' ids, which each folder
    is to have.
    """

    def bound(loaded: LoadedPolicy) -> BoundPolicy:
        assert config_key is not None
        assert model_configs is not None
        vectors = {path.stem for path in (model_configs / "steering" / config_key).glob("*.safetensors")}
        return bind(loaded, build_detectors(loaded, config_key, model_configs), vectors)

    failed = False
    alone = Alone(model_configs) if config_key is None and model_configs is not None else None
    for path in paths:
        if path.is_dir():
            # One that is wrong is told once; the whole would only tell it again.
            sound = all([_reported(_lines(file, None, None, elsewhere, alone), say) for file in _files(path)])
            sound = sound and _reported(_whole(path, bound if config_key else None, model, keys or {}), say)
        else:
            sound = _reported(_lines(path, bound if config_key else None, model, elsewhere, alone), say)
        failed |= not sound
    if alone is not None and alone.unchecked:
        say(f"not checked without --model: {alone.unchecked}")
    return int(failed)


BETWEEN = "its scores lie between 0 and 1"


def remarks(policy: Policy) -> list[str]:
    """What is no mistake and still worth a look."""
    return [*_unused(policy), *_never(policy)]


def _never(policy: Policy) -> list[str]:
    """Scores of built-in kinds lie between 0 and 1."""
    built_in = {name for name, use in policy.detectors.items() if use.kind in BUILT_IN}
    bounds = [
        (rule.name, bound)
        for rule in policy.rules
        for bound in (bounds_of(rule.when) if rule.when is not None else ())
        if bound.detector in built_in
    ]
    never = [
        f"rule {rule}: {bound.detector} never scores {bound.at_least:g}: {BETWEEN}"
        for rule, bound in bounds
        if isinstance(bound.at_least, float) and bound.at_least > 1
    ]
    never += [
        f"rule {rule}: {bound.detector} never scores below {bound.below:g}: {BETWEEN}"
        for rule, bound in bounds
        if isinstance(bound.below, float) and bound.below <= 0
    ]
    # Of a probe a gate reads the logit, which may be anything; of attention the mass.
    gates = [(rule.name, rule.gate) for rule in policy.rules if rule.gate is not None and rule.gate.span is not None]
    never += [
        f"rule {rule}: its gate never opens: attention lies between 0 and 1"
        for rule, gate in gates
        if (gate.above is not None and gate.above >= 1) or (gate.below is not None and gate.below <= 0)
    ]
    return never


def _unused(policy: Policy) -> list[str]:
    used = {name for rule in policy.rules for name in detectors_in(rule)}
    used |= {name for use in used & policy.detectors.keys() for name in policy.detectors[use].inputs.values()}
    return [f"detector {name} is measured, and no rule uses it" for name in policy.detectors if name not in used]


Bound = Callable[[LoadedPolicy], BoundPolicy]


def _reported(check: Iterator[str], say: Callable[[str], None]) -> bool:
    """Whether it found nothing wrong."""
    try:
        for line in check:
            say(line)
    except PolicyError as error:
        say(str(error))
        return False
    return True


def _files(folder: Path) -> list[Path]:
    selection = folder / SELECTION_FILE
    return [
        *policy_files(folder),
        *sorted(folder.glob(f"*{TESTS_SUFFIX}")),
        *([selection] if selection.exists() else []),
    ]


def _lines(
    path: Path, bound: Bound | None, model: Path | None, elsewhere: Collection[str], alone: Alone | None
) -> Iterator[str]:
    if path.name.endswith(TESTS_SUFFIX):
        tests = validated(read_mapping(path), Cases).tests
        yield f"{path}: ok ({len(tests)} tests; guard policy test runs them)"
    elif path.name == SELECTION_FILE:
        yield f"{path}: ok ({len(load_selection(path).assignments)} assignments)"
    else:
        loaded = load_policy(path)
        check_routes(loaded, elsewhere)
        _check_kinds(loaded)
        whole = bound(loaded) if bound is not None else None
        calibrated = alone.check(loaded) if alone is not None else []
        if whole is not None:
            calibrated = calibration_remarks(whole, model)
            _check_fit(path, whole, model)
        yield f"{path}: ok ({loaded.label}, {len(loaded.policy.rules)} rules)"
        yield from (f"{path}: note: {remark}" for remark in (*remarks(loaded.policy), *calibrated))


def _check_kinds(loaded: LoadedPolicy) -> None:
    """Raises ``PolicyError`` for a kind of detector that is not installed here."""
    for name, use in loaded.policy.detectors.items():
        if use.kind not in detector_kinds():
            raise loaded.error(("detectors", name, "kind"), str(UnknownDetectorError.of(use.kind)))


def _check_fit(path: Path, policy: BoundPolicy, model: Path | None) -> None:
    """Raises ``PolicyError``."""
    if found := misfits(policy, model):
        raise PolicyError("\n".join(f"{path}: policy {policy.name}: {one}" for one in found))


def _whole(folder: Path, bound: Bound | None, model: Path | None, keys: Mapping[str, str]) -> Iterator[str]:
    policies = load_policies(folder, bound) if bound is not None else None
    selection = policies.selection if policies is not None else read_folder(folder).selection
    yield f"{folder}: ok (default {selection.default})"
    yield from (f"{folder}: note: {remark}" for remark in keys_without_policy(selection, keys))
    for one in policies.policies if policies is not None else ():
        _check_fit(folder, one, model)
        yield from (f"{folder}: note: policy {one.label}: {remark}" for remark in calibration_remarks(one, model))
