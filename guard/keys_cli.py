"""The commands ``guard keys …``: read options, call one function each, print, set the exit code. Own no logic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from guard.finite import finite
from guard.help_texts import CREATE_END, KEYS_LIST_END, REVOKE_END

if TYPE_CHECKING:
    from guard.proxy.keys import Key, Limits

keys_app = typer.Typer(
    help="API keys: who may ask, as which tenant, and how much. A running proxy notices changes within two seconds.",
    no_args_is_help=True,
)

KeysFileOption = Annotated[
    Path, typer.Option("--file", envvar="GUARD_KEYS", help="The file of keys, as in guard proxy --keys.")
]


@keys_app.command("create", epilog=CREATE_END)
def create(
    file: KeysFileOption,
    name: Annotated[str, typer.Option(help="For people: who or what uses the key.")] = "",
    tenant: Annotated[str | None, typer.Option(help="Whom it belongs to.")] = None,
    policy: Annotated[
        str | None, typer.Option(help="Policy of its requests; selection.yaml lists it under for_keys.")
    ] = None,
    requests_per_s: Annotated[float | None, typer.Option(callback=finite, help="Most requests a second.")] = None,
    tokens_per_min: Annotated[int | None, typer.Option(help="Most tokens of prompts and answers a minute.")] = None,
    concurrent: Annotated[int | None, typer.Option(help="Most requests under way at once.")] = None,
    admin: Annotated[bool, typer.Option("--admin", help="For the admin API, and for nothing else.")] = False,
) -> None:
    """Make a key and print it, this once: the file keeps its hash only. The file is made if need be.

    Prints the key alone on standard output, and its id on standard error.
    """
    from pydantic import ValidationError

    from guard.mistakes import first_mistake
    from guard.proxy.keys import KeysError, Limits, NewKey, create_key

    try:
        limits = Limits(requests_per_s=requests_per_s, tokens_per_min=tokens_per_min, concurrent=concurrent)
        secret, key = create_key(file, NewKey(name, tenant, policy, limits, admin))
    except ValidationError as error:
        where, what = first_mistake(error)
        _fail(f"{where[0]}: {what}")
    except KeysError as error:
        _fail(str(error))
    typer.echo(secret)
    typer.echo(f"guard: key {key.id} is in {file}; the key above is shown this once", err=True)


@keys_app.command("list", epilog=KEYS_LIST_END)
def list_keys(
    file: KeysFileOption,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    policy: Annotated[
        Path | None,
        typer.Option(
            envvar="GUARD_POLICY", help="Policies, to say which keys have one of their own that is not there."
        ),
    ] = None,
) -> None:
    """Show the keys of the file: id, tenant, policy, limits, what they are for. No hashes."""
    from guard.policy import PolicyError
    from guard.policy.policy_set import selection_at
    from guard.policy.selection import keys_without_policy
    from guard.proxy.keys import KeysError, key_ring, read_keys

    try:
        read = read_keys(file)
        selection = selection_at(policy) if policy is not None else None
    except (KeysError, PolicyError) as error:
        _fail(str(error))
    if as_json:
        shown = [key.model_dump(mode="json", exclude={"sha256"}) for key in read.keys]
        typer.echo(json.dumps(shown, indent=2))
    else:
        for key in read.keys:
            typer.echo(_line(key))
    for remark in keys_without_policy(selection, key_ring(read).policies) if selection is not None else ():
        typer.echo(f"guard: {remark}", err=True)


@keys_app.command("revoke", epilog=REVOKE_END)
def revoke(file: KeysFileOption, key_id: Annotated[str, typer.Argument(help="The key's id; guard keys list.")]) -> None:
    """Take a key out of the file. Requests under way go on; the next one is a 401."""
    from guard.proxy.keys import KeysError, revoke_key

    try:
        key = revoke_key(file, key_id)
    except KeysError as error:
        _fail(str(error))
    typer.echo(f"revoked {_line(key)}")


def _line(key: Key) -> str:
    kind = "admin" if key.admin else key.tenant or "-"
    return (
        f"{key.id:<10} {kind:<16} {key.policy or '-':<12} {_limits(key.limits):<24} {key.created:%Y-%m-%d} {key.name}"
    )


def _limits(limits: Limits) -> str:
    parts = (
        (limits.requests_per_s, "{:g}/s"),
        (limits.tokens_per_min, "{} tokens/min"),
        (limits.concurrent, "{} at once"),
    )
    return ", ".join(form.format(value) for value, form in parts if value is not None) or "-"


def _fail(message: str) -> NoReturn:
    typer.echo(f"guard: {message}", err=True)
    raise typer.Exit(1)
