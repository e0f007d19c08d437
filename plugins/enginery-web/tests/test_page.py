"""The chat in a real browser, against a server that is scripted."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

MARKDOWN = """# Plan

Text with **weight**, `code` and a [link](https://example.org "t").

```python
print("<b>1</b>")
```

| left | right |
|---|--:|
| a<br>b | 2 |

- [x] done
"""


def ask(page, text: str = "Hi") -> None:
    page.fill("#say", text)
    page.keyboard.press("Enter")


def finished(page) -> None:
    page.wait_for_selector("#log[aria-busy=false]")


def say(page, text: str = "Hi") -> None:
    """Asks and waits for the whole answer."""
    before = page.locator("#log article").count()
    ask(page, text)
    page.locator("#log article").nth(before).wait_for(timeout=30_000)
    finished(page)


def last(page) -> str:
    return page.locator("#log article").last.inner_text()


def opened(tab, fake):
    tab.goto(fake.url)
    tab.wait_for_selector("#state.good")
    return tab


def until(page, expression: str) -> None:
    """Playwright's own way evaluates text in the page, which the page's policy does not allow."""
    end_s = time.monotonic() + 30
    while not page.evaluate(expression):
        assert time.monotonic() < end_s, expression
        page.wait_for_timeout(50)


def contents(fake, index: int = -1) -> list[str]:
    return [message["content"] for message in fake.asked[index]["messages"]]


def far_from_end(page) -> int:
    return page.evaluate("(log => log.scrollHeight - log.scrollTop - log.clientHeight)(document.getElementById('log'))")


# The answer


def test_an_answer_appears_piece_by_piece(page, fake) -> None:
    fake.go = type(fake.go)(1)
    ask(page)
    page.wait_for_selector("#log article.assistant >> text=Hello")
    assert "world" not in last(page)
    assert page.is_visible("#stop")
    assert not page.is_visible("#send")
    page.wait_for_timeout(20)  # less than that has no rate
    fake.go.release()
    finished(page)
    assert "Hello world" in last(page)
    assert re.search(r"2 tokens · [\d.]+ tokens/s · first after [\d.]+ m?s", last(page))
    assert not page.is_visible("#stop")
    assert page.evaluate("document.activeElement.id") == "say"


def test_the_server_s_count_of_tokens_is_shown_and_a_cut_is_told(page, fake) -> None:
    fake.end = [
        {"choices": [{"delta": {}, "finish_reason": "length"}]},
        {"choices": [], "usage": {"completion_tokens": 41, "prompt_tokens": 7}},
        "[DONE]",
    ]
    say(page)
    assert "41 tokens" in last(page)
    assert "prompt of 7" in last(page)
    assert "cut at the maximum of tokens" in last(page)


def test_markdown_is_shown_as_such(page, fake) -> None:
    fake.deltas = [{"content": piece} for piece in re.findall(r".{1,9}", MARKDOWN, re.DOTALL)]
    say(page)
    answer = page.locator("article.assistant .markdown")
    assert answer.locator("h4").inner_text() == "Plan"
    assert answer.locator("strong").inner_text() == "weight"
    assert answer.locator("pre code").inner_text() == 'print("<b>1</b>")\n'
    assert answer.locator(".code .head").inner_text().strip() == "python"
    assert answer.locator("td").all_inner_texts() == ["a\nb", "2"]
    assert answer.locator("td").last.get_attribute("align") == "right"
    assert answer.locator("li").inner_text().strip() == "☑ done"
    link = answer.locator("a")
    assert [link.get_attribute(name) for name in ("href", "target", "rel")] == [
        "https://example.org",
        "_blank",
        "noopener noreferrer nofollow",
    ]


@pytest.mark.parametrize(
    "evil",
    [
        "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>\n\n<b>&amp;</b>",
        "[x](javascript:document.title='owned') [y](data:text/html,<script>1</script>) [z](//elsewhere.example/)",
        '![x](https://elsewhere.example/x.png) !["onload=1](x:y)',
        "<svg><style><img src=x onerror=1></style></svg> <a href='javascript:1'>x</a> <form><input name=body></form>",
        "```x\" onload=\"1\n<iframe srcdoc='<script>1</script>'></iframe>\n```",
    ],
)
def test_what_the_model_says_does_nothing(page, fake, evil: str) -> None:
    fake.deltas = [{"reasoning_content": evil}, {"content": evil}]
    say(page, evil)
    assert page.locator("article.user .said").evaluate("node => node.textContent") == evil
    assert page.locator("details .said").evaluate("node => node.textContent") == evil
    assert page.locator("#log :is(img, script, iframe, style, form, input, b)").count() == 0
    assert page.locator("#messages svg:not(button svg)").count() == 0
    hrefs = [link.get_attribute("href") or "" for link in page.locator("#log a").all()]
    assert all(re.match(r"(https://|$)", href) for href in hrefs), hrefs
    attributes = page.evaluate("[...document.querySelectorAll('#log .markdown *')].flatMap((one) => one.getAttributeNames())")
    assert not [name for name in attributes if name.startswith("on") or name in ("style", "id", "name", "src")]
    assert page.title() == "Enginery"


def test_html_of_the_model_can_be_read(page, fake) -> None:
    fake.deltas = [{"content": "Use <b>bold</b>.\n\n<div>\nx < 1\n</div>"}]
    say(page)
    assert page.inner_text("article.assistant .markdown").split("\n") == ["Use <b>bold</b>.", "", "<div>", "x < 1", "</div>"]


def test_blocks_that_are_complete_stay_as_they_are(page, fake) -> None:
    fake.deltas = [{"content": "One.\n\n"}, {"content": "Two"}, {"content": " and more.\n\n"}, {"content": "Three."}]
    fake.go = type(fake.go)(2)
    ask(page)
    page.wait_for_selector("text=Two")
    page.evaluate("document.querySelectorAll('.markdown p').forEach((one, index) => one.mark = index)")
    fake.go.release(10)
    finished(page)
    marks = page.evaluate("[...document.querySelectorAll('.markdown p')].map((one) => one.mark ?? null)")
    assert marks == [0, None, None]


def test_an_answer_in_pieces_is_the_same_as_at_once(page) -> None:
    tricky = "a\r\n\r\n- one\n* two\n**bold** goes on\n\n  in it\n\n1. x\n2. y\n\nTitle\n===\n\n> q\nlazy\n\n### h\n\n"
    address = page.evaluate("document.querySelector('script').src").replace("start.js", "markdown.js")
    code = f"""async (text) => {{
        const {{ Markdown }} = await import("{address}");
        const [grown, whole] = [1, 2].map(() => new Markdown(document.getElementById("messages")));
        for (let end = 1; end <= text.length; end += 1) grown.show(text.slice(0, end));
        const shown = grown.place.outerHTML;
        grown.finish(text);
        whole.finish(text);
        return [shown, grown.place.outerHTML, whole.place.outerHTML];
    }}"""
    shown, grown, whole = page.evaluate(code, tricky + MARKDOWN)
    assert shown == grown == whole
    assert whole.count("<h") == 3


def test_headings_of_an_answer_skip_no_level(page, fake) -> None:
    fake.deltas = [{"content": "### a\n\n# b\n\n###### c\n\n- ## d\n"}]
    say(page)
    names = page.evaluate("[...document.querySelectorAll('#messages :is(h1,h2,h3,h4,h5,h6)')].map((one) => one.tagName)")
    assert names == ["H3", "H3", "H4", "H4", "H5", "H5"]


def test_the_policy_lets_no_markup_and_no_script_in(page) -> None:
    page.evaluate("document.body.append(Object.assign(document.createElement('div'), {id: 'x'}))")
    refused = """(code) => { try { code(); } catch (error) { return error.name; } }"""
    for code in (
        "() => document.getElementById('x').innerHTML = '<b>x</b>'",
        "() => trustedTypes.createPolicy('own', {createHTML: (text) => text})",
        "() => trustedTypes.createPolicy('dompurify', {createHTML: (text) => text})",
        "() => document.createElement('script').text = '1'",
    ):
        assert page.evaluate(f"({refused})({code})") == "TypeError", code
    page.evaluate("document.head.append(Object.assign(document.createElement('style'), {textContent: '#log { color: red }'}))")
    assert page.evaluate("getComputedStyle(document.getElementById('log')).color") != "rgb(255, 0, 0)"
    page.complaints.clear()


def test_reasoning_is_folded_away_and_not_sent_back(page, fake) -> None:
    fake.deltas = [{"reasoning_content": "think"}, {"reasoning_content": "ing"}, {"content": "said"}]
    say(page)
    assert "said" in last(page)
    assert not page.is_visible("details .said")
    page.click("#log summary")
    assert page.inner_text("details .said") == "thinking"
    say(page, "again")
    assert fake.asked[1]["messages"] == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "said"},
        {"role": "user", "content": "again"},
    ]


def test_calls_of_tools_are_shown(page, fake) -> None:
    pieces = [{"name": "add", "arguments": '{"a"'}, {"arguments": ": 1}"}]
    fake.deltas = [{"tool_calls": [{"index": 0, "function": piece}]} for piece in pieces]
    say(page)
    assert 'add({"a": 1})' in last(page)
    page.reload()
    page.wait_for_selector("article.assistant")
    assert 'add({"a": 1})' in last(page)


def test_readers_of_screens_hear_each_paragraph_once(page, fake) -> None:
    fake.deltas = [{"content": piece} for piece in ("First par", "agraph.\n\n", "Second ", "paragraph.")]
    fake.go = type(fake.go)(3)
    ask(page)
    until(page, "document.getElementById('spoken').childElementCount === 1")
    fake.go.release(10)
    finished(page)
    assert page.get_attribute("#spoken", "aria-live") == "polite"
    assert page.locator("#spoken p").all_text_contents() == ["First paragraph.", "Second paragraph."]


# Scrolling


@pytest.mark.parametrize("size", [(1280, 800), (390, 844)], ids=["wide", "narrow"])
def test_the_end_of_the_answer_stays_in_view(page, fake, size: tuple[int, int]) -> None:
    page.set_viewport_size({"width": size[0], "height": size[1]})
    fake.deltas = [{"content": f"Paragraph {index} of several words.\n\n"} for index in range(12)]
    for number in range(4):
        say(page, f"question {number}")
        assert far_from_end(page) <= 1
    assert page.evaluate("document.getElementById('log').scrollTop") > 500
    assert page.locator("article.assistant .note").last.is_visible()
    page.set_viewport_size({"width": size[0], "height": 500})
    until(page, "(log => log.scrollHeight - log.scrollTop - log.clientHeight)(document.getElementById('log')) <= 1")


def test_who_scrolls_up_is_left_there_until_the_end_is_asked_for(page, fake) -> None:
    fake.deltas = [{"content": f"Paragraph {index}.\n\n"} for index in range(60)]
    fake.go = type(fake.go)(40)
    ask(page)
    page.wait_for_selector("text=Paragraph 39.")
    page.mouse.move(600, 400)
    page.mouse.wheel(0, -400)
    page.wait_for_selector("#to-end", state="visible")
    top = page.evaluate("document.getElementById('log').scrollTop")
    fake.go.release(100)
    finished(page)
    assert page.evaluate("document.getElementById('log').scrollTop") == top
    page.click("#to-end")
    assert far_from_end(page) <= 1
    assert not page.is_visible("#to-end")


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
    page.click("#clear")
    until(page, "document.querySelectorAll('#log article').length === 0")
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
    page.click("#clear")
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
        page.click("#clear")
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
