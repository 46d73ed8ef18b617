"""A vision-language model: its text part is read exactly, and a prompt with an image in it is refused, not misread."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from guard.mia.engine_config import EngineConfig
from guard.mia.llm import MiaLLM
from guard.mia.results import AttentionReadout, HiddenReadout
from guard.mia.spec import MiaSpec
from tests.engine import engines, oracle
from tests.engine.tiny_multimodal import IMAGE_TOKENS, image_url

SPEC = MiaSpec.model_validate(
    {
        "spans": {"data": "user.last"},
        "hidden": {"h": {"layer": 2}},
        "attention": {"a": {"heads": [[1, 0], [3, 2]], "spans": ["data"]}},
    }
)
TEXT = [{"role": "user", "content": "What colour is the sky?"}]
PICTURE = [
    {
        "role": "user",
        "content": [
            {"type": "image_url", "image_url": {"url": image_url()}},
            {"type": "text", "text": "What is this?"},
        ],
    }
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return oracle.save("idefics3", tmp_path_factory.mktemp("tiny-idefics3"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[MiaLLM]:
    config = EngineConfig(hidden_layers=(2,), attention_heads=((1, 0), (3, 2)))
    with engines.engine(folder, config) as llm:
        yield llm


def look(llm: MiaLLM) -> Any:
    """vLLM's own answer on the picture, with the taps in place."""
    from vllm import SamplingParams

    (output,) = llm.llm.chat([PICTURE], SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True), use_tqdm=False)
    return output


@pytest.mark.parametrize(
    "asked",
    [
        SPEC,
        MiaSpec.model_validate({"hidden": {"h": {"layer": 2}}}),
        MiaSpec.model_validate({"spans": {"first": {"tokens": [[0, 1]]}}, "hidden": {"h": {"layer": 2}}}),
    ],
    ids=["spans", "hidden", "ranges"],
)
def test_a_prompt_with_an_image_is_refused_before_the_engine_and_the_engine_goes_on(
    llm: MiaLLM, asked: MiaSpec
) -> None:
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match="prompts of text alone"):
        llm.chat([TEXT, PICTURE], asked, max_tokens=2)
    (answer,) = llm.chat([TEXT], SPEC, max_tokens=2)
    assert {item.status for item in answer.items.values()} == {"complete"}


def test_generate_refuses_a_picture_before_vllms_cache_has_seen_it(llm: MiaLLM) -> None:
    """Once it has, it takes the picture for known to the engine, and whoever sends it next fails."""
    from PIL import Image
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    picture = {"prompt": "<image>What is this?", "multi_modal_data": {"image": Image.new("RGB", (32, 32), "teal")}}
    asking = SamplingParams(
        max_tokens=2, extra_args={"mia": SPEC.model_copy(update={"spans": {}, "attention": {}}).to_wire()}
    )
    for _ in range(2):
        with pytest.raises(VLLMValidationError, match="prompts of text alone"):
            llm.generate([picture], asking.clone())
    (output,) = llm.llm.generate([picture], SamplingParams(max_tokens=2), use_tqdm=False)
    assert len(output.outputs[0].token_ids) > 0


def test_a_text_beside_an_image_in_one_batch_is_the_models_own_and_so_is_the_image(folder: Path, llm: MiaLLM) -> None:
    from vllm import SamplingParams
    from vllm.renderers.params import ChatParams

    from guard.mia.frontend import RequestContext, active

    image = llm.tokenizer.convert_tokens_to_ids("<image>")
    seen = look(llm)
    assert seen.prompt_token_ids.count(image) == IMAGE_TOKENS
    llm.llm.reset_prefix_cache()
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    llm.llm.enqueue_chat([PICTURE], params, use_tqdm=False)
    context, renderer = RequestContext(SPEC), llm.llm.renderer
    chat = ChatParams(chat_template_kwargs={"add_generation_prompt": True, "tokenize": False})
    with active(context), llm._whole_batch() as add:
        offsets = replace(renderer.default_chat_tok_params, return_token_offsets=True)
        _, (rendered,) = renderer.render_chat([TEXT], chat, offsets)
        text = add(rendered, params, context)
    outputs = llm._run()
    (pictured,) = (output for id_, output in outputs.items() if id_ != text)
    assert pictured.outputs[0].token_ids == seen.outputs[0].token_ids
    (readouts,) = context.take()
    (truth,) = oracle.read(folder, [outputs[text].prompt_token_ids])
    state, attention = readouts.items["h"], readouts.items["a"]
    assert isinstance(state, HiddenReadout)
    assert isinstance(attention, AttentionReadout)
    assert np.linalg.norm(state.values - truth.hidden[1][-1]) <= 1e-4 * np.linalg.norm(truth.hidden[1][-1])
    tokens = [t for start, end in readouts.span_tokens["data"] for t in range(start, end)]
    expected = [truth.attention[layer - 1][head, -1, tokens].sum() for layer, head in ((1, 0), (3, 2))]
    np.testing.assert_allclose(attention.mass["data"], expected, atol=1e-4)
