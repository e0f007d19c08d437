"""The page of a real server, with the model that ships with the plugins, behind a key."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

NEEDED = ("enginery_weights_tiny", "enginery_model_llama", "enginery_attn_torch")
COMMAND = [sys.executable, "-m", "enginery", "serve", "--device", "cpu"]
SETTINGS = {"Temperature": "0.7", "Top P": "0.9", "Top K": "40", "Maximum of tokens": "20", "Seed": "3", "System prompt": "Short."}


@pytest.fixture
def server() -> Iterator[str]:
    if absent := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        pytest.skip(f"{', '.join(absent)} are not installed")
    command, variables = [*COMMAND, "--port", "0", "--num-pages", "256"], os.environ | {"ENGINERY_API_KEY": "secret-1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=variables) as process:
        assert process.stdout is not None
        yield next(filter(None, (re.search(r"http://[\d.]+:\d+", line) for line in process.stdout)))[0]
        process.terminate()
        with contextlib.suppress(ValueError):
            process.stdout.read()


def test_the_page_talks_to_the_engine(tab, server: str) -> None:
    tab.goto(server)
    tab.wait_for_selector("#key-dialog[open] >> text=needs an API key", timeout=45_000)
    tab.keyboard.type("secret-1")
    tab.keyboard.press("Enter")
    tab.wait_for_selector("#state.good", timeout=45_000)
    tab.click("#open-settings")
    for name, value in SETTINGS.items():
        tab.get_by_label(name).fill(value)
    tab.click("#settings >> text=Done")
    for number, text in enumerate(("Hello 😀", "And then?"), start=1):
        tab.fill("#say", text)
        tab.keyboard.press("Enter")
        tab.wait_for_selector(f":nth-match(#log article.assistant .note, {number}) >> text=/\\d+ tokens?/", timeout=45_000)
        tab.wait_for_selector("#log[aria-busy=false]")
    assert tab.locator("#failures p").count() == 0
    assert tab.locator("#log .said").first.inner_text() == "Hello 😀"
    assert "prompt of" in tab.locator("#log article").last.inner_text()
    assert {"device", "attention", "KV cache"} <= set(tab.locator("#choices dt").all_inner_texts())
    assert "enginery-web" in tab.locator("#plugins dd").all_inner_texts()
    tab.wait_for_selector("#tiles div >> text=/^[\\d.]+ m?s$/", timeout=45_000)
    tab.wait_for_selector("#tiles div:has(dt:text-is('Requests running')) dd:text-is('0')", timeout=45_000)
    tiles = dict(zip(tab.locator("#tiles dt").all_inner_texts(), tab.locator("#tiles dd").all_inner_texts(), strict=True))
    assert tiles["Requests running"] == "0"
    assert tiles["Requests waiting"] == "0"
    assert tiles["KV cache held"].endswith(" %")
    assert tiles["To the first token"].endswith("s")
