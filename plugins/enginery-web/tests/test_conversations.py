"""What people do with messages and conversations of the chat, in a real browser, against a server that is scripted."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from chat_page import MARKDOWN, ask, begin_anew, contents, finished, last, opened, say, until

# Copy, stop, regenerate, edit


@pytest.mark.parametrize("has_clipboard", [True, False])
def test_messages_and_code_are_copied(tab, fake, has_clipboard: bool) -> None:
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    fake.deltas = [{"content": MARKDOWN}]
    opened(tab, fake)
    say(tab)
    if not has_clipboard:  # as on a page of another machine without TLS
        tab.evaluate("navigator.clipboard.writeText = undefined")
    read = "navigator.clipboard.readText()"
    tab.get_by_label("Copy message").last.click()
    tab.wait_for_selector("article.assistant [aria-label=Copied]")
    assert tab.evaluate(read) == MARKDOWN
    tab.get_by_label("Copy code").click()
    tab.wait_for_selector(".code [aria-label=Copied]")
    assert tab.evaluate(read) == 'print("<b>1</b>")'
    tab.get_by_label("Copy code").wait_for()


@pytest.mark.parametrize("how", ["Escape", "button"])
def test_an_answer_is_stopped_and_the_server_is_told(page, fake, how: str) -> None:
    fake.go = type(fake.go)(1)
    ask(page)
    page.wait_for_selector("text=Hello")
    if how == "Escape":
        page.keyboard.press("Escape")
    else:
        page.click("#stop")
    assert fake.hung_up.wait(30)
    finished(page)
    assert "stopped" in last(page)
    assert page.evaluate("document.activeElement.id") == "say"
    fake.go.release(10)
    say(page, "go on")
    assert contents(fake) == ["Hi", "Hello", "go on"]


def test_a_question_that_is_stopped_before_its_answer_comes_back(page, fake) -> None:
    fake.go = type(fake.go)(0)
    ask(page, "my question")
    until(page, "document.getElementById('log').getAttribute('aria-busy') === 'true'")
    page.keyboard.press("Escape")
    finished(page)
    assert page.input_value("#say") == "my question"
    assert page.locator("#log article").count() == 0


def test_an_answer_is_made_again(page, fake) -> None:
    say(page, "one")
    say(page, "two")
    fake.deltas = [{"content": "Other"}]
    page.get_by_label("Regenerate").first.click()
    page.wait_for_selector("text=Other")
    finished(page)
    assert contents(fake) == ["one"]
    assert page.locator("#log article").count() == 2
    assert "Hello" not in page.inner_text("#log")


def test_an_answer_that_cannot_be_made_again_stays(page, fake) -> None:
    say(page)
    fake.refusal = (429, {"error": {"message": "too many"}})
    page.get_by_label("Regenerate").click()
    page.wait_for_selector("#failures p")
    assert "too many" in page.inner_text("#failures")
    assert "Hello world" in last(page)
    page.reload()
    page.wait_for_selector("article.assistant")
    assert "Hello world" in last(page)


def test_a_question_is_edited_and_sent_again(page, fake) -> None:
    for text in ("one", "two"):
        say(page, text)
    page.get_by_label("Edit and send again").first.click()
    assert page.input_value(".edit textarea") == "one"
    page.keyboard.press("Escape")
    assert page.locator(".edit").count() == 0
    page.get_by_label("Edit and send again").first.click()
    page.fill(".edit textarea", "uno")
    page.keyboard.press("Enter")
    until(page, "document.querySelectorAll('#log article').length === 2")
    finished(page)
    assert contents(fake) == ["uno"]
    assert page.inner_text("article.user .said") == "uno"
    fake.refusal = (400, {"error": {"message": "no"}})
    page.get_by_label("Edit and send again").click()
    page.fill(".edit textarea", "dos")
    page.click(".edit >> text=Send")
    page.wait_for_selector("#failures p")
    assert page.input_value(".edit textarea") == "dos"
    assert "Hello world" in last(page)


# Conversations


def test_conversations_are_kept_and_opened_again(page, fake) -> None:
    say(page, "first conversation")
    begin_anew(page)
    say(page, "second conversation")
    assert contents(fake) == ["second conversation"]
    assert page.locator("#conversations a").all_inner_texts() == ["second conversation", "first conversation"]
    page.reload()
    page.wait_for_selector("article.user >> text=second conversation")
    assert re.search(r"2 tokens", last(page))
    page.click("#conversations >> text=first")
    page.wait_for_selector("article.user >> text=first conversation")
    assert page.get_attribute("#conversations [aria-current]", "title").startswith("first conversation\n")
    say(page, "more")
    assert contents(fake) == ["first conversation", "Hello world", "more"]
    page.go_back()
    page.wait_for_selector("article.user >> text=second conversation")


def test_what_is_said_at_once_in_a_new_chat_begins_it(page, fake) -> None:
    """Before the browser has told the page of the new address."""
    say(page, "first conversation")
    enter = "dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter', cancelable: true}))"
    page.evaluate(f"document.getElementById('clear').click(), say.value = 'second', say.{enter}")
    page.wait_for_selector("#conversations >> text=second")
    finished(page)
    assert contents(fake) == ["second"]
    assert page.locator("#conversations a").all_inner_texts() == ["second", "first conversation"]


def test_a_new_chat_in_the_middle_of_an_answer_keeps_its_part(page, fake) -> None:
    fake.go = type(fake.go)(1)
    ask(page)
    page.wait_for_selector("text=Hello")
    page.click("#clear")
    assert fake.hung_up.wait(30)
    finished(page)
    assert page.input_value("#say") == ""
    fake.go.release(10)
    say(page, "other")
    assert contents(fake) == ["other"]
    page.click("#conversations >> text=Hi")
    page.wait_for_selector("text=stopped")
    assert "Hello" in last(page)


def test_a_page_that_is_left_in_the_middle_of_an_answer_keeps_its_part(page, fake) -> None:
    fake.go = type(fake.go)(1)
    ask(page, "to be left")
    page.wait_for_selector("text=Hello")
    page.reload()
    page.wait_for_selector("article.assistant .note >> text=/stopped|incomplete/")
    assert "Hello" in last(page)
    ask(page, "never answered")
    until(page, "document.getElementById('log').getAttribute('aria-busy') === 'true'")
    page.reload()
    page.wait_for_selector("article.assistant")
    assert page.input_value("#say") == "never answered"
    assert page.locator("#log article").count() == 2


def test_conversations_are_exported(page, fake) -> None:
    fake.deltas = [{"reasoning_content": "hm"}, {"content": "Hello"}]
    say(page, "one")
    begin_anew(page)
    say(page, "two")
    with page.expect_download() as downloading:
        page.click("#export-all")
    told = json.loads(Path(downloading.value.path()).read_text())
    assert (told["format"], told["version"]) == ("enginery-conversations", 1)
    said = [[message["content"] for message in one["messages"]] for one in told["conversations"]]
    assert said == [["two", "Hello"], ["one", "Hello"]]
    answer = told["conversations"][0]["messages"][1]
    assert (answer["role"], answer["reasoning"], answer["model"], answer["finish"]) == ("assistant", "hm", "m", "stop")
    page.hover("#conversations li:last-child")
    with page.expect_download() as downloading:
        page.get_by_label("Export: one").click()
    told = json.loads(Path(downloading.value.path()).read_text())
    assert [one["messages"][0]["content"] for one in told["conversations"]] == ["one"]


def test_conversations_are_deleted_after_a_question(page, fake) -> None:
    for text in ("one", "two", "three"):
        begin_anew(page)
        say(page, text)
    page.hover("#conversations li:first-child")
    page.get_by_label("Delete: three").click()
    page.click("#confirm-keep")
    assert page.locator("#conversations li").count() == 3
    page.get_by_label("Delete: three").click()
    page.click("#confirm-delete")
    until(page, "document.querySelectorAll('#log article').length === 0")
    assert page.locator("#conversations a").all_inner_texts() == ["two", "one"]
    page.click("#delete-all")
    assert "(2)" in page.inner_text("#confirm-question")
    page.click("#confirm-delete")
    page.wait_for_selector("#no-conversations", state="visible")
    assert page.evaluate("Object.keys(localStorage).filter((name) => name.startsWith('conversation'))") == []
    assert page.is_disabled("#export-all")


def test_one_that_is_deleted_while_its_answer_comes_stays_deleted(page, fake) -> None:
    fake.go = type(fake.go)(1)
    ask(page)
    page.wait_for_selector("text=Hello")
    page.click("#delete-all")
    page.click("#confirm-delete")
    assert fake.hung_up.wait(30)
    finished(page)
    until(page, "document.querySelectorAll('#log article').length === 0")
    assert page.locator("#conversations li").count() == 0


def test_another_tab_sees_what_is_kept(page, fake) -> None:
    other = opened(page.context.new_page(), fake)
    say(page, "seen by both")
    other.wait_for_selector("#conversations >> text=seen by both")


def test_a_full_browser_is_told(page, fake) -> None:
    fill = "while (true) localStorage[Math.random()] = 'x'.repeat(size)"
    page.evaluate(f"for (let size = 4e6; size >= 1; size /= 2) try {{ {fill} }} catch {{}}")
    say(page)
    assert "Hello world" in last(page)
    assert "no room" in page.inner_text("#failures")


def test_what_others_keep_under_its_names_does_no_harm(tab, fake) -> None:
    kept = {"conversation:x": "{", "conversation:y": "[1]", "settings": "7"}
    opened(tab, fake).evaluate(f"Object.assign(localStorage, {json.dumps(kept)})")
    opened(tab, fake)
    assert tab.locator("#conversations li").count() == 0
    say(tab)
