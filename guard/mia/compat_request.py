"""MIA's request keys as a spec of ours.

Owns what each key means here. A path that comes with a request is never opened: it counts as the name of a vector that
the operator has loaded, or is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from guard.mia.compat import (
    ADDITIONAL_CONFIG_KEY,
    CompatConfig,
    Mode,
    SteeringSection,
    When,
    layers_from,
    whole_number,
)
from guard.mia.engine_config import EngineConfig
from guard.mia.spec import (
    FOREIGN_KEYS,
    MAX_CAPTURES,
    AttentionCapture,
    HiddenCapture,
    MiaSpec,
    QKCapture,
    SpecError,
    Steer,
    parse_spec,
)
from guard.mistakes import first_mistake


class RequestKeys(BaseModel):
    """MIA's keys of one request, in ``vllm_xargs`` (HTTP) or ``extra_args`` (offline)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    output_hidden_states: bool | tuple[int, ...] = False
    hs_mode: Mode = "last_token"
    output_qk: bool | tuple[int, ...] | dict[int, tuple[int, ...]] = False
    hookq_mode: Mode = "all_tokens"
    hooks_on: When = "prefill"
    qk_capture: Literal["qk", "score"] = "qk"
    score_head: Literal[0] = 0
    """Heads are named in ``output_qk``."""
    save_to_disk: bool = False
    run_id: str | None = None
    hook_dir: None = None
    steer: bool | dict[str, Any] = False

    @field_validator("output_hidden_states", mode="plain")
    @classmethod
    def _all_or_layers(cls, value: Any) -> Any:
        value = _decoded(value)
        return bool(value) if value in (True, False) else layers_from(value, 1, "true")

    @field_validator("output_qk", mode="plain")
    @classmethod
    def _all_or_layers_or_heads(cls, value: Any) -> Any:
        value = _decoded(value)
        if not isinstance(value, dict | list | tuple) and value in (True, False):
            return bool(value)
        heads = _heads(value)
        return layers_from(value, 0, "true, {layer: [heads]}") if heads is None else heads

    @field_validator("steer", mode="plain")
    @classmethod
    def _configured_or_section(cls, value: Any) -> Any:
        value = _decoded(value)
        if isinstance(value, dict):
            return value
        if value in (True, False):
            return bool(value)
        raise ValueError("is true, or a steering section as JSON")

    @field_validator("run_id", mode="before")
    @classmethod
    def _no_path(cls, value: Any) -> Any:
        if value is not None:
            check_run_id(value)
        return value

    @field_validator("hook_dir", mode="before")
    @classmethod
    def _no_folder(cls, value: Any) -> None:
        if value is not None:
            raise ValueError("is refused: where an engine writes is its operator's choice (artifact_folder)")


KEYS = frozenset(RequestKeys.model_fields)
"""Every key of MIA's that a request may have."""


def check_run_id(value: Any) -> None:
    """Raises ``ValueError`` for what would be a path, or no name."""
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9_\-][A-Za-z0-9_.\-]{0,63}", value):
        raise ValueError("run_id is a name of up to 64 letters, digits, '_', '-' and '.', and no path")


def _heads(value: Any) -> dict[int, tuple[int, ...]] | None:
    """``{layer: [heads]}`` with layers from 0, as JSON has it or as Python has it; None when it is something else."""
    if not isinstance(value, dict) or not value:
        return None
    try:
        layers = {int(layer): heads for layer, heads in value.items()}
    except (TypeError, ValueError):
        return None
    right = all(
        layer >= 0 and isinstance(heads, list | tuple) and heads and all(whole_number(head, 0) for head in heads)
        for layer, heads in layers.items()
    )
    return {layer: tuple(heads) for layer, heads in layers.items()} if right else None


def _decoded(value: Any) -> Any:
    """Over HTTP, where values are scalars, anything else travels as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise ValueError("is not JSON") from None


def asks(given: Mapping[str, Any]) -> bool:
    """Whether a request asks for something, in MIA's way or in ours."""
    return "mia" in given or not FOREIGN_KEYS.isdisjoint(given)


def requested_spec(
    given: Mapping[str, Any], compat: CompatConfig | None, taps: EngineConfig, loaded: Collection[str] | None = None
) -> MiaSpec:
    """The spec of a request that ``asks``, whichever way. Raises ``SpecError``.

    Only an engine that plays MIA's part takes MIA's keys: behind a guard, requests may say ``mia`` or nothing.
    """
    acting = sorted(FOREIGN_KEYS & given.keys())
    if not acting:
        return parse_spec(given["mia"])
    if "mia" in given:
        raise SpecError(f"{acting[0]}: a request has either mia or MIA's own keys", acting[0])
    if compat is None:
        raise SpecError(
            f"{acting[0]}: this engine does not take MIA's own keys; start it with MIA_WORKER, or with "
            f'"{ADDITIONAL_CONFIG_KEY}": {{}} beside "mia" in --additional-config',
            acting[0],
        )
    return spec_from_keys(given, compat, taps, loaded)


def spec_from_keys(
    given: Mapping[str, Any], compat: CompatConfig, taps: EngineConfig, loaded: Collection[str] | None = None
) -> MiaSpec:
    """The spec that MIA's keys in ``given`` ask for; other keys are left alone. ``loaded``: names in the vector bank.

    Raises ``SpecError`` that names the key, also for layers and heads that this engine has no taps for.
    """
    keys = _parse(RequestKeys, {key: value for key, value in given.items() if key in KEYS})
    if keys.save_to_disk and taps.artifact_folder is None:
        raise SpecError(
            "save_to_disk: this engine was started without a folder for it (MIA_APERTURE_DIR, or artifact_folder)",
            "save_to_disk",
        )
    try:
        attention, qk = _attention(keys, compat, taps)
        return MiaSpec(
            hidden=_hidden(keys, taps),
            attention=attention,
            qk=qk,
            steer=_steer(keys, compat, taps.steering_layers, taps.steering_vectors if loaded is None else loaded),
            deliver=compat.file_format if keys.save_to_disk else "answer",
        )
    except ValidationError as error:
        # Only what is too much gets here: more layers or heads than one request may name.
        location, what = first_mistake(error)
        key = _KEY_OF.get(str(location[0]) if location else "", "output_hidden_states")
        raise SpecError(f"{key} {what}", key) from None


_KEY_OF = {"heads": "output_qk", "steer": "steer.optimal_layer", "layer": "steer.optimal_layer"}
"""By the field of ours that refuses: the key that it comes from."""


def without_keys(given: Mapping[str, Any]) -> dict[str, Any]:
    """``given`` without MIA's keys."""
    return {key: value for key, value in given.items() if key not in KEYS}


def _parse(model: type[Any], values: Mapping[str, Any], below: str = "") -> Any:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        location, what = first_mistake(error)
        path = ".".join([*([below] if below else []), str(location[0])])
        reason = what.removeprefix(f"{path} ")
        raise SpecError(f"{path} {reason}", path) from None


def _refuse(key: str, missing: Sequence[Any], has: Sequence[Any]) -> NoReturn:
    raise SpecError(f"{key}: this engine has no tap for {list(missing)[:8]}; it has {list(has)}", key)


def _positions(mode: Mode, when: When) -> tuple[Literal["last_prompt", "prompt", "generated", "all"], ...]:
    """Positions of ours that are together those of MIA's mode and hooks_on."""
    if when == "decode":
        return ("generated",)
    if mode == "all_tokens":
        return ("prompt",) if when == "prefill" else ("all",)
    return ("last_prompt",) if when == "prefill" else ("last_prompt", "generated")


def _hidden(keys: RequestKeys, taps: EngineConfig) -> dict[str, HiddenCapture]:
    asked = keys.output_hidden_states
    if asked is False:
        return {}
    layers = taps.hidden_layers if asked is True else asked
    if missing := [layer for layer in layers if layer not in taps.hidden_layers]:
        _refuse("output_hidden_states", missing, taps.hidden_layers)
    if not layers:
        _refuse("output_hidden_states", ["any layer"], ())
    captures = {
        f"hs.{layer}.{positions}": HiddenCapture(layer=layer, positions=positions)
        for layer in layers
        for positions in _positions(keys.hs_mode, keys.hooks_on)
    }
    if len(captures) > MAX_CAPTURES:
        raise SpecError(
            f"output_hidden_states asks for {len(captures)} captures, and a request may have {MAX_CAPTURES}: one for "
            "each layer, two with hs_mode last_token and hooks_on both",
            "output_hidden_states",
        )
    return captures


def _attention(
    keys: RequestKeys, compat: CompatConfig, taps: EngineConfig
) -> tuple[dict[str, AttentionCapture], dict[str, QKCapture]]:
    asked = keys.output_qk
    if asked is False:
        return {}, {}
    by_layer: dict[int, list[int]] = {}
    for layer, head in taps.attention_heads:
        by_layer.setdefault(layer - 1, []).append(head)
    layers = tuple(by_layer) if asked is True else tuple(asked)
    if missing := [layer for layer in layers if layer not in by_layer]:
        _refuse("output_qk", missing, tuple(by_layer))
    if not layers:
        _refuse("output_qk", ["any layer"], ())
    named = asked if isinstance(asked, dict) else {}
    if missing_heads := [[layer, head] for layer in named for head in named[layer] if head not in by_layer[layer]]:
        _refuse("output_qk", missing_heads, [[layer, head] for layer in named for head in by_layer[layer]][:8])
    # MIA gives whole layers, whichever heads were named: analyzers count heads in what they get.
    if parts := [layer for layer in layers if len(by_layer[layer]) != compat.heads]:
        raise SpecError(
            f"output_qk reads whole layers, of which this engine reads only some heads: {parts[:8]}; ask for them with "
            "mia",
            "output_qk",
        )
    heads = tuple((layer + 1, head) for layer in layers for head in by_layer[layer])
    positions = _positions(keys.hookq_mode, keys.hooks_on)
    if keys.qk_capture == "qk":
        return {}, {f"qk.{where}": QKCapture(heads=heads, positions=where) for where in positions}
    if positions != ("last_prompt",):
        raise SpecError("qk_capture score needs hookq_mode last_token and hooks_on prefill", "qk_capture")
    return {"score.last_prompt": AttentionCapture(heads=heads, weights=True)}, {}


def _steer(
    keys: RequestKeys, compat: CompatConfig, layers: Sequence[int], loaded: Collection[str]
) -> tuple[Steer, ...]:
    if keys.steer is False:
        return ()
    configured = {} if compat.steering is None else compat.steering.model_dump(exclude_defaults=True)
    asked = keys.steer if isinstance(keys.steer, dict) else {}
    section: SteeringSection = _parse(SteeringSection, {**configured, **asked}, "steer")
    name = _vector_name(section.vector_path, compat, loaded)
    phase, positions = _where(section)
    if section.method == "adjust_rs":
        target = compat.vectors[name].avg_proj if name in compat.vectors else None
        if target is None:
            raise SpecError(
                f"steer.method: adjust_rs needs a vector with avg_proj and a direction of length 1, unlike {name!r}",
                "steer.method",
            )
        how: dict[str, Any] = {"method": "project", "target": target, "coefficient": 1.0}
    elif section.coefficient is None:
        raise SpecError("steer.coefficient: method add_vector needs one", "steer.coefficient")
    else:
        how = {"method": "add_vector", "coefficient": section.coefficient}
    return tuple(
        Steer(vector=name, layer=layer, phase=phase, positions=positions, **how)
        for layer in _steered_layers(section, layers)
    )


def _steered_layers(section: SteeringSection, layers: Sequence[int]) -> tuple[int, ...]:
    if section.optimal_layer is None:
        raise SpecError("steer.optimal_layer: name a layer, a list of them, or all", "steer.optimal_layer")
    asked = tuple(layers) if section.optimal_layer == "all" else tuple(layer + 1 for layer in section.optimal_layer)
    if missing := [layer - 1 for layer in asked if layer not in layers]:
        _refuse("steer.optimal_layer", missing, [layer - 1 for layer in layers])
    return asked


def _where(section: SteeringSection) -> tuple[When, Literal["all", "last"]]:
    """MIA's two generations of settings: the older flag counts where the newer ones are not given."""
    everywhere = section.apply_at_all_positions
    phase: When = section.phase or ("both" if everywhere or section.positions else "prefill")
    positions = section.positions or ("all_tokens" if everywhere or section.phase else "last_token")
    return phase, "all" if positions == "all_tokens" else "last"


def _vector_name(path: str | None, compat: CompatConfig, loaded: Collection[str]) -> str:
    """The loaded vector that a request's ``vector_path`` names. Nothing is looked up in a file system."""
    if path is None:
        raise SpecError("steer.vector_path: name a vector", "steer.vector_path")
    for name in loaded:
        paths = compat.vectors[name].paths if name in compat.vectors else ()
        if path in (name, f"{name}.safetensors", *paths):
            return name
    raise SpecError(
        "steer.vector_path: no file is opened for a request, and this engine has loaded no vector of that name; it "
        f"has {sorted(loaded)}. Its operator loads them: MIA_STEER_CONFIG, config_file or steering_folder",
        "steer.vector_path",
    )
