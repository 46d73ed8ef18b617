"""How one proxy process is set up: by options, else the environment (``GUARD_*``), else a file, else defaults.

Owns the settings, the order of their sources, and what must hold between them. A malformed value stops the start. Never
reads a policy.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    AnyHttpUrl,
    Field,
    FilePath,
    SecretStr,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from guard.data import data_folder, default_policy
from guard.mistakes import told
from guard.paths import state_folder
from guard.policy.yaml_file import PolicyError, message_at, plain_data, read_mapping

PREFIX = "GUARD_"
NEARLY = 0.88
"""Of ``difflib``: one or two letters of a name are other ones."""
MIN_LEDGER_KEY = 16
SHORT_LEDGER_KEY = f"is shorter than {MIN_LEDGER_KEY} characters, which can be guessed: openssl rand -hex 32"
SERVICE_LINK = re.compile(r"(tcp|udp|sctp)://")
"""How the value begins that Kubernetes gives ``NAME_PORT`` in the pods of a namespace with a Service ``name``."""
PLAIN_PATH = re.compile(r"(?:/(?!\.{1,2}(?:/|$))[A-Za-z0-9._~-]+)+")
SHA256_HEX = re.compile(r"[0-9a-f]{64}")


class SettingsError(ValueError):
    """Settings that the proxy cannot start with; one line for each, with the remedy."""


class Settings(BaseSettings):
    """Each field is also the environment variable ``GUARD_`` + its name in capitals, and a key of the file."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )

    config: FilePath | None = None
    """File of settings in YAML, by the names of these variables in lower case without ``GUARD_``. The environment
    counts before it, command-line options before both."""

    upstream: Annotated[tuple[str, ...], NoDecode] = ("http://127.0.0.1:8001",)
    """Base URL of vLLM, without ``/v1``; several, which serve the same model, are separated by commas. Requests go to
    those that are healthy, those that begin alike to the same one. Empty: none, only ``providers``."""

    upstream_plugin: bool = True
    """Whether vLLM has the guard's plugin. ``false``: it is asked for answers alone, and every detector that reads the
    model is unavailable; rules on texts judge as ever."""

    upstream_api_key: SecretStr | None = None
    """Key that vLLM wants (its ``--api-key``). A client's own key is never sent on."""

    providers: FilePath | None = None
    """File of models that other providers serve, asked through litellm (``pip install 'mia-guard[litellm]'``). Requests
    for these go there, all others to ``upstream``. Every detector that reads the model is unavailable for them."""

    policy: Annotated[Path, Field(default_factory=default_policy)]
    """The policy file, or a folder of policies with ``selection.yaml``. Changes are noticed while the proxy runs."""

    config_key: str = "SmolLM2-135M-Instruct"
    """Which file of ``model_configs`` the detectors are built from: the served model's name there."""

    model_configs: Annotated[Path, Field(default_factory=lambda: data_folder("model_configs"))]
    """The folder with the detectors' calibrations."""

    rerank: bool = False
    """Whether ``/v1/rerank`` is served, with the heads in ``core_reranker`` of ``model_configs``. ``guard serve`` then
    gives the engine their taps."""

    host: str = "127.0.0.1"
    """Address to listen on. Other than loopback needs API keys."""

    port: Annotated[int, Field(ge=1, le=65535)] = 8080
    """Port to listen on."""

    api_key_hashes: Annotated[tuple[str, ...], NoDecode] = ()
    """SHA-256, in hex, of accepted API keys, beside those of ``keys``; several are separated by commas."""

    keys: Path | None = None
    """File of API keys, written by ``guard keys``; changes are noticed while the proxy runs. Without it and without
    ``api_key_hashes`` no key is asked for."""

    workers: Annotated[int, Field(ge=1, le=256)] = 1
    """Processes that the proxy runs in, on the same port; one uses at most one core. More than one count limits of keys
    and tenants only through Redis."""

    max_concurrent: Annotated[int, Field(ge=1)] = 4096
    """Most requests under way at once, of everybody together; more are a 503. Each worker takes its share of them."""

    redis_url: SecretStr | None = None
    """Redis that counts the limits of keys and tenants for all replicas together, as ``redis://HOST:6379/0``. Without
    it each process counts for itself."""

    ledger: Annotated[Path, Field(default_factory=lambda: state_folder() / "ledger.jsonl")]
    """File that gets one JSON line for each request; several processes may share it. Beside it lie its older files, its
    head and captured text."""

    ledger_key: SecretStr | None = None
    """Secret, of at least 16 characters, that keys the hashes of the ledger's chain: who does not have it can add or
    change nothing unseen. Where it is given, nothing that was written without it counts as the guard's."""

    ledger_max_bytes: Annotated[int, Field(ge=4096)] = 256 * 1024 * 1024
    """From which size on the ledger goes on in a new file."""

    ledger_max_hours: Annotated[float, Field(gt=0)] | None = None
    """After how long it does, however small it is. Without it size alone counts."""

    ledger_keep_files: Annotated[int, Field(ge=0)] | None = None
    """How many of its older files are kept. Without it, and without ``ledger_keep_days``, all are."""

    ledger_keep_days: Annotated[float, Field(gt=0)] | None = None
    """How long an older file is kept after its last line."""

    otlp_endpoint: str | None = None
    """Base URL of a collector that takes OTLP over HTTP, as ``http://collector:4318``, with or without ``/v1/traces``;
    it gets a trace of each request (``pip install 'mia-guard[otlp]'``). Without it there are none."""

    max_body_bytes: Annotated[int, Field(ge=1024)] = 8 * 1024 * 1024
    """Longest accepted request body."""

    body_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Longest time that a client may take to send its body."""

    client_timeout_s: Annotated[float, Field(gt=0, le=86400)] = 120.0
    """Longest time that a client may take nothing of its answer; then its connection is closed, and vLLM stops. Needs
    Linux."""

    connect_timeout_s: Annotated[float, Field(gt=0)] = 5.0
    """Longest time to reach vLLM."""

    read_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Longest silence of vLLM inside one answer."""

    passed_paths: Annotated[tuple[str, ...], NoDecode] = ()
    """Other paths of vLLM that pass as they are, several separated by commas. No policy sees them. Empty: refused."""

    upstream_ca: FilePath | None = None
    """Certificates, in PEM, that vLLM's own must be signed by where ``upstream`` is ``https://``. Default: those that
    the system trusts."""

    tls_cert: FilePath | None = None
    """Certificate in PEM, with its chain: the proxy then speaks HTTPS. Read at start."""

    tls_key: FilePath | None = None
    """Its private key in PEM, without a passphrase."""

    tls_client_ca: FilePath | None = None
    """Certificates, in PEM, that clients' own must be signed by. Without it clients need none."""

    drain_delay_s: Annotated[float, Field(ge=0)] = 0.0
    """Told to stop, how long the proxy goes on as ever but for ``/readyz``, so that load balancers send to others."""

    drain_timeout_s: Annotated[float, Field(gt=0)] = 20.0
    """Afterwards, how long answers under way may take to end; then they are ended with an error."""

    admin_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Port of the admin API; without it there is none. It needs ``keys``, and a key made with ``--admin``."""

    admin_host: str = "127.0.0.1"
    """Address of the admin API. Other than loopback it wants TLS, of its own or before it: the start warns without."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The first source that has a field counts."""
        path = {**env_settings(), **init_settings()}.get("config")
        file = () if path is None else (InitSettingsSource(settings_cls, read_settings_file(Path(path))),)
        return (init_settings, env_settings, *file)

    @field_validator("upstream")
    @classmethod
    def _are_base_urls(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for one in value:
            TypeAdapter(AnyHttpUrl).validate_python(one)
        bases = tuple(dict.fromkeys(one.rstrip("/") for one in value))
        if any(base.endswith("/v1") for base in bases):
            raise ValueError("is the server's base URL, without /v1")
        return bases

    @field_validator("upstream", "api_key_hashes", "passed_paths", mode="before")
    @classmethod
    def _split_at_commas(cls, value: Any) -> Any:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

    @field_validator("port", "admin_port", mode="before")
    @classmethod
    def _is_no_service_link(cls, value: Any) -> Any:
        if isinstance(value, str) and SERVICE_LINK.match(value):
            raise ValueError(
                "is the address of a Kubernetes Service that has this variable's name, and no port; "
                "set enableServiceLinks: false in the pod's spec"
            )
        return value

    @field_validator("passed_paths")
    @classmethod
    def _are_paths(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for one in value:
            if not one.startswith("/"):
                raise ValueError(f"a path begins with a slash: /{one}")
            if not PLAIN_PATH.fullmatch(one):
                # What a server may take for another path, or for several, may be one that is guarded.
                raise ValueError(
                    f"{one}: a path is written out in full, of letters, digits and . _ ~ - between single slashes, "
                    "without . or .. alone, and without a slash at its end"
                )
        return value

    @field_validator("api_key_hashes")
    @classmethod
    def _are_hashes(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        hashes = tuple(one.lower() for one in value)
        if not all(SHA256_HEX.fullmatch(one) for one in hashes):
            # Not shown: somebody may have put the key itself here.
            raise ValueError("each is a SHA-256 in hex, 64 digits: printf %s KEY | sha256sum")
        return hashes

    @field_validator("otlp_endpoint")
    @classmethod
    def _is_a_url(cls, value: str | None) -> str | None:
        if value is not None:
            TypeAdapter(AnyHttpUrl).validate_python(value)
        return value

    @field_validator("ledger_key")
    @classmethod
    def _is_long(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and len(value.get_secret_value()) < MIN_LEDGER_KEY:
            raise ValueError(SHORT_LEDGER_KEY)
        return value

    @model_validator(mode="after")
    def _open_to_others_only_with_keys(self) -> Self:
        if not self.api_key_hashes and self.keys is None and not is_loopback(self.host):
            raise ValueError(
                f"without API keys the proxy listens on loopback only, not on {self.host}; "
                f"set {PREFIX}KEYS, or host 127.0.0.1"
            )
        return self

    @model_validator(mode="after")
    def _go_together(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca needs tls_cert: without TLS no client shows a certificate")
        if not self.upstream and self.providers is None:
            raise ValueError(f"upstream ({PREFIX}UPSTREAM): is empty, and so is providers: nobody is left to answer")
        if self.admin_port is not None and self.keys is None:
            raise ValueError("admin_port needs keys: a file with a key that guard keys create --admin made")
        return self


def read_settings_file(path: Path) -> dict[str, Any]:
    """Raises ``SettingsError`` with file and line, for names that are no settings too."""
    try:
        root = read_mapping(path)
        values: dict[str, Any] = plain_data(root)
    except PolicyError as error:
        raise SettingsError(str(error)) from None
    for name in values:
        if name not in Settings.model_fields or name == "config":
            raise SettingsError(message_at(root, (name,), "no setting has this name"))
    return values


def load_settings(**given: Any) -> Settings:
    """``Settings`` with errors for people. Values that are given win over the environment, and that over the file."""
    if misspelt := misspelt_variables(os.environ):
        raise SettingsError("\n".join(f"{name}: no setting has this name; {like} has" for name, like in misspelt))
    try:
        return Settings(**given)
    except ValidationError as error:
        raise SettingsError(
            "\n".join(_line(one["loc"], told(one)) for one in error.errors(include_url=False, include_input=False))
        ) from None


def misspelt_variables(names: Iterable[str]) -> list[tuple[str, str]]:
    """Variables that are nearly a setting's, and the setting's. What is not near is not ours."""
    known = [PREFIX + field.upper() for field in Settings.model_fields]
    strange = sorted(name for name in names if name.startswith(PREFIX) and name not in known)
    return [(name, like[0]) for name in strange if (like := get_close_matches(name, known, 1, NEARLY))]


def is_loopback(host: str) -> bool:
    """Whether ``host``, a name or an address without port, means this machine only."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _line(location: tuple[int | str, ...], message: str) -> str:
    name = ".".join(str(part) for part in location)
    return f"{name} ({PREFIX}{name.upper()}): {message}" if name else message
