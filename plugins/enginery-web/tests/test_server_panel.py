"""What the page shows of the server, in a real browser: live figures, backends, plugins."""

from __future__ import annotations

import time

import pytest

GAP = "\u2013"
EXPORTS = {"figures.js": "samples", "metrics.js": "parseMetrics, total, mean, quantile"}


def until(page, module: str, expression: str) -> None:
    """Until the expression holds of what a module of the page exports."""
    end_s = time.monotonic() + 30
    while not evaluate(page, module, f"() => {expression}"):
        assert time.monotonic() < end_s, expression
        page.wait_for_timeout(50)


def evaluate(page, module: str, code: str, given: object = None) -> object:
    """What a function gives, to whom the exports of a module are names."""
    address = page.evaluate("document.querySelector('script').src").replace("start.js", module)
    names = f"const {{ {EXPORTS[module]} }} = await import('{address}');"
    return page.evaluate(f"async (given) => {{ {names} return ({code})(given); }}", given)


def tile(page, title: str) -> str:
    return page.locator("#tiles div", has_text=title).locator("dd").inner_text()


def test_live_figures_are_the_server_s(page) -> None:
    until(page, "figures.js", "samples.length > 1")
    assert (tile(page, "Requests running"), tile(page, "Requests waiting")) == ("3", "7")
    assert tile(page, "KV cache held") == "42.5 %"
    at_once = "() => [document.querySelector('#tiles dd').textContent, samples.at(-1).at - samples.at(-2).at]"
    shown, apart_ms = evaluate(page, "figures.js", at_once)
    assert apart_ms > 900
    assert float(shown.removesuffix("/s")) == pytest.approx(100_000 / apart_ms, abs=0.6)
    assert tile(page, "Prompt tokens") == "0.0/s"
    assert tile(page, "To the first token") == "20 ms"
    assert tile(page, "Between tokens") == GAP
    assert tile(page, "Prefix cache hits") == "0.0 %"
    assert tile(page, "Tokens a verification") == "1.50"
    assert len(page.locator("#tiles polyline").first.get_attribute("points").split()) >= 2


def test_a_server_that_was_started_anew_shows_no_nonsense(page, fake) -> None:
    until(page, "figures.js", "samples.length > 2")
    fake.look = type(fake.look)(0)
    fake.generated = 0
    fake.look.release()
    until(page, "figures.js", "samples.length === 1")
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
    tab.fill("#say", "Hi")
    tab.keyboard.press("Enter")
    tab.wait_for_selector("text=Hello world")


def test_metrics_of_another_server_leave_gaps(tab, fake) -> None:
    fake.metrics = "other_total 1\nvllm:num_requests_running 4\nbroken line\n"
    tab.goto(fake.url)
    tab.wait_for_selector("#state.good")
    assert tile(tab, "Requests running") == "4"
    assert tile(tab, "Output tokens") == tile(tab, "KV cache held") == tile(tab, "Tokens a verification") == GAP


def test_backends_and_plugins_are_listed(page) -> None:
    first = page.locator("#choices div").first
    assert first.locator("dt, dd").all_inner_texts() == ["attention", "fa", "highest priority <b>of all</b>"]
    assert "64 pages of 16" in page.inner_text("#choices")
    assert page.locator("#plugins :is(dt, dd)").all_inner_texts() == ["attn-fa", "1.2", "fa-dist"]


def test_a_hidden_page_asks_nothing(page, fake) -> None:
    page.evaluate("Object.defineProperty(document, 'hidden', { get: () => true })")
    page.evaluate("window.turns = 0, window.later = setTimeout, window.setTimeout = (...all) => (turns++, later(...all)), 0")
    until(page, "figures.js", "turns >= 1")
    before = fake.generated
    until(page, "figures.js", "turns >= 3")
    assert fake.generated == before


def test_quantiles_are_prometheus_s(page) -> None:
    buckets = [[0.1, 10], [0.2, 30], ["Infinity", 40]]
    for before, share, wanted in ((0, 0.5, 0.15), (0, 0.25, 0.1), (0, 0.9, 0.2), (40, 0.5, None)):
        code = """([buckets, before, share]) => {
            const now = buckets.map(([bound, count]) => [Number(bound), count]);
            return quantile(before ? now : [], now, share);
        }"""
        assert evaluate(page, "metrics.js", code, [buckets, before, share]) == (wanted and pytest.approx(wanted))


def test_a_share_of_several_engines_is_their_mean(page) -> None:
    code = "(text) => { const found = parseMetrics(text); return [mean(found, 'a'), mean(found, 'b')]; }"
    assert evaluate(page, "metrics.js", code, 'a{engine="0"} 0.75\na{engine="1"} 0.5\n') == [0.625, None]


def test_metrics_are_read_as_prometheus_writes_them(page) -> None:
    text = '# TYPE a counter\na_total{x="1,2}",y="\\"q\\""} 1.5\na_total{x="3"} 2e3\nb NaN\nc{le="+Inf"} 4 1700000000\n'
    code = """(text) => {
        const found = parseMetrics(text);
        return [total(found, 'a'), found.get('a_total')[0].labels, total(found, 'c'), total(found, 'd')];
    }"""
    assert evaluate(page, "metrics.js", code, text) == [2001.5, {"x": "1,2}", "y": '\\"q\\"'}, 4, None]
