"""The figures in the pages of the uses are those of the recorded results, their servers those of the examples."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import yaml

from bench.uses.ranking import difference
from guard.mia.engine_config import EngineConfig

CHECKOUT = Path(__file__).parent.parent.parent
PAGES = CHECKOUT / "docs" / "use-cases"


def result_of(page: str) -> tuple[str, Any]:
    text = (PAGES / page).read_text(encoding="utf-8")
    (file,) = set(re.findall(r"\]\(\.\./\.\./(bench/results/[^)]+\.json)\)", text))
    return text, json.loads((CHECKOUT / file).read_text())


def cells(text: str, name: str) -> list[str]:
    (row,) = re.findall(rf"^\| {re.escape(name)} \| (.+) \|$", text, re.MULTILINE)
    return [cell.strip() for cell in row.split("|")]


def test_the_rerankers_figures_are_the_recorded_ones() -> None:
    text, result = result_of("reranking.md")
    names = {
        "core": "CoRe, 8 of 270 heads",
        "bm25": "BM25",
        "core without N/A": 'CoRe without "N/A"',
        "all heads": 'all heads, with "N/A"',
        "prompt's order": "the order in the prompt",
    }
    assert names.keys() == result["quality"].keys()
    for name, shown in names.items():
        quality = result["quality"][name]
        expected = [f"{quality['ndcg_at_10']:.3f}", f"{quality['mrr_at_10']:.3f}", f"{100 * quality['first']:.0f} %"]
        assert cells(text, shown) == expected, name
    gap = result["ndcg_core_minus_bm25"]
    assert f"difference of nDCG {gap['mean']:.3f}, 95 % interval {gap['low']:.3f} to {gap['high']:.3f}" in text
    assert f"{100 * result['recall_at_10_of_candidates']:.0f} % of cases" in text
    ranks = result["ranks"]
    for other in ("all heads", "core without N/A"):
        more = difference(ranks["core"], ranks[other])
        assert f"({more['mean']:.3f}, interval {more['low']:.3f} to {more['high']:.3f})" in text
    loss = result["quality"]["core"]["ndcg_at_10"] - result["quality"]["all heads"]["ndcg_at_10"]
    assert f"cost\n[{loss:.3f} nDCG@10]" in (CHECKOUT / "docs" / "comparison.md").read_text(encoding="utf-8")


def test_schema_linkings_figures_are_the_recorded_ones() -> None:
    text, result = result_of("schema-linking.md")
    names = {
        "head, top_p 0.2": "layer 25, head 4, `top_p` 0.2",
        "head, top_p 0.8": "the same, `top_p` 0.8",
        "mean of all heads, top_p 0.8": "mean of all heads, `top_p` 0.8",
        "shared words": "words shared with the question, `top_p` 0.8",
    }
    for name, shown in names.items():
        quality = result["quality"][name]
        assert cells(text, shown) == [
            f"{100 * quality['precision']:.0f} %",
            f"{100 * quality['recall']:.0f} %",
            f"{quality['selected']:.1f}",
            f"{quality['average_precision']:.2f}",
        ], name
    best = result["heads_by_average_precision_on_choose"][0]
    assert f"layer {best['layer']}, head {best['head']}, " in text
    assert result["questions"] == {"choose": 20, "measure": 32}
    clinic = yaml.safe_load((CHECKOUT / "examples" / "clinic.yaml").read_text(encoding="utf-8"))
    columns = sum(map(len, clinic["tables"].values()))
    assert (len(clinic["choose"]), len(clinic["measure"]), columns) == (20, 32, result["columns"])
    assert f"Our own schema, {columns} columns, and {20 + 32} questions" in text


@pytest.mark.parametrize(
    ("page", "example"),
    [
        ("reranking.md", "rerank"),
        ("schema-linking.md", "schema_linking"),
        ("hidden-states.md", "hidden_states"),
        ("capture-at-scale.md", "capture_at_scale"),
        ("steering-language.md", "steering_language"),
        ("instruction-following.md", "instruction_following"),
        ("detectors-offline.md", "detectors_offline"),
    ],
)
def test_each_page_has_the_server_that_its_examples_help_names(
    page: str, example: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(CHECKOUT / "examples"))
    for module in ("arguments", "door", "steering_door", example):
        sys.modules.pop(module, None)
    with pytest.raises(SystemExit, match="0"):
        importlib.import_module(example).main(["--help"])
    command, then = capsys.readouterr().out.split("leave out the last line:\n\n")[1].split("\n\nThen add: ")
    (config,) = re.findall(r"--additional-config '(.+)'", command)
    assert EngineConfig.model_validate(json.loads(config)["mia"]) != EngineConfig()
    text = (PAGES / page).read_text(encoding="utf-8")
    assert f"```\n{command}\n```" in text
    assert f".venv/bin/python examples/{example}.py {then.strip()}\n" in text


def test_each_server_that_a_page_starts_names_the_plugin_without_which_it_has_no_routes() -> None:
    pages = [*(CHECKOUT / "docs").rglob("*.md"), CHECKOUT / "README.md"]
    blocks = [block for page in pages for block in re.findall(r"```\w*\n(.*?)```", page.read_text("utf-8"), re.DOTALL)]
    servers = [block for block in blocks if "guard.mia.server.MiaMiddleware" in block and "api_server" in block]
    assert len(servers) >= 8
    assert all("VLLM_PLUGINS=mia " in block for block in servers)


Load = Callable[[type[BaseHTTPRequestHandler]], str]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Load:
    """The line with which a steering example ends that loads a vector into a server with these answers."""
    monkeypatch.syspath_prepend(str(CHECKOUT / "examples"))
    for module in ("arguments", "door", "steering_door"):
        sys.modules.pop(module, None)
    steering = importlib.import_module("steering_door")

    def load(answers: type[BaseHTTPRequestHandler]) -> str:
        with HTTPServer(("127.0.0.1", 0), answers) as server:
            Thread(target=server.serve_forever, daemon=True).start()
            url = f"http://127.0.0.1:{server.server_port}/v1"
            options = steering.steering_parser("", 2).parse_args(["--base-url", url, "--vectors", str(tmp_path)])
            with (
                pytest.raises(SystemExit, match="2"),
                steering.steering_door(options, steering.steering_taps(2, tmp_path)) as door,
            ):
                door.load("french", np.ones(4, np.float32))
            server.shutdown()
        (line,) = capsys.readouterr().err.splitlines()
        return line

    return load


def test_a_server_without_the_routes_for_vectors_is_one_line_that_says_what_to_start_it_with(load: Load) -> None:
    assert re.search("/v1/mia/vectors.+VLLM_PLUGINS=mia", load(NoRoutes))


def test_a_server_that_has_an_older_vector_of_that_name_in_its_own_folder_is_not_steered_by_it(
    load: Load, tmp_path: Path
) -> None:
    line = load(HasAnother)
    assert f"another vector 'french' than the one just written: --vectors, {tmp_path}, must be the server's" in line


class NoRoutes(BaseHTTPRequestHandler):
    def do_PUT(self) -> None:
        self.send_error(404)

    def log_message(self, format: str, *args: object) -> None:
        pass


class HasAnother(NoRoutes):
    def do_PUT(self) -> None:
        digest = hashlib.sha256(np.zeros(4, np.float32).tobytes()).hexdigest()
        body = json.dumps({"object": "mia.vector", "name": "french", "sha256": digest}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
