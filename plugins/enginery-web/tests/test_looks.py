"""How the page looks, in a real browser: both sizes, both colour schemes, and what axe-core finds."""

from __future__ import annotations

import re

import pytest
from chat_page import begin_anew, say

SIZES = {"wide": (1280, 800), "narrow": (390, 844)}
MARKDOWN = """### First

A list with a [link](https://example.org) and `code`:

1. one
2. two

# Second

```python
print("a line that is far too long for a narrow window, and for a wide one with panels on both sides, too")
```

| backend | device | why it was chosen of all those that are there |
|---|---|---|
| attn-torch | cpu | highest priority |

> quoted
"""


@pytest.fixture(params=SIZES)
def sized(request, tab, fake):
    """The page in one of the sizes, ready."""
    width, height = SIZES[request.param]
    tab.set_viewport_size({"width": width, "height": height})
    tab.goto(fake.url)
    tab.wait_for_selector("#state.good")
    return tab


def talk(page, fake) -> None:
    """A conversation with all that there is in one, and an error at its end."""
    fake.deltas = [{"reasoning_content": "Let me think."}, {"content": MARKDOWN}]
    say(page, "Tell me about extraordinarily long words, such as Donaudampfschifffahrtsgesellschaft")
    fake.refusal = (400, {"error": {"message": "the context has room for 4,096 tokens"}})
    page.fill("#say", "more")
    page.keyboard.press("Enter")
    page.wait_for_selector("#failures p")


def violations(page, state: str) -> list[str]:
    """In both colour schemes."""
    told = []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
        told += [f"{state}, {scheme}: {one['id']}: {node['html']} {node['any']}" for one in found for node in one["nodes"]]
    return told


def test_axe_finds_nothing(sized, fake) -> None:
    script = pytest.importorskip("axe_playwright_python.base", reason="pip install axe-playwright-python").AXE_SCRIPT
    sized.evaluate(script)
    found = violations(sized, "empty")
    talk(sized, fake)
    sized.click("summary")
    found += violations(sized, "conversation")
    sized.locator(".user .changes").click()
    sized.click("#open-settings")
    found += violations(sized, "edit and settings")
    sized.click("#change-key")
    found += violations(sized, "key")
    sized.keyboard.press("Escape")
    sized.keyboard.press("Escape")
    for panel in ("server", "history"):
        if not sized.is_visible(f"#{panel}"):
            sized.click(f"#open-{panel}")
            found += violations(sized, panel)
    sized.click("#delete-all")
    found += violations(sized, "confirm")
    assert not found, "\n".join(found)


def test_words_are_whole_and_nothing_is_wider_than_the_window(sized, fake) -> None:
    talk(sized, fake)
    broken = """() => {
        const found = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
        for (let node = walker.nextNode(); node; node = walker.nextNode()) {
            if (!node.parentElement.checkVisibility()) continue;
            for (const { 0: word, index } of node.data.matchAll(/[\\w.,]+/g)) {
                const range = document.createRange();
                range.setStart(node, index);
                range.setEnd(node, index + word.length);
                if (new Set([...range.getClientRects()].map(({ top }) => Math.round(top))).size > 1) found.push(word);
            }
        }
        return found;
    }"""
    boxes = "[...document.querySelectorAll('html, body, main, #log, #server, #history')]"
    wide = f"{boxes}.filter((one) => one.scrollWidth > one.clientWidth).map((one) => one.id || one.tagName)"
    for panel in ("server", "history"):
        if not sized.is_visible(f"#{panel}"):
            sized.click(f"#open-{panel}")
        assert sized.evaluate(broken) == []
        assert sized.evaluate(wide) == []
    sized.keyboard.press("Escape")
    assert sized.evaluate(broken) == []
    sized.click("#open-settings")
    assert sized.evaluate(broken) == []


@pytest.mark.parametrize("width", [320, 768, 1600])
def test_a_word_longer_than_the_window_does_not_widen_it(page, fake, width: int) -> None:
    fake.deltas = [{"reasoning_content": "z" * 500}, {"content": "x" * 2000 + "\n\n" + "`" + "c" * 300 + "`"}]
    page.set_viewport_size({"width": width, "height": 700})
    say(page, "y" * 500)
    page.click("summary")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("(log => log.scrollWidth - log.clientWidth)(document.getElementById('log'))") == 0


def test_panels_of_a_narrow_window_lie_over_the_chat_and_close(tab, fake) -> None:
    tab.set_viewport_size({"width": 390, "height": 844})
    tab.goto(fake.url)
    tab.wait_for_selector("#state.good")
    say(tab, "Hi")
    for panel in ("history", "server"):
        assert not tab.is_visible(f"#{panel}")
        tab.click(f"#open-{panel}")
        assert tab.is_visible(f"#{panel}")
        assert tab.get_attribute(f"#open-{panel}", "aria-expanded") == "true"
        assert tab.evaluate("document.getElementById('chat').inert")
    assert not tab.is_visible("#history")
    tab.keyboard.press("Escape")
    assert not tab.is_visible("#server")
    assert tab.evaluate("document.activeElement.id") == "open-server"
    begin_anew(tab)
    tab.click("#open-history")
    tab.click("#conversations a")
    tab.wait_for_selector("article.user >> text=Hi")
    assert not tab.is_visible("#history")
    assert not tab.evaluate("document.getElementById('chat').inert")
    tab.set_viewport_size({"width": 1280, "height": 800})
    tab.wait_for_selector("#history", state="visible")
    assert not tab.evaluate("document.getElementById('chat').inert")


def is_dark(page) -> bool:
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return sum(map(int, re.findall(r"\d+", colour)[:3])) < 150


def test_the_colours_can_be_chosen_and_stay_so(page) -> None:
    assert not is_dark(page)
    page.click("#open-settings")
    page.get_by_label("Colours").select_option("dark")
    assert is_dark(page)
    page.reload()
    page.wait_for_selector("#state.good")
    assert is_dark(page)
    page.click("#open-settings")
    page.get_by_label("Colours").select_option("")
    assert not is_dark(page)
    page.emulate_media(color_scheme="dark")
    assert is_dark(page)
