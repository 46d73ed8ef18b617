"""The notebook runs from its first cell to its last, and its committed outputs are those of its code."""

from __future__ import annotations

import copy
import os
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import nbformat
import pytest
from nbclient import NotebookClient

from guard.machine import vllm_build
from guard.models import pull

pytestmark = pytest.mark.engine

CHECKOUT = Path(__file__).parents[2]
NOTEBOOK = CHECKOUT / "examples" / "notebooks" / "story.ipynb"
LIMIT_S = 600
"""For one cell, on a machine with a lot else to do."""


def shown(cell: Any) -> list[str]:
    """What a cell put out, without numbers: text as it is, and of pictures their words."""
    texts = []
    for output in cell.outputs:
        if output.output_type == "stream" and output.name == "stdout":
            texts.append(output.text)
        elif output.output_type == "display_data":
            texts += re.findall(r"<text[^>]*>([^<]*)</text>", output.data["image/svg+xml"])
    return [re.sub(r"-?\d+(\.\d+)?", "#", text) for text in texts]


def test_the_notebook_runs_and_its_committed_outputs_are_what_it_puts_out() -> None:
    if vllm_build() is None:
        pytest.skip("needs vLLM: make install")
    pull("smollm2-135m")
    committed = nbformat.read(NOTEBOOK, as_version=4)
    fresh = copy.deepcopy(committed)
    for cell in fresh.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    environment = {"PYTHONPATH": str(CHECKOUT), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with patch.dict(os.environ, environment):
        NotebookClient(fresh, timeout=LIMIT_S, resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
    for before, after in zip(committed.cells, fresh.cells, strict=True):
        if before.cell_type == "code":
            assert [len(part) > 0 for part in (shown(before), shown(after))] in ([True, True], [False, False])
            # Of text that the model writes a word may differ from one processor to the next.
            if "generated" not in before.metadata.get("tags", ()):
                assert shown(after) == shown(before), before.source


def test_the_committed_notebook_was_run_whole_and_in_order() -> None:
    cells = [cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    pictures = [output for cell in cells for output in cell.outputs if output.output_type == "display_data"]
    assert len(pictures) >= 3
    assert not [output for cell in cells for output in cell.outputs if output.output_type == "error"]
