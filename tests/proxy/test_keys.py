"""Keys of a file decide who may ask, as which tenant and under which policy, from one request to the next."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from guard.proxy.keys import NewKey, create_key, hash_of, revoke_key
from tests.proxy.conftest import BLOCKED, POLICY, Proxy, StartProxy, eventually
from tests.proxy.engine import FakeEngine, running

ALLOWING = POLICY.replace("action: block", "action: flag").replace("name: test", "name: lenient")
SELECTION = """\
version: 1
default: test
assignments:
  - {name: friends, match: {tenants: [acme]}, policy: lenient}
"""


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def write_policies(folder: Path, selection: str) -> Path:
    folder.mkdir()
    (folder / "test.yaml").write_text(POLICY)
    (folder / "lenient.yaml").write_text(ALLOWING)
    (folder / "selection.yaml").write_text(selection)
    return folder


async def code_of(proxy: Proxy, headers: dict[str, str]) -> tuple[int, str | None]:
    status, _, body = await proxy.post(headers=headers)
    return status, json.loads(body).get("error", {}).get("code")


async def until_status(proxy: Proxy, headers: dict[str, str], wanted: int) -> None:
    """Ask until the answer has this status; fails after some seconds."""
    for _ in range(300):
        if (await code_of(proxy, headers))[0] == wanted:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"never {wanted}")


async def test_a_key_works_from_when_it_is_made_until_it_is_revoked_without_a_restart(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    file = tmp_path / "keys.yaml"
    first, first_key = create_key(file, NewKey())
    async with running(FakeEngine()) as engine, start_proxy(engine, keys=file) as proxy:
        assert (await code_of(proxy, bearer(first)))[0] == 200
        assert await code_of(proxy, bearer("mg_wrong")) == (401, "invalid_api_key")
        second, second_key = create_key(file, NewKey(tenant="acme"))
        await until_status(proxy, bearer(second), 200)
        revoke_key(file, first_key.id)
        await until_status(proxy, bearer(first), 401)
        assert (await code_of(proxy, bearer(second)))[0] == 200
        # The last key is revoked too: the door is shut, not open.
        revoke_key(file, second_key.id)
        await until_status(proxy, bearer(second), 401)
        assert await code_of(proxy, {}) == (401, "invalid_api_key")
        ledger = proxy.ledger.read_text()
    answered = [entry for entry in map(json.loads, ledger.splitlines()) if entry["status"] == 200]
    assert {(entry["key"], entry["tenant"]) for entry in answered} == {(first_key.id, None), (second_key.id, "acme")}
    assert first not in ledger
    assert hash_of(first.encode()) not in ledger


async def test_a_file_that_breaks_keeps_the_keys_before_it_and_readyz_and_metrics_say_so(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    file = tmp_path / "keys.yaml"
    key, _ = create_key(file, NewKey())
    async with running(FakeEngine()) as engine, start_proxy(engine, keys=file) as proxy:
        file.write_text("version: 1\nkeys: [{id: x}]\n")
        for _ in range(300):
            if json.loads((await proxy.get("/readyz"))[2])["keys_reload"] == "failed":
                break
            await asyncio.sleep(0.02)
        else:
            raise AssertionError("never told")
        assert (await code_of(proxy, bearer(key)))[0] == 200
        assert b"\nguard_keys_file_in_force 0.0\n" in (await proxy.get("/metrics"))[2]
        file.unlink()
        repaired, _ = create_key(file, NewKey())
        await until_status(proxy, bearer(repaired), 200)
        assert b"\nguard_keys_file_in_force 1.0\n" in (await proxy.get("/metrics"))[2]


async def test_keys_whose_policy_no_key_may_have_are_in_the_log_at_start_and_when_a_file_changes(
    start_proxy: StartProxy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys.yaml"
    _, lost = create_key(file, NewKey(policy="lenient"))
    policies = write_policies(tmp_path / "policies", SELECTION)
    text = (policies / "selection.yaml").read_text()
    async with running(FakeEngine()) as engine, start_proxy(engine, path=policies, keys=file):
        assert f"key {lost.id}: each of its requests is a 503" in caplog.text
        _, later = create_key(file, NewKey(policy="nowhere"))
        await eventually(lambda: f"key {later.id}: each" in caplog.text)
        caplog.clear()
        (policies / "selection.yaml").write_text(text + "for_keys: [lenient]\n")
        await eventually(lambda: f"key {later.id}: each" in caplog.text, 20)
        assert lost.id not in caplog.text


async def test_a_tenant_selects_the_policy_of_its_keys(start_proxy: StartProxy, tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    acme, _ = create_key(file, NewKey(tenant="acme"))
    other, _ = create_key(file, NewKey(tenant="other"))
    policies = write_policies(tmp_path / "policies", SELECTION)
    async with running(FakeEngine(logit=BLOCKED)) as engine, start_proxy(engine, path=policies, keys=file) as proxy:
        assert (await code_of(proxy, bearer(acme)))[0] == 200
        assert (await code_of(proxy, bearer(other)))[0] == 400
        entries = await proxy.entries(2)
    assert [(one["tenant"], one["policy"], one["assignment"]) for one in entries] == [
        ("acme", "lenient", "friends"),
        ("other", "test", None),
    ]


async def test_a_keys_own_policy_counts_before_any_assignment_and_never_gives_way_to_another(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    file = tmp_path / "keys.yaml"
    own, _ = create_key(file, NewKey(tenant="acme", policy="test"))
    missing, _ = create_key(file, NewKey(policy="strict"))
    policies = write_policies(tmp_path / "policies", SELECTION + "for_keys: [test]\n")
    async with running(FakeEngine(logit=BLOCKED)) as engine, start_proxy(engine, path=policies, keys=file) as proxy:
        assert await code_of(proxy, bearer(own)) == (400, "content_filter")
        assert await code_of(proxy, bearer(missing)) == (503, "guard_unavailable")
        assert len(engine.bodies) == 1


async def test_anthropics_header_is_a_key_too_and_goes_no_further(start_proxy: StartProxy, tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    key, _ = create_key(file, NewKey())
    async with running(FakeEngine()) as engine, start_proxy(engine, keys=file) as proxy:
        assert (await code_of(proxy, {"x-api-key": key}))[0] == 200
        assert (await code_of(proxy, {"x-api-key": key, "authorization": "Bearer no"}))[0] == 401
        assert key not in str(engine.headers)


async def test_the_key_for_vllm_never_reaches_a_client_even_when_vllm_repeats_it(start_proxy: StartProxy) -> None:
    engine = FakeEngine(extra_headers={"authorization": "Bearer engine-key", "x-echo": "engine-key"})
    async with running(engine), start_proxy(engine, upstream_api_key="engine-key") as proxy:
        answers: list[Any] = [await proxy.post(), await proxy.post({**_body(), "stream": True})]
        answers += [await proxy.get("/v1/models"), await proxy.get("/readyz"), await proxy.get("/metrics")]
        assert {one["authorization"] for one in engine.headers} == {"Bearer engine-key"}
    assert "engine-key" not in str(answers)


def _body() -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "private words"}]}


async def test_keys_given_by_hash_alone_work_beside_the_file_and_the_ledger_has_nothing_of_the_hash(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    file = tmp_path / "keys.yaml"
    made, key = create_key(file, NewKey())
    listed = hash_of(b"listed by hand")
    async with running(FakeEngine()) as engine, start_proxy(engine, keys=file, api_key_hashes=listed) as proxy:
        for given in (made, "listed by hand"):
            assert (await code_of(proxy, bearer(given)))[0] == 200
        entries = await proxy.entries(2)
        assert [entry["key"] for entry in entries] == [key.id, "listed1"]
        assert listed[:8] not in proxy.ledger.read_text()
