"""Answers in French to English questions, without a word about it in the prompt: a vector is learnt, loaded, and added.

    .venv/bin/python examples/steering_language.py

One engine does it all: it reads 16 pairs of answers, French and English; their difference becomes a vector, which is
loaded while the engine runs and added to the residual stream of some requests and not of others. A model of 135 million
parameters writes poor French: the vector changes the language and costs sense. What was measured is in
docs/use-cases/steering-language.md.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from detectors.calibration.readers import open_engine
from guard.mia.engine_config import EngineConfig
from guard.mia.spec import MiaSpec, Steer
from guard.models import pull
from guard.steering.coherence import continuation_logprobs, perplexity
from guard.steering.languages import language_share
from guard.steering.learning import learn
from guard.steering.rows import read_pairs, read_prompts
from guard.steering.states import Reading, states_of
from guard.steering.vector_files import write_vector

HERE = Path(__file__).parent
LAYER, COEFFICIENTS, TOKENS = 8, (0.0, 0.5, 0.75), 32


def main() -> None:
    pairs = read_pairs(HERE / "pairs" / "french.jsonl")
    prompts = read_prompts(HERE / "prompts.jsonl").conversations[:6]
    reading = Reading((LAYER,), at="mean")
    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig(
            hidden_layers=(LAYER,),
            max_hidden_rows_per_step="tokens",
            steering_layers=(LAYER,),
            steering_folder=Path(folder),
            max_steering_vectors=1,
        )
        with open_engine(pull("smollm2-135m"), config, max_num_batched_tokens=2048) as llm:
            states = states_of(llm, [*pairs.positive, *pairs.negative], reading)
            (french,) = learn(states[: len(pairs.positive)], states[len(pairs.positive) :], (LAYER,), "diff")
            print(f"layer {LAYER}: length {french.norm:.1f} in a stream of {french.stream_norm:.1f}")
            write_vector(Path(folder), "french", french.vector, {})
            llm.load_vector("french")

            # One batch; each request is steered its own way. A coefficient of 0 changes nothing, to the last bit.
            specs = [MiaSpec(steer=(Steer(vector="french", layer=LAYER, coefficient=c),)) for c in COEFFICIENTS]
            answers = llm.chat(list(prompts) * len(specs), [spec for spec in specs for _ in prompts], max_tokens=TOKENS)
            written = [(answer.prompt_token_ids, answer.token_ids) for answer in answers]
            logprobs = continuation_logprobs(llm, written, [None] * len(written))
    for i, coefficient in enumerate(COEFFICIENTS):
        own = slice(i * len(prompts), (i + 1) * len(prompts))
        share = np.mean([language_share(answer.text, "fr") for answer in answers[own]])
        strange = perplexity([one for tokens in logprobs[own] for one in tokens])
        print(f"\ncoefficient {coefficient}: French {share:.0%} of function words, perplexity {strange:.1f}")
        for prompt, answer in list(zip(prompts, answers[own], strict=True))[:3]:
            print(f"  {prompt[-1]['content']}\n    {' '.join(answer.text.split())}")


if __name__ == "__main__":
    main()
