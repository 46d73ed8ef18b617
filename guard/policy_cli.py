"""The commands ``guard policy …``: read options, call one function each, print, set the exit code. Own no logic.

Imports nothing that is not needed for ``--help`` before a command runs.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn, TypeVar

import typer

from guard.finite import finite, finite_number
from guard.help_texts import DIFF_END, EXPLAIN_END, LINT_END, REPLAY_END, SCHEMA_END, TEST_END

if TYPE_CHECKING:
    from guard.policy.compiled import Thresholds
    from guard.policy.loading import LoadedPolicy

T = TypeVar("T")

policy_app = typer.Typer(help="Policy files.", no_args_is_help=True)

PolicyArgument = Annotated[Path, typer.Argument(help="Policy file.")]
LedgerOption = Annotated[
    Path | None, typer.Option("--ledger", envvar="GUARD_LEDGER", help="The ledger; the proxy's own one if not given.")
]
ModelOption = Annotated[
    str | None,
    typer.Option("--model", help="Take the numbers of named thresholds from this model's calibrations."),
]

ModelConfigs = Annotated[
    Path | None,
    typer.Option(envvar="GUARD_MODEL_CONFIGS", help="Folder with the models' files; the shipped one if not given."),
]

UNUSABLE = 2
"""Exit code when a command could not do its work at all."""

UNJUDGED = 3
"""Exit code of a replay that can say nothing of some of the candidate's changes."""

UNCOMPARED = 4
"""Exit code of a replay that could compare no request."""


@policy_app.command("lint", epilog=LINT_END)
def lint(
    files: Annotated[list[Path], typer.Argument(help="Files and folders: policies, selection.yaml, *.tests.yaml.")],
    model: Annotated[
        str | None, typer.Option(help="Check thresholds and vectors against this model's files too.")
    ] = None,
    model_configs: ModelConfigs = None,
    providers: Annotated[
        Path | None,
        typer.Option(envvar="GUARD_PROVIDERS", help="File of other providers' models, which no rule can route to."),
    ] = None,
    keys: Annotated[
        Path | None,
        typer.Option(envvar="GUARD_KEYS", help="File of keys, whose own policies each folder is to let keys have."),
    ] = None,
) -> None:
    """Check policies; every error names file, line and field."""
    from guard.policy.lint import lint
    from guard.proxy.keys import KeysError, key_ring, read_keys
    from guard.proxy.provider_file import read_providers
    from guard.settings import SettingsError

    folder = _model_configs(model_configs)
    config_key = _config_key(model, folder) if model else None
    at = _model_folder(model) if model else None
    try:
        elsewhere = {} if providers is None else read_providers(providers)
        owned = {} if keys is None else key_ring(read_keys(keys)).policies
    except (SettingsError, KeysError) as error:
        _fail(str(error))
    raise typer.Exit(
        lint(files, typer.echo, config_key=config_key, model_configs=folder, model=at, elsewhere=elsewhere, keys=owned)
    )


@policy_app.command("test", epilog=TEST_END)
def test(
    paths: Annotated[list[Path], typer.Argument(help="Policies, folders of them, or *.tests.yaml files.")],
) -> None:
    """Run the tests that lie beside policies."""
    from guard.policy import PolicyError
    from guard.policy.cases import Report, cases_beside, run_cases
    from guard.policy.policy_set import TESTS_SUFFIX

    reports: list[Report] = []
    for path in paths:
        files = sorted(path.glob(f"*{TESTS_SUFFIX}")) if path.is_dir() else [path]
        for file in files:
            try:
                reports.append(run_cases(file if file.name.endswith(TESTS_SUFFIX) else cases_beside(file)))
            except PolicyError as error:
                _fail(str(error))
    for report in reports:
        for outcome in report.outcomes:
            if outcome.failure is not None:
                typer.echo(f"{report.path}:{outcome.line}: FAILED {outcome.case}: {outcome.failure}")
        passed = sum(outcome.failure is None for outcome in report.outcomes)
        typer.echo(f"{report.path}: {passed} of {len(report.outcomes)} passed ({report.policy})")
        if report.untested:
            typer.echo(f"{report.path}: note: no test makes these rules hit: {', '.join(report.untested)}")
    if not reports:
        _fail("there are no tests here")
    raise typer.Exit(0 if all(report.passed for report in reports) else 1)


@policy_app.command("explain", epilog=EXPLAIN_END)
def explain(
    policy: PolicyArgument,
    request: Annotated[str | None, typer.Option(help="Explain this request of the ledger, by its id.")] = None,
    score: Annotated[
        list[str] | None,
        typer.Option(help="Explain these scores: DETECTOR=NUMBER, or =unavailable, =timeout, =not_applicable."),
    ] = None,
    ledger: LedgerOption = None,
    model: ModelOption = None,
    model_configs: ModelConfigs = None,
) -> None:
    """Show what every rule makes of one request's scores, which one decides and why."""
    from detectors.base import Score
    from guard.policy.cases import NO_SCORES
    from guard.policy.compiled import compile_rules
    from guard.policy.explain_request import explained
    from guard.policy.recorded import find_request
    from guard.telemetry.ledger_reader import LedgerReadError

    loaded = _load(policy)
    rules = _checked(lambda: compile_rules(loaded, _thresholds(loaded, model, model_configs)))
    given: dict[str, Score] = {}
    entry = None
    typer.echo(f"policy {loaded.label}")
    if request is not None:
        try:
            entry = find_request(ledger or _own_ledger(), request)
        except LedgerReadError as error:
            _fail(str(error))
        if entry.request_id != request:
            typer.echo(f"{request!r} is the client's id; the request's own is {entry.request_id}")
    for option in score or ():
        name, _, value = option.partition("=")
        if name not in loaded.policy.detectors:
            _fail(f"the policy has no detector {name!r}; it has {', '.join(loaded.policy.detectors) or 'none'}")
        try:
            given[name] = NO_SCORES[value] if value in NO_SCORES else Score("scored", finite_number(value))
        except ValueError:
            _fail(f"--score {option}: neither a finite number nor one of {', '.join(NO_SCORES)}")
    for line in explained(loaded, rules, entry, given):
        typer.echo(line)


@policy_app.command("diff", epilog=DIFF_END)
def diff(
    before: Annotated[Path, typer.Argument(help="Policy file.")],
    after: Annotated[Path, typer.Argument(help="Policy file.")],
) -> None:
    """Show what one policy says that another does not."""
    from guard.policy.difference import differences

    found = differences(_load(before).policy, _load(after).policy)
    for line in found:
        typer.echo(line)
    raise typer.Exit(1 if found else 0)


@policy_app.command("replay", epilog=REPLAY_END)
def replay(
    policy: PolicyArgument,
    ledger: LedgerOption = None,
    model: ModelOption = None,
    model_configs: ModelConfigs = None,
    judged_by: Annotated[
        str | None, typer.Option(help="Only requests that the policy of this name judged at the time.")
    ] = None,
    fail_on: Annotated[
        Literal["any", "looser", "stricter"], typer.Option(help="Which changes count for the exit code.")
    ] = "any",
    max_percent: Annotated[
        float,
        typer.Option(min=0, max=100, callback=finite, help="How many of the compared requests may change so."),
    ] = 0.0,
    allow_unjudged: Annotated[
        bool, typer.Option("--allow-unjudged", help="Exit as if there were nothing that replay cannot judge.")
    ] = False,
    playground: Annotated[
        bool, typer.Option("--playground", help="With runs of the console's playground, which are left out else.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Decide the ledger's requests again with another policy, on the recorded scores, and show what changes."""
    from guard.policy.compiled import compile_rules
    from guard.policy.recorded import read_ledger
    from guard.policy.replay import replay
    from guard.policy.replay_summary import summary
    from guard.telemetry.ledger_reader import LedgerReadError

    loaded = _load(policy)
    rules = _checked(lambda: compile_rules(loaded, _thresholds(loaded, model, model_configs)))
    files = _files(loaded, model, model_configs)
    entries = read_ledger(ledger or _own_ledger())
    try:
        result = replay(loaded, rules, entries, judged_by, playground=playground, files=files)
    except LedgerReadError as error:
        _fail(str(error))
    if as_json:
        typer.echo(json.dumps({"policy": loaded.label, **result.to_json()}, indent=2))
    else:
        for line in (f"policy {loaded.label}", *summary(result)):
            typer.echo(line)
    lacking = bool(result.never_measured) or result.incomplete > result.compared
    if not result.compared and (allow_unjudged or not result.not_judged):
        typer.echo("guard: no request could be compared", err=True)
        raise typer.Exit(UNCOMPARED)
    if result.percent(fail_on) > max_percent:
        raise typer.Exit(1)
    raise typer.Exit(UNJUDGED if (result.not_judged or lacking) and not allow_unjudged else 0)


@policy_app.command("schema", epilog=SCHEMA_END)
def schema(
    kind: Annotated[Literal["policy", "selection", "tests"], typer.Argument(help="Which kind of file.")] = "policy",
) -> None:
    """Print the JSON schema for editors; the same lies in the folder of the shipped policies."""
    from guard.policy.json_schema import json_schema

    typer.echo(json_schema(kind), nl=False)


def _load(path: Path) -> LoadedPolicy:
    from guard.policy import load_policy

    return _checked(lambda: load_policy(path))


def _thresholds(loaded: LoadedPolicy, model: str | None, folder: Path | None) -> Thresholds:
    """Without a model those that need none: of files that the policy names, and of detectors without a calibration."""
    from guard.policy import build_detectors
    from guard.policy.bound import thresholds_alone

    folder = _model_configs(folder)
    if model is None:
        return thresholds_alone(loaded, folder)
    detectors = build_detectors(loaded, _config_key(model, folder), folder)
    return {name: detector.thresholds for name, detector in detectors.items()}


def _files(loaded: LoadedPolicy, model: str | None, folder: Path | None) -> dict[str, str | None]:
    """Fingerprints of the model's files, by detector; none without a model."""
    from detectors.model_config import fingerprint_of
    from guard.policy import build_detectors

    folder = _model_configs(folder)
    built = {} if model is None else build_detectors(loaded, _config_key(model, folder), folder)
    return {name: fingerprint_of(detector) for name, detector in built.items()}


def _model_configs(given: Path | None) -> Path:
    from guard.data import data_folder

    return data_folder("model_configs") if given is None else given


def _config_key(model: str, folder: Path) -> str:
    """A name that the folder has files of is that; else whatever ``guard serve`` makes of it."""
    from guard.models import ModelError, resolve_model

    if next(folder.glob(f"*/{glob.escape(model)}.json"), None) is not None:
        return model
    try:
        return resolve_model(model).config_key
    except ModelError as error:
        _fail(str(error))


def _model_folder(model: str) -> Path | None:
    """Where it is, if it is on this machine; a name of files of ``model_configs`` may be a short name's."""
    from guard.models import SOURCES, ModelError, model_folder, resolve_model

    if (source := next((one for one in SOURCES.values() if one.name == model), None)) is not None:
        return model_folder(source)
    try:
        return Path(resolve_model(model).path)
    except ModelError:
        return None


def _own_ledger() -> Path:
    from guard.paths import state_folder

    return state_folder() / "ledger.jsonl"


def _checked(work: Callable[[], T]) -> T:
    from guard.policy import PolicyError

    try:
        return work()
    except PolicyError as error:
        _fail(str(error))


def _fail(message: str) -> NoReturn:
    typer.echo(f"guard: {message}", err=True)
    raise typer.Exit(UNUSABLE)
