"""What one engine has taps for: given at start in vLLM's ``--additional-config``, checked against every request.

Owns the ``additional_config["mia"]`` schema. It travels inside ``VllmConfig`` to every process and is part of vLLM's
compile-cache key, so an engine with other taps never loads a stale graph. Without it the plugin does nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from guard.mia.spec import AttentionCapture, Head, Layer, MiaSpec, Name, QKCapture, SpecError
from guard.mistakes import first_mistake


class EngineConfig(BaseModel):
    """Taps and limits of one engine. Every list is what requests may ask for; anything else is refused with a 400."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    hidden_layers: tuple[Layer, ...] = ()
    """Layers whose residual stream requests may read."""
    attention_heads: tuple[Head, ...] = ()
    """``(layer, head)`` pairs whose attention requests may read."""
    steering_layers: tuple[Layer, ...] = ()
    """Layers after which requests may steer."""
    steering_folder: Path | None = None
    """The operator's folder of ``NAME.safetensors`` files, each with one tensor ``vector`` of ``[hidden_size]``."""
    steering_vectors: tuple[Name, ...] = ()
    """Names of the vectors in that folder that requests may use; all are loaded at start."""
    max_steering_vectors: Annotated[int | None, Field(ge=0, le=65536)] = None
    """Room in the bank, for vectors that are added while the engine runs. None: those loaded at start, no more."""
    max_relative_dose: Annotated[float | None, Field(gt=0, allow_inf_nan=False)] = None
    """Most that steering may change a token's residual stream, as a part of its length; a stronger change is shortened
    to it and counted. None: no limit."""
    probe_folder: Path | None = None
    """The operator's folder of ``NAME.safetensors`` files with tensors ``weight`` ``[outputs, hidden_size]`` and
    ``bias`` ``[outputs]``."""
    probes: dict[Name, Layer] = {}
    """Probes in that folder that requests may read, and the layer that each was trained on."""
    max_hidden_rows_per_step: Annotated[int, Field(ge=1)] | Literal["tokens"] | None = None
    """Rows of the residual stream that one step may copy, per layer; a capture beyond it gets ``dropped``. None: one
    for each request in a step, which is enough for last prompt tokens and generated ones. ``tokens``: as many as a step
    holds, so that spans and whole prompts always fit."""
    max_query_rows_per_step: Annotated[int, Field(ge=1)] | Literal["tokens"] | None = None
    """The same for queries, per head: spans and whole prompts of them need more than one for each request."""
    max_host_bytes: Annotated[int, Field(ge=0)] = 256 * 1024 * 1024
    """Host memory for what is gathered until it can be sent: keys for attention, rows of the residual stream, queries.
    Captures beyond it get ``dropped``."""
    max_shared_bytes: Annotated[int, Field(ge=0)] = 256 * 1024 * 1024
    """Host memory through which rows of the residual stream reach the API server. Rows that would not fit into it at
    once, and those that are fetched so late that later ones have taken their place, get ``dropped``."""
    max_answer_bytes: Annotated[int, Field(ge=0)] = 32 * 1024 * 1024
    """Most bytes of arrays in one answer over HTTP, before base64; readouts beyond it get ``dropped``. Files have a
    limit of their own."""
    artifact_folder: Path | None = None
    """The operator's folder for readouts that requests want as files; None: such requests are refused."""
    max_artifact_bytes: Annotated[int, Field(ge=0)] = 1024 * 1024 * 1024
    """Most bytes that the artifacts in that folder may have together; readouts that do not fit get ``dropped``."""
    artifact_retention_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 3600.0
    """How long an artifact is kept. Nothing younger is removed, whatever space is needed."""

    @model_validator(mode="after")
    def _room_for_what_is_loaded(self) -> Self:
        if self.max_steering_vectors is not None and self.max_steering_vectors < len(self.steering_vectors):
            raise ValueError(f"max_steering_vectors has no room for the {len(self.steering_vectors)} steering_vectors")
        return self

    @property
    def bank_capacity(self) -> int:
        """Steering vectors that the bank has room for."""
        return len(self.steering_vectors) if self.max_steering_vectors is None else self.max_steering_vectors

    @property
    def tapped_layers(self) -> tuple[int, ...]:
        """Layers whose residual stream has a tap: for requests or for probes."""
        return tuple(sorted({*self.hidden_layers, *self.probes.values()}))

    def check(self, spec: MiaSpec, vectors: Collection[str] | None = None) -> None:
        """Raise ``SpecError`` when ``spec`` asks for something that this engine has no tap for.

        ``vectors``: names in the bank now, where they are not those that were loaded at start.
        """
        if spec.deliver != "answer" and self.artifact_folder is None:
            raise SpecError("this engine was started without artifact_folder, so it writes no files", "mia.deliver")
        for name, hidden in spec.hidden.items():
            if hidden.layer not in self.hidden_layers:
                raise SpecError(
                    f"this engine has no hidden-state tap at layer {hidden.layer}; it has {list(self.hidden_layers)}",
                    f"mia.hidden.{name}.layer",
                )
        for name, probe in spec.probes.items():
            if probe.probe not in self.probes:
                raise SpecError(
                    f"this engine has no probe {probe.probe!r}; it has {sorted(self.probes)}",
                    f"mia.probes.{name}.probe",
                )
        by_kind: tuple[tuple[str, Mapping[str, AttentionCapture | QKCapture]], ...]
        by_kind = (("attention", spec.attention), ("qk", spec.qk))
        for kind, captures in by_kind:
            for name, capture in captures.items():
                if missing := [list(head) for head in capture.heads if head not in self.attention_heads]:
                    raise SpecError(
                        f"this engine has no attention tap for heads {missing[:8]}, layers counted from 1",
                        f"mia.{kind}.{name}.heads",
                    )
        loaded = self.steering_vectors if vectors is None else vectors
        for i, steer in enumerate(spec.steer):
            if steer.layer not in self.steering_layers:
                raise SpecError(
                    f"this engine does not steer at layer {steer.layer}; it steers at {list(self.steering_layers)}",
                    f"mia.steer.{i}.layer",
                )
            if steer.vector not in loaded:
                raise SpecError(
                    f"this engine has no steering vector {steer.vector!r}; it has {sorted(loaded)}",
                    f"mia.steer.{i}.vector",
                )


class EngineConfigError(ValueError):
    """``additional_config["mia"]`` is wrong; the message names the field."""


def configured(additional_config: object) -> EngineConfig | None:
    """The engine's taps from vLLM's ``additional_config``, or None when it has none. Raises ``EngineConfigError``."""
    if not (isinstance(additional_config, dict) and "mia" in additional_config):
        return None
    try:
        return EngineConfig.model_validate(additional_config["mia"])
    except ValidationError as error:
        location, what = first_mistake(error)
        raise EngineConfigError(f"--additional-config: {'.'.join(map(str, ('mia', *location)))}: {what}") from None
