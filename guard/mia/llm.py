"""``MiaLLM``: the engine in your own process's command, for scripts, notebooks and calibration.

Owns the offline door: the same specs, spans, taps and readouts as over HTTP, without a server. Its constructor and
``generate`` and ``analyze`` are also MIA's, with MIA's names and layouts; ``chat`` and ``read`` are our own.
"""

from __future__ import annotations

import itertools
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from guard.mia.compat import (
    ADDITIONAL_CONFIG_KEY,
    CompatConfig,
    CompatError,
    ModelConfig,
    compat_of,
    file_format_of,
    load_steering,
    parse_uses,
    read_model_config,
)
from guard.mia.compat_request import asks, check_run_id, requested_spec, without_keys
from guard.mia.engine_config import EngineConfig, configured
from guard.mia.registry import Analyzer, make_analyzer
from guard.mia.results import Readout, Readouts
from guard.mia.spec import MiaSpec
from guard.mia.vectors import VectorError, raise_refusal
from guard.paths import cache_folder

if TYPE_CHECKING:
    from guard.mia.frontend import RequestContext

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


@dataclass(frozen=True)
class _MiaSetup:
    """What MIA's arguments of the constructor say: the engine's part, and what every request asks for."""

    compat: CompatConfig
    request_keys: dict[str, Any]
    layer_to_heads: dict[int, list[int]]


class MiaLLM:
    """A vLLM engine with taps.

    Either ``engine_config`` says which layers and heads have taps, or MIA's arguments do: ``worker_name`` (several
    with commas), ``config_file`` and, for ``analyze``, ``analyzer_name``; ``save_to_disk`` writes to ``hook_dir``.
    ``vllm_args`` go to ``vllm.LLM``. Raises what vLLM raises, ``ValueError`` naming the field for a spec that the
    engine has no taps for, and ``CompatError`` for arguments and files of MIA's that do not fit.
    """

    def __init__(
        self,
        model: str | Path,
        engine_config: EngineConfig | None = None,
        *,
        worker_name: str | None = None,
        analyzer_name: str | None = None,
        config_file: str | Path | None = None,
        hook_dir: str | Path | None = None,
        enable_hook: bool = True,
        **vllm_args: Any,
    ) -> None:
        setup = _mia_setup(engine_config, worker_name, config_file)
        self.hook_dir = cache_folder() / "runs" if hook_dir is None else Path(hook_dir)
        self.analyzer: Analyzer | None = None
        if analyzer_name is not None:
            self.analyzer = make_analyzer(analyzer_name, self.hook_dir, setup.layer_to_heads)

        from vllm import LLM

        from guard.mia.frontend import EngineFacts

        vllm_args.setdefault("enforce_eager", True)
        additional = {ADDITIONAL_CONFIG_KEY: setup.compat.model_dump(mode="json", exclude_defaults=True)}
        if engine_config is not None:
            additional["mia"] = engine_config.model_dump(mode="json")
        self.llm = LLM(model=str(model), additional_config=additional, **vllm_args)
        started = self.llm.llm_engine.vllm_config.additional_config
        taps, compat = configured(started), compat_of(started)
        if taps is None or compat is None:
            raise CompatError("vLLM did not load the plugin mia: VLLM_PLUGINS must be unset, or name it")
        self.engine_config = taps
        self.engine_facts = EngineFacts.of(self.llm.llm_engine.vllm_config)
        self._compat = compat
        self._request_keys = setup.request_keys if enable_hook else {}
        self._last_run: tuple[str, Any] | None = None
        self._ids = itertools.count()

    @property
    def llm_engine(self) -> Any:
        """vLLM's engine."""
        return self.llm.llm_engine

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.llm.get_tokenizer()

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

        from guard.mia.frontend import RequestContext, active

        specs = [spec] * len(conversations) if isinstance(spec, MiaSpec) else list(spec)
        if len(specs) != len(conversations):
            raise ValueError(f"{len(specs)} specs for {len(conversations)} conversations")
        vectors = self.vectors() if any(one.steer for one in specs) else {}
        for one in specs:
            self.engine_config.check(one, vectors)
        renderer = self.llm.renderer
        chat_params = ChatParams(chat_template_kwargs={"add_generation_prompt": True, "tokenize": False})
        contexts: dict[str, RequestContext] = {}
        with self._whole_batch() as add:
            for conversation, one in zip(conversations, specs, strict=True):
                context = RequestContext(one, vectors, self.engine_facts)
                with active(context):
                    _, (rendered,) = renderer.render_chat([list(conversation)], chat_params)
                    request_id = add(rendered, SamplingParams(**{"temperature": 0.0, **sampling}), context)
                contexts[request_id] = context
        outputs = self._run(progress)
        return [_answer(outputs[request_id], context) for request_id, context in contexts.items()]

    def read(
        self, conversations: Sequence[Conversation], spec: MiaSpec, progress: Callable[[int], None] | None = None
    ) -> list[Readouts]:
        """Prompt readouts of every conversation, in order; generates one token each, which is thrown away."""
        answers = self.chat(conversations, spec, progress, max_tokens=1)
        return [answer.readouts[0] for answer in answers]

    def generate(
        self,
        prompts: Any,
        sampling_params: Any = None,
        use_hook: bool = True,
        save_to_disk: bool = False,
        run_id: str | None = None,
        **sampling: Any,
    ) -> list[Any]:
        """MIA's ``generate``: vLLM's ``RequestOutput`` for each prompt, in order, with ``probes`` on each.

        ``prompts`` and ``sampling_params`` as ``vllm.LLM.generate`` takes them, or ``sampling`` as the fields of one
        ``SamplingParams`` for all. Every request asks for what the config file says; MIA's keys in ``extra_args`` of
        its sampling parameters win. With ``use_hook=False`` nothing is read or steered. The first output's ``probes``
        are those of the whole batch, as MIA has it, so its own are the first entries; every other output has its own.
        ``save_to_disk`` also writes the readouts to ``hook_dir/run_id``.
        """
        from vllm.renderers.inputs.preprocess import parse_model_prompt, prompt_to_seq

        from guard.mia.analyzers.probes import in_batch, probes_of
        from guard.mia.frontend import RequestContext, active

        if run_id is not None:
            check_run_id(run_id)
        asked = prompt_to_seq(prompts)
        params = self._sampling_params(sampling_params, sampling, len(asked))
        vectors = self.vectors()
        specs = [self._spec(one.extra_args or {}, vectors) if use_hook else None for one in params]
        save_to_disk = save_to_disk or any((one.extra_args or {}).get("save_to_disk") for one in params)
        contexts: dict[str, RequestContext | None] = {}
        with self._whole_batch() as add:
            for prompt, one, spec in zip(asked, params, specs, strict=True):
                context = None if spec is None else RequestContext(spec, vectors, self.engine_facts)
                others = without_keys(one.extra_args or {})
                others.pop("mia", None)
                one.extra_args = others or None
                with nullcontext() if context is None else active(context):
                    (rendered,) = self.llm.renderer.render_cmpl([parse_model_prompt(self.llm.model_config, prompt)])
                    contexts[add(rendered, one, context)] = context
        finished = self._run()
        outputs = [finished[request_id] for request_id in contexts]
        readouts = [[] if context is None else context.take() for context in contexts.values()]
        for i, output in enumerate(outputs):
            output.probes = probes_of(in_batch(readouts if i == 0 else [readouts[i]]))
        run_id = run_id or uuid.uuid4().hex
        self._last_run = (run_id, outputs[0].probes) if outputs else None
        if save_to_disk:
            _save(self.hook_dir / run_id, in_batch(readouts))
        return outputs

    def analyze(self, analyzer_spec: Any = None, run_id: str | None = None, probes: Any = None) -> Any:
        """What the analyzer makes of ``probes``, of a saved run, or of the last ``generate``."""
        if self.analyzer is None:
            raise CompatError("there is no analyzer: pass analyzer_name")
        if probes is None and self._last_run is not None and run_id in (None, self._last_run[0]):
            run_id, probes = self._last_run
        return self.analyzer.analyze(analyzer_spec, run_id=run_id, probes=probes)

    def vectors(self) -> dict[str, str]:
        """Digests of the engine's steering vectors by name."""
        digests: dict[str, str] = self.llm.collective_rpc("mia_vectors")[0]
        return digests

    def load_vector(self, name: str) -> None:
        """Load ``NAME.safetensors`` from the steering folder, or load it again. Raises ``VectorError``."""
        self._change_vectors("mia_load_vector", name)

    def evict_vector(self, name: str) -> None:
        """Forget a steering vector. Raises ``VectorError``."""
        if name not in self.vectors():
            raise VectorError("unknown", f"there is no steering vector {name!r}")
        self._change_vectors("mia_evict_vector", name)

    def _change_vectors(self, method: str, name: str) -> None:
        raise_refusal(self.llm.collective_rpc(method, args=(name,)))

    def close(self) -> None:
        """Stop the engine's processes."""
        self.llm.llm_engine.engine_core.shutdown()

    def __enter__(self) -> MiaLLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _sampling_params(self, given: Any, fields: dict[str, Any], prompts: int) -> list[Any]:
        """One of its own for each prompt, of which vLLM sends the end alone."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if given is not None and fields:
            raise TypeError("pass sampling_params, or their fields by name")
        if given is None:
            given = SamplingParams(**fields) if fields else self.llm.get_default_sampling_params()
        listed = list(given) if isinstance(given, Sequence) else [given] * prompts
        if len(listed) != prompts:
            raise ValueError(f"{len(listed)} sampling parameters for {prompts} prompts")
        params = [one.clone() for one in listed]
        for one in params:
            one.output_kind = RequestOutputKind.FINAL_ONLY
        return params

    def _spec(self, extra_args: dict[str, Any], vectors: dict[str, str]) -> MiaSpec | None:
        """What one request asks for: the config file's keys, and over them its own."""
        here = {"save_to_disk", "run_id"}
        own = {key: value for key, value in extra_args.items() if key not in here}
        given = own if "mia" in own else {**self._request_keys, **own}
        if not asks(given):
            return None
        spec = requested_spec(given, self._compat, self.engine_config, vectors)
        self.engine_config.check(spec, vectors)
        return spec

    @contextmanager
    def _whole_batch(self) -> Iterator[Callable[[Any, Any, RequestContext | None], str]]:
        """Gives a function that adds a request and returns its id. When one fails, none stays in the engine."""
        from guard.mia.frontend import prepare

        engine: Any = self.llm.llm_engine
        added: list[str] = []

        def add(rendered: Any, params: Any, context: RequestContext | None) -> str:
            request_id = f"mia-{next(self._ids)}"
            if context is not None:
                rendered, params = prepare(context, rendered, params, request_id)
            engine.add_request(request_id, rendered, params)
            added.append(request_id)
            return request_id

        try:
            yield add
        except BaseException:
            engine.abort_request(added)
            raise

    def _run(self, progress: Callable[[int], None] | None = None) -> dict[str, Any]:
        """Step until all is done. Returns vLLM's final outputs by request id."""
        engine: Any = self.llm.llm_engine
        outputs: dict[str, Any] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    outputs[output.request_id] = output
                    if progress is not None:
                        progress(len(outputs))
        return outputs


def _answer(output: Any, context: RequestContext) -> Answer:
    completion = output.outputs[0]
    return Answer(
        completion.text,
        tuple(completion.token_ids),
        tuple(output.prompt_token_ids),
        tuple(context.take()),
        completion.cumulative_logprob,
    )


def _mia_setup(
    engine_config: EngineConfig | None, worker_name: str | None, config_file: str | Path | None
) -> _MiaSetup:
    """Raises ``CompatError``."""
    if (engine_config is None) == (worker_name is None):
        raise CompatError("pass either engine_config or worker_name")
    if worker_name is None:
        return _MiaSetup(CompatConfig(), {}, {})
    uses = parse_uses(worker_name, "worker_name")
    config = ModelConfig() if config_file is None else read_model_config(Path(config_file))
    keys: dict[str, Any] = {}
    parts: dict[str, Any] = {"uses": uses}
    if "hidden_states" in uses:
        keys |= config.hidden_keys()
        parts["hidden_layers"] = config.hidden_layers
    if "qk" in uses:
        keys |= config.qk_keys("all_tokens")
        parts["qk_layers"] = tuple(config.layer_to_heads)
    if "steer" in uses:
        if config_file is None:
            raise CompatError("worker_name steer needs a config_file with a steering section, which names a vector")
        keys["steer"] = True
        parts |= load_steering(Path(config_file))
    return _MiaSetup(CompatConfig(**parts), keys, config.layer_to_heads)


def _save(folder: Path, readouts: list[Readouts]) -> None:
    """Write a run's files. Raises ``CompatError`` when nothing was read."""
    from guard.mia.artifacts import encode

    if not any(one.items for one in readouts):
        raise CompatError("save_to_disk: nothing was read, so there is nothing to write")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, content in encode(readouts, file_format_of(os.environ)).items():
        unfinished = folder / f".{name}"
        unfinished.write_bytes(content)
        unfinished.chmod(0o600)
        unfinished.replace(folder / name)
