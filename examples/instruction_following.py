"""Answers as a list, with the instruction in a vector instead of in the prompt.

    .venv/bin/python examples/instruction_following.py

From 16 requests, each once with "Answer with a bulleted list." behind it and once with "Answer with one paragraph of
plain text.", one engine learns what the first adds at the prompt's last token. Then other requests, which say nothing
about lists, are answered without it, with the instruction in words, and with the vector. What was measured is in
docs/use-cases/instruction-following.md.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from steering_door import steering_door, steering_parser, steering_taps

from guard.mia.spec import MiaSpec, Steer
from guard.steering.coherence import perplexity
from guard.steering.learning import learn
from guard.steering.rows import read_pairs, read_prompts
from guard.steering.states import Reading

HERE = Path(__file__).parent
LAYER, COEFFICIENT, TOKENS = 20, 2.0, 32
IN_WORDS = " Answer with a bulleted list."
LIST_ITEM = re.compile(r"(?m)^\s*([-*•]|\d+[.)]) ")


def main(arguments: Sequence[str] | None = None) -> None:
    options = steering_parser(__doc__, LAYER).parse_args(arguments)
    layer = options.layer
    pairs = read_pairs(HERE / "pairs" / "list.jsonl")
    prompts = [[dict(one) for one in prompt] for prompt in read_prompts(HERE / "prompts.jsonl").conversations]
    told = [[{**prompt[-1], "content": prompt[-1]["content"] + IN_WORDS}] for prompt in prompts]
    with steering_door(options, steering_taps(layer, options.vectors)) as engine:
        states = engine.states([*pairs.positive, *pairs.negative], Reading((layer,), at="last"))
        (listed,) = learn(states[: len(pairs.positive)], states[len(pairs.positive) :], (layer,), "diff")
        engine.load("list", listed.vector)

        plain, steered = MiaSpec(), MiaSpec(steer=(Steer(vector="list", layer=layer, coefficient=COEFFICIENT),))
        asked = [*((one, plain) for one in [*prompts, *told]), *((one, steered) for one in prompts)]
        answers = engine.ask(asked, TOKENS)
        logprobs = engine.logprobs(answers)
    for i, how in enumerate(("nothing said", "in words", "as a vector")):
        own = slice(i * len(prompts), (i + 1) * len(prompts))
        lists = sum(LIST_ITEM.search(answer.text) is not None for answer in answers[own])
        strange = perplexity([one for tokens in logprobs[own] for one in tokens])
        print(f"\n{how}: {lists} of {len(prompts)} answers have a list in them, perplexity {strange:.1f}")
        for prompt, answer in list(zip(prompts, answers[own], strict=True))[:2]:
            print(f"  {prompt[-1]['content']}\n    {' / '.join(answer.text.splitlines())}")


if __name__ == "__main__":
    main()
