"""The files under ``deploy`` are what Compose and Kubernetes accept, fit together, and name what the guard has."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import typer.main
import yaml

from guard.cli import app
from guard.data import data_folder
from guard.models import resolve_model
from guard.proxy.monitor import monitor_routes
from guard.serve import bound_policies, engine_config_of
from guard.settings import PREFIX, Settings, load_settings

CHECKOUT = Path(__file__).parent.parent
DEPLOY = CHECKOUT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())
KUSTOMIZATION = yaml.safe_load((DEPLOY / "kubernetes" / "kustomization.yaml").read_text())
MANIFESTS: list[dict[str, Any]] = [
    one for name in KUSTOMIZATION["resources"] for one in yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text())
]
OPERATOR = ("ServiceMonitor", "PrometheusRule")
"""Kinds of the Prometheus operator, whose schemas no package has."""

KUBERNETES = "1.33"
DEPLOYMENTS = {one["metadata"]["name"]: one for one in MANIFESTS if one["kind"] == "Deployment"}
PODS = {name: one["spec"]["template"] for name, one in DEPLOYMENTS.items()}
CONTAINERS = {name: one["spec"]["containers"][0] for name, one in PODS.items()}


def named(kind: str) -> dict[str, dict[str, Any]]:
    return {one["metadata"]["name"]: one for one in MANIFESTS if one["kind"] == kind}


def given(entry: dict[str, Any]) -> str:
    """Of a variable; of one from a Secret something as long as README.md makes it."""
    return str(entry.get("value", "0" * 64))


def environments() -> dict[str, dict[str, str]]:
    """Of every container, by a name to read."""
    pods = {f"kubernetes {name}": {e["name"]: given(e) for e in one.get("env", ())} for name, one in CONTAINERS.items()}
    return pods | {f"compose {name}": one.get("environment", {}) for name, one in COMPOSE["services"].items()}


def test_compose_accepts_the_file() -> None:
    schema = files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json"
    jsonschema.Draft202012Validator(json.loads(schema.read_text())).validate(COMPOSE)


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda one: f"{one['kind']}-{one['metadata']['name']}")
def test_kubernetes_accepts_each_manifest(manifest: dict[str, Any]) -> None:
    if manifest["kind"] in OPERATOR:
        assert manifest["apiVersion"] == "monitoring.coreos.com/v1"
        assert set(manifest["spec"]) <= {"jobLabel", "selector", "endpoints", "groups"}
        return
    kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def test_every_manifest_is_applied() -> None:
    there = {file.name for file in (DEPLOY / "kubernetes").iterdir()} - {"kustomization.yaml"}
    assert there == set(KUSTOMIZATION["resources"])


@pytest.mark.parametrize("where", environments())
def test_every_setting_exists_and_has_a_value_that_can_be_read(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {name: value for name, value in environments()[where].items() if name.startswith(PREFIX)}
    names = {PREFIX + name.upper() for name in Settings.model_fields}
    assert given.keys() <= names
    if f"{PREFIX}UPSTREAM" not in given:
        return
    for name, value in given.items():
        value = re.sub(r"\$\{\w+:\?.*\}", "0" * 64, value)
        monkeypatch.setenv(name, re.sub(r"\$\{\w+:-(.*)\}", r"\1", value))
    settings = load_settings()
    assert not settings.api_key_hashes
    assert settings.ledger_key is not None
    assert settings.keys == Path("/etc/guard/keys/keys.yaml")


def service_links(name: str, port: dict[str, Any]) -> set[str]:
    """The variables that kubelet puts into every pod of a Service's namespace, of one port of it:
    https://kubernetes.io/docs/tutorials/services/connect-applications-service/#environment-variables"""
    start = name.upper().replace("-", "_")
    tcp = f"{start}_PORT_{port['port']}_{port.get('protocol', 'TCP')}"
    named = f"{start}_SERVICE_PORT_{port['name'].upper().replace('-', '_')}"
    return {f"{start}_SERVICE_HOST", f"{start}_SERVICE_PORT", named, f"{start}_PORT", tcp} | {
        f"{tcp}_{part}" for part in ("PROTO", "PORT", "ADDR")
    }


def test_no_service_becomes_a_setting_of_the_guard_or_of_vllm_in_any_pod() -> None:
    from vllm import envs

    read = {PREFIX + name.upper() for name in Settings.model_fields} | envs.environment_variables.keys()
    links = {
        link
        for name, service in named("Service").items()
        for port in service["spec"]["ports"]
        for link in service_links(name, port)
    }
    # As long as the Services have these names, their links are settings.
    assert links & read == {"GUARD_PORT", "VLLM_PORT"}
    assert [name for name, pod in PODS.items() if pod["spec"].get("enableServiceLinks") is not False] == []


def test_every_command_of_the_guard_and_its_options_exist() -> None:
    command: Any = typer.main.get_command(app)
    asked = [
        one["command"] for one in COMPOSE["services"].values() if one.get("image", "").startswith("mia-guard-proxy")
    ]
    asked += [CONTAINERS["guard"]["args"]]
    (taps,) = re.findall(r"\$\(guard (.*)\)", (DEPLOY / "engine.sh").read_text())
    for words in [*filter(None, asked), taps.split()]:
        found = command
        rest = list(words)
        while rest and rest[0] in getattr(found, "commands", {}):
            found = found.commands[rest.pop(0)]
        options = {option for parameter in found.params for option in parameter.opts}
        assert found is not command, words
        assert {word for word in rest if word.startswith("--")} <= options


def test_ports_and_probes_are_those_that_the_programs_have() -> None:
    services = named("Service")
    for name, container in CONTAINERS.items():
        (port,) = container["ports"]
        (served,) = services[name]["spec"]["ports"]
        assert served["targetPort"] == port["name"]
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            for how in container.get(probe, {}).keys() & {"httpGet", "tcpSocket"}:
                assert container[probe][how]["port"] == port["name"]
    guard = environments()["kubernetes guard"]
    assert int(guard["GUARD_PORT"]) == CONTAINERS["guard"]["ports"][0]["containerPort"]
    probed = {CONTAINERS["guard"][probe]["httpGet"]["path"] for probe in ("livenessProbe", "readinessProbe")}
    assert probed <= {route.path for route in monitor_routes(None)}  # type: ignore[arg-type]
    port = CONTAINERS["vllm"]["ports"][0]["containerPort"]
    assert f"--port {port} " in (DEPLOY / "engine.sh").read_text()
    for url, name in ((guard["GUARD_UPSTREAM"], "vllm"), (guard["GUARD_REDIS_URL"], "redis")):
        host, at = re.fullmatch(r"\w+://(\w+):(\d+)(?:/0)?", url).groups()  # type: ignore[union-attr]
        assert (host, int(at)) == (name, services[name]["spec"]["ports"][0]["port"])


def test_selectors_find_pods_and_services_and_volumes_are_there() -> None:
    labels = [one["metadata"]["labels"] for one in PODS.values()]
    for kind in ("Service", "NetworkPolicy", "PodDisruptionBudget", "Deployment", "ServiceMonitor"):
        for one in named(kind).values():
            selector = one["spec"].get("podSelector") or one["spec"]["selector"]
            wanted = selector.get("matchLabels", selector).items()
            found = [service["metadata"]["labels"] for service in named("Service").values()]
            assert any(wanted <= has.items() for has in (found if kind == "ServiceMonitor" else labels)), (kind, one)
    for policy in named("NetworkPolicy").values():
        ((ports,),) = [[rule["ports"] for rule in policy["spec"]["ingress"]]]
        wanted = policy["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/name"]
        assert [one["port"] for one in ports] == [one["containerPort"] for one in CONTAINERS[wanted]["ports"]]
    readme = (DEPLOY / "README.md").read_text()
    secrets = {"guard-keys": {"keys.yaml"}, "guard-ledger": {"key"}}
    for name, keys in secrets.items():
        (made_of,) = re.findall(rf"create secret generic {name} --from-(?:file|literal)=([\w.]+)", readme)
        assert {made_of} == keys
    for entry in (one for container in CONTAINERS.values() for one in container.get("env", ()) if "valueFrom" in one):
        wanted_from = entry["valueFrom"]["secretKeyRef"]
        assert wanted_from["key"] in secrets[wanted_from["name"]]
    made = secrets.keys() | named("ConfigMap").keys() | named("PersistentVolumeClaim").keys()
    for name, pod in PODS.items():
        volumes = {one["name"]: one for one in pod["spec"].get("volumes", ())}
        assert {one["name"] for one in CONTAINERS[name].get("volumeMounts", ())} == volumes.keys()
        sources = [
            one.get("configMap", {}).get("name") or one.get("secret", {}).get("secretName") for one in volumes.values()
        ]
        claims = [one.get("persistentVolumeClaim", {}).get("claimName") for one in volumes.values()]
        assert {one for one in (*sources, *claims) if one} <= made


def test_monitors_scrape_a_port_that_exists_under_the_names_that_rules_expect() -> None:
    monitors, services = named("ServiceMonitor"), named("Service")
    assert monitors.keys() == {"guard", "vllm"}
    for name, monitor in monitors.items():
        (endpoint,) = monitor["spec"]["endpoints"]
        assert endpoint["port"] in {port["name"] for port in services[name]["spec"]["ports"]}
        assert services[name]["metadata"]["labels"][monitor["spec"]["jobLabel"]] == name


def test_a_pod_has_longer_to_stop_than_the_proxy_takes() -> None:
    guard = environments()["kubernetes guard"]
    takes_s = float(guard["GUARD_DRAIN_DELAY_S"]) + float(guard["GUARD_DRAIN_TIMEOUT_S"])
    assert PODS["guard"]["spec"]["terminationGracePeriodSeconds"] > takes_s
    proxy = COMPOSE["services"]["proxy"]
    assert float(proxy["stop_grace_period"].rstrip("s")) > float(proxy["environment"]["GUARD_DRAIN_TIMEOUT_S"])


def test_rules_and_policies_are_copies_of_those_that_ship() -> None:
    stale = "run: python scripts/kubernetes_copies.py"
    rules = yaml.safe_load((CHECKOUT / "dashboards" / "prometheus" / "rules.yml").read_text())
    assert named("PrometheusRule")["guard"]["spec"] == rules, stale
    data = named("ConfigMap")["guard-policies"]["data"]
    assert data["default.yaml"] == (CHECKOUT / "policies" / "default.yaml").read_text(), stale


def test_the_engine_gets_taps_for_the_policies_of_its_pod(tmp_path: Path) -> None:
    for name, text in named("ConfigMap")["guard-policies"]["data"].items():
        (tmp_path / name).write_text(text)
    environment = {entry["name"]: entry["value"] for entry in CONTAINERS["vllm"]["env"]}
    taps = json.loads(engine_config_of(environment["MODEL"], tmp_path, tmp_path / "probes"))["mia"]
    assert taps["hidden_layers"]
    assert taps["attention_heads"]
    key = resolve_model(environment["MODEL"]).config_key
    guard = environments()["kubernetes guard"]
    assert guard["GUARD_CONFIG_KEY"] == key
    assert [one.name for one in bound_policies(tmp_path, key, data_folder("model_configs")).policies] == ["default"]


def test_compose_mounts_files_that_exist_and_names_volumes_services_and_networks_that_do() -> None:
    for name, service in COMPOSE["services"].items():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (DEPLOY / "compose" / source).exists(), (name, source)
            else:
                assert source in COMPOSE["volumes"]
        assert set(service.get("networks", ())) <= COMPOSE["networks"].keys()
        assert set(service.get("depends_on", ())) <= COMPOSE["services"].keys()
        if "build" in service:
            dockerfile = (DEPLOY / "Dockerfile").read_text()
            assert f" AS {service['build']['target']}\n" in dockerfile
    published = [port for one in COMPOSE["services"].values() for port in one.get("ports", ())]
    assert all(port.startswith("127.0.0.1:") for port in published)
    scraped = yaml.safe_load((DEPLOY / "compose" / "prometheus.yml").read_text())["scrape_configs"]
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in scraped}
    assert targets == {"guard": ["proxy:8080"], "vllm": ["engine:8000"]}
    assert COMPOSE["services"]["proxy"]["environment"]["GUARD_UPSTREAM"] == "http://engine:8000"
