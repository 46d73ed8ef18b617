"""``MiaClient``: MIA's client for a vLLM server with taps, on top of the openai package.

Owns the way from a model config to a request's keys, and from an answer's readouts to MIA's probes and analyzers, which
run here and not in the server. It needs no file system in common with the server.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from guard.mia.compat import CompatError, ModelConfig, read_model_config
from guard.mia.compat_request import check_run_id
from guard.mia.registry import Analyzer, make_analyzer
from guard.mia.results import Readouts
from guard.mia.spec import MiaSpec

Messages = Sequence[Mapping[str, Any]]


class MiaClient:
    """A client of one server.

    ``config_file`` says what requests ask for: its ``hidden_states``, its ``hookq`` with ``params.important_heads``.
    Without one, they ask for all that the analyzer reads. Raises ``CompatError`` for names and
    files that do not fit, and what the openai package raises.
    """

    def __init__(
        self,
        base_url: str,
        analyzer_name: str | None = None,
        config_file: str | Path | None = None,
        api_key: str | None = None,
    ) -> None:
        import openai

        config = None if config_file is None else read_model_config(Path(config_file))
        self._request_keys = _request_keys(config, analyzer_name)
        self.analyzer: Analyzer | None = None
        if analyzer_name is not None:
            self.analyzer = make_analyzer(analyzer_name, None, config.layer_to_heads if config else {})
        # The package wants some key; a server without keys ignores it.
        self.client = openai.OpenAI(base_url=base_url, api_key=api_key or "EMPTY")
        self.probes: Any = None
        self.run_id: str | None = None

    def generate(self, messages: Messages, model: str, **options: Any) -> Any:
        """A chat completion, with its ``probes``.

        ``options``: of ``chat.completions.create``; and ``save_to_disk``, ``run_id``, ``steer`` (a section, or True for
        the server's own), ``extra_xargs`` (further ``vllm_xargs``), ``capture`` (False: read nothing).
        """
        return self._ask(self.client.chat.completions.create, {"messages": messages, "model": model, **options})

    def generate_text(self, prompt: str | Sequence[str], model: str, **options: Any) -> Any:
        """A completion of a text as it is, or of several, with its ``probes``. ``options`` as for ``generate``."""
        return self._ask(self.client.completions.create, {"prompt": prompt, "model": model, **options})

    def generate_tokens(self, token_ids: Sequence[int], model: str, **options: Any) -> Any:
        """A completion of exactly these tokens, with its ``probes``. ``options`` as for ``generate``."""
        return self._ask(self.client.completions.create, {"prompt": list(token_ids), "model": model, **options})

    def chat(self, messages: Messages, spec: MiaSpec, model: str, **sampling: Any) -> tuple[Any, tuple[Readouts, ...]]:
        """A chat completion, greedy unless ``sampling`` says otherwise, and its readouts, as ``MiaLLM.chat`` has them.
        vLLM's own fields go into ``extra_body``, as for the openai package.

        Raises ``CompatError`` when the server sends none, or sends them as files.
        """
        create: Any = self.client.chat.completions.create
        body = {**(sampling.pop("extra_body", None) or {}), "vllm_xargs": {"mia": spec.to_wire()}}
        answer = create(messages=list(messages), model=model, extra_body=body, **{"temperature": 0.0, **sampling})
        event = getattr(answer, "mia", None)
        if event is None:
            raise CompatError("the answer has no readouts: the server has no taps, or a proxy before it keeps them")
        if "artifact" in event:
            raise CompatError("the readouts are files: read them with generate, or ask for them in the answer")
        return answer, tuple(map(Readouts.from_wire, event["readouts"]))

    def read(self, messages: Messages, spec: MiaSpec, model: str) -> Readouts:
        """Readouts of a conversation's prompt, as ``MiaLLM.read``; generates one token, which is thrown away. Raises as
        ``chat``."""
        _, readouts = self.chat(messages, spec, model, max_tokens=1)
        return next(one for one in readouts if one.stage == "prompt")

    def analyze(self, analyzer_spec: Any = None, run_id: str | None = None, probes: Any = None) -> Any:
        """What the analyzer makes of ``probes``, or of the last answer's."""
        if self.analyzer is None:
            raise CompatError("there is no analyzer: pass analyzer_name")
        if probes is None:
            if self.probes is None:
                raise CompatError("nothing to analyze: pass probes, or generate first")
            if run_id not in (None, self.run_id):
                raise CompatError(f"run {run_id!r} is not the last one; keep its answer's probes and pass them")
            run_id, probes = self.run_id, self.probes
        return self.analyzer.analyze(analyzer_spec, run_id=run_id, probes=probes)

    def tokenizer_for(self, model: str) -> Any:
        """The tokenizer of a model by its name on Hugging Face or its folder."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(model)

    def _ask(
        self,
        create: Any,
        options: dict[str, Any],
    ) -> Any:
        if options.get("stream"):
            raise CompatError(
                "answers are taken whole here: for a stream use the openai client, which gets the readouts"
            )
        run_id = options.pop("run_id", None) or uuid.uuid4().hex
        check_run_id(run_id)
        keys = self._request_keys if options.pop("capture", True) else {}
        keys = {**keys, "steer": options.pop("steer", None), "save_to_disk": options.pop("save_to_disk", None)}
        xargs = {name: _scalar(value) for name, value in keys.items() if value is not None}
        body = options.pop("extra_body", None) or {}
        xargs = {**xargs, **(options.pop("extra_xargs", None) or {}), **(body.get("vllm_xargs") or {})}
        answer = create(**options, extra_body={**body, "vllm_xargs": xargs} if xargs else body)
        self.run_id, self.probes = run_id, self._probes(getattr(answer, "mia", None))
        answer.probes = self.probes
        return answer

    def _probes(self, event: Any) -> Any:
        from guard.mia.analyzers.probes import probes_of

        if event is None:
            return {}
        if "artifact" in event:
            event = self.client.get(f"/mia/readouts/{event['artifact']['id']}", cast_to=object)
        return probes_of(Readouts.from_wire(wire) for wire in event["readouts"])


def _request_keys(config: ModelConfig | None, analyzer_name: str | None) -> dict[str, Any]:
    if config is None:
        nothing = ModelConfig()
        by_analyzer = {"hidden_states": nothing.hidden_keys(), "attn_tracker": nothing.qk_keys("last_token")}
        return by_analyzer.get(analyzer_name or "", {})
    keys: dict[str, Any] = {}
    if config.hidden_states is not None:
        keys |= config.hidden_keys()
    if config.hookq is not None or config.layer_to_heads:
        keys |= config.qk_keys("last_token")
    return keys


def _scalar(value: Any) -> Any:
    """``vllm_xargs`` takes scalars; anything else travels as JSON text."""
    return value if isinstance(value, str | int | float) and not isinstance(value, bool) else json.dumps(value)
