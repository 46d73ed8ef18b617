"""How long rows' data is in tokens, where no engine reads them and says so.

Owns counting as an engine does: in the prompt that the model's template makes, a token that a text touches is its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from detectors.calibration.rows import Row
from detectors.windows import DATA, TEXTS
from guard.mia.results import FloatArray
from guard.mia.spans import SpanError, locate_messages, resolve


def data_tokens(rows: Sequence[Row], tokenizer: Any) -> FloatArray:
    """``[rows]``. tokenizer: the model's, with its chat template, which takes these rows."""
    return np.array([_tokens(row, tokenizer) for row in rows], np.float32)


def _tokens(row: Row, tokenizer: Any) -> int:
    def render(messages: list[dict[str, Any]]) -> str:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    prompt = render(list(row.messages))
    try:
        encoded = tokenizer(prompt, add_special_tokens=False, return_offsets_mapping=True)
        offsets = np.asarray(encoded["offset_mapping"], np.int64).reshape(-1, 2)
        found = resolve(TEXTS[DATA], locate_messages(row.messages, prompt, render), offsets, len(offsets))
    except (SpanError, NotImplementedError):
        # A template that rewrites texts, or a tokenizer that does not say which characters a token is.
        return len(tokenizer(row.text, add_special_tokens=False)["input_ids"])
    return sum(end - begin for begin, end in found.tokens)
