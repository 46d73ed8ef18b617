"""Hidden states of chosen layers and tokens, whole or reduced: ``python examples/hidden_states.py``."""

from __future__ import annotations

from collections.abc import Sequence

from arguments import whole
from door import door, parser

from guard.mia.engine_config import EngineConfig
from guard.mia.spec import SpanPositions
from guard.uses.hidden_states import extract

CONVERSATIONS = [
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]
    for question in ("Why is the sky blue?", "Which river flows through Vienna, and where does it end?")
]
LAYERS = (0, 15, 30)


def taps(layers: tuple[int, ...]) -> EngineConfig:
    return EngineConfig(hidden_layers=layers, max_hidden_rows_per_step="tokens")


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__, taps(LAYERS))
    made.add_argument("--layers", type=whole(0), nargs="+", default=LAYERS)
    options = made.parse_args(arguments)
    layers = tuple(options.layers)
    with door(options, taps(layers)) as ask:
        last = extract(ask, CONVERSATIONS, layers)
        user = extract(
            ask, CONVERSATIONS, layers, SpanPositions(span="question"), "mean", spans={"question": ("user.last",)}
        )  # the mean over what the user said
        lengths = extract(ask, CONVERSATIONS, layers, "prompt", "norm")
        answers = extract(ask, CONVERSATIONS, layers, "generated", max_tokens=8)
    for i in range(len(CONVERSATIONS)):
        for layer in layers:
            print(
                f"conversation {i}, layer {layer}: last token {last[i][layer].shape}, mean {user[i][layer].shape}, "
                f"length of the prompt's states {float(lengths[i][layer]):.1f}, generated {answers[i][layer].shape}"
            )


if __name__ == "__main__":  # vLLM starts processes of its own
    main()
