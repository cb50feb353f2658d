"""The page in a real browser: it loads, streams, stops, asks again, and says what the engine does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, Page, browser
from fakes import THINKS, FakeEngine, Served, served


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    with served(FakeEngine(template=THINKS)) as running:
        yield running


@pytest.fixture
def page(chromium: Browser, server: Served) -> Iterator[Page]:
    """The page of the server, ready; afterwards it has asked nobody else, and its console has no complaint."""
    opened = chromium.page()
    opened.ask("Storage.clearDataForOrigin", origin=server.url, storageTypes="local_storage")
    opened.open(server.url)
    opened.until("document.getElementById('state').textContent === 'ready'")
    yield opened
    opened.js("1")  # takes the last events
    requests, complaints = opened.requests, opened.complaints
    opened.ask("Page.close")
    assert all(each["url"].startswith(server.url) for each in requests)
    assert complaints == []


def ask(page: Page, text: str) -> None:
    page.type("#input", text)
    page.press("Enter")


def last(page: Page, part: str = ".body") -> str:
    text: str = page.js(f"[...document.querySelectorAll('.assistant {part}')].at(-1)?.innerText ?? ''")
    return text


def asked(page: Page) -> list[dict[str, Any]]:
    """The bodies of all chats that the page has asked for."""
    return [json.loads(each["postData"]) for each in page.requests if each["url"].endswith("/v1/chat/completions")]


def answered(page: Page) -> None:
    page.until("document.querySelector('.assistant') && !document.querySelector('.busy')")


def test_an_answer_comes_piece_by_piece(server: Served, page: Page) -> None:
    server.engine.say = lambda prompt, index: "One **two** `three`.\n\n```\n<b>four</b>\n```\nfive"
    server.engine.delay = 0.02
    ask(page, "Hello\nthere")
    sizes = set()
    while page.js("!document.querySelector('.again')"):
        sizes.add(len(last(page)))
    assert len(sizes) > 3
    assert "One two three." in last(page) and "<b>four</b>" in last(page)  # text, never HTML
    for tag in ("strong", "code", "pre"):
        assert page.js(f"document.querySelector('.assistant {tag}') !== null")
    assert page.js("document.querySelector('.assistant b')") is None
    assert "tokens, first after" in last(page, ".foot")
    assert page.js("document.activeElement.id") == "input"
    (body,) = asked(page)
    assert body["messages"] == [{"role": "user", "content": "Hello\nthere"}]
    assert "temperature" not in body and body["stream"] is True


def test_a_conversation(server: Served, page: Page) -> None:
    server.engine.say = lambda prompt, index: f"answer {len(server.engine.asked)}"
    ask(page, "first")
    answered(page)
    ask(page, "second")
    page.until("document.querySelectorAll('.assistant .again').length === 1 && !document.querySelector('.busy')")
    assert asked(page)[-1]["messages"] == [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "answer 1"},
        {"role": "user", "content": "second"},
    ]
    page.click(".again")
    page.until("[...document.querySelectorAll('.assistant .body')].at(-1).innerText === 'answer 3'")
    answered(page)
    assert asked(page)[-1]["messages"] == asked(page)[-2]["messages"]  # the answer that was not liked is forgotten
    assert page.js("document.querySelectorAll('.assistant').length") == 2
    page.click("#clear")
    assert page.js("document.querySelectorAll('.message').length") == 0
    ask(page, "anew")
    answered(page)
    assert asked(page)[-1]["messages"] == [{"role": "user", "content": "anew"}]


@pytest.mark.parametrize("how", ["button", "key"])
def test_stop(server: Served, page: Page, how: str) -> None:
    server.engine.say = lambda prompt, index: "word " * 200
    server.engine.delay = 0.02
    ask(page, "go on")
    page.until("document.querySelector('.assistant .body')?.innerText.length > 10")
    if how == "button":
        page.click("#stop")
    else:
        page.press("Escape")
    answered(page)
    assert server.idle(2)  # the engine too has stopped
    assert "stopped" in last(page, ".foot") and last(page).startswith("word word")
    server.engine.delay = 0.0
    server.engine.say = lambda prompt, index: "whole"
    page.click(".again")
    page.until("[...document.querySelectorAll('.assistant .body')].at(-1).innerText === 'whole'")


def test_options_reach_the_engine_and_are_remembered(server: Served, page: Page) -> None:
    given = {"temperature": 0.5, "max_tokens": 7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3}
    given |= {"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.2}
    for name, value in given.items():
        page.type(f"[data-name={name}]", str(value))
        page.press("Tab")
    page.type("[data-name=stop]", "END")
    page.type("#system", "Be brief.")
    ask(page, "hi")
    answered(page)
    params = server.engine.asked[-1]["params"]
    assert {name: getattr(params, name) for name in given} == given
    assert params.stop == ("END",)
    assert asked(page)[-1]["messages"][0] == {"role": "system", "content": "Be brief."}
    assert "cut off by its limit" in last(page, ".foot")
    page.open(server.url)
    assert page.js("document.querySelector('[data-name=top_k]').value") == "5"
    page.click("#reset")
    ask(page, "hi")
    answered(page)
    assert server.engine.asked[-1]["params"].top_k != 5


def test_reasoning_is_shown_apart(server: Served, page: Page) -> None:
    server.engine.say = lambda prompt, index: "<think>\nI wonder.\n</think>\n\nSo it is."
    ask(page, "why")
    answered(page)
    assert page.js("document.querySelector('.assistant details').textContent") == "ReasoningI wonder."
    assert page.js("document.querySelector('.assistant .body > p').innerText") == "So it is."


def test_what_fails_is_said_and_can_be_tried_again(server: Served, page: Page) -> None:
    server.engine.error, server.engine.error_after = RuntimeError("secret"), 3
    ask(page, "hi")
    answered(page)
    assert page.js("document.querySelector('.assistant').className") == "message assistant error"
    assert "internal error" in last(page) and "secret" not in last(page)
    server.engine.error = None
    page.click(".again")
    answered(page)
    assert "and no other" in last(page)


def test_the_panel(server: Served, page: Page) -> None:
    def text(id: str) -> str:
        found: str = page.js(f"document.getElementById('{id}').innerText")
        return found

    assert text("kv-text") == "5 of 50 blocks"
    assert page.js("document.querySelector('#kv i').style.width") == "10%"
    bars = page.js("[...document.querySelectorAll('#ranks .bar')].map(bar => bar.getAttribute('aria-label'))")
    assert bars == [
        "rank 0: compute 60 %, collectives 20 %, idle 20 %",
        "rank 1: compute 50 %, collectives 30 %, idle 20 %",
    ]
    assert page.js("document.querySelectorAll('#ranks .bar')[1].children[1].style.width") == "30%"
    server.engine.say = lambda prompt, index: "word " * 500
    server.engine.delay = 0.01
    ask(page, "go on")
    page.until("document.getElementById('running').innerText === '1'")
    page.until("Number(document.getElementById('speed').innerText) > 1")
    assert page.js("document.querySelector('#spark polyline').getAttribute('points')")
    page.press("Escape")
    page.until("document.getElementById('running').innerText === '0'")


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
def test_it_fits_and_can_be_read(
    chromium: Browser, server: Served, tmp_path: Path, width: int, height: int, dark: bool
) -> None:
    server.engine.say = lambda prompt, index: f"{'long' * 60} `{'code' * 60}`\n\n```\n{'wide ' * 80}\n```"
    page = chromium.page(width, height, dark)
    page.open(server.url)
    page.until("document.getElementById('state').textContent === 'ready'")
    ask(page, "unbroken" * 40)
    answered(page)
    page.js("document.querySelectorAll('aside > details').forEach(each => each.open = true)")
    assert page.js("document.documentElement.scrollWidth") == width
    for selector in ("#log", "aside"):
        assert page.js(f"(e => e.scrollWidth <= e.clientWidth)(document.querySelector('{selector}'))"), selector
    assert page.js("document.getElementById('send').getBoundingClientRect().bottom") <= height
    assert page.js("document.getElementById('log').clientHeight") >= 150
    for selector in ("body", ".user .body", ".assistant .body", ".foot", "label", "#state", "#send", "code", ".again"):
        assert page.js(CONTRAST % json.dumps(selector)) >= 4.5, selector
    page.ask("Page.close")


# WCAG's contrast of an element's text with what is painted behind it.
CONTRAST = """(selector => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (c) => [0.2126, 0.7152, 0.0722].reduce((sum, part, i) => {
    const x = c[i] / 255;
    return sum + part * (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
  }, 0);
  const element = document.querySelector(selector);
  let behind = element;
  while (rgb(getComputedStyle(behind).backgroundColor)[3] === 0) behind = behind.parentElement;
  const a = light(rgb(getComputedStyle(element).color));
  const b = light(rgb(getComputedStyle(behind).backgroundColor));
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
})(%s)"""


def test_a_server_that_loads_and_one_that_goes_away(chromium: Browser) -> None:
    def says(text: str) -> None:
        page.until(f"document.getElementById('state').textContent === '{text}'")

    page = chromium.page()
    with served() as server:
        page.open(server.url)
        says("ready")
        state = server.server.config.app.state.serried  # type: ignore[union-attr]
        state.engine_or_none = None
        says("loading the model")
        ask(page, "hi")
        answered(page)
        assert "the model is being loaded" in last(page)
        state.engine_or_none = server.engine
        says("ready")
    says("unreachable")
    page.ask("Page.close")
