"""What the aperture counts, as vLLM's own ``/metrics`` shows it, on a server that does everything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from guard.mia.metrics import ENGINE, KINDS
from guard.mia.results import HiddenReadout, Readouts, size_bytes
from guard.telemetry.family import created
from tests.engine.server import COMPLETIONS, Server, save_vector

Found = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


async def metrics(server: Server) -> Found:
    status, text = await server.request("GET", "/metrics", key=None)
    assert status == 200
    families = text_string_to_metric_families(text.decode())
    return {(one.name, frozenset(one.labels.items())): one.value for family in families for one in family.samples}


def value(found: Found, name: str, **labels: str) -> float:
    return found[name, frozenset(labels.items())]


def grown(before: Found, after: Found, name: str) -> dict[str, float]:
    """By the value of a metric's one label: by how much it has grown, where it has."""
    labelled = {labels: after[n, labels] - before[n, labels] for n, labels in after if n == name}
    return {next(iter(dict(labels).values()), ""): one for labels, one in labelled.items() if one}


async def test_every_series_is_there_and_is_what_is_declared(server: Server) -> None:
    _, text = await server.request("GET", "/metrics", key=None)
    ours = [one for one in text_string_to_metric_families(text.decode()) if one.name.startswith("mia_")]
    exposed = {
        one.name + ("_total" if one.type == "counter" else ""): one for one in ours if "_created" not in one.name
    }
    assert {one.name for one in ours if "_created" in one.name} == {created(one) for one in ENGINE} - {None}
    assert exposed.keys() == {family.name for family in ENGINE}
    for family in ENGINE:
        one = exposed[family.name]
        assert (one.type, one.documentation) == (family.kind, family.meaning)
        for label, values in family.labels.items():
            assert {sample.labels[label] for sample in one.samples} == set(values)


async def test_readouts_count_by_kind_with_their_rows_bytes_and_times(server: Server) -> None:
    before = await metrics(server)
    event = await server.event()
    after = await metrics(server)
    told = [Readouts.from_wire(one) for one in event["readouts"]]
    items = [item for one in told for item in one.items.values()]
    assert {item.kind for item in items} == {"hidden", "rows", "attention", "qk"}
    assert grown(before, after, "mia_requests_total") == {"readouts": 1}
    rows, sizes = Counter[str](), Counter[str]()
    for item in items:
        rows[item.kind] += 1 if isinstance(item, HiddenReadout) else len(item.positions)
        sizes[item.kind] += size_bytes(item)
    assert grown(before, after, "mia_captured_rows_total") == rows
    assert grown(before, after, "mia_captured_bytes_total") == sizes
    assert sizes["hidden"] == 4 * 128
    assert grown(before, after, "mia_courier_lag_seconds_count") == Counter(one.stage for one in told)
    assert grown(before, after, "mia_queue_wait_seconds_count") == {"": 1}
    assert 0 < sum(grown(before, after, "mia_courier_lag_seconds_sum").values()) < 60
    counts = Counter(item.kind for item in items)
    for kind in KINDS:
        labels = {"kind": kind, "status": "complete"}
        counted = value(after, "mia_readouts_total", **labels) - value(before, "mia_readouts_total", **labels)
        assert counted == counts[kind]


async def test_what_asks_for_nothing_and_what_is_refused_is_counted_too(server: Server) -> None:
    before = await metrics(server)
    plain = {"model": "tiny", "prompt": "hello", "max_tokens": 1}
    assert (await server.request("POST", COMPLETIONS, json=plain))[0] == 200
    assert (await server.ask(spec={"hidden": {"h": {"layer": 99}}}))[0] == 400
    after = await metrics(server)
    assert grown(before, after, "mia_requests_total")["nothing"] == 1
    assert grown(before, after, "mia_refused_specs_total") == {"": 1}


async def test_a_readout_that_finds_no_space_is_counted_under_the_setting(server: Server) -> None:
    before = await metrics(server)
    hidden = {f"h{layer}": {"layer": layer, "positions": "all"} for layer in (1, 2, 3)}
    event = await server.event(path=COMPLETIONS, prompt=[5] * 1600, spec={"hidden": hidden})
    dropped = [item for one in event["readouts"] for item in one["items"].values() if item["status"] == "dropped"]
    assert dropped
    assert all("(max_answer_bytes)" in item["reason"] for item in dropped)
    after = await metrics(server)
    assert grown(before, after, "mia_dropped_readouts_total") == {"max_answer_bytes": len(dropped)}


async def test_steering_counts_requests_tokens_doses_and_gates(server: Server) -> None:
    before = await metrics(server)
    steer = {"vector": "push", "layer": 1, "coefficient": 2.0}
    assert (await server.ask(spec={"steer": [steer]}))[0] == 200
    reading = {"spans": {"start": {"tokens": [[0, 4]]}}, "attention": {"a": {"heads": [[1, 0]], "spans": ["start"]}}}
    # An attention mass is between 0 and 1.
    for threshold in ({"above": -1.0}, {"above": 2.0}):
        gate = {"readout": "a", "span": "start", **threshold}
        status, answer = await server.ask(spec={**reading, "steer": [{**steer, "phase": "decode", "gate": gate}]})
        assert status == 200, answer
    after = await metrics(server)
    assert grown(before, after, "mia_gates_total") == {"opened": 1, "shut": 1}
    assert grown(before, after, "mia_steered_requests_total") == {"": 2}
    assert grown(before, after, "mia_steered_tokens_total").keys() == {"whole"}
    assert grown(before, after, "mia_steering_relative_dose_count") == {"": 2}
    assert grown(before, after, "mia_requests_total") == {"steering": 1, "both": 2}


async def test_the_bank_says_what_is_in_it_and_what_it_has_room_for(server: Server, model_folder: Path) -> None:
    assert value(await metrics(server), "mia_bank_vectors") == 1
    assert value(await metrics(server), "mia_bank_capacity") == 2
    save_vector(model_folder, "counted", 3)
    assert (await server.request("PUT", "/v1/mia/vectors/counted"))[0] == 200
    assert value(await metrics(server), "mia_bank_vectors") == 2
    assert (await server.request("DELETE", "/v1/mia/vectors/counted"))[0] == 200
    assert value(await metrics(server), "mia_bank_vectors") == 1
