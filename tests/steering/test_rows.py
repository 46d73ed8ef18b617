"""Files of examples: what can be used, and how mistakes are told, before any engine starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from guard.cli import app
from guard.steering.rows import RowsError, read_pairs, read_prompts

CHECKOUT = Path(__file__).parents[2]
GOOD = '{"positive": "Bonjour", "negative": "Hello"}'


def test_a_text_is_what_a_user_says_and_messages_are_taken_as_they_are(tmp_path: Path) -> None:
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Salut"}]
    file = tmp_path / "pairs.jsonl"
    file.write_text(f"{GOOD}\n\n{json.dumps({'positive': said, 'negative': 'Hello'})}\n")
    pairs = read_pairs(file)
    assert pairs.positive == (({"role": "user", "content": "Bonjour"},), tuple(said))
    assert pairs.negative == (({"role": "user", "content": "Hello"},),) * 2


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"positive": "a"}', "row 3: negative: is missing"),
        ('{"positive": "", "negative": "b"}', "row 3: positive.0.content: must have at least 1 character"),
        ('{"positive": "a", "negative": "\u200b "}', "row 3: negative.0.content: is blank"),
        ('{"positive": "a", "negative": "b", "positive": "c"}', "row 3: the key 'positive' is written twice"),
        ('{"positive": "a", "negative": []}', "row 3: negative: must have at least 1 item, not 0"),
        ('{"positive": "a", "negative": [{"role": "boss", "content": "b"}]}', "row 3: negative.0.role: must be"),
        ('{"positive": "a", "negative": "b", "label": 1}', "row 3: label: there is no such field"),
        ('{"positive": 4, "negative": "b"}', "row 3: positive: must be a list"),
        ('["a", "b"]', "row 3: the row: must be a mapping"),
        ('{"positive": "secret', "row 3: not JSON (Unterminated string"),
        ("[" * 100_000, "row 3: lists or objects in one another too deep"),
        ('{"positive": "secret", "negative": ' + "1" * 5000 + "}", "row 3: has a number of too many digits"),
    ],
)
def test_a_malformed_row_is_named_with_file_row_and_field_before_the_model_is_looked_for(
    tmp_path: Path, line: str, told: str
) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text(f"{GOOD}\n{GOOD}\n{line}\n")
    done = CliRunner().invoke(app, ["steer", "learn", "x", "--pairs", str(file), "--model", "/no/such/model"])
    assert done.exit_code == 1
    assert done.stderr.startswith(f"guard: {file}: {told}")
    assert "secret" not in done.stderr


def test_only_line_feeds_end_a_row(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one\u2028text\x85of one row"}\n{"prompt": "two"}', encoding="utf-8")
    assert [said[0]["content"] for said in read_prompts(file).conversations] == ["one\u2028text\x85of one row", "two"]


@pytest.mark.parametrize(("content", "told"), [(GOOD, "has 1 pairs"), ("", "has 0 pairs"), ("\xff", "is not UTF-8")])
def test_a_file_with_too_little_in_it_is_refused(tmp_path: Path, content: str, told: str) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(RowsError, match=told):
        read_pairs(file)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RowsError, match="cannot be read: No such file"):
        read_prompts(tmp_path / "none.jsonl")


def test_the_files_of_the_examples_can_be_read() -> None:
    assert read_prompts(CHECKOUT / "examples" / "prompts.jsonl").conversations
    for file in (CHECKOUT / "examples" / "pairs").glob("*.jsonl"):
        pairs = read_pairs(file)
        assert not set(map(str, pairs.positive)) & set(map(str, pairs.negative))
