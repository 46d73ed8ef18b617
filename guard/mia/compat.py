"""MIA's own request keys, model configs and start, as this aperture's specs and taps.

Owns the translation, one way: nothing else knows MIA's names or numbering. Its hidden-state layers count from 1 as ours
do; the layers of its heads and of its steering count from 0. A path that comes with a request is never opened: it
counts as the name of a vector that the operator has loaded, or is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from guard.mia.engine_config import EngineConfig
from guard.mia.spec import (
    Head,
    Name,
)
from guard.mistakes import first_mistake

ADDITIONAL_CONFIG_KEY = "mia_compat"
"""Key of vLLM's ``additional_config`` under which an engine keeps its ``CompatConfig``."""

DEFAULT_APERTURE_BYTES = 4 * 2**30
"""Room for captured rows unless MIA_APERTURE_GPU_BYTES says otherwise, as MIA has it."""

Use = Literal["hidden_states", "qk", "steer"]

USES: Mapping[str, Use] = {
    "hidden_states": "hidden_states",
    "capture_hs": "hidden_states",
    "probe_hidden_states": "hidden_states",
    "qk": "qk",
    "capture_qk": "qk",
    "probe_hook_qk": "qk",
    "steer": "steer",
    "steer_hook_act": "steer",
}
"""Every name that MIA and vLLM-Hook have given their workers."""

Mode = Literal["last_token", "all_tokens"]
When = Literal["prefill", "decode", "both"]


class CompatError(ValueError):
    """A start as MIA's that cannot be; the message names the setting or the file and the remedy."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def whole_number(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def layers_from(value: Any, least: int, otherwise: str) -> tuple[int, ...]:
    if isinstance(value, list | tuple) and value and all(whole_number(layer, least) for layer in value):
        return tuple(dict.fromkeys(value))
    raise ValueError(f"is {otherwise} or a list of layers that count from {least}")


class SteeringSection(_Model):
    """``steering`` of a model config, and a request's ``steer``. ``optimal_layer`` counts from 0."""

    method: Literal["adjust_rs", "add_vector"] = "adjust_rs"
    coefficient: Annotated[float, Field(ge=-1e4, le=1e4, allow_inf_nan=False)] | None = None
    optimal_layer: Literal["all"] | tuple[int, ...] | None = None
    vector_path: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    apply_at_all_positions: bool = True
    phase: When | None = None
    positions: Literal["all_tokens", "last_token"] | None = None

    @field_validator("optimal_layer", mode="before")
    @classmethod
    def _one_layer_is_a_list_of_one(cls, value: Any) -> Any:
        if value is None or value == "all":
            return value
        return (value,) if whole_number(value, 0) else layers_from(value, 0, '"all", a layer')


class HiddenStatesSection(_Model):
    """``hidden_states`` of a model config. No layers: all."""

    layers: tuple[Annotated[int, Field(ge=1)], ...] = ()
    mode: Mode = "last_token"


class HookqSection(_Model):
    """``hookq`` of a model config."""

    hookq_mode: Mode | None = None
    capture: Literal["qk", "score"] = "qk"
    score_head: Literal[0] = 0


class ParamsSection(BaseModel):
    """What of ``params`` is read. Heads are ``[layer, head]`` with layers from 0."""

    important_heads: tuple[tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]], ...] = ()


class ModelConfig(BaseModel):
    """What of ``model_configs/USE_CASE/MODEL.json`` says what to read and how to steer. Other sections are not read."""

    model_config = ConfigDict(frozen=True)

    hidden_states: HiddenStatesSection | None = None
    hookq: HookqSection | None = None
    params: ParamsSection = ParamsSection()
    steering: SteeringSection | None = None

    @property
    def layer_to_heads(self) -> dict[int, list[int]]:
        """Heads by layer, which counts from 0 as in the file."""
        by_layer: dict[int, list[int]] = {}
        for layer, head in self.params.important_heads:
            by_layer.setdefault(layer, []).append(head)
        return by_layer

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return self.hidden_states.layers if self.hidden_states is not None else ()

    def hidden_keys(self) -> dict[str, Any]:
        """Request keys that ask for what ``hidden_states`` says."""
        section = self.hidden_states or HiddenStatesSection()
        return {"output_hidden_states": list(section.layers) or True, "hs_mode": section.mode}

    def qk_keys(self, default_mode: Mode) -> dict[str, Any]:
        """Request keys that ask for what ``hookq`` and ``params.important_heads`` say."""
        section = self.hookq or HookqSection()
        return {
            "output_qk": self.layer_to_heads or True,
            "hookq_mode": section.hookq_mode or default_mode,
            "qk_capture": section.capture,
        }


def read_model_config(path: Path) -> ModelConfig:
    """Raises ``CompatError`` that names the file and the field."""
    try:
        return ModelConfig.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise CompatError(f"config file {path}: {error}") from error
    except ValidationError as error:
        location, what = first_mistake(error)
        raise CompatError(f"config file {path}: {'.'.join(map(str, location))}: {what}") from None


class LoadedVector(_Model):
    """What is known of a vector besides its numbers. ``paths``: how the operator's configs call its file."""

    paths: tuple[str, ...] = ()
    avg_proj: float | None = None
    """Target of ``adjust_rs``; None when the file has none or its direction is not of length 1."""


class CompatConfig(_Model):
    """How one engine plays MIA's part; ``additional_config["mia_compat"]``."""

    uses: tuple[Use, ...] = ()
    hidden_layers: tuple[int, ...] = ()
    """Layers to read, from 1; none named: all."""
    qk_layers: tuple[int, ...] = ()
    """Layers whose heads to read, from 0; none named: all."""
    heads: Annotated[int, Field(ge=0)] = 0
    """The model's query heads in a layer; found at start."""
    steering: SteeringSection | None = None
    """What a request's ``steer`` leaves out."""
    vectors: dict[Name, LoadedVector] = {}
    steering_folder: Path | None = None
    artifact_folder: Path | None = None
    """Where ``save_to_disk`` writes; None: such requests are refused."""
    aperture_bytes: Annotated[int, Field(ge=1)] = DEFAULT_APERTURE_BYTES
    file_format: Literal["safetensors", "pt"] = "safetensors"
    """Of what ``save_to_disk`` writes."""


def compat_of(additional_config: object) -> CompatConfig | None:
    """The engine's ``CompatConfig`` from vLLM's ``additional_config``, or None. Raises pydantic's error."""
    if isinstance(additional_config, dict) and ADDITIONAL_CONFIG_KEY in additional_config:
        return CompatConfig.model_validate(additional_config[ADDITIONAL_CONFIG_KEY])
    return None


def parse_uses(text: str, setting: str) -> tuple[Use, ...]:
    """Worker names, separated by commas: unlike MIA's, an engine here has several uses at once."""
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in USES]:
        raise CompatError(f"{setting} names {unknown[0]!r}; it is one of {', '.join(USES)}, or several with commas")
    return tuple(dict.fromkeys(USES[name] for name in names))


def compat_from_environment(environment: Mapping[str, str]) -> CompatConfig | None:
    """What MIA_WORKER and its companions ask for; None without MIA_WORKER. Raises ``CompatError``."""
    if not environment.get("MIA_WORKER"):
        return None
    uses = parse_uses(environment["MIA_WORKER"], "MIA_WORKER")
    steering: dict[str, Any] = {}
    if "steer" in uses:
        if not environment.get("MIA_STEER_CONFIG"):
            raise CompatError(
                "MIA_WORKER=steer needs MIA_STEER_CONFIG=FILE, a model config with a steering section: vectors are "
                "loaded at start, and a request names one and no file"
            )
        steering = load_steering(Path(environment["MIA_STEER_CONFIG"]))
    return CompatConfig(
        uses=uses,
        aperture_bytes=_aperture_bytes(environment),
        artifact_folder=Path(folder).absolute() if (folder := environment.get("MIA_APERTURE_DIR")) else None,
        file_format=file_format_of(environment),
        **steering,
    )


def file_format_of(environment: Mapping[str, str]) -> Literal["safetensors", "pt"]:
    """safetensors unless MIA_USE_SAFETENSORS is 0."""
    return "pt" if environment.get("MIA_USE_SAFETENSORS") == "0" else "safetensors"


def _aperture_bytes(environment: Mapping[str, str]) -> int:
    text = environment.get("MIA_APERTURE_GPU_BYTES") or str(DEFAULT_APERTURE_BYTES)
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise CompatError(f"MIA_APERTURE_GPU_BYTES is a number of bytes, not {text!r}")
    return int(text)


def load_steering(config_file: Path) -> dict[str, Any]:
    """The parts of a ``CompatConfig`` that come from one operator's config. Raises ``CompatError``."""
    from guard.mia.compat_vectors import convert_vector

    section = read_model_config(config_file).steering
    if section is None or section.vector_path is None:
        raise CompatError(f"config file {config_file} has no steering.vector_path")
    name, folder, avg_proj = convert_vector(Path(section.vector_path))
    paths = tuple(dict.fromkeys((section.vector_path, Path(section.vector_path).name)))
    vectors = {name: LoadedVector(paths=paths, avg_proj=avg_proj)}
    return {"steering": section, "vectors": vectors, "steering_folder": folder}


@dataclass(frozen=True)
class ModelShape:
    """What of a loaded model's configuration decides how many taps there are and how large."""

    layers: int
    heads: int
    hidden_row_bytes: int
    max_tokens_per_step: int
    max_requests: int


def engine_config(compat: CompatConfig, shape: ModelShape) -> EngineConfig:
    """Taps for what ``compat`` names: as many as MIA has, all layers and heads unless a config says which."""
    hidden = compat.hidden_layers or tuple(range(1, shape.layers + 1))
    qk = compat.qk_layers or tuple(range(shape.layers))
    heads: tuple[Head, ...] = tuple((layer + 1, head) for layer in qk for head in range(shape.heads))
    hidden_rows, query_rows = (_rows_per_step(compat, shape, len(layers)) for layers in (hidden, qk))
    return EngineConfig(
        hidden_layers=hidden if "hidden_states" in compat.uses else (),
        attention_heads=heads if "qk" in compat.uses else (),
        steering_layers=tuple(range(1, shape.layers + 1)) if "steer" in compat.uses else (),
        steering_folder=compat.steering_folder,
        steering_vectors=tuple(compat.vectors),
        max_hidden_rows_per_step=hidden_rows if "hidden_states" in compat.uses else None,
        max_query_rows_per_step=query_rows if "qk" in compat.uses else None,
        max_host_bytes=compat.aperture_bytes,
        artifact_folder=compat.artifact_folder,
    )


def _rows_per_step(compat: CompatConfig, shape: ModelShape, layers: int) -> int:
    """A whole step's tokens where there is room for them, since MIA reads whole prompts too."""
    room = compat.aperture_bytes // max(1, len(compat.uses)) // (layers * shape.hidden_row_bytes)
    return max(shape.max_requests, min(shape.max_tokens_per_step, room))
