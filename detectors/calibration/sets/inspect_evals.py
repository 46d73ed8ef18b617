"""inspect_evals: ordinary work as benign (writing briefs, assistants' questions, shell and web tasks, a bank's help
pages), and two benchmarks of attacks on agents (``ipi_coding_agent``, ``agent_threat_bench``)."""

from __future__ import annotations

import re
from typing import Any

from detectors.calibration.sets.content import Content, pick, shortened
from detectors.calibration.sources import Seed, Text
from detectors.calibration.wheels import read_json, read_jsonl

NAME = "inspect-evals"
ROOT = "inspect_evals"
WRITING_BRIEFS, QUESTIONS, WEB_TASKS, HELP_PAGES = 220, 220, 80, 90
LONGEST_CHARACTERS, LONGEST_CHINESE = 2400, 500
CJK = re.compile(r"[\u4e00-\u9fff]")


def content() -> Content:
    texts = [*_writing_briefs(), *_questions(), *_tasks(), *_coding_agent(), *_threats()]
    pages = pick(read_json(NAME, f"{ROOT}/tau2/data/domains/banking_knowledge/documents.json.gz"), HELP_PAGES, NAME)
    documents = [
        Seed(f"inspect-bank-{i:02}", f"inspect:bank-{i:02}", shortened(f"{p['title']}\n\n{p['content']}", 1500))
        for i, p in enumerate(pages)
    ]
    return Content(tuple(texts), tuple(documents))


def _benign(kind: str, number: int, text: str, lang: str = "en") -> Text:
    name = f"inspect-{kind}-{number:03}"
    return Text(name, NAME, f"inspect:{kind}-{number:03}", "benign", lang, text)


def _writing_briefs() -> list[Text]:
    briefs = [row["query"] for row in read_jsonl(NAME, f"{ROOT}/writingbench/benchmark_all.jsonl")]
    short = [
        text for text in briefs if 40 <= len(text) <= (LONGEST_CHINESE if CJK.search(text) else LONGEST_CHARACTERS)
    ]
    return [
        _benign("writing", i, text, "zh" if CJK.search(text) else "en")
        for i, text in enumerate(pick(short, WRITING_BRIEFS, "writing"))
    ]


def _questions() -> list[Text]:
    rows = [
        row["query"]
        for name in ("beneficial_samples", "cross_domain", "sycophancy")
        for row in read_jsonl(NAME, f"{ROOT}/persistbench/benchmark_samples/{name}.jsonl")
    ]
    return [_benign("question", i, text) for i, text in enumerate(pick(sorted(set(rows)), QUESTIONS, "questions"))]


def _tasks() -> list[Text]:
    web = sorted(
        {r["confirmed_task"] for r in read_json(NAME, f"{ROOT}/mind2web_sc/data/seeact/sample_labeled_all.json")}
    )
    shell = [row["description"] for row in read_json(NAME, f"{ROOT}/agent_bench/data/agent_bench_os_test.json")]
    return [
        *(_benign("web", i, text) for i, text in enumerate(pick(web, WEB_TASKS, "web"))),
        *(_benign("shell", i, text) for i, text in enumerate(pick(shell, WEB_TASKS, "shell"))),
    ]


def _coding_agent() -> list[Text]:
    """Bug reports and files that a coding agent reads; the file that has the injection, or the report."""
    texts = []
    for row in read_json(NAME, f"{ROOT}/ipi_coding_agent/dataset/samples.json"):
        carrier = _carrier(row)
        # Plain, hidden and authoritative wordings of one payload have its number.
        family = row["id"] if row["is_benign"] else f"{row['payload_category']}-{row['id'].split('-')[3]}"
        if carrier is not None:
            texts.append(
                Text(
                    f"inspect-{row['id']}",
                    NAME,
                    f"inspect:ipi-{family}",
                    "benign" if row["is_benign"] else "attack",
                    "en",
                    shortened(carrier, LONGEST_CHARACTERS),
                    pasted=True,
                )
            )
    return texts


def _carrier(row: dict[str, Any]) -> str | None:
    vector = row["injection_vector"]
    if vector in ("issue_text", "none"):
        return str(row["issue_text"])
    wanted = {"readme": "readme", "config_file": "", "code_comment": ".py"}[vector]
    marks = [mark for mark in str(row["payload_indicator"]).split("|") if mark]
    for path, text in row["repo_files"].items():
        if wanted in path.lower() and any(mark in text for mark in marks):
            return f"{path}\n\n{text}"
    return None


def _threats() -> list[Text]:
    """What an agent's memory, inbox or customer record holds, with the attack in it."""
    texts = []
    for name in ("memory_poison", "autonomy_hijack", "data_exfil"):
        for row in read_json(NAME, f"{ROOT}/agent_threat_bench/data/{name}.json"):
            store = row.get("memory_store") or row.get("inbox") or row.get("customer_db")
            lines = _lines(store)
            text = "\n".join(lines)
            texts.append(
                Text(f"inspect-{row['id']}", NAME, f"inspect:{row['attack_name']}", "attack", "en", text, pasted=True)
            )
    return texts


def _lines(node: Any) -> list[str]:
    if isinstance(node, dict):
        return [f"{key}: {value}" for key, value in node.items() if isinstance(value, str)]
    return [line for one in node or [] for line in [*_lines(one), ""]]
