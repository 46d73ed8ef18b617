"""The commands ``guard ledger …``: read options, call one function each, print, set the exit code. Own no logic."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, get_args

import typer

from guard.finite import finite_number
from guard.help_texts import QUERY_END, SHOW_END, STATS_END, TAIL_END, VERIFY_END

if TYPE_CHECKING:
    from guard.telemetry.chain import Secret
    from guard.telemetry.content import Captured
    from guard.telemetry.ledger_check import Anchor

ledger_app = typer.Typer(
    help="The ledger: one entry for every request. Its older files are read too.", no_args_is_help=True
)

LedgerOption = Annotated[
    Path | None, typer.Option("--ledger", envvar="GUARD_LEDGER", help="The ledger; the proxy's own one if not given.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, an entry a line.")]
SinceOption = Annotated[datetime | None, typer.Option(help="Only requests that came then or later, UTC.")]
UntilOption = Annotated[datetime | None, typer.Option(help="Only requests that came then or before, UTC.")]

MOST = 1_000_000_000
"""Requests that are shown at once."""

UNUSABLE = 2
"""Exit code when a command could not do its work at all."""


@ledger_app.command("tail", epilog=TAIL_END)
def tail(
    ledger: LedgerOption = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, max=MOST, help="How many of the latest requests.")] = 20,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with those that come, until Ctrl-C.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the latest requests, the latest at the end."""
    from guard.telemetry.ledger_reader import LedgerReadError, recent
    from guard.telemetry.ledger_reader import follow as following

    path = ledger or _own_ledger()
    try:
        _print(following(path, lines) if follow else reversed(recent(path, lines)), as_json=as_json)
    except LedgerReadError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


@ledger_app.command("query", epilog=QUERY_END)
def query(
    ledger: LedgerOption = None,
    request: Annotated[
        str | None, typer.Option(help="The request of this id, then those whose client sent it.")
    ] = None,
    action: Annotated[str | None, typer.Option(help="What was decided: allow, flag, block, …")] = None,
    policy: Annotated[str | None, typer.Option(help="Which policy judged.")] = None,
    assignment: Annotated[
        str | None, typer.Option(help="What chose its policy, by selection.yaml; console: the playground's runs.")
    ] = None,
    rule: Annotated[str | None, typer.Option(help="Which rule hit, in shadow too.")] = None,
    outcome: Annotated[str | None, typer.Option(help="How it ended: completed, blocked, client_gone, …")] = None,
    key: Annotated[str | None, typer.Option(help="Id of the API key.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Tenant of the key.")] = None,
    model: Annotated[str | None, typer.Option(help="The model that was asked for.")] = None,
    route: Annotated[str | None, typer.Option(help="Path, such as /v1/chat/completions.")] = None,
    score: Annotated[
        list[str] | None, typer.Option(help="DETECTOR=NUMBER: those that it gave this score or more.")
    ] = None,
    since: SinceOption = None,
    until: UntilOption = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=MOST, help="Most requests to show.")] = 100,
    as_json: JsonOption = False,
) -> None:
    """Show requests that fit, the newest first."""
    from guard.telemetry.families import ACTIONS
    from guard.telemetry.ledger_query import Query, matching
    from guard.telemetry.ledger_reader import LedgerReadError, find_all
    from guard.telemetry.record import Outcome

    _check_known("--action", action, ACTIONS)
    _check_known("--outcome", outcome, get_args(Outcome))
    path = ledger or _own_ledger()
    asked = dict(action=action, policy=policy, assignment=assignment, outcome=outcome, key=key, tenant=tenant)
    asked |= dict(model=model, route=route)
    values = {name: value for name, value in asked.items() if value is not None}
    wanted = Query(values, rule, _scores(score or []), _utc(since), _utc(until))
    try:
        if request is not None:
            of_id = find_all(path, request)
            own = [of_id.own] if of_id.own is not None and wanted.fits(of_id.own) else []
            others = [one for one in of_id.of_clients if wanted.fits(one)][: limit - len(own)]
            count = _print(own, as_json=as_json) + _print(others, as_json=as_json, of_client=True)
        else:
            count = _print(itertools.islice(matching(path, wanted), limit), as_json=as_json)
    except LedgerReadError as error:
        _fail(str(error))
    if not count and wanted.scores:
        _tell_unknown_detectors(path, wanted.scores)
    raise typer.Exit(0 if count else 1)


@ledger_app.command("show", epilog=SHOW_END)
def show(
    request: Annotated[str, typer.Argument(help="The request's id.")],
    ledger: LedgerOption = None,
    content: Annotated[bool, typer.Option("--content", help="Its text too, if its policy had it captured.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print it in one line.")] = False,
) -> None:
    """Print all that is known of a request, as JSON; by an id of the client's, of every request that has it."""
    from guard.telemetry.ledger_reader import LedgerReadError, captured_of, cut, find_all

    path = ledger or _own_ledger()
    try:
        found = find_all(path, request)
        told = [found.own] if found.own is not None else list(found.of_clients)
        texts = [captured_of(path, entry) if content else None for entry in told]
    except LedgerReadError as error:
        _fail(str(error))
    if not told:
        _fail(f"{path}: has no request {request!r}{cut(request)}")
    for entry, text in zip(told, texts, strict=True):
        whole = _whole(entry, text, content=content, of_client=found.own is None)
        typer.echo(json.dumps(whole, default=str, **({"separators": (",", ":")} if as_json else {"indent": 2})))
    if found.own is None:
        typer.echo(
            f"guard: no request has the id {request!r} from the guard; {len(told)} have it from their clients", err=True
        )


@ledger_app.command("verify", epilog=VERIFY_END)
def verify(
    ledger: LedgerOption = None,
    key_file: Annotated[
        Path | None,
        typer.Option(help="File with the secret of the chain. Default: what GUARD_LEDGER_KEY has, else none."),
    ] = None,
    since: Annotated[
        int, typer.Option(min=1, help="Tell of entries from this number on: those before are known to have problems.")
    ] = 1,
    anchor: Annotated[
        list[str] | None,
        typer.Option(help="NUMBER:HASH of an entry, noted earlier somewhere else: it must be there as it was."),
    ] = None,
    content: Annotated[
        bool, typer.Option("--content", help="Check captured text too: it must be what the entries vouch for.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check that no entry was removed, changed, moved or added; name file, line and what is wrong."""
    from guard.telemetry.ledger_check import check
    from guard.telemetry.ledger_reader import LedgerReadError

    try:
        anchors = [_anchor(one) for one in anchor or ()]
        found = check(ledger or _own_ledger(), _secret(key_file), since, anchors, content=content)
    except LedgerReadError as error:
        _fail(str(error))
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2))
    else:
        for problem in found.problems:
            typer.echo(f"{problem}")
        for note in found.notes:
            typer.echo(f"note: {note}")
        typer.echo(found.summary())
    raise typer.Exit(1 if found.problems else 0)


@ledger_app.command("stats", epilog=STATS_END)
def stats(
    ledger: LedgerOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Count requests by policy, assignment, action, outcome and rule; times and tokens."""
    from guard.telemetry.ledger_query import Query, matching
    from guard.telemetry.ledger_reader import LedgerReadError, chained, entries, first_number
    from guard.telemetry.ledger_stats import stats

    path, wanted = ledger or _own_ledger(), Query(since=_utc(since), until=_utc(until))
    try:
        if since or until:
            # A ledger without any chain is an older version's.
            counts_all = not first_number(path)
            found = stats(one if counts_all or chained(one) else None for one in matching(path, wanted))
        else:
            found = stats(entries(path))
    except LedgerReadError as error:
        _fail(str(error))
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2))
    else:
        for line in found.lines():
            typer.echo(line)


def _whole(entry: dict[str, Any], text: Captured | None, *, content: bool, of_client: bool) -> dict[str, Any]:
    """One request as ``show`` prints it."""
    from dataclasses import asdict

    from guard.telemetry.ledger_reader import OF_CLIENT, UNCHAINED, chained

    told: dict[str, Any] = {"found_by": OF_CLIENT} if of_client else {}
    told["entry"] = entry
    if not chained(entry):
        told["warning"] = UNCHAINED
    if content:
        told["content"] = None if text is None else asdict(text)
    return told


def _print(entries: Iterable[dict[str, Any]], *, as_json: bool, of_client: bool = False) -> int:
    """As they come; how many there were. ``of_client``: they were found by an id that their clients sent."""
    from guard.telemetry.ledger_reader import OF_CLIENT
    from guard.telemetry.ledger_stats import one_line

    count = 0
    for entry in entries:
        if as_json:
            marked = {"found_by": OF_CLIENT, **entry} if of_client else entry
            typer.echo(json.dumps(marked, separators=(",", ":")))
        else:
            typer.echo(one_line(entry) + ("  (by the client's id)" if of_client else ""))
        count += 1
    return count


def _check_known(option: str, given: str | None, known: tuple[str, ...]) -> None:
    if given is not None and given not in known:
        _fail(f"{option} {given}: has to be one of {', '.join(known)}")


def _tell_unknown_detectors(path: Path, asked: Iterable[str]) -> None:
    """When nothing was found: a name that is in no entry is likely misspelt."""
    from guard.telemetry.ledger_query import detectors_in

    known = detectors_in(path)
    for name in asked:
        if name not in known:
            there = f"there are {', '.join(sorted(known))}" if known else "no request has any score"
            typer.echo(f"guard: --score {name}: no request has a score of that name; {there}", err=True)


def _scores(given: list[str]) -> dict[str, float]:
    scores = {}
    for one in given:
        name, _, number = one.partition("=")
        try:
            least: float | None = finite_number(number)
        except ValueError:
            least = None
        if not name or least is None:
            _fail(f"--score {one}: is DETECTOR=NUMBER, and the number a finite one")
        scores[name] = least
    return scores


def _anchor(given: str) -> Anchor:
    from guard.telemetry.ledger_check import Anchor

    number, _, hash_ = given.partition(":")
    if not number.isdecimal() or len(hash_) != 64 or set(hash_) - set("0123456789abcdef"):
        _fail(f"--anchor {given}: is NUMBER:HASH, as guard ledger verify prints it")
    return Anchor(int(number), hash_)


def _secret(file: Path | None) -> Secret | None:
    import os

    from guard.settings import MIN_LEDGER_KEY, SHORT_LEDGER_KEY
    from guard.telemetry.chain import Secret

    # Never an option: other users of the machine see those.
    given = os.environ.get("GUARD_LEDGER_KEY")
    if file is not None:
        try:
            given = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            _fail(f"--key-file {file}: cannot be read")
    if given and len(given) < MIN_LEDGER_KEY:
        _fail(f"{f'--key-file {file}' if file is not None else 'GUARD_LEDGER_KEY'}: {SHORT_LEDGER_KEY}")
    return Secret.of(given) if given else None


def _utc(time: datetime | None) -> datetime | None:
    return time if time is None or time.tzinfo else time.replace(tzinfo=UTC)


def _own_ledger() -> Path:
    from guard.paths import state_folder

    return state_folder() / "ledger.jsonl"


def _fail(message: str) -> NoReturn:
    typer.echo(f"guard: {message}", err=True)
    raise typer.Exit(UNUSABLE)
