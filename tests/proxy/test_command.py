"""``guard proxy`` as an operator runs it: settings from everywhere, TLS, the admin API, and stopping without losses."""

from __future__ import annotations

import asyncio
import json
import re
import resource
import shutil
import signal
import ssl
import subprocess
from collections import Counter
from pathlib import Path

import aiohttp
import pytest
from pydantic import SecretStr
from typer.testing import CliRunner

from guard.cli import app
from guard.machine import free_port
from guard.proxy.keys import NewKey, create_key, hash_of
from guard.serve import ProxyOptions, ServeOptions
from guard.settings import load_settings
from tests.proxy.command import Running, guard_proxy
from tests.proxy.conftest import BODY, POLICY
from tests.proxy.engine import WORDS, FakeEngine, running


async def test_sigterm_lets_answers_end_takes_no_new_ones_and_loses_no_entry(tmp_path: Path) -> None:
    engine = FakeEngine(word_delay_s=0.3)
    async with running(engine), guard_proxy(tmp_path, engine, "--set", "drain_delay_s=0.5") as proxy:
        assert (await proxy.ask("GET", "/readyz"))[1]["status"] == "ok"

        async def streamed() -> bytes:
            async with (
                aiohttp.ClientSession() as session,
                session.post(f"{proxy.url}/v1/chat/completions", json={**BODY, "stream": True}) as answer,
            ):
                return await answer.read()

        answers = [asyncio.create_task(streamed()) for _ in range(4)]
        while len(engine.bodies) < 4:
            await asyncio.sleep(0.01)
        proxy.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.2)
        status, ready = await proxy.ask("GET", "/readyz")
        assert (status, ready["status"], ready["engine"]) == (503, "draining", "ok")
        # A load balancer may not know yet.
        late = asyncio.create_task(streamed())
        for body in await asyncio.gather(*answers, late):
            assert body.count(b'"content"') == len(WORDS)
            assert body.endswith(b"data: [DONE]\n\n")
        assert await asyncio.wait_for(proxy.process.wait(), 10) == 0
        assert proxy.outcomes() == ["completed"] * 5
        with pytest.raises(aiohttp.ClientConnectorError):
            await proxy.ask("GET", "/livez")


async def test_what_does_not_end_in_time_is_ended_with_an_error_and_recorded(tmp_path: Path) -> None:
    engine = FakeEngine(answer_delay_s=None)
    async with running(engine), guard_proxy(tmp_path, engine, GUARD_DRAIN_TIMEOUT_S="1") as proxy:
        hanging = asyncio.create_task(proxy.ask("POST", "/v1/chat/completions", json=BODY))
        while not engine.bodies:
            await asyncio.sleep(0.01)
        proxy.process.send_signal(signal.SIGTERM)
        status, body = await asyncio.wait_for(hanging, 10)
        assert (status, body["error"]["code"]) == (503, "stopping")
        assert proxy.process.stdout is not None
        said = await asyncio.wait_for(proxy.process.stdout.read(), 10)
        assert await asyncio.wait_for(proxy.process.wait(), 10) == 0
        assert b"Traceback" not in said
        assert proxy.outcomes() == ["stopped"]


async def test_sigterm_under_load_leaves_no_request_without_its_answer_and_its_entry(tmp_path: Path) -> None:
    """Forty clients that ask again and again: each gets whole answers until it is not let in any more, or an error that
    says why; and the ledger has exactly those that were let in."""
    engine = FakeEngine(word_delay_s=0.02)
    ends: Counter[str] = Counter()

    async def client(proxy: Running, number: int) -> None:
        async with aiohttp.ClientSession() as session:
            while True:
                body = {**BODY, "stream": number % 2 == 0}
                try:
                    async with session.post(f"{proxy.url}/v1/chat/completions", json=body) as answer:
                        raw = await answer.read()
                except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError, ConnectionResetError):
                    return
                if answer.status == 503 or b'"code": "stopping"' in raw:
                    ends["stopped"] += 1
                    return
                assert answer.status == 200
                assert raw == engine.whole() or raw.endswith(b"data: [DONE]\n\n")
                ends["completed"] += 1

    async with running(engine), guard_proxy(tmp_path, engine, "--set", "drain_timeout_s=2") as proxy:
        clients = [asyncio.create_task(client(proxy, number)) for number in range(40)]
        while ends["completed"] < 80:
            await asyncio.sleep(0.01)
        proxy.process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(asyncio.gather(*clients), 20)
        assert await asyncio.wait_for(proxy.process.wait(), 20) == 0
        assert Counter(proxy.outcomes()) == ends
        assert len(engine.bodies) == ends["completed"] + ends["stopped"]


async def test_a_disk_that_is_full_for_a_while_costs_no_request_and_no_entry(tmp_path: Path) -> None:
    """The operating system's limit of a file's size stands for the disk's."""
    engine = FakeEngine()
    async with running(engine), guard_proxy(tmp_path, engine) as proxy:

        async def ask(count: int) -> None:
            found = await asyncio.gather(*(proxy.ask("POST", "/v1/chat/completions", json=BODY) for _ in range(count)))
            assert {status for status, _ in found} == {200}

        async def metric(name: str) -> float:
            async with aiohttp.ClientSession() as session, session.get(f"{proxy.url}/metrics") as answer:
                text = (await answer.read()).decode()
            return float(next(line for line in text.splitlines() if line.startswith(name)).split()[-1])

        await ask(5)
        while len(proxy.ledger.read_text().splitlines()) < 5:
            await asyncio.sleep(0.01)
        _, hard = resource.prlimit(proxy.process.pid, resource.RLIMIT_FSIZE)
        full = proxy.ledger.stat().st_size + 100
        resource.prlimit(proxy.process.pid, resource.RLIMIT_FSIZE, (full, hard))
        await ask(40)
        while not await metric('guard_ledger_entries_total{result="delayed"}'):
            await asyncio.sleep(0.02)
        assert proxy.ledger.stat().st_size == full
        async with asyncio.timeout(10):
            while (ready := await proxy.ask("GET", "/readyz"))[1]["ledger"] == "ok":
                await asyncio.sleep(0.02)
        assert (ready[0], ready[1]["status"], ready[1]["ledger"]) == (200, "ok", "degraded")
        resource.prlimit(proxy.process.pid, resource.RLIMIT_FSIZE, (hard, hard))
        async with asyncio.timeout(10):
            while await metric('guard_ledger_entries_total{result="written"}') < 45:
                await asyncio.sleep(0.05)
            while (await proxy.ask("GET", "/readyz"))[1]["ledger"] != "ok":
                await asyncio.sleep(0.05)
        assert await metric('guard_ledger_entries_total{result="failed"}') == 0
        assert await metric('guard_ledger_entries_total{result="dropped"}') == 0
        # Half of one line is there as well: what the full disk took of it.
        ids = re.findall(r'^{"time":.*"request_id":"(\w+)".*}$', proxy.ledger.read_text(), re.MULTILINE)
        assert len(ids) == len(set(ids)) == 45


async def test_the_admin_api_needs_an_admin_key_and_shows_and_reloads_what_counts(tmp_path: Path) -> None:
    file, admin_port = tmp_path / "keys.yaml", free_port()
    (admin, admin_key), (client, client_key) = (
        create_key(file, NewKey(admin=True)),
        create_key(file, NewKey(tenant="acme")),
    )
    engine, admin_url = FakeEngine(), f"http://127.0.0.1:{admin_port}"
    as_admin = {"url": admin_url, "headers": {"authorization": f"Bearer {admin}"}}
    as_client = {"headers": {"authorization": f"Bearer {client}"}}
    options = ("--keys", str(file), "--admin-port", str(admin_port))
    async with running(engine), guard_proxy(tmp_path, engine, *options) as proxy:
        for headers in ({}, as_client["headers"]):
            for method, path in (("GET", "/policies"), ("GET", "/keys"), ("POST", "/keys/reload")):
                status, body = await proxy.ask(method, f"/admin/v1{path}", url=admin_url, headers=headers)
                assert (status, body["error"]["code"]) == (401, "invalid_api_key")
        assert (await proxy.ask("POST", "/v1/chat/completions", json=BODY, **as_client))[0] == 200
        # An admin key asks no model, and the client's port has no admin API.
        headers = as_admin["headers"]
        assert (await proxy.ask("POST", "/v1/chat/completions", json=BODY, headers=headers))[0] == 401
        assert (await proxy.ask("GET", "/admin/v1/keys", **as_client))[0] == 404

        _, body = await proxy.ask("GET", "/admin/v1/keys", **as_admin)
        by_id = {key["id"]: key for key in body["keys"]}
        assert (by_id[client_key.id]["requests"], by_id[client_key.id]["tokens"]) == (2, 12)
        assert by_id[client_key.id]["last_used"] is not None
        assert by_id[admin_key.id]["for"] == "admin"
        assert not any(secret in str(body) for secret in (client, admin, hash_of(client.encode())))

        _, before = await proxy.ask("GET", "/admin/v1/policies", **as_admin)
        assert [one["name"] for one in before["policies"]] == ["test"]
        (tmp_path / "policy.yaml").write_text(POLICY.replace("0.9", "0.95"))
        _, after = await proxy.ask("POST", "/admin/v1/policies/reload", **as_admin)
        assert after["result"] in ("success", "noop")
        assert after["version"] != before["version"]
        (tmp_path / "policy.yaml").write_text("version: 1\nname: [\n")
        _, broken = await proxy.ask("POST", "/admin/v1/policies/reload", **as_admin)
        assert (broken["result"], broken["version"]) == ("failure", after["version"])
        assert "policy.yaml:" in broken["error"]

        _, body = await proxy.ask("GET", "/admin/v1/upstreams", **as_admin)
        assert body["upstreams"] == [{"url": engine.url, "healthy": True, "in_flight": 0}]
        assert (await proxy.ask("GET", "/admin/v1/policies/reload", **as_admin))[0] == 405
        assert (await proxy.ask("GET", "/docs", **as_admin))[1]["error"]["code"] == "not_found"


async def test_with_a_certificate_it_speaks_https_and_asks_clients_for_theirs_when_told_to(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "server")
    client_cert, client_key = certificate(tmp_path, "client")
    engine = FakeEngine()
    trusting = ssl.create_default_context(cafile=str(cert))
    known = ssl.create_default_context(cafile=str(cert))
    known.load_cert_chain(client_cert, client_key)
    options = ("--tls-cert", str(cert), "--tls-key", str(key))
    async with running(engine), guard_proxy(tmp_path, engine, *options, scheme="https") as proxy:
        assert (await proxy.ask("POST", "/v1/chat/completions", json=BODY, tls=trusting))[0] == 200
    options = (*options, "--set", f"tls_client_ca={client_cert}")
    async with running(engine), guard_proxy(tmp_path, engine, *options, scheme="https") as proxy:
        with pytest.raises((aiohttp.ClientError, OSError)):
            await proxy.ask("GET", "/livez", tls=trusting)
        assert (await proxy.ask("GET", "/livez", tls=known))[0] == 200


async def test_vllm_behind_https_is_believed_only_with_a_certificate_that_is_trusted(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "engine")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    async with running(FakeEngine(), tls=context) as engine:
        async with guard_proxy(tmp_path, engine) as proxy:
            assert (await proxy.ask("POST", "/v1/chat/completions", json=BODY))[0] == 502
        async with guard_proxy(tmp_path, engine, "--set", f"upstream_ca={cert}") as proxy:
            assert (await proxy.ask("POST", "/v1/chat/completions", json=BODY))[0] == 200


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """One that signs itself, for 127.0.0.1, and its key."""
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("needs openssl to make a certificate")
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = [program, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-out", str(cert), "-keyout", str(key)]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


@pytest.mark.parametrize(
    ("options", "said", "code"),
    [
        (("--set", "no_such=1"), "no_such", 1),
        (("--set", "max_body_bytes"), "is no NAME=VALUE", 2),
        (("--port", "8080", "--set", "port=9"), "port is given twice", 2),
        (("--set", "max_body_bytes=8 MB"), "max_body_bytes (GUARD_MAX_BODY_BYTES)", 1),
        (("--config", "/no/such/file"), "/no/such/file: cannot be read", 1),
        (("--keys", "/no/such/keys.yaml"), "/no/such/keys.yaml: cannot be read", 1),
        (("--tls-cert", __file__), "tls_cert and tls_key go together", 1),
        (("--tls-cert", __file__, "--tls-key", __file__), "cannot be used", 1),
        (("--admin-port", "9999"), "admin_port needs keys", 1),
        (("--redis-url", "http://localhost"), "redis_url (GUARD_REDIS_URL)", 1),
        (("--set", f"upstream_ca={__file__}"), "upstream_ca (GUARD_UPSTREAM_CA)", 1),
    ],
)
def test_what_cannot_work_is_said_in_one_line_before_anything_starts(
    tmp_path: Path, options: tuple[str, ...], said: str, code: int
) -> None:
    port = () if "--port" in options else ("--port", str(free_port()))
    ledger = ("--ledger", str(tmp_path / "ledger"))
    ended = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["proxy", *ledger, *port, *options])
    assert ended.exit_code == code
    assert said in ended.output
    assert ended.exception is None or isinstance(ended.exception, SystemExit)


WAYS: dict[str, tuple[str, str, str]] = {
    "upstream": ("http://a:1", "http://b:1", "http://c:1"),
    "policy": ("a.yaml", "b.yaml", "c.yaml"),
    "host": ("localhost", "127.0.0.1", "127.0.0.2"),
    "port": ("8001", "8002", "8003"),
    "ledger": ("a", "b", "c"),
    "keys": ("a", "b", "c"),
    "redis_url": ("redis://a", "redis://b", "redis://c"),
    "workers": ("2", "3", "4"),
    "admin_port": ("8001", "8002", "8003"),
    "read_timeout_s": ("1", "2", "3"),
    "max_body_bytes": ("2001", "2002", "2003"),
}
"""By setting: as an option, in the environment and in a file."""


@pytest.mark.parametrize("command", ["proxy", "serve"])
@pytest.mark.parametrize("name", list(WAYS))
def test_an_option_counts_before_the_environment_and_that_before_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str, name: str
) -> None:
    """However the option is spelt; a variable that it stands before may be of no use."""
    found: list[str] = []

    def start(options: ProxyOptions | ServeOptions) -> int:
        (value,) = (getattr(load_settings(**options.settings), name),)
        shown = value[0] if isinstance(value, tuple) else value
        found.append(shown.get_secret_value() if isinstance(shown, SecretStr) else str(shown).removesuffix(".0"))
        return 0

    monkeypatch.setattr("guard.serve.serve_proxy", start)
    monkeypatch.setattr("guard.serve.serve", start)
    by_option, by_environment, by_file = WAYS[name]
    beside = {"keys": "k"} if name == "admin_port" else {}
    (tmp_path / "guard.yaml").write_text(json.dumps({**beside, name: by_file}))

    def run(*options: str, **environment: str) -> str:
        line = [command, "--config", str(tmp_path / "guard.yaml"), *options]
        ended = CliRunner(env={"COLUMNS": "200", **environment}).invoke(app, line)
        assert ended.exit_code == 0, ended.output
        return found[-1]

    variable, option = f"GUARD_{name.upper()}", f"--{name.replace('_', '-')}"
    spelt = [("--set", f"{name}={by_option}")]
    if name not in ("read_timeout_s", "max_body_bytes") and (command, name) != ("serve", "upstream"):
        spelt.append((option, by_option))
    for options in spelt:
        for value in (by_environment, "of no use"):
            assert run(*options, **{variable: value}) == by_option
    assert run(**{variable: by_environment}) == by_environment
    assert run() == by_file


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])  # noqa: S104
def test_one_port_for_clients_and_operators_is_refused_before_it_is_ready(
    tmp_path: Path, host: str, workers: str
) -> None:
    create_key(tmp_path / "keys.yaml", NewKey(admin=True))
    port = str(free_port())
    options = ["--ledger", str(tmp_path / "ledger"), "--keys", str(tmp_path / "keys.yaml"), "--host", host]
    options += ["--port", port, "--admin-port", port, "--workers", workers]
    ended = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["proxy", *options])
    assert ended.exit_code == 1
    assert f"cannot listen on 127.0.0.1:{port}" in ended.output
    assert "choose another with --admin-port" in ended.output
    assert "ready: " not in ended.output


async def test_what_is_likely_not_meant_is_said_once_at_the_start_and_nothing_else_is(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("version: 1\n")
    options = ["--keys", str(keys), "--workers", "2", "--set", "admin_host=0.0.0.0"]
    async with running(FakeEngine()) as engine:
        async with guard_proxy(tmp_path, engine, *options, "--admin-port", str(free_port())) as proxy:
            warned = [line for line in proxy.said.splitlines() if line.startswith("warning: ")]
            for said, line in zip(("every request is a 401", "--admin", "admin_host is"), warned, strict=True):
                assert said in line
        for wanted in (NewKey(admin=True), NewKey(tenant="acme")):
            create_key(keys, wanted)
        port = str(free_port())
        async with guard_proxy(tmp_path, engine, "--keys", str(keys), "--admin-port", port) as proxy:
            assert "warning" not in proxy.said
