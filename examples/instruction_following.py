"""Answers as a list, with the instruction in a vector instead of in the prompt.

    .venv/bin/python examples/instruction_following.py

From 16 requests, each once with "Answer with a bulleted list." behind it and once with "Answer with one paragraph of
plain text.", one engine learns what the first adds at the prompt's last token. Then other requests, which say nothing
about lists, are answered without it, with the instruction in words, and with the vector. What was measured is in
docs/use-cases/instruction-following.md.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from detectors.calibration.readers import open_engine
from guard.mia.engine_config import EngineConfig
from guard.mia.spec import MiaSpec, Steer
from guard.models import pull
from guard.steering.coherence import continuation_logprobs, perplexity
from guard.steering.learning import learn
from guard.steering.rows import read_pairs, read_prompts
from guard.steering.states import Reading, states_of
from guard.steering.vector_files import write_vector

HERE = Path(__file__).parent
LAYER, COEFFICIENT, TOKENS = 20, 2.0, 32
IN_WORDS = " Answer with a bulleted list."
LIST_ITEM = re.compile(r"(?m)^\s*([-*•]|\d+[.)]) ")


def main() -> None:
    pairs = read_pairs(HERE / "pairs" / "list.jsonl")
    prompts = list(read_prompts(HERE / "prompts.jsonl").conversations)
    told = [[{**prompt[-1], "content": prompt[-1]["content"] + IN_WORDS}] for prompt in prompts]
    reading = Reading((LAYER,), at="last")
    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig(
            hidden_layers=(LAYER,), steering_layers=(LAYER,), steering_folder=Path(folder), max_steering_vectors=1
        )
        with open_engine(pull("smollm2-135m"), config) as llm:
            states = states_of(llm, [*pairs.positive, *pairs.negative], reading)
            (listed,) = learn(states[: len(pairs.positive)], states[len(pairs.positive) :], (LAYER,), "diff")
            write_vector(Path(folder), "list", listed.vector, {})
            llm.load_vector("list")

            steered = MiaSpec(steer=(Steer(vector="list", layer=LAYER, coefficient=COEFFICIENT),))
            asked = [*prompts, *told, *prompts]
            specs = [MiaSpec()] * (len(prompts) + len(told)) + [steered] * len(prompts)
            answers = llm.chat(asked, specs, max_tokens=TOKENS)
            written = [(answer.prompt_token_ids, answer.token_ids) for answer in answers]
            logprobs = continuation_logprobs(llm, written, [None] * len(written))
    for i, how in enumerate(("nothing said", "in words", "as a vector")):
        own = slice(i * len(prompts), (i + 1) * len(prompts))
        lists = sum(LIST_ITEM.search(answer.text) is not None for answer in answers[own])
        strange = perplexity([one for tokens in logprobs[own] for one in tokens])
        print(f"\n{how}: {lists} of {len(prompts)} answers have a list in them, perplexity {strange:.1f}")
        for prompt, answer in list(zip(prompts, answers[own], strict=True))[:2]:
            print(f"  {prompt[-1]['content']}\n    {' / '.join(answer.text.splitlines())}")


if __name__ == "__main__":
    main()
