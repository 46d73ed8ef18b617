"""What a request may ask: every mistake is an error that names its field, and nothing else ever comes out."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guard.mia.engine_config import EngineConfig, EngineConfigError, configured
from guard.mia.spec import MAX_CAPTURES, MAX_SPEC_BYTES, MiaSpec, SpecError, parse_spec

FULL = {
    "spans": {"instruction": "system", "data": ["user.last", "tool"], "head": {"tokens": [[0, 4]]}},
    "hidden": {"h": {"layer": 3}},
    "attention": {"focus": {"heads": [[2, 0], [3, 1]], "spans": ["instruction", "data"]}},
    "steer": [{"vector": "calm", "layer": 2, "coefficient": 1.5}],
}


def test_a_full_spec_survives_the_wire() -> None:
    spec = parse_spec(json.dumps(FULL))
    assert spec.spans["instruction"] == ("system",)
    assert spec.attention["focus"].heads == ((2, 0), (3, 1))
    assert parse_spec(spec.to_wire()) == spec


GATE = {"readout": "risk", "above": 0.5}
GATED = {"vector": "v", "layer": 2, "coefficient": 1, "phase": "decode", "gate": GATE}
RISK = {"risk": {"probe": "x"}}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"hiden": {}}, "mia.hiden"),
        ({"hidden": {"h": {"layer": -1}}}, "mia.hidden.h.layer"),
        ({"hidden": {"h": {"layer": 3, "position": "first"}}}, "mia.hidden.h.position"),
        ({"hidden": {"h": {"layer": 3, "positions": "first"}}}, "mia.hidden.h.positions"),
        ({"hidden": {"h": {"layer": 3, "positions": {"span": "nowhere"}}}}, "mia.hidden.h"),
        ({"hidden": {"h": {"layer": 3, "positions": {"tokens": [[3, 2]]}}}}, "mia.hidden.h.positions.tokens"),
        ({"hidden": {"bad name!": {"layer": 3}}}, "mia.hidden.bad name!"),
        ({"attention": {"focus": {"heads": [], "spans": ["data"]}}}, "mia.attention.focus.heads"),
        ({"attention": {"focus": {"heads": [[2, 0]]}}}, "mia.attention.focus"),
        ({"attention": {"focus": {"heads": [[0, 1]], "spans": ["data"]}}}, "mia.attention.focus.heads.0.0"),
        ({"attention": {"focus": {"heads": [[2, 1]], "spans": ["nowhere"]}}}, "mia.attention.focus"),
        ({"attention": {"focus": {"heads": [[2, 1]], "positions": "all", "weights": True}}}, "mia.attention.focus.pos"),
        ({"attention": {"focus": {"heads": [[2, 1]], "position": "last", "weights": True}}}, "mia.attention.focus.pos"),
        (
            {"attention": {"f": {"heads": [[2, 1]], "positions": {"generated": 0}, "weights": True}}},
            "mia.attention.f.pos",
        ),
        ({"hidden": {"h": {"layer": 3, "positions": {"generated": 2}}}}, "mia.hidden.h.positions"),
        ({"progress_tokens": 0}, "mia.progress_tokens"),
        ({"probes": {"p": {"probe": "../x"}}}, "mia.probes.p.probe"),
        ({"probes": {"p": {"probe": "x", "positions": {"span": "nowhere"}}}}, "mia.probes.p"),
        ({"qk": {"q": {"heads": [[2, 1]], "positions": {"span": "nowhere"}}}}, "mia.qk.q"),
        ({"qk": {"q": {"heads": [[2]]}}}, "mia.qk.q.heads.0"),
        ({"steer": [GATED]}, "mia.steer.0.gate.readout"),
        ({"steer": [GATED | {"phase": "both"}], "probes": RISK}, "mia.steer.0"),
        ({"steer": [GATED | {"gate": {"readout": "risk"}}], "probes": RISK}, "mia.steer.0.gate"),
        ({"steer": [GATED | {"gate": GATE | {"span": "data"}}], "probes": RISK}, "mia.steer.0.gate.readout"),
        ({"steer": [GATED | {"gate": GATE | {"readout": "focus"}}]}, "mia.steer.0.gate.span"),
        ({"steer": [GATED | {"gate": GATE | {"below": 1}}], "probes": RISK}, "mia.steer.0.gate"),
        ({"probes": {"h": {"probe": "x"}}}, "mia.hidden.h"),
        ({"spans": {"data": "user.part"}}, "mia.spans.data"),
        ({"spans": {"data": {"tokens": [[0, "1"]]}}}, "mia.spans.data.tokens.0.1"),
        ({"spans": {"data": {"span": "instruction"}}}, "mia.spans.data"),
        ({"hidden": {"h": {"layer": "3"}}}, "mia.hidden.h.layer"),
        ({"hidden": {"h": {"layer": True}}}, "mia.hidden.h.layer"),
        ({"hidden": {"h": {"layer": 3, "average": True}}}, "mia.hidden.h.average"),
        ({"hidden": {"h": {"layer": 3, "positions": "all", "average": True}}}, "mia.hidden.h.average"),
        ({"hidden": {"h": {"layer": 3, "positions": {}}}}, "mia.hidden.h.positions.tokens"),
        ({"hidden": {"h": {"layer": 3, "positions": {"tokens": [[0, 1]], "span": "data"}}}}, "mia.hidden.h.positions"),
        ({"attention": {"focus": {"heads": [[2, 1], [2, 1]], "spans": ["data"]}}}, "mia.attention.focus.heads"),
        ({"steer": [{"vector": "v", "layer": 2, "coefficient": 1, "positions": {"span": "data"}}]}, "mia.steer.0.pos"),
        ({"spans": {"data": "User says"}}, "mia.spans.data"),
        ({"spans": {"data": {"tokens": [[4, 4]]}}}, "mia.spans.data"),
        ({"steer": [{"vector": "../x", "layer": 2, "coefficient": 1}]}, "mia.steer.0.vector"),
        ({"steer": [{"vector": "v", "layer": 0, "coefficient": 1}]}, "mia.steer.0.layer"),
        ({"steer": [{"vector": "v", "layer": 2, "coefficient": 1, "method": "project"}]}, "mia.steer.0"),
        ({"steer": [{"vector": "v", "layer": 2, "coefficient": 1, "target": 3}]}, "mia.steer.0"),
        ({"steer": [{"vector": "v", "layer": 2, "coefficient": 1, "method": "rotate"}]}, "mia.steer.0.method"),
        ({"steer": [{"vector": "v", "layer": 2, "coefficient": 1, "positions": "some"}]}, "mia.steer.0.positions"),
        ({"steer": [{"vector": "v", "layer": 2, "coefficient": 1e9}]}, "mia.steer.0.coefficient"),
        ({"steer": [{"vector": "v", "layer": 2, "coefficient": 1}] * 5}, "mia.steer"),
        ({"hidden": {"focus": {"layer": 3}}}, "mia.hidden.focus"),
        ({"hidden": {f"h{i}": {"layer": 3} for i in range(MAX_CAPTURES + 1)}}, "mia"),
    ],
)
def test_a_mistake_is_refused_at_its_field(change: dict, param: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec(json.dumps(FULL | change))
    assert caught.value.param.startswith(param)


@pytest.mark.parametrize("text", [None, 3, {}, "", "[]", "null", "{", '{"hidden": NaN}', "[" * 50_000, "\ud800"])
def test_what_is_not_a_json_object_in_a_string_is_refused(text: object) -> None:
    with pytest.raises(SpecError):
        parse_spec(text)


def test_a_key_that_is_written_twice_is_refused() -> None:
    with pytest.raises(SpecError, match="'layer' is written twice"):
        parse_spec('{"hidden": {"h": {"layer": 1, "layer": 2}}}')


def test_an_oversized_spec_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(SpecError, match=str(MAX_SPEC_BYTES)):
        parse_spec(" " * (MAX_SPEC_BYTES + 1))


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["spans", "hidden", "attention", "steer", "layer", "heads", "tokens", "x"]),
                inner,
                max_size=4,
            )
        ),
    )
)
def test_any_json_gives_a_spec_or_a_spec_error(value: object) -> None:
    with contextlib.suppress(SpecError):
        assert isinstance(parse_spec(json.dumps(value)), MiaSpec)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"hidden": {"h": {"layer": 5}}}, "mia.hidden.h.layer"),
        ({"attention": {"focus": {"heads": [[2, 0], [9, 9]], "spans": ["data"]}}}, "mia.attention.focus.heads"),
        ({"steer": [{"vector": "calm", "layer": 4, "coefficient": 1}]}, "mia.steer.0.layer"),
        ({"steer": [{"vector": "wild", "layer": 2, "coefficient": 1}]}, "mia.steer.0.vector"),
    ],
)
def test_an_engine_refuses_what_it_has_no_tap_for(change: dict, param: str) -> None:
    engine = EngineConfig(
        hidden_layers=(3,), attention_heads=((2, 0), (3, 1)), steering_layers=(2,), steering_vectors=("calm",)
    )
    engine.check(parse_spec(json.dumps(FULL)))
    with pytest.raises(SpecError) as caught:
        engine.check(parse_spec(json.dumps(FULL | change)))
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"hiden_layers": [1]}, "mia.hiden_layers"),
        ({"hidden_layers": ["one"]}, "mia.hidden_layers.0"),
        ({"steering_vectors": ["a", "b"], "max_steering_vectors": 1}, "max_steering_vectors has no room"),
        ([], "mia: "),
    ],
)
def test_what_an_engine_is_told_of_taps_is_an_error_that_names_the_field(given: object, field: str) -> None:
    with pytest.raises(EngineConfigError, match=field):
        configured({"mia": given})
    assert configured({"other": 1}) is None
