"""The page in a real browser, against a server that is scripted."""

from __future__ import annotations

import re
import time

import pytest

GAP = "\u2013"


def ask(page, text: str = "Hi"):
    page.fill("#say", text)
    page.keyboard.press("Enter")


def last(page) -> str:
    return page.locator("#log article").last.inner_text()


def until(page, expression: str) -> None:
    """Playwright's own way evaluates text in the page, which the page's policy does not allow."""
    end_s = time.monotonic() + 30
    while not page.evaluate(expression):
        assert time.monotonic() < end_s, expression
        page.wait_for_timeout(50)


def finished(page) -> None:
    page.wait_for_selector("#log[aria-busy=false]")


def test_an_answer_appears_piece_by_piece(page, fake) -> None:
    fake.go = type(fake.go)(1)
    ask(page)
    page.wait_for_selector("#log article.assistant >> text=Hello")
    assert "world" not in last(page)
    assert page.is_visible("#stop")
    assert page.is_disabled("#send")
    fake.go.release()
    finished(page)
    assert "Hello world" in last(page)
    assert re.search(r"2 tokens · [\d.]+ tokens/s · first after [\d.]+ m?s", last(page))
    assert not page.is_visible("#stop")
    assert page.evaluate("document.activeElement.id") == "say"


def test_the_server_s_count_of_tokens_is_shown_and_a_cut_is_told(page, fake) -> None:
    fake.end = [
        {"choices": [{"delta": {}, "finish_reason": "length"}]},
        {"choices": [], "usage": {"completion_tokens": 41}},
        "[DONE]",
    ]
    ask(page)
    finished(page)
    assert "41 tokens" in last(page)
    assert "cut at the most tokens" in last(page)


def test_what_the_model_says_is_text(page, fake) -> None:
    evil = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>\n<b>&amp;</b>"
    fake.deltas = [{"reasoning_content": evil}, {"content": evil}]
    fake.models = ["m"]
    ask(page, evil)
    finished(page)
    assert page.locator("#log article").count() == 2
    assert page.locator("#log .said").first.evaluate("node => node.textContent") == evil
    assert page.locator("#log article.assistant .said").last.evaluate("node => node.textContent") == evil
    assert page.locator("#log img, #log script, #log b").count() == 0
    assert page.title() == "Enginery"
    assert "highest priority <b>of all</b>" in page.inner_text("#choices")


def test_a_page_that_was_tampered_with_runs_nothing(tab, fake) -> None:
    tab.goto(fake.url)
    tab.evaluate("document.body.append(Object.assign(document.createElement('div'), {id: 'x'}))")
    refused = tab.evaluate(
        "(() => { try { document.getElementById('x').innerHTML = '<b>x</b>'; } catch (error) { return error.name; } })()"
    )
    assert refused == "TypeError"
    tab.complaints.clear()


def test_reasoning_is_folded_away(page, fake) -> None:
    fake.deltas = [{"reasoning_content": "thinking"}, {"content": "said"}]
    ask(page)
    finished(page)
    assert "said" in last(page)
    assert not page.is_visible("#log details .said")
    page.click("#log summary")
    assert page.is_visible("#log details .said")
    ask(page, "again")
    finished(page)
    assert fake.asked[1]["messages"] == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "said"},
        {"role": "user", "content": "again"},
    ]


def test_a_new_chat_forgets(page, fake) -> None:
    ask(page)
    finished(page)
    page.click("#clear")
    assert page.locator("#log article").count() == 0
    ask(page, "other")
    finished(page)
    assert fake.asked[-1]["messages"] == [{"role": "user", "content": "other"}]


def test_a_new_chat_in_the_middle_of_an_answer_forgets_that_too(page, fake) -> None:
    fake.go = type(fake.go)(1)
    ask(page)
    page.wait_for_selector("text=Hello")
    page.click("#clear")
    assert fake.hung_up.wait(30)
    finished(page)
    assert page.input_value("#say") == ""
    fake.go.release(10)
    ask(page, "other")
    finished(page)
    assert [message["content"] for message in fake.asked[-1]["messages"]] == ["other"]


def test_settings_are_sent_and_what_is_empty_is_left_out(page, fake) -> None:
    ask(page)
    finished(page)
    assert fake.asked[0] == {
        "model": "m",
        "messages": [{"role": "user", "content": "Hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    page.click("summary >> text=Settings")
    page.get_by_label("System message").fill("be brief")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Most tokens").fill("7")
    ask(page, "again")
    finished(page)
    assert fake.asked[1]["messages"][0] == {"role": "system", "content": "be brief"}
    assert (fake.asked[1]["temperature"], fake.asked[1]["max_tokens"]) == (0.5, 7)


def test_escape_stops_an_answer_and_the_server_is_told(page, fake) -> None:
    fake.go = type(fake.go)(1)
    ask(page)
    page.wait_for_selector("text=Hello")
    page.keyboard.press("Escape")
    assert fake.hung_up.wait(30)
    finished(page)
    assert "stopped" in last(page)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"refusal": (400, {"error": {"message": "the prompt is too long"}})}, "status 400: the prompt is too long"),
        ({"refusal": (429, {"oops": 1})}, "status 429"),
        ({"end": [{"error": {"message": "the engine gave up"}}, "[DONE]"]}, "the engine gave up"),
        ({"end": []}, "The answer was cut off"),
        ({"end": ["{"]}, "The answer cannot be read"),
    ],
)
def test_what_goes_wrong_is_said_and_the_question_comes_back(page, fake, change: dict, words: str) -> None:
    vars(fake).update(change)
    ask(page, "my question")
    finished(page)
    assert words in page.locator("#log [role=alert]").inner_text()
    assert page.input_value("#say") == "my question"
    vars(fake).update(refusal=None, end=["[DONE]"])
    page.keyboard.press("Enter")
    finished(page)
    assert [message["content"] for message in fake.asked[-1]["messages"]] == ["my question"]


def test_a_server_that_is_gone_is_said(page, fake) -> None:
    fake.stop()
    page.wait_for_selector("#state.bad")
    assert page.inner_text("#state") == "unreachable"
    assert "cannot be reached" in page.inner_text("#notice")
    ask(page)
    finished(page)
    assert "cannot be reached" in last(page)


def test_a_server_that_loads_is_waited_for(tab, fake) -> None:
    fake.state = "loading"
    tab.goto(fake.url)
    until(tab, "find('state').textContent !== 'connecting'")
    assert tab.inner_text("#state") == "loading"
    fake.state = "ready"
    tab.wait_for_selector("#state.good")
    assert tab.input_value("#model") == "m"


def test_a_key_is_asked_for_and_kept_for_this_tab_only(tab, fake) -> None:
    fake.key = "secret-1"
    tab.goto(fake.url)
    tab.wait_for_selector("#state.bad")
    assert tab.inner_text("#state") == "locked"
    assert "API key" in tab.inner_text("#notice")
    assert tab.is_visible("#key")
    tab.fill("#key", "secret-1")
    tab.keyboard.press("Tab")
    tab.wait_for_selector("#state.good")
    assert not tab.is_visible("#notice")
    ask(tab)
    finished(tab)
    assert "Hello world" in last(tab)
    tab.reload()
    tab.wait_for_selector("#state.good")
    assert tab.evaluate("Object.values(localStorage).includes('secret-1')") is False
    assert "secret-1" not in tab.url


def test_a_key_that_no_header_carries_is_said(tab, fake) -> None:
    tab.goto(fake.url)
    tab.wait_for_selector("#state.good")
    tab.click("summary >> text=Settings")
    tab.fill("#key", "ключ")
    tab.keyboard.press("Tab")
    tab.wait_for_selector("#state.bad")
    assert "no header carries" in tab.inner_text("#notice")


def tile(page, title: str) -> str:
    return page.locator("#tiles div", has_text=title).locator("dd").inner_text()


def test_live_figures_are_the_server_s(page) -> None:
    until(page, "samples.length > 1")
    assert (tile(page, "Requests running"), tile(page, "Requests waiting")) == ("3", "7")
    assert tile(page, "KV cache held") == "42.5 %"
    at_once = "[find('tiles').querySelector('dd').textContent, samples.at(-1).at - samples.at(-2).at]"
    shown, apart_ms = page.evaluate(at_once)
    assert apart_ms > 900
    assert float(shown.removesuffix("/s")) == pytest.approx(100_000 / apart_ms, abs=0.6)
    assert tile(page, "Prompt tokens") == "0.0/s"
    assert tile(page, "To the first token") == "20 ms"
    assert tile(page, "Between tokens") == GAP
    assert tile(page, "Prefix cache hits") == "0.0 %"
    assert len(page.locator("#tiles polyline").first.get_attribute("points").split()) >= 2


def test_a_server_that_was_started_anew_shows_no_nonsense(page, fake) -> None:
    until(page, "samples.length > 2")
    fake.look = type(fake.look)(0)
    fake.generated = 0
    fake.look.release()
    until(page, "samples.length === 1")
    assert tile(page, "Output tokens") == GAP
    assert "-" not in page.inner_text("#tiles")


def test_without_metrics_and_info_the_chat_goes_on(tab, fake) -> None:
    fake.metrics = fake.info = None
    tab.goto(fake.url)
    tab.wait_for_selector("#state.good")
    assert tab.inner_text("#no-metrics") == "This server has no /metrics."
    assert "/server_info is not there" in tab.inner_text("#no-info")
    assert not tab.is_visible("#tiles")
    assert not tab.is_visible("#plugins")
    ask(tab)
    finished(tab)
    assert "Hello world" in last(tab)


def test_metrics_of_another_server_leave_gaps(tab, fake) -> None:
    fake.metrics = "other_total 1\nvllm:num_requests_running 4\nbroken line\n"
    tab.goto(fake.url)
    tab.wait_for_selector("#state.good")
    assert tile(tab, "Requests running") == "4"
    assert tile(tab, "Output tokens") == tile(tab, "KV cache held") == GAP


def test_backends_and_plugins_are_listed(page) -> None:
    assert page.locator("#choices tbody tr").first.locator("td").all_inner_texts()[:2] == ["attention", "fa"]
    assert "64 pages of 16" in page.inner_text("#choices")
    assert page.locator("#plugins tbody td").all_inner_texts() == ["attn-fa", "fa-dist", "1.2"]


def test_several_models_can_be_chosen(tab, fake) -> None:
    fake.models = ["a", "b"]
    tab.goto(fake.url)
    tab.wait_for_selector("#state.good")
    tab.select_option("#model", "b")
    ask(tab)
    finished(tab)
    assert fake.asked[0]["model"] == "b"


def test_the_keyboard_is_enough(page, fake) -> None:
    assert page.evaluate("document.activeElement.id") == "say"
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    assert page.input_value("#say") == "one\ntwo"
    page.keyboard.press("Enter")
    finished(page)
    assert fake.asked[0]["messages"][0]["content"] == "one\ntwo"
    reached = []
    for _ in range(12):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
        ring = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert ring != "none" or reached[-1] == "BODY", reached[-1]
    assert {"send", "clear", "SUMMARY", "theme", "log"} <= set(reached)
    page.keyboard.press("Enter")


def test_every_field_has_a_name_and_headings_are_in_order(page) -> None:
    page.click("summary >> text=Settings")
    for name in ("Message", "API key", "System message", "Temperature", "Most tokens", "Model"):
        assert page.get_by_label(name, exact=False).count() >= 1, name
    assert page.evaluate("[...document.querySelectorAll('button')].every((one) => one.textContent.trim())")
    assert page.evaluate("[...document.querySelectorAll('h1,h2')].map((one) => one.tagName)") == ["H1", "H2", "H2", "H2"]


def luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(page, selector: str, behind: str) -> float:
    front = luminance(page.locator(selector).first.evaluate("node => getComputedStyle(node).color"))
    back = luminance(page.locator(behind).first.evaluate("node => getComputedStyle(node).backgroundColor"))
    return (max(front, back) + 0.05) / (min(front, back) + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_colour_schemes_can_be_read(page, fake, scheme: str) -> None:
    fake.refusal = (400, {"error": {"message": "no"}})
    page.emulate_media(color_scheme=scheme)
    ask(page)
    finished(page)
    is_dark = luminance(page.evaluate("getComputedStyle(document.body).backgroundColor")) < 0.1
    assert is_dark == (scheme == "dark")
    for selector, behind in (
        ("h2", ".card"),
        (".note", ".card"),
        (".error", ".card"),
        ("#state", "header"),
        ("#send", "#send"),
        ("article.user .said", "article.user"),
        ("article.user h3", "article.user"),
    ):
        assert contrast(page, selector, behind) >= 4.5, (selector, scheme)


def test_the_colours_can_be_turned_and_stay_so(page) -> None:
    assert page.inner_text("#theme") == "Dark colours"
    page.click("#theme")
    assert luminance(page.evaluate("getComputedStyle(document.body).backgroundColor")) < 0.1
    page.reload()
    page.wait_for_selector("#state.good")
    assert page.inner_text("#theme") == "Light colours"
    assert luminance(page.evaluate("getComputedStyle(document.body).backgroundColor")) < 0.1


@pytest.mark.parametrize("width", [320, 768, 1600])
def test_nothing_is_wider_than_the_window(page, fake, width: int) -> None:
    fake.deltas = [{"content": "x" * 2000}]
    page.set_viewport_size({"width": width, "height": 700})
    ask(page, "y" * 500)
    finished(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_hidden_page_asks_nothing(page, fake) -> None:
    page.evaluate("Object.defineProperty(document, 'hidden', { get: () => true })")
    page.evaluate("window.turns = 0, window.later = setTimeout, window.setTimeout = (...all) => (turns++, later(...all)), 0")
    until(page, "turns >= 1")
    before = fake.generated
    until(page, "turns >= 3")
    assert fake.generated == before


def test_quantiles_are_prometheus_s(page) -> None:
    buckets = [[0.1, 10], [0.2, 30], ["Infinity", 40]]
    for before, share, wanted in ((0, 0.5, 0.15), (0, 0.25, 0.1), (0, 0.9, 0.2), (40, 0.5, None)):
        code = """([buckets, before, share]) => {
            const now = buckets.map(([bound, count]) => [Number(bound), count]);
            return quantile(before ? now : [], now, share);
        }"""
        assert page.evaluate(code, [buckets, before, share]) == (wanted and pytest.approx(wanted))


def test_metrics_are_read_as_prometheus_writes_them(page) -> None:
    text = '# TYPE a counter\na_total{x="1,2}",y="\\"q\\""} 1.5\na_total{x="3"} 2e3\nb NaN\nc{le="+Inf"} 4 1700000000\n'
    code = """(text) => {
        const found = parseMetrics(text);
        return [total(found, 'a'), found.get('a_total')[0].labels, total(found, 'c'), total(found, 'd')];
    }"""
    assert page.evaluate(code, text) == [2001.5, {"x": "1,2}", "y": '\\"q\\"'}, 4, None]
