"""Settings come from arguments, then the environment, then defaults; what is malformed stops the start."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from guard.settings import Settings, SettingsError, is_loopback, load_settings

KEY = "a-secret-key"
KEY_HASH = hashlib.sha256(KEY.encode()).hexdigest()


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "GUARD_UPSTREAM",
        "GUARD_HOST",
        "GUARD_PORT",
        "GUARD_API_KEY_HASHES",
        "GUARD_MAX_BODY_BYTES",
        "GUARD_KEYS",
        "GUARD_CONFIG",
    ):
        monkeypatch.delenv(name, raising=False)


def test_an_argument_wins_over_the_environment_and_that_over_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GUARD_PORT", "9001")
    monkeypatch.setenv("GUARD_UPSTREAM", "http://gpu:8000/")
    settings = load_settings(port=9002)
    assert (settings.port, settings.upstream, settings.host) == (9002, ("http://gpu:8000",), "127.0.0.1")


def test_an_option_wins_over_the_environment_that_over_the_file_and_that_over_the_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "guard.yaml"
    file.write_text(
        "upstream: [http://a:1, http://b:2/]\nport: 9001\nmax_body_bytes: 2048\nbody_timeout_s: 7\n"
        f"api_key_hashes: {KEY_HASH}\n"
    )
    monkeypatch.setenv("GUARD_MAX_BODY_BYTES", "4096")
    monkeypatch.setenv("GUARD_PORT", "9002")
    settings = load_settings(config=file, port=9003)
    assert (settings.port, settings.max_body_bytes, settings.body_timeout_s) == (9003, 4096, 7.0)
    assert settings.upstream == ("http://a:1", "http://b:2")
    assert (settings.api_key_hashes, settings.read_timeout_s) == ((KEY_HASH,), 600.0)
    monkeypatch.setenv("GUARD_CONFIG", str(file))
    assert load_settings().port == 9002


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1\n", "guard.yaml:1: prot: no setting has this name"),
        ("port: 1\nport: 2\n", "guard.yaml:2: 'port' is written twice"),
        ("config: other.yaml\n", "guard.yaml:1: config"),
        ("port: eighty\n", "port (GUARD_PORT): "),
        ("- port\n", "guard.yaml:1: it is no mapping"),
        ("upstream: []\n", "upstream (GUARD_UPSTREAM)"),
        ("admin_port: 9\n", "admin_port needs keys"),
    ],
)
def test_a_file_with_a_mistake_stops_the_start(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "guard.yaml").write_text(text)
    with pytest.raises(SettingsError) as refused:
        load_settings(config=tmp_path / "guard.yaml")
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("variable", "value", "field"),
    [
        ("GUARD_PORT", "eighty", "port"),
        ("GUARD_PORT", "0", "port"),
        ("GUARD_MAX_BODY_BYTES", "8 MB", "max_body_bytes"),
        ("GUARD_CONNECT_TIMEOUT_S", "-1", "connect_timeout_s"),
        ("GUARD_UPSTREAM", "gpu:8000", "upstream"),
        ("GUARD_UPSTREAM", "http://gpu:8000/v1", "upstream"),
    ],
)
def test_a_malformed_value_stops_the_start_and_names_its_variable(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, field: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(SettingsError, match=rf"{field} \({variable}\): "):
        load_settings()


def test_a_misspelt_variable_stops_the_start_and_what_is_not_near_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GUARD_SERVICE_HOST", "GUARD_PORT_80_TCP", "GUARD_DEMO_ARGS", "GUARDIAN"):
        monkeypatch.setenv(name, "x")
    load_settings()
    for name, like in (("GUARD_DRAIN_TIMOUT_S", "GUARD_DRAIN_TIMEOUT_S"), ("GUARD_POLCY", "GUARD_POLICY")):
        monkeypatch.setenv(name, "3")
        with pytest.raises(SettingsError, match=f"{name}: no setting has this name; {like} has"):
            load_settings()
        monkeypatch.delenv(name)


@pytest.mark.parametrize("name", [f"GUARD_{one.upper()}" for one in Settings.model_fields if one.endswith("port")])
def test_what_kubernetes_puts_into_pods_for_a_service_is_told_from_a_port(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "tcp://10.96.0.12:80")
    with pytest.raises(SettingsError, match=rf"\({name}\): .*enableServiceLinks: false"):
        load_settings()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.10", "example.org", ""])  # noqa: S104
def test_without_keys_only_loopback_is_listened_on(host: str) -> None:
    with pytest.raises(SettingsError, match="GUARD_KEYS"):
        load_settings(host=host)
    assert load_settings(host=host, api_key_hashes=(KEY_HASH,)).host == host


def test_several_key_hashes_are_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GUARD_API_KEY_HASHES", f"{KEY_HASH.upper()}, {'0' * 64},")
    assert load_settings().api_key_hashes == (KEY_HASH, "0" * 64)


def test_a_key_given_in_place_of_its_hash_is_refused_and_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GUARD_API_KEY_HASHES", KEY)
    with pytest.raises(SettingsError, match="SHA-256 in hex") as refused:
        load_settings()
    assert KEY not in str(refused.value)


def test_vllms_own_key_does_not_show_when_settings_are_printed() -> None:
    settings = load_settings(upstream_api_key=KEY)
    assert KEY not in repr(settings)
    assert settings.upstream_api_key is not None
    assert settings.upstream_api_key.get_secret_value() == KEY


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("[::1]", True), ("LOCALHOST", True),
     ("10.0.0.1", False), ("localhost.evil.org", False), ("127.0.0.1.evil.org", False), ("", False)],
)  # fmt: skip
def test_loopback_is_told_by_address_not_by_how_a_name_begins(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
