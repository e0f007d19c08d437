"""Signals as init systems and terminals send them: to the whole process group, more than once, or ignored from the start."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading

import httpx
import pytest
import quick_processes
from fake_engine import HELD
from process_table import is_running, wait_until_gone
from running import PATIENCE_S, child_of, is_stopping, started, wait_until

HELD_STREAM = {"prompt": "a b", "seed": HELD, "max_tokens": 20, "ignore_eos": True, "stream": True}


@contextlib.contextmanager
def streaming(url, log, count):
    """So many streams that the engine holds; what each got is in the list at the end."""
    got = []

    def read():
        with httpx.stream("POST", f"{url}/v1/completions", json=HELD_STREAM, timeout=PATIENCE_S) as response:
            got.append([line.removeprefix("data: ") for line in response.iter_lines() if line])

    threads = [threading.Thread(target=read) for _ in range(count)]
    for thread in threads:
        thread.start()
    wait_until(lambda: log.read_text().count("submit") == count)
    yield got
    for thread in threads:
        thread.join(PATIENCE_S)


def finish_reason(lines):
    *_, last, done = lines
    assert done == "[DONE]"
    return json.loads(last)["choices"][0]["finish_reason"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_whole_group_lets_streams_end(folder, log, number):
    with started(folder, drain_s=600) as (process, url):
        chat = {"messages": [{"role": "user", "content": "x"}]}
        assert httpx.post(f"{url}/v1/chat/completions", json=chat, timeout=PATIENCE_S).status_code == 200
        children = [child_of(process), child_of(process, "template_process")]
        log.write_text("")
        with streaming(url, log, 6) as got:
            os.killpg(process.pid, number)
            wait_until(lambda: is_stopping(url))
            assert [is_running(child) for child in children] == [True, True]
            log.with_name("go").touch()
        assert [finish_reason(lines) for lines in got] == ["length"] * 6
        assert process.wait(PATIENCE_S) == 0
        for child in children:
            wait_until_gone(child)


def test_a_terminal_s_signals_are_not_for_the_engine_s_process(folder):
    """It imports before it says what signals are to it: Ctrl-C then ended it, and the server said that it had died."""
    with started(folder) as (process, _):
        assert os.getpgid(child_of(process)) == child_of(process)


def test_a_second_signal_to_the_whole_group_does_not_wait(folder, log):
    with started(folder, drain_s=600) as (process, url):
        child = child_of(process)
        with streaming(url, log, 2) as got:
            os.killpg(process.pid, signal.SIGTERM)
            wait_until(lambda: is_stopping(url))
            os.killpg(process.pid, signal.SIGTERM)
        assert [json.loads(lines[-2])["error"]["code"] for lines in got] == ["shutting_down"] * 2
        assert process.wait(PATIENCE_S) == 0
        wait_until_gone(child)


@pytest.mark.parametrize(("path", "kind"), [("/v1/completions", "unavailable_error"), ("/v1/messages", "overloaded_error")])
def test_a_body_that_has_not_come_when_the_server_ends_is_answered_as_others_are(folder, path, kind):
    """Its sender got uvicorn's words, with status 500."""
    with started(folder, drain_s=0.1) as (process, url):
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as sender, sender.makefile("rb") as answer:
            sender.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 9\r\n\r\n".encode())
            assert answer.readline().startswith(b"HTTP/1.1 100")  # the body is waited for
            process.send_signal(signal.SIGTERM)
            said = answer.read().decode().lower()
        assert "http/1.1 503" in said
        assert "retry-after: 1" in said
        assert f'"type":"{kind}"' in said
        assert "the server is shutting down" in said
        assert process.wait(PATIENCE_S) == 0


def test_a_terminal_that_closes_and_says_so_twice_ends_nothing_early(folder, log):
    with started(folder, drain_s=600) as (process, url):
        with streaming(url, log, 1) as got:
            process.send_signal(signal.SIGHUP)
            wait_until(lambda: is_stopping(url))
            process.send_signal(signal.SIGHUP)
            assert is_stopping(url)
            log.with_name("go").touch()
        assert [finish_reason(lines) for lines in got] == ["length"]
        assert process.wait(PATIENCE_S) == 0


def test_under_nohup_a_terminal_that_closes_changes_nothing(folder):
    with started(folder, prefix=("nohup",)) as (process, url):
        os.killpg(process.pid, signal.SIGHUP)
        for _ in range(3):
            assert httpx.get(f"{url}/health", timeout=PATIENCE_S).json() == {"status": "ready"}
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("name", ["TERM", "INT"])
def test_a_signal_just_when_an_engine_starts(folder, tmp_path, name):
    """It ended the server as if nothing was there to end: a folder with a socket stayed."""
    code = (
        "from enginery.config.schema import EngineOptions\n"
        "from enginery.plugin.registry import Registry\n"
        "from enginery.serve.server import ServeSettings, serve\n"
        "from enginery.serve.start_display import StartDisplay\n"
        f"settings = ServeSettings(port=0, engine_command=('sh', '-c', 'kill -{name} $PPID; exec sleep 60'))\n"
        "with StartDisplay() as display:\n"
        f"    serve(EngineOptions(model={str(folder)!r}), Registry.load(no_plugins=True), settings, display)\n"
    )
    there = tmp_path / "there"
    there.mkdir()
    environment = {**os.environ, "TMPDIR": str(there)}
    done = quick_processes.run_python("-c", code, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, list(there.iterdir())) == (0, []), done.stderr
