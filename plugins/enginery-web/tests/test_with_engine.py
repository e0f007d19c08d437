"""The page of a real server, with the model that ships with the plugins."""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator

import pytest

NEEDED = ("enginery_weights_tiny", "enginery_model_llama", "enginery_attn_torch")
COMMAND = [sys.executable, "-c", "from enginery.cli.main import main; main()", "serve", "--route", "web", "--device", "cpu"]


@pytest.fixture
def server() -> Iterator[str]:
    if absent := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        pytest.skip(f"{', '.join(absent)} are not installed")
    command = [*COMMAND, "--port", "0", "--num-pages", "256", "--seed", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        line = next(line for line in process.stdout if line.startswith("ready: "))
        yield line.partition(" at ")[2].partition(",")[0]
        process.terminate()
        with contextlib.suppress(ValueError):
            process.stdout.read()


def test_the_page_talks_to_the_engine(tab, server: str) -> None:
    tab.goto(server)
    tab.wait_for_selector("#state.good", timeout=45_000)
    tab.click("summary >> text=Settings")
    tab.get_by_label("Most tokens").fill("20")
    tab.fill("#say", "Hello 😀")
    tab.keyboard.press("Enter")
    tab.wait_for_selector("#log article.assistant .note >> text=/\\d+ tokens/", timeout=45_000)
    tab.wait_for_selector("#log[aria-busy=false]")
    assert tab.locator("#log [role=alert]").count() == 0
    assert tab.locator("#log .said").first.inner_text() == "Hello 😀"
    settings = tab.locator("#choices tbody tr td:first-child").all_inner_texts()
    assert {"device", "attention", "KV cache"} <= set(settings)
    assert "enginery-web" in tab.locator("#plugins td").all_inner_texts()
    tab.wait_for_selector("#tiles div >> text=/^[\\d.]+ m?s$/", timeout=45_000)
    tab.wait_for_selector("#tiles div:has(dt:text-is('Requests running')) dd:text-is('0')", timeout=45_000)
    tiles = dict(zip(tab.locator("#tiles dt").all_inner_texts(), tab.locator("#tiles dd").all_inner_texts(), strict=True))
    assert tiles["Requests running"] == "0"
    assert tiles["Requests waiting"] == "0"
    assert tiles["KV cache held"].endswith(" %")
    assert tiles["To the first token"].endswith("s")
