"""What breaks inside or around the server: rows 16, 17, 26 to 32, 37, 39 and 41 of the checklist."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest
import quick_processes
from chaos.faulty_engine import BROKEN, NAN, OUT_OF_MEMORY, RAISES, WEDGE, WRONG_SHAPE
from chaos.harness import HERE, SETTINGS, started

from enginery.engine.engine import MAX_FAILED_STEPS

LONG = {"max_tokens": 1000, "ignore_eos": True, "temperature": 0}  # 4 s at the least


def end_of(server, seconds=90):
    """The exit code, within that time."""
    return server.process.wait(seconds)


def socket_of(server):
    """The path of the UNIX socket that the server listens on."""
    own = {os.readlink(link) for link in Path(f"/proc/{server.process.pid}/fd").iterdir()}
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines() if "/enginery-" in line]
    (path,) = {line[-1] for line in lines if f"socket:[{line[6]}]" in own}
    return path


def test_row_16_nobody_else_can_connect_to_the_engines_socket(server):
    """It was removed when the engine had. Who may before that, and what is no message: `tests/serve/test_processes.py`."""
    path = Path(socket_of(server))
    assert not path.parent.exists()
    with socket.socket(socket.AF_UNIX) as stranger, pytest.raises(FileNotFoundError):
        stranger.connect(os.fspath(path))


def test_row_17_the_http_port_is_the_only_one(server):
    for pid in (server.process.pid, server.engine_pid):
        listening = [found.laddr for found in psutil.Process(pid).net_connections(kind="inet") if found.status == "LISTEN"]
        assert [tuple(found) for found in listening] == ([server.address] if pid == server.process.pid else [])


@pytest.mark.parametrize("is_loaded", [False, True])
def test_row_26_a_killed_engine_ends_the_server_and_nobody_hangs(is_loaded):
    with started() as server, concurrent.futures.ThreadPoolExecutor() as pool:
        running = [pool.submit(server.complete, "x", **LONG, n=4) for _ in range(3 if is_loaded else 0)]
        if is_loaded:
            server.until(lambda: server.metric("vllm:num_requests_running") == 12)
        os.kill(server.engine_pid, signal.SIGKILL)
        with contextlib.suppress(httpx.TransportError):
            server.until(lambda: server.http.get("/health/ready").status_code == 503)
            assert server.http.get("/health/progress").status_code == 503
            assert server.http.get("/health/live").status_code == 200
        assert [answer.result().status_code for answer in running] == [503] * len(running)
        assert end_of(server) == 1
        *_, last = server.said().strip().splitlines()
        assert last.startswith("engine: the engine's process was killed by SIGKILL")


def test_row_27_a_killed_server_leaves_no_process():
    with started() as server:
        own = {server.engine_pid, server.template_pid}
        family = psutil.Process(server.process.pid).children(recursive=True)
        assert own <= {process.pid for process in family}
        server.process.kill()
        server.process.wait()
        gone, alive = psutil.wait_procs(family, timeout=20)
        assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
        assert len(gone) + len(alive) == len(family)


@pytest.mark.parametrize("num_signals", [1, 2])
def test_row_28_a_signal_drains_and_a_second_one_does_not_wait(num_signals):
    with started() as server, concurrent.futures.ThreadPoolExecutor() as pool:
        running = [pool.submit(server.complete, "x", **LONG | {"max_tokens": 300 if num_signals == 1 else 1000}) for _ in range(4)]
        server.until(lambda: server.metric("vllm:num_requests_running") == 4)
        began = time.monotonic()
        for _ in range(num_signals):
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
        if num_signals == 1:
            with contextlib.suppress(httpx.TransportError):
                assert server.complete("x").status_code == 503
        assert {answer.result().status_code for answer in running} == ({200} if num_signals == 1 else {503})
        assert end_of(server) == 0
        assert time.monotonic() - began < SETTINGS["drain_s"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_row_28_a_signal_to_every_process_of_the_group_lets_streams_end(number):
    """As systemd stops a service and a terminal says that it closes."""
    with started() as server, concurrent.futures.ThreadPoolExecutor() as pool:
        assert psutil.pid_exists(server.template_pid)
        family = psutil.Process(server.process.pid).children()
        running = [pool.submit(server.complete, "x", **LONG | {"max_tokens": 300}, stream=True) for _ in range(6)]
        server.until(lambda: server.metric("vllm:num_requests_running") == 6)
        os.killpg(server.process.pid, number)
        answers = [answer.result().text for answer in running]
        assert [(text.count('"finish_reason":"length"'), text.endswith("data: [DONE]\n\n")) for text in answers] == [(1, True)] * 6
        assert end_of(server) == 0
        assert len(family) == 2
        _, alive = psutil.wait_procs(family, timeout=20)
        assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_row_29_a_loop_that_is_stuck_is_seen_and_its_stacks_are_written_down(server):
    seen: list[tuple[int, int, str]] = []
    with concurrent.futures.ThreadPoolExecutor() as pool:
        wedged = pool.submit(server.complete, "x", seed=WEDGE, max_tokens=8, ignore_eos=True)
        while not wedged.done():
            live, progress = server.http.get("/health/live"), server.http.get("/health/progress")
            seen.append((live.status_code, progress.status_code, progress.json()["status"]))
            time.sleep(0.1)
    assert wedged.result().status_code == 200
    assert {live for live, _, _ in seen} == {200}
    assert (200, 503, "stuck") in seen
    said = server.said()
    assert "no step has completed for" in said
    assert "Stacks of the HTTP process:\nThread " in said
    assert "\nThread MainThread:\n" in said
    assert "1 prompt tokens, 3 generated" in said
    assert f'faulty_engine.py", line' in said  # noqa: F541
    assert server.http.get("/health/progress").status_code == 200


def with_a_neighbour(server, seed):
    """The answer to a request with this seed, beside a request whose answer must be what it always is."""
    body = {"max_tokens": 20, "ignore_eos": True, "seed": seed}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        faulty = pool.submit(server.complete, "x", **body)
        neighbour = pool.submit(server.complete, "y", max_tokens=60, ignore_eos=True, temperature=0)
        return faulty.result(), neighbour.result()


@pytest.mark.parametrize(("seed", "name"), [(OUT_OF_MEMORY, "OutOfMemoryError"), (RAISES, "ValueError"), (WRONG_SHAPE, "Error: ")])
def test_rows_30_and_32_a_step_that_fails_ends_its_requests_and_names_whose_code_it_ran(server, seed, name):
    before = server.metric("enginery:steps_failed_total")
    faulty, _ = with_a_neighbour(server, seed)
    assert faulty.status_code == 500
    message = faulty.json()["error"]["message"]
    assert name in message
    assert re.search("enginery-attn-(cpu|torch)==", message)
    server.until(lambda: server.metric("enginery:steps_failed_total") == before + 1)


def test_row_30_memory_may_run_out_any_number_of_times(server):
    for _ in range(8):
        assert server.complete("x", seed=OUT_OF_MEMORY, max_tokens=8, ignore_eos=True).status_code == 500


def test_row_32_a_stream_is_told_in_an_event(server):
    text = server.complete("x", seed=RAISES, max_tokens=8, ignore_eos=True, stream=True).text
    *_, last, done = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert (json.loads(last)["error"]["type"], done) == ("server_error", "[DONE]")


def test_row_32_what_fails_every_time_ends_the_server_with_the_cause_last():
    with started() as server:
        statuses = [server.complete("x", seed=BROKEN).status_code for _ in range(MAX_FAILED_STEPS)]
        assert statuses == [500] * (MAX_FAILED_STEPS - 1) + [503]
        assert end_of(server) == 1
        *_, last = server.said().strip().splitlines()
        assert last.startswith("in step ")
        assert re.search("enginery-attn-(cpu|torch)==", last)
        assert server.said().count("engine: the engine broke: KeyError: 'no such layer'") == 1


@pytest.mark.parametrize("temperature", [0, 1])
def test_row_31_nan_logits_end_their_own_request(server, temperature):
    alone = server.complete("y", max_tokens=60, ignore_eos=True, temperature=0).json()["choices"][0]["text"]
    before = server.metric("vllm:corrupted_requests_total")
    body = {"max_tokens": 20, "ignore_eos": True, "seed": NAN, "temperature": temperature}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        neighbour = pool.submit(server.complete, "y", max_tokens=60, ignore_eos=True, temperature=0)
        faulty = server.complete("x", **body)
    assert faulty.status_code == 500
    assert "NaN" in faulty.json()["error"]["message"]
    assert neighbour.result().json()["choices"][0]["text"] == alone
    server.until(lambda: server.metric("vllm:corrupted_requests_total") == before + 1)


def test_row_37_without_a_place_for_the_socket_the_start_says_so(tmp_path):
    environ = {**os.environ, "TMPDIR": str(tmp_path / ("x" * 110)), "HF_HUB_OFFLINE": "1"}
    (tmp_path / ("x" * 110)).mkdir()
    command = [sys.executable, str(HERE / "chaos_server.py"), "{}", "{}"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=150, check=False)
    assert (done.returncode, done.stderr.strip().splitlines()[-1].split(";")[-1]) == (2, " set TMPDIR to another, shorter path")


def test_row_37_without_a_network_a_model_of_the_hub_is_an_error_that_says_so():
    environ = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(HERE / "chaos_server.py"), '{"model": "somebody/unheard-of"}', "{}"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "somebody/unheard-of" in done.stderr


def test_row_39_a_second_server_on_the_port_ends_before_it_loads_anything(server):
    host, port = server.address
    code = f"from enginery.serve.http.listening import bind; bind({host!r}, {port})"
    done = quick_processes.run_python("-c", code, capture_output=True, text=True, timeout=150, check=False)
    assert f"port {port} of {host} cannot be used" in done.stderr


def test_row_41_no_clock_that_can_jump_is_read_for_durations():
    """The wall clock may name a moment to people: when an answer was made, a line written, a span begun."""
    core = HERE.parents[1] / "core" / "enginery"
    packages = ("serve", "run", "schedule", "memory")
    files = [path for package in packages for path in (core / package).rglob("*.py")]
    found = {path.name for path in files if any(call in path.read_text() for call in ("time.time()", "time_ns()", "datetime.now"))}
    assert found <= {"access.py", "app.py", "service.py", "responses.py"}
