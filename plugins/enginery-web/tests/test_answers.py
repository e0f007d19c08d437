"""How an answer of the chat is shown, in a real browser, against a server that is scripted."""

from __future__ import annotations

import re

import pytest
from chat_page import MARKDOWN, ask, finished, last, say, until


def far_from_end(page) -> int:
    return page.evaluate("(log => log.scrollHeight - log.scrollTop - log.clientHeight)(document.getElementById('log'))")


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
