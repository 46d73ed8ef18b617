"""Which columns a question needs, from one attention head: ``python examples/schema_linking.py``.

The schema and the questions are those of ``clinic.yaml`` beside this file; the head is the one that
``python -m bench.uses.schema_linking`` chose.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml
from arguments import share, whole
from door import door, parser

from guard.mia.engine_config import EngineConfig
from guard.uses.schema_linking import Column, link

HEAD = (25, 4)
"""Layer, counted from 1, and head of SmolLM2-135M-Instruct."""


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__, EngineConfig(attention_heads=(HEAD,)))
    made.add_argument("--top-p", type=share, default=0.2)
    made.add_argument("--head", type=whole(0), nargs=2, default=HEAD, help="layer from 1, and head from 0")
    made.add_argument("--questions", type=whole(1), default=6)
    options = made.parse_args(arguments)
    clinic = yaml.safe_load((Path(__file__).parent / "clinic.yaml").read_text())
    columns = [Column(name, table) for table, names in clinic["tables"].items() for name in names]
    layer, head = options.head
    if layer == 0:
        made.error("argument --head: layers count from 1")
    with door(options, EngineConfig(attention_heads=((layer, head),))) as ask:
        for one in clinic["measure"][: options.questions]:
            linked = link(ask, (layer, head), one["question"], columns, top_p=options.top_p)
            print(one["question"])
            print("  chosen:", ", ".join(columns[i].text for i in linked.selected))
            print("  needed:", ", ".join(one["needed"]))


if __name__ == "__main__":  # vLLM starts processes of its own
    main()
