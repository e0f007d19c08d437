"""What is done and read on the page of the chat."""

from __future__ import annotations

import time

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


def begin_anew(page) -> None:
    """A new chat, once the page has turned to it: the browser tells it of a new address a moment later."""
    page.click("#clear")
    until(page, "document.querySelectorAll('#log article').length === 0")


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
