"""vLLM's start: what it was told of taps is checked; and as MIA has it, MIA_WORKER decides the taps, and the middleware
is there without a flag.

Relies on (vLLM 0.29): EngineArgs.{create_engine_config, from_cli_args}, VllmConfig.{additional_config, model_config,
scheduler_config}, ModelConfig.{model_arch_config, dtype}, SchedulerConfig.{max_num_batched_tokens, max_num_seqs}.
Without MIA_WORKER and without ``additional_config["mia_compat"]`` vLLM's methods do what they always do.
"""

from __future__ import annotations

import os
from argparse import Namespace
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from guard.mia.compat import (
    ADDITIONAL_CONFIG_KEY,
    CompatConfig,
    ModelShape,
    compat_from_environment,
    compat_of,
    engine_config,
)
from guard.mia.engine_config import configured
from guard.mia.patching import wrap

MIDDLEWARE = "guard.mia.server.MiaMiddleware"


def install() -> None:
    """Wrap the two methods. Safe to call once per process, before any engine exists."""
    wrap(EngineArgs, "create_engine_config", _create_engine_config)
    # Bound to the class that it is called on, so not for ``wrap``.
    original: Any = EngineArgs.__dict__["from_cli_args"].__func__

    def from_cli_args(cls: type[EngineArgs], args: Namespace) -> Any:
        _add_middleware(args)
        return original(cls, args)

    EngineArgs.from_cli_args = classmethod(from_cli_args)  # type: ignore[method-assign,assignment]


def _create_engine_config(original: Any, args: EngineArgs, *rest: Any, **kwargs: Any) -> VllmConfig:
    config: VllmConfig = original(args, *rest, **kwargs)
    additional = config.additional_config
    compat = _compat(additional)
    if compat is not None and isinstance(additional, dict):
        shape = _shape(config)
        compat = compat.model_copy(update={"heads": shape.heads})
        ours = {ADDITIONAL_CONFIG_KEY: compat.model_dump(mode="json", exclude_defaults=True)}
        if "mia" not in additional and compat.uses:
            ours["mia"] = engine_config(compat, shape).model_dump(mode="json", exclude_defaults=True)
        config.additional_config = {**additional, **ours}
    # In the front end, so that what is wrong there is said before a worker starts, and without its traceback.
    configured(config.additional_config)
    return config


def _compat(additional_config: Any) -> CompatConfig | None:
    """What the start says, or else what the environment says. Raises ``CompatError``, and pydantic's error."""
    given = compat_of(additional_config)
    return compat_from_environment(os.environ) if given is None else given


def _shape(config: VllmConfig) -> ModelShape:
    model, scheduler = config.model_config.model_arch_config, config.scheduler_config
    dtype: Any = config.model_config.dtype
    return ModelShape(
        layers=model.total_num_hidden_layers,
        heads=model.total_num_attention_heads,
        hidden_row_bytes=model.hidden_size * dtype.itemsize,
        max_tokens_per_step=scheduler.max_num_batched_tokens,
        max_requests=scheduler.max_num_seqs,
    )


def _add_middleware(args: Namespace) -> None:
    """Before the API server's application is built from the same arguments."""
    middleware = getattr(args, "middleware", None)
    if middleware is None or MIDDLEWARE in middleware:
        return
    if _compat(getattr(args, "additional_config", None)) is not None:
        args.middleware = [*middleware, MIDDLEWARE]
