"""The first pages tell the truth: links lead somewhere, commands exist, the example policy loads."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
import typer.main

import guard
from guard.cli import app
from guard.data import default_policy
from guard.policy import load_policy
from guard.proxy.keys import read_keys
from guard.reference import reference
from guard.settings import load_settings

CHECKOUT = Path(__file__).parent.parent
PAGES = sorted([*CHECKOUT.glob("*.md"), *(CHECKOUT / "docs").rglob("*.md")])
README = (CHECKOUT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(CHECKOUT).as_posix())
def test_links_to_files_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert missing == []


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(CHECKOUT).as_posix())
def test_links_to_headings_lead_to_one(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", page.read_text(encoding="utf-8"))
    inside = [(name, anchor) for name, anchor in targets if not name or ("://" not in name and name.endswith(".md"))]
    missing = [(name, anchor) for name, anchor in inside if anchor not in anchors(page.parent / name if name else page)]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(CHECKOUT).as_posix())
def test_commands_of_the_guard_that_pages_name_exist(page: Path) -> None:
    known = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    named = set(re.findall(r"(?:^|`|/)guard ([a-z]+)", page.read_text(encoding="utf-8"), re.MULTILINE))
    assert named <= known


@pytest.mark.parametrize("page", [*PAGES, CHECKOUT / "deploy" / "README.md"], ids=lambda page: page.name)
def test_commands_to_copy_are_where_make_install_puts_them(page: Path) -> None:
    blocks = re.findall(r"^```[a-z]*\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert re.findall(r"^ *(?:\$ )?guard [a-z]+", "\n".join(blocks), re.MULTILINE) == []


def test_targets_of_make_that_pages_name_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (CHECKOUT / "Makefile").read_text(), re.MULTILINE))
    named = {name for page in PAGES for name in re.findall(r"(?:^|`)make ([a-z]+)", page.read_text(), re.MULTILINE)}
    assert {"demo", "test"} <= named <= targets


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150


def test_the_policy_in_the_readme_is_a_policy(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    (tmp_path / "readme.yaml").write_text(text)
    shown = load_policy(tmp_path / "readme.yaml").policy
    shipped = {rule.name: rule for rule in load_policy(default_policy()).policy.rules}
    assert [rule.action for rule in shown.rules] == ["block", "steer"]
    for rule in shown.rules:
        assert (rule.when, rule.action, rule.steer) == (
            shipped[rule.name].when,
            shipped[rule.name].action,
            shipped[rule.name].steer,
        )


def test_the_answer_in_the_readme_is_the_shipped_policys() -> None:
    assert re.findall(r"default@([0-9a-f]{12})", README) == [load_policy(default_policy()).hash[:12]]


def test_the_settings_and_the_keys_in_the_operators_page_can_be_read(tmp_path: Path) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (CHECKOUT / "docs" / "operations.md").read_text(), re.DOTALL)
    (settings,) = [block for block in blocks if "upstream:" in block]
    (keys,) = [block for block in blocks if "tenants:\n" in block]
    (tmp_path / "guard.yaml").write_text(settings)
    (tmp_path / "keys.yaml").write_text(keys)
    assert len(load_settings(config=tmp_path / "guard.yaml").upstream) == 2
    assert read_keys(tmp_path / "keys.yaml").tenants["acme"].limits.concurrent == 64


def test_every_known_failure_of_others_is_answered_once() -> None:
    page = (CHECKOUT / "docs" / "known-failures-of-others.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \|.*\| ([^|]+) \|$", page, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 51))
    for number, answer in rows:
        assert re.search("[Hh]andled|Impossible|Open", answer), number
        assert "`test_" in answer or not re.search("[Hh]andled", answer), number


def test_the_tests_that_pages_name_exist() -> None:
    written = "".join(file.read_text(encoding="utf-8") for file in (CHECKOUT / "tests").rglob("test_*.py"))
    known = set(re.findall(r"def (test_\w+)\(", written))
    named = {page.name: set(re.findall(r"`(test_\w+)`", page.read_text(encoding="utf-8"))) for page in PAGES}
    assert {page: sorted(tests - known) for page, tests in named.items() if tests - known} == {}


def test_no_page_has_a_placeholder() -> None:
    assert [page.name for page in PAGES if re.search(r"@@|TODO|TBD|\bXXX\b", page.read_text(encoding="utf-8"))] == []


def test_the_version_is_the_same_everywhere() -> None:
    declared = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["version"]
    newest = re.findall(r"^## (\d+\.\d+\.\d+)", (CHECKOUT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    assert guard.__version__ == declared == newest


@pytest.mark.engine
def test_the_python_example_in_the_readme_prints_what_it_should(
    proxy_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(program.replace("http://127.0.0.1:8080", proxy_url), {})  # noqa: S102 - our own page
    assert capsys.readouterr().out.splitlines() == [
        "allow The capital of France is Paris.",
        "content_filter This request looks like an attempt to override the assistant's instructions. (rule injection)",
    ]


def test_the_api_page_is_what_the_code_says() -> None:
    page = (CHECKOUT / "docs" / "api.md").read_text(encoding="utf-8")
    assert page == reference(), "run: python -m guard.reference > docs/api.md"


def test_every_cell_about_a_peer_names_its_source_and_the_sources_date() -> None:
    text = (CHECKOUT / "docs" / "comparison.md").read_text(encoding="utf-8")
    sources = dict(re.findall(r"^\| \*\*(\w+)\*\* \| .+ \| (.+) \|$", text, re.MULTILINE))
    assert [mark for mark, date in sources.items() if not re.search(r"20\d\d", date)] == []
    used = set()
    for heading in ("Inside the model", "Guardrail proxies"):
        table = text.partition(f"## {heading}\n")[2].partition("\n\n")[0].splitlines()
        for row in table[2:]:
            _, *peers, ours = row.strip("| ").split(" | ")
            assert re.search(r"\]\([^)]+\)", ours), f"no page says how: {ours}"
            for cell in peers:
                found = re.search(r" \*\*(\w+)\*\*$", cell)
                assert found, cell
                used.add(found[1])
    assert used == sources.keys()


@pytest.mark.parametrize("picture", ["console-request.png", "console-requests.png"])
def test_the_consoles_pictures_show_the_thresholds_that_ship(picture: str) -> None:
    """Taken again by ``python -m bench.console_picture``, which writes what they show into them."""
    image = pytest.importorskip("PIL.Image", reason="needs Pillow: make install")
    with image.open(CHECKOUT / "docs" / picture) as opened:
        shown = json.loads(opened.info["thresholds"])
    for kind, thresholds in shown.items():
        config = json.loads((CHECKOUT / "model_configs" / kind / "SmolLM2-135M-Instruct.json").read_text())
        shipped = {name: one["value"] for name, one in config["calibration"]["thresholds"].items()}
        assert thresholds == pytest.approx(shipped), kind
    assert set(shown) == {"probe", "attention_tracker"}
