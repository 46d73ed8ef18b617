"""What chat templates write between messages, where it stands in a message's own text: the model then reads turns that
nobody took, and its prompt seems to end behind words that others have not said.

Owns how these marks are spelt, by the families of templates that are in use; whichever is served, and whether its
tokenizer reads them in texts, is not known here. Never decides anything.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from guard.policy.measuring import Part

MARK = re.compile(
    r"<\|[\w /.:-]{1,48}\|?>"  # ChatML, Llama 3 and 4, Phi, GLM, Granite, Command R, gpt-oss, and <|turn> of Gemma 4
    r"|<[\w /.:-]{1,48}\|>"  # <turn|> of Gemma 4
    r"|<\uff5c[^<>\uff5c]{1,48}\uff5c>"  # DeepSeek
    r"|\[\|[\w /.:-]{1,48}\|\]"  # EXAONE
    r"|<(?:start|end)_of_(?:turn|utterance)>"  # Gemma 2 and 3, SmolVLM
    r"|\[/?(?:INST|SYSTEM_PROMPT|TOOL_RESULTS|TOOL_CALLS|AVAILABLE_TOOLS|TOOL_CONTENT|TOOL_CALL_ID|ARGS)\]"  # Mistral
    r"|<</?SYS>>"  # Llama 2
    r"|</?s>|<(?:bos|eos)>|<extra_id_\d{1,2}>"  # Llama 2 and Mistral, Gemma, Nemotron
)
"""As tokenizers take them: letter by letter."""

HINT = re.compile(r'[<|]|uff5c|\[[A-Z/"]|\\\\u00')
"""What a request has, written as JSON in ASCII, in which any of these may be, in parts too. Most have none."""

ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|/)")
"""Arguments of tools are JSON in a text, which templates show as it is read."""


def may_mark_turns(fields: Mapping[str, Any]) -> bool:
    """Whether the texts of a request are worth a look."""
    return HINT.search(json.dumps(fields, separators=(",", ":"), default=str)) is not None


def marks_turns(texts: Iterable[Part]) -> bool:
    """Whether a text of a conversation has such a mark; of a message's parts also where templates join them."""
    for _, parts in groupby(texts, key=lambda one: one[0]):
        written = [text for _, _, text in parts]
        if any(MARK.search(_read(text)) for text in (*written, "".join(written))):
            return True
    return False


def _read(text: str) -> str:
    return ESCAPE.sub(lambda found: chr(int(found[1] or "2f", 16)), text) if "\\" in text else text
