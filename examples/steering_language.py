"""Answers in French to English questions, without a word about it in the prompt: a vector is learnt, loaded, and added.

    .venv/bin/python examples/steering_language.py

One engine does it all: it reads 16 pairs of answers, French and English; their difference becomes a vector, which is
loaded while the engine runs and added to the residual stream of some requests and not of others. A model of 135 million
parameters writes poor French: the vector changes the language and costs sense. What was measured is in
docs/use-cases/steering-language.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from steering_door import steering_door, steering_parser, steering_taps

from guard.mia.spec import MiaSpec, Steer
from guard.steering.coherence import perplexity
from guard.steering.languages import language_share
from guard.steering.learning import learn
from guard.steering.rows import read_pairs, read_prompts
from guard.steering.states import Reading

HERE = Path(__file__).parent
LAYER, COEFFICIENTS, TOKENS = 8, (0.0, 0.5, 0.75), 32
WHOLE_ANSWERS = {"max_hidden_rows_per_step": "tokens"}


def main(arguments: Sequence[str] | None = None) -> None:
    options = steering_parser(__doc__, LAYER, **WHOLE_ANSWERS).parse_args(arguments)
    layer = options.layer
    pairs = read_pairs(HERE / "pairs" / "french.jsonl")
    prompts = read_prompts(HERE / "prompts.jsonl").conversations[:6]
    reading = Reading((layer,), at="mean")
    taps = steering_taps(layer, options.vectors, **WHOLE_ANSWERS)
    with steering_door(options, taps, max_num_batched_tokens=2048) as engine:
        states = engine.states([*pairs.positive, *pairs.negative], reading)
        (french,) = learn(states[: len(pairs.positive)], states[len(pairs.positive) :], (layer,), "diff")
        print(f"layer {layer}: length {french.norm:.1f} in a stream of {french.stream_norm:.1f}")
        engine.load("french", french.vector)

        # One batch; each request is steered its own way. A coefficient of 0 changes nothing, to the last bit.
        specs = [MiaSpec(steer=(Steer(vector="french", layer=layer, coefficient=c),)) for c in COEFFICIENTS]
        asked = [([dict(one) for one in prompt], spec) for spec in specs for prompt in prompts]
        answers = engine.ask(asked, TOKENS)
        logprobs = engine.logprobs(answers)
    for i, coefficient in enumerate(COEFFICIENTS):
        own = slice(i * len(prompts), (i + 1) * len(prompts))
        share = np.mean([language_share(answer.text, "fr") for answer in answers[own]])
        strange = perplexity([one for tokens in logprobs[own] for one in tokens])
        print(f"\ncoefficient {coefficient}: French {share:.0%} of function words, perplexity {strange:.1f}")
        for prompt, answer in list(zip(prompts, answers[own], strict=True))[:3]:
            print(f"  {prompt[-1]['content']}\n    {' '.join(answer.text.split())}")


if __name__ == "__main__":
    main()
