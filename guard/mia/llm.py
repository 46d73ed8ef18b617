"""``MiaLLM``: the engine in your own process's command, for scripts, notebooks and calibration.

Owns the offline door: the same specs, spans, taps and readouts as over HTTP, without a server.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from guard.mia.engine_config import EngineConfig
from guard.mia.results import Readout, Readouts
from guard.mia.spec import MiaSpec

Conversation = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Answer:
    """One conversation's answer. ``readouts`` is empty when the spec captures nothing.

    ``cumulative_logprob`` is None unless ``logprobs`` were asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    readouts: tuple[Readouts, ...]
    cumulative_logprob: float | None

    @property
    def items(self) -> dict[str, Readout]:
        """Every readout by capture name, of all stages."""
        return {name: item for readouts in self.readouts for name, item in readouts.items.items()}


class MiaLLM:
    """A vLLM engine with taps.

    ``engine_config`` says which layers and heads have taps; ``vllm_args`` go to ``vllm.LLM``. Raises what vLLM raises,
    and ``ValueError`` naming the field for a spec that the engine has no taps for.
    """

    def __init__(self, model: str | Path, engine_config: EngineConfig, **vllm_args: Any) -> None:
        from vllm import LLM

        self.engine_config = engine_config
        vllm_args.setdefault("enforce_eager", True)
        self.llm = LLM(model=str(model), additional_config={"mia": engine_config.model_dump(mode="json")}, **vllm_args)
        self._ids = itertools.count()

    def chat(
        self,
        conversations: Sequence[Conversation],
        spec: MiaSpec | Sequence[MiaSpec],
        progress: Callable[[int], None] | None = None,
        **sampling: Any,
    ) -> list[Answer]:
        """Answer every conversation, in order, all in flight at once. ``spec`` is for all, or one for each.

        ``sampling`` goes to ``vllm.SamplingParams``, greedy by default. ``progress`` is called with each number done.
        """
        from vllm import SamplingParams
        from vllm.renderers.params import ChatParams

        from guard.mia.frontend import RequestContext, active, prepare

        specs = [spec] * len(conversations) if isinstance(spec, MiaSpec) else list(spec)
        if len(specs) != len(conversations):
            raise ValueError(f"{len(specs)} specs for {len(conversations)} conversations")
        for one in specs:
            self.engine_config.check(one)
        engine: Any = self.llm.llm_engine
        renderer = self.llm.renderer
        contexts: dict[str, RequestContext] = {}
        chat_params = ChatParams(chat_template_kwargs={"add_generation_prompt": True, "tokenize": False})
        tokenize = replace(renderer.default_chat_tok_params, return_token_offsets=True)
        for conversation, one in zip(conversations, specs, strict=True):
            request_id = f"mia-{next(self._ids)}"
            context = contexts[request_id] = RequestContext(one)
            with active(context):
                _, (rendered,) = renderer.render_chat([list(conversation)], chat_params, tokenize)
                params = SamplingParams(**{"temperature": 0.0, **sampling})
                prompt, params = prepare(context, rendered, params, request_id)
                engine.add_request(request_id, prompt, params)
        outputs: dict[str, Any] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    outputs[output.request_id] = output
                    if progress is not None:
                        progress(len(outputs))
        return [_answer(outputs[request_id], context) for request_id, context in contexts.items()]

    def read(
        self, conversations: Sequence[Conversation], spec: MiaSpec, progress: Callable[[int], None] | None = None
    ) -> list[Readouts]:
        """Prompt readouts of every conversation, in order; generates one token each, which is thrown away."""
        answers = self.chat(conversations, spec, progress, max_tokens=1)
        return [answer.readouts[0] for answer in answers]

    def close(self) -> None:
        """Stop the engine's processes."""
        self.llm.llm_engine.engine_core.shutdown()

    def __enter__(self) -> MiaLLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _answer(output: Any, context: Any) -> Answer:
    completion = output.outputs[0]
    return Answer(
        completion.text,
        tuple(completion.token_ids),
        tuple(output.prompt_token_ids),
        tuple(context.take()),
        completion.cumulative_logprob,
    )
