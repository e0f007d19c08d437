"""Settings, models, keys and errors of the chat, in a real browser, against a server that is scripted."""

from __future__ import annotations

import pytest
from chat_page import ask, contents, finished, last, opened, say, until

# Settings


def test_settings_are_sent_and_kept_and_what_is_empty_is_left_out(page, fake) -> None:
    say(page)
    assert fake.asked[0] == {
        "model": "m",
        "messages": [{"role": "user", "content": "Hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    page.click("#open-settings")
    page.get_by_label("System prompt").fill("be brief")
    for name, value in {"Temperature": "0.5", "Top P": "0.9", "Top K": "40", "Maximum of tokens": "7", "Seed": "3"}.items():
        page.get_by_label(name).fill(value)
    page.click("#settings >> text=Done")
    page.reload()
    page.wait_for_selector("#state.good")
    say(page, "again")
    assert fake.asked[1]["messages"][0] == {"role": "system", "content": "be brief"}
    sent = {name: fake.asked[1].get(name) for name in ("temperature", "top_p", "top_k", "max_tokens", "seed")}
    assert sent == {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "max_tokens": 7, "seed": 3}
    page.click("#open-settings")
    page.click("#settings >> text=Reset")
    page.keyboard.press("Escape")
    say(page, "and again")
    assert fake.asked[2].keys() == fake.asked[0].keys()
    assert fake.asked[2]["messages"][0]["role"] == "user"


def test_settings_out_of_range_are_marked_and_not_taken(page, fake) -> None:
    page.click("#open-settings")
    page.get_by_label("Top P").fill("1.5")
    assert page.get_by_label("Top P").get_attribute("aria-invalid") == "true"
    page.click("#settings >> text=Done")
    assert page.is_visible("#settings")
    page.get_by_label("Top P").fill("1")
    page.click("#settings >> text=Done")
    assert not page.is_visible("#settings")


# What goes wrong


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"refusal": (400, {"error": {"message": "the <b>prompt</b> is too long"}})}, "status 400: the <b>prompt</b> is too long"),
        ({"refusal": (429, {"oops": 1})}, "status 429"),
        ({"deltas": [], "end": [{"error": {"message": "the engine gave up"}}, "[DONE]"]}, "the engine gave up"),
        ({"deltas": [], "end": []}, "The answer was cut off"),
        ({"deltas": [], "end": ["{"]}, "cannot be read"),
    ],
)
def test_what_goes_wrong_is_said_and_the_question_comes_back(page, fake, change: dict, words: str) -> None:
    vars(fake).update(change)
    ask(page, "my question")
    page.wait_for_selector("#log [role=alert] p")
    assert words in page.locator("#log [role=alert]").inner_text()
    assert page.input_value("#say") == "my question"
    assert page.locator("#log article").count() == 0
    vars(fake).update(refusal=None, end=["[DONE]"])
    page.keyboard.press("Enter")
    page.wait_for_selector("article.assistant")
    finished(page)
    assert contents(fake) == ["my question"]
    assert page.locator("#failures p").count() == 0


def test_a_part_of_an_answer_stays_when_the_rest_fails(page, fake) -> None:
    fake.end = [{"error": {"message": "the engine gave up"}}]
    say(page)
    assert "the engine gave up" in page.inner_text("#failures")
    assert "Hello world" in last(page)
    assert "incomplete" in last(page)
    assert page.input_value("#say") == ""


def test_a_server_that_is_gone_is_said(page, fake) -> None:
    fake.stop()
    page.wait_for_selector("#state.bad")
    assert page.inner_text("#state") == "unreachable"
    assert "cannot be reached" in page.inner_text("#notice")
    ask(page)
    page.wait_for_selector("#failures >> text=cannot be reached")


def test_a_server_that_loads_is_waited_for(tab, fake) -> None:
    fake.state = "loading"
    tab.goto(fake.url)
    until(tab, "document.getElementById('state').textContent !== 'connecting'")
    assert tab.inner_text("#state") == "loading"
    fake.state = "ready"
    tab.wait_for_selector("#state.good")
    assert tab.input_value("#model") == "m"


def test_a_key_is_asked_for_and_a_wrong_one_is_told_from_none(tab, fake) -> None:
    fake.key = "secret-1"
    tab.goto(fake.url)
    tab.wait_for_selector("#key-dialog[open]")
    assert tab.inner_text("#state") == "locked"
    assert "needs an API key" in tab.inner_text("#key-reason")
    assert "needs an API key" in tab.inner_text("#notice")
    tab.keyboard.type("secret-2")
    tab.keyboard.press("Enter")
    tab.wait_for_selector("#key-dialog[open] >> text=does not know this API key")
    assert tab.get_attribute("#key", "aria-invalid") == "true"
    tab.keyboard.press("Escape")
    ask(tab)
    tab.wait_for_selector("#failures >> text=does not know this API key")
    tab.click("#enter-key")
    tab.fill("#key", "secret-1")
    tab.keyboard.press("Enter")
    tab.wait_for_selector("#state.good")
    assert not tab.is_visible("#notice")


def test_the_key_is_kept_for_this_tab_only(tab, fake) -> None:
    fake.key = "secret-1"
    tab.goto(fake.url)
    tab.wait_for_selector("#key-dialog[open]")
    tab.keyboard.type("secret-1")
    tab.keyboard.press("Enter")
    tab.wait_for_selector("#state.good")
    say(tab)
    assert "Hello world" in last(tab)
    tab.reload()
    tab.wait_for_selector("#state.good")
    assert "secret-1" not in tab.evaluate("JSON.stringify(localStorage)")
    assert "secret-1" not in tab.url


def test_one_who_closes_the_question_for_a_key_is_left_alone(tab, fake) -> None:
    fake.key = "secret-1"
    tab.goto(fake.url)
    tab.wait_for_selector("#key-dialog[open]")
    tab.keyboard.press("Escape")
    tab.evaluate("window.turns = 0, window.later = setTimeout, window.setTimeout = (...all) => (turns++, later(...all)), 0")
    until(tab, "turns >= 2")
    assert not tab.is_visible("#key-dialog")


def test_a_key_that_no_header_carries_is_said(page) -> None:
    page.click("#open-settings")
    page.click("#change-key")
    page.fill("#key", "ключ")
    page.keyboard.press("Enter")
    page.wait_for_selector("#state.bad")
    assert "no header carries" in page.inner_text("#notice")


# The keyboard, models


def test_several_models_can_be_chosen(tab, fake) -> None:
    fake.models = ["a", "b"]
    opened(tab, fake)
    tab.select_option("#model", "b")
    say(tab)
    assert fake.asked[0]["model"] == "b"
    assert "b" in tab.inner_text("article.assistant h3")


def test_the_keyboard_is_enough(page, fake) -> None:
    assert page.evaluate("document.activeElement.id") == "say"
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    assert page.input_value("#say") == "one\ntwo"
    page.keyboard.press("Enter")
    page.wait_for_selector("article.assistant")
    finished(page)
    assert contents(fake) == ["one\ntwo"]
    reached = []
    for _ in range(24):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("(one => one.id || one.ariaLabel || one.tagName)(document.activeElement)"))
        ring = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert ring != "none" or reached[-1] == "BODY", reached[-1]
    buttons = {"send", "clear", "open-settings", "Regenerate", "Edit and send again", "Copy message"}
    assert buttons | {"log", "A", "server"} <= set(reached)
