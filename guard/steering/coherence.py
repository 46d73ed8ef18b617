"""How readable a steered answer still is: its perplexity to the unsteered model, and whether it repeats itself.

Owns both measures. They belong together: a loop has a low perplexity, and a salad of words repeats nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

TokenIds = Sequence[int]


def distinct_share(text: str) -> float:
    """Distinct word triples among all: 1 for ordinary text, near 0 for a loop; 0 for fewer than three words."""
    words = text.split()
    triples = [tuple(words[i : i + 3]) for i in range(len(words) - 2)]
    return len(set(triples)) / len(triples) if triples else 0.0


def perplexity(logprobs: Sequence[float]) -> float:
    """exp of the mean negative log-probability of tokens; infinite for none."""
    return math.exp(-sum(logprobs) / len(logprobs)) if logprobs else math.inf


def continuation_logprobs(
    llm: Any, continuations: Sequence[tuple[TokenIds, TokenIds]], specs: Sequence[str | None]
) -> list[list[float]]:
    """Log-probability of each token of each continuation, given the prompt before it.

    continuations: prompt and continuation. specs: for each, a ``MiaSpec`` on the wire that steers, or None.
    """
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": [*prompt, *continuation]} for prompt, continuation in continuations]
    params = [
        SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, extra_args={"mia": spec} if spec else None)
        for spec in specs
    ]
    outputs = llm.generate(prompts, params)
    return [
        [
            output.prompt_logprobs[i][output.prompt_token_ids[i]].logprob
            for i in range(len(prompt), len(prompt) + len(rest))
        ]
        for output, (prompt, rest) in zip(outputs, continuations, strict=True)
    ]
