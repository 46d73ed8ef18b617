"""The console in a real browser: with the keyboard, in both themes, on a phone, and with prompts that attack it."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest

from guard.data import data_folder, default_policy
from tests.console.conftest import Console, StartConsole
from tests.proxy.conftest import BLOCKED, CLEAN, FLAGGED, POLICY
from tests.proxy.engine import FakeEngine, running

playwright = pytest.importorskip("playwright.async_api", reason="needs playwright: make install")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")

DESK, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}

ATTACKS = (
    "<script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 2'>",
    "<svg onload=window.hacked=3>",
    "'\"><iframe srcdoc='<script>parent.hacked=4</script>'>",
    "</textarea></pre><details open ontoggle=window.hacked=5>",
    "javascript:window.hacked=6",
    "{{constructor.constructor('window.hacked=7')()}} ${window.hacked=8}",
    "<a href='javascript:window.hacked=9' autofocus onfocus=window.hacked=10>here</a>",
    "<style>@import 'http://127.0.0.1:9/x'; *{background:url(http://127.0.0.1:9/y)}</style>",
    "<meta http-equiv=refresh content='0;url=http://127.0.0.1:9/'><base href='http://127.0.0.1:9/'>",
    "\u202etxet\u0000\ufffe\u2028<b>x</b>",
)

WATCH = """
window.violations = [];
addEventListener('securitypolicyviolation', (event) => violations.push(event.violatedDirective));
"""


FITS = """
document.documentElement.scrollWidth <= innerWidth
  && [...document.querySelectorAll('table, dl, ol, ul')].every((one) => one.scrollWidth <= one.clientWidth + 1)
"""


def nth(number: int) -> str:
    """The line of one request, counted from 1 in the order in which they ended; the newest is at the top."""
    return f"table.requests tbody tr:nth-last-child({number})"


class Tab:
    """A page in which somebody has signed in with the keyboard, and what went wrong in it."""

    def __init__(self, page: Any, console: Console) -> None:
        self.page, self.console = page, console
        self.errors: list[str] = []
        self.elsewhere: list[str] = []
        page.on("console", lambda message: message.type == "error" and self.errors.append(message.text))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", self._asked)

    def _asked(self, request: Any) -> None:
        if not request.url.startswith(self.console.admin_url):
            self.elsewhere.append(request.url)

    async def sign_in(self) -> None:
        await self.page.goto(f"{self.console.admin_url}/console/")
        await self.page.wait_for_selector("form.sign-in input:focus")
        await self.page.keyboard.type(self.console.admin_key)
        await self.page.keyboard.press("Enter")
        await self.page.wait_for_selector("table.requests")

    async def press(self, *keys: str) -> None:
        for key in keys:
            await self.page.keyboard.press(key)

    async def text(self, selector: str) -> str:
        return str(await self.page.inner_text(selector))

    async def fits(self) -> bool:
        """Whether nothing stands out to the right, and no table or list is cut there."""
        return bool(await self.page.evaluate(FITS))

    async def check(self) -> None:
        """Nothing was broken, nothing was refused by the content security policy, nothing came from elsewhere."""
        assert (self.errors, self.elsewhere) == ([], [])
        assert await self.page.evaluate("violations") == []


@pytest.fixture
async def browser() -> AsyncIterator[Any]:
    async with playwright.async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        await browser.close()


@asynccontextmanager
async def opened(
    browser: Any, console: Console, size: dict[str, int] = DESK, scheme: str = "light"
) -> AsyncIterator[Tab]:
    context = await browser.new_context(viewport=size, color_scheme=scheme)
    await context.add_init_script(WATCH)
    tab = Tab(await context.new_page(), console)
    await tab.sign_in()
    yield tab
    await tab.check()


async def test_with_the_keyboard_alone_a_request_is_seen_as_it_ends_and_why(browser: Any, console: Console) -> None:
    console.engine.logit = CLEAN
    await console.chat()
    async with opened(browser, console) as tab:
        await tab.page.wait_for_selector(f"{nth(1)} .action-allow")
        console.engine.logit = BLOCKED
        _, headers, _ = await console.chat()
        await tab.page.wait_for_selector(f"{nth(2)} .action-block")  # by itself
        await tab.press("p")
        console.engine.logit = FLAGGED
        await console.chat()
        await tab.page.wait_for_selector("text=paused; 1 newer")
        assert await tab.page.locator(nth(3)).count() == 0
        await tab.press("p")
        await tab.page.wait_for_selector(nth(3))
        # Down to the second line, which is the block, and into it.
        await tab.press("j", "j", "Enter")
        await tab.page.wait_for_selector(".rule.decided")
        assert "stop" in await tab.text(".rule.decided")
        assert "0.900" in await tab.text(".rule.decided")
        assert await tab.page.title() == f"Request {headers['x-guard-request-id'][:8]} · mia-guard"
        outline = "getComputedStyle(document.activeElement).outlineStyle"
        await tab.press("Tab")
        assert await tab.page.evaluate(outline) != "none"
        await tab.press("Escape")
        await tab.page.wait_for_selector("table.requests")
        await tab.press("?")
        assert "along the tokens" in await tab.text("dialog[open]")
        await tab.press("Escape", "3")
        await tab.page.wait_for_selector(".calibration")
        # A filter leaves what fits it.
        await tab.press("1")
        await tab.page.click(".chip.action-block")
        assert await tab.page.locator("tbody tr").count() == 1


async def test_who_works_with_the_keyboard_stays_where_they_are_while_requests_come(
    browser: Any, console: Console
) -> None:
    for logit in (BLOCKED, CLEAN, BLOCKED, FLAGGED):
        console.engine.logit = logit
        await console.chat()
    focused = "document.activeElement.textContent"
    async with opened(browser, console) as tab:
        await tab.page.wait_for_selector(nth(4))
        await tab.press("f")
        assert await tab.page.evaluate(focused) == "block2"
        console.engine.logit = CLEAN
        await console.chat()
        await tab.page.wait_for_selector(nth(5))
        assert await tab.page.evaluate(focused) == "block2"
        # From one request to the next means of those that are listed.
        await tab.press("Enter", "j", "Enter")
        await tab.page.wait_for_selector("h1 .action-block")
        first = await tab.text("dl.facts div:last-child dd")
        await tab.press("j")
        await tab.page.wait_for_selector(f"dl.facts:not(:has-text('{first}'))")
        assert await tab.text("h1") == "block"
        await tab.press("2")
        await tab.page.wait_for_selector("form.playground")
        # The first stop of all passes over the bar, and stays in the view.
        await tab.page.focus(".skip")
        await tab.press("Enter")
        assert await tab.page.evaluate("document.activeElement.id") == "main"
        assert await tab.page.locator("form.playground").count() == 1
        # What was looked into can be gone along at once.
        await tab.page.fill("[name=prompt]", "a few words")
        await tab.press("Control+Enter")
        await tab.page.click(".outcome a")
        await tab.page.wait_for_selector(".message")
        await tab.press("i")
        await tab.page.wait_for_selector(".tokens .token.at")
        before = await tab.text(".readout")
        await tab.press("ArrowLeft")
        assert await tab.text(".readout") != before


async def test_a_list_goes_back_to_the_line_that_was_looked_at(browser: Any, console: Console) -> None:
    for _ in range(60):
        await console.chat()
    async with opened(browser, console) as tab:
        await tab.page.wait_for_selector(nth(60))
        await tab.press(*["j"] * 50)
        next_ = "document.activeElement.closest('tr').nextElementSibling.dataset.id"
        id_ = await tab.page.evaluate(next_)
        await tab.press("Enter")
        await tab.page.wait_for_selector("dl.facts")
        assert await tab.page.evaluate("scrollY") == 0
        await tab.press("j")
        await tab.page.wait_for_selector(f"dl.facts:has-text('{id_}')")
        await tab.press("Escape")
        await tab.page.wait_for_selector(f"tr[data-id='{id_}'] a:focus")
        assert await tab.page.evaluate("scrollY") > 0


async def test_a_page_that_stays_open_says_when_a_change_of_the_policies_is_refused(
    browser: Any, console: Console
) -> None:
    await console.chat()
    file = console.services.policies.path / "test.yaml"
    good = file.read_text()
    async with opened(browser, console, PHONE) as tab:
        await tab.page.clock.install()
        await tab.page.reload()
        await tab.page.wait_for_selector(nth(1))
        for text, refused in ((good + "nonsense: 1\n", True), (good, False)):
            file.write_text(text)
            await asyncio.to_thread(console.services.policies.reload)
            await tab.page.clock.fast_forward(11_000)
            await tab.page.wait_for_selector("#alert:has-text('test.yaml')", state="visible" if refused else "detached")
            assert await tab.page.locator("#alert").is_visible() == refused
            assert await tab.fits()


async def test_why_a_request_was_refused_is_in_the_list(browser: Any, console: Console) -> None:
    assert (await console.post(headers={"authorization": "Bearer guessed"}))[0] == 401
    async with opened(browser, console) as tab:
        await tab.page.wait_for_selector(nth(1))
        assert await tab.text(f"{nth(1)} .named") == "refused: invalid api key"


BESIDE = """
async (pairs) => {
  const { score } = await import("/console/static/format.js");
  return pairs.map(([one, other]) => [score(one, other), score(other, one)]);
}
"""


async def test_no_score_is_rounded_to_1_or_onto_its_threshold(browser: Any, console: Console) -> None:
    console.engine.logit = 9.5  # 0.999925
    await console.chat()
    random = Random(0)  # noqa: S311
    pairs = [(random.random(), random.random()) for _ in range(100)]
    pairs += [(one, min(1.0, one + 10 ** -random.uniform(2, 15))) for one, _ in pairs] + [(0.5, 0.5), (1.0, 1.0)]
    async with opened(browser, console) as tab:
        await tab.page.wait_for_selector(nth(1))
        assert "0.9999" in await tab.text(f"{nth(1)} .score .number")
        await tab.page.click(nth(1))
        await tab.page.wait_for_selector(".rule.decided")
        for place in (".rule.decided .asked b", ".detectors b"):
            assert await tab.text(place) == "0.9999"
        for (one, other), told in zip(pairs, await tab.page.evaluate(BESIDE, pairs), strict=True):
            mine, beside = map(float, told)
            assert ((mine < beside), (mine > beside)) == ((one < other), (one > other)), (one, other, told)
            assert (mine == 1, beside == 1) == (one == 1, other == 1)


async def test_what_clients_write_is_text_and_a_prompt_is_tried_and_looked_into(browser: Any, console: Console) -> None:
    for attack in ATTACKS:
        await console.chat(model=attack)
    console.engine.logit = BLOCKED
    async with opened(browser, console) as tab:
        await tab.page.wait_for_selector(nth(len(ATTACKS)))
        assert ATTACKS[0] in await tab.text(f"{nth(1)} td.model")
        await tab.page.click(nth(2))
        await tab.page.wait_for_selector("dl.facts")
        assert ATTACKS[1] in await tab.text("dl.facts")
        await tab.press("2")
        await tab.page.wait_for_selector("form.playground")
        await tab.page.fill("[name=prompt]", "\n".join(ATTACKS))
        await tab.press("Control+Enter")
        await tab.page.wait_for_selector(".outcome:nth-child(2)")
        assert [await one.inner_text() for one in await tab.page.query_selector_all(".outcome h2")] == [
            "test",
            "second",
        ]
        await tab.page.click(".outcome:nth-child(2) a")
        await tab.page.wait_for_selector(".message")
        shown = await tab.page.text_content("main")
        assert all(attack.split("\u0000")[0] in shown for attack in ATTACKS)
        await tab.press("i")
        await tab.page.wait_for_selector(".tokens .of-answer")
        colours = "[...document.querySelectorAll('.token')].map((one) => +one.style.getPropertyValue('--heat'))"
        heat = await tab.page.evaluate(colours)
        assert heat == sorted(heat)
        assert heat[-1] > 0.9
        before = await tab.text(".readout")
        await tab.page.focus(".tokens")
        await tab.press("ArrowLeft")
        assert await tab.text(".readout") != before
        assert await tab.page.evaluate("window.hacked") is None


async def test_values_of_a_text_that_was_changed_are_said_to_be_of_another(
    browser: Any, start_console: StartConsole
) -> None:
    policy = POLICY + "capture: {prompt: true, patterns: {colour: blue}}\n"
    async with running(FakeEngine()) as engine, start_console(engine, policy) as console:
        for words in ("I like blue", "I like red"):
            await console.chat(messages=[{"role": "user", "content": words}])
        await console.entries(2)
        async with opened(browser, console) as tab:
            for number, changed in ((1, 1), (2, 0)):
                await tab.page.click(nth(number))
                await tab.page.click("button:has-text('Look inside')")
                await tab.page.wait_for_selector(".tokens")
                assert await tab.page.locator("text=Not the text that was judged (taken out").count() == changed
                await tab.press("Escape")


CUT = """
() => [...document.querySelectorAll("select")].filter((one) => {
  const alone = one.cloneNode(false);
  alone.append(one.selectedOptions[0].cloneNode(true));
  alone.style.cssText = "position: absolute; flex: none; max-width: none";
  document.body.append(alone);
  const needs = alone.offsetWidth;
  alone.remove();
  return needs > one.offsetWidth;
}).map((one) => one.selectedOptions[0].text)
"""
"""What is chosen, of each choice that has no room for it."""


async def test_more_requests_than_a_table_begins_with_are_shown_when_somebody_asks(
    browser: Any, console: Console
) -> None:
    for _ in range(270):
        await console.chat()
    async with opened(browser, console) as tab:
        await tab.page.wait_for_selector("text=270 requests")
        assert await tab.page.locator("tr[data-id]").count() == 250
        await tab.page.click("text=20 older requests: show more")
        await tab.page.wait_for_selector(nth(270))
        assert not await tab.page.locator("button.more").is_visible()


async def test_it_fits_a_desk_and_a_phone_in_both_themes(browser: Any, console: Console) -> None:
    console.engine.logit = FLAGGED
    await console.chat(model="a-model-with-a-rather-long-name-" * 4)
    for size, scheme in ((DESK, "dark"), (PHONE, "light")):
        async with opened(browser, console, size, scheme) as tab:
            await tab.page.wait_for_selector(nth(1))
            paper = await tab.page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
            bright = sum(int(part) for part in paper.removeprefix("rgb(").removesuffix(")").split(","))
            assert (bright < 384) == (scheme == "dark")
            assert await tab.fits()
            assert await tab.page.evaluate(CUT) == []
            await tab.page.click(nth(1))
            await tab.page.wait_for_selector(".rules")
            assert await tab.fits()
            for key, selector in (("2", "form.playground"), ("3", ".calibration")):
                await tab.press(key)
                await tab.page.wait_for_selector(selector)
                assert await tab.fits()


async def test_every_score_and_figure_of_a_real_policy_is_seen_on_phones_and_tablets(
    browser: Any, start_console: StartConsole
) -> None:
    policy = default_policy().read_text().replace("name: default", "name: test")
    real: dict[str, Any] = {"config_key": "SmolLM2-135M-Instruct", "model_configs": data_folder("model_configs")}
    async with (
        running(FakeEngine()) as engine,
        start_console(engine, policy, **real) as console,
    ):
        await console.chat()
        for width in (320, PHONE["width"], 720):
            async with opened(browser, console, {**PHONE, "width": width}) as tab:
                await tab.page.wait_for_selector(nth(1))
                assert await tab.fits()
                await tab.press("3")
                await tab.page.wait_for_selector(".calibration .figures")
                assert await tab.page.locator(".figures tbody tr").count() > 6
                assert await tab.fits()
