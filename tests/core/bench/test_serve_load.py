"""engine bench serve against servers that are scripted byte by byte: what is counted, what fails, how loads are shaped."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from pathlib import Path

import pytest
from free_ports import free_ports
from scripted_server import STREAM, USAGE, Scripted, chunked, event, one, using
from typer.testing import CliRunner, Result

from enginery.bench.report import Row
from enginery.bench.serve_load import Client, Load, measure_load, run_load
from enginery.bench.workloads import WORKLOADS, write_shape, write_tokenizer
from enginery.cli.bench_serve import LoadFlags, loads
from enginery.cli.main import build_app
from enginery.errors import ConfigError, EnginError
from enginery.text.tokenizer import Tokenizer


def measured(url: str, load: Load) -> Row:
    return using(url, lambda client: measure_load(client, load, model="m", vocab_size=50))


def test_text_is_timed_and_tokens_are_the_server_s_count(server) -> None:
    scripted, url = server
    scripted.pause_s = 0.2
    began_s = time.perf_counter()
    call = one(url)
    assert call.error is None
    assert call.num_tokens == 3
    assert len(call.times) == 3
    assert began_s < call.sent_s < call.times[0] < call.times[1] < call.times[2]
    assert call.times[2] - call.times[0] > 0.1
    assert call.times[2] + 0.1 < call.ended_s < time.perf_counter()


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_a_stream_may_be_cut_anywhere(server, size: int) -> None:
    scripted, url = server
    body = b"".join(STREAM)
    pieces = b"".join(chunked(body[at : at + size]) for at in range(0, len(body), size)) + b"0\r\n\r\n"
    scripted.parts = [pieces[at : at + 3] for at in range(0, len(pieces), 3)]
    call = one(url)
    assert (call.error, call.num_tokens, len(call.times)) == (None, 3, 3)


def test_a_server_that_counts_no_tokens_is_counted_by_its_pieces(server) -> None:
    scripted, url = server
    scripted.parts = [chunked(event("a")), chunked(event("b")), b"0\r\n\r\n"]
    assert one(url).num_tokens == 2


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([chunked(event("a"))], "closed the connection in the middle"),
        (
            [chunked(event("a")), chunked(b'data: {"error": {"message": "no"}}\n\n'), b"0\r\n\r\n"],
            "in the stream: {'message': 'no'}",
        ),
        ([chunked(b"data: {\n\n"), b"0\r\n\r\n"], "DecodeError"),
        ([chunked(USAGE), b"0\r\n\r\n"], "no text"),
        ([b"zz\r\n"], "ValueError"),
    ],
)
def test_a_stream_that_goes_wrong_is_an_error(server, parts: list[bytes], words: str) -> None:
    scripted, url = server
    scripted.parts = parts

    async def then_close(writer: asyncio.StreamWriter) -> None:
        await scripted.stream(writer)
        writer.close()

    scripted.script = then_close
    assert words in one(url).error


def test_a_refusal_is_an_error_with_the_server_s_words(server) -> None:
    scripted, url = server

    async def refuse(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 429 Too Many\r\ncontent-length: 4\r\nconnection: close\r\n\r\nbusy")

    scripted.script = refuse
    assert one(url).error == "status 429: busy"


def test_nobody_there_is_an_error() -> None:
    url = f"http://127.0.0.1:{free_ports()}"
    assert "ConnectionRefusedError" in one(url).error
    with pytest.raises(EnginError, match="does not name a model"):
        using(url, Client.first_model)


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http:///v1", "http://127.0.0.1:99999", "http://[::1"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--url"):
        Client(url)


def test_a_server_that_accepts_and_never_answers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("enginery.bench.serve_load._GET_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(EnginError, match=r"/v1/models does not name a model \(TimeoutError: no answer within 0.2 s\)"):
            using(url, lambda client: asyncio.wait_for(client.first_model(), 20))


def test_a_closed_loop_keeps_so_many_running_on_as_many_connections(server) -> None:
    scripted, url = server

    async def stream(writer: asyncio.StreamWriter) -> None:
        await scripted.hold_until_open(3)
        await scripted.stream(writer)

    scripted.script = stream
    calls = using(url, lambda client: run_load(client, [b"{}"] * 12, Load(lengths=(), concurrency=3)))
    assert [call.error for call in calls] == [None] * 12
    assert (scripted.most_open, scripted.num_connections) == (3, 3)


def test_an_open_loop_does_not_wait_for_answers(server) -> None:
    scripted, url = server

    async def stream(writer: asyncio.StreamWriter) -> None:
        await scripted.hold_until_open(40)
        await scripted.stream(writer)

    scripted.script = stream
    calls = using(url, lambda client: run_load(client, [b"{}"] * 40, Load(lengths=(), rate=200)))
    dues = [call.due_s for call in calls]
    assert dues == sorted(dues)
    assert 0.1 < dues[-1] - dues[0] < 0.4
    assert [call.error for call in calls] == [None] * 40
    assert all(call.sent_s >= call.due_s for call in calls)


def test_prompts_have_their_lengths_share_their_beginning_and_are_never_the_same() -> None:
    load = Load(lengths=((5, 2), (9, 4)), shared_prefix=3, temperature=0.5)
    first, second = (json.loads(body) for body in load.bodies("m", 1000))
    assert [len(body["prompt"]) for body in (first, second)] == [5, 9]
    assert first["prompt"][:3] == second["prompt"][:3]
    assert (first["max_tokens"], second["max_tokens"]) == (2, 4)
    assert {"ignore_eos", "stream", "stream_options"} <= first.keys()
    assert max(second["prompt"]) < 1000
    assert json.loads(load.bodies("m", 1000)[0])["prompt"] != first["prompt"]


def test_a_row_has_percentiles_rates_errors_and_the_client_s_own_load(server) -> None:
    scripted, url = server
    row = measured(url, Load(lengths=((4, 3),) * 6, concurrency=2))
    assert row.what == {"model": "m", "load": "2 at once", "requests": 6, "input": "4", "output": "3"}
    assert [f"{name}_p{each}_s" for name in ("ttft", "itl", "e2e") for each in (50, 90, 99)] + ["total_s"] == list(row.measured)
    assert row.derived["output_tokens_per_s"] == pytest.approx(18 / row.measured["total_s"])
    assert row.derived["requests_per_s"] == pytest.approx(6 / row.measured["total_s"])
    assert row.derived["errors"] == 0
    assert 0 < row.derived["client_busy_fraction"] < 2
    assert row.derived["client_late_p99_s"] >= 0
    assert {body["model"] for body in scripted.bodies} == {"m"}


def fail_once(scripted: Scripted) -> None:
    """Have it refuse the next request, and stream to all others."""
    answers = iter([b"HTTP/1.1 500 Bug\r\ncontent-length: 3\r\n\r\nbug"])

    async def script(writer: asyncio.StreamWriter) -> None:
        answer = next(answers, None)
        writer.write(answer) if answer else await scripted.stream(writer)

    scripted.script = script


def test_some_failures_are_counted_and_all_of_them_are_an_error(server) -> None:
    scripted, url = server
    fail_once(scripted)
    load = Load(lengths=((4, 3),) * 4)
    row = measured(url, load)
    assert row.derived["errors"] == 1
    assert row.details["errors"] == {"status 500: bug": 1}
    scripted.parts = [b"0\r\n\r\n"]
    with pytest.raises(EnginError, match="all 4 requests failed, most often so: the stream had no text"):
        measured(url, load)


def bench(*arguments: object) -> Result:
    result = CliRunner(env={"COLUMNS": "90"}).invoke(build_app(), ["bench", "serve", *map(str, arguments)])
    if isinstance(result.exception, EnginError):
        raise result.exception
    return result


def test_the_command_measures_each_load_and_compares(server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINERY_API_KEY", " secret other")
    scripted, url = server
    flags = ("--url", f"{url}/v1/", "--requests", 20, "--input-len", "5:9", "--output-len", 3)
    before = tmp_path / "before.json"
    shown = bench(*flags, "--rate", 500, "--concurrency", 2, "--output", before)
    assert shown.exit_code == 0, shown.output
    for text in ("500/s", "2 at once", "ttft p99", "errors", "client busy fraction"):
        assert text in shown.output
    assert max(map(len, shown.output.splitlines())) <= 90
    assert all(b"Authorization: Bearer secret\r\n" in head for head in scripted.heads)
    assert {head.split()[1] for head in scripted.heads} == {b"/v1/models", b"/v1/completions"}
    report = json.loads(before.read_text())
    assert report["bench"] == "serve"
    assert report["device"] == "a server on 127.0.0.1"
    assert {row["what"]["input"] for row in report["rows"]} == {"5:9"}
    assert {"command", "commit", "versions"} <= report.keys()
    again = bench(*flags, "--rate", 500, "--compare", before, "--tolerance", 1_000_000)
    assert again.exit_code == 0
    assert "times grew by more than" in again.output


def test_a_load_of_which_requests_failed_is_reported_and_ends_with_status_1(server, tmp_path: Path) -> None:
    scripted, url = server
    fail_once(scripted)
    flags = ("--url", url, "--requests", 4, "--concurrency", 1, "--warm-up", 0)
    done = bench(*flags, "--output", tmp_path / "report.json")
    assert done.exit_code == 1
    assert "1 times: status 500: bug" in done.output
    assert json.loads((tmp_path / "report.json").read_text())["rows"][0]["derived"]["errors"] == 1
    assert bench(*flags).exit_code == 0


def test_the_model_is_the_server_s_first_or_the_one_that_is_named(server) -> None:
    scripted, url = server
    bench("--url", url, "--requests", 1)
    bench("other", "--url", url, "--requests", 1)
    assert {body["model"] for body in scripted.bodies} == {"m", "other"}
    scripted.models = {"data": []}
    with pytest.raises(EnginError, match=r"does not name a model \(IndexError"):
        bench("--url", url)


def test_the_model_of_a_server_that_runs_may_be_a_flag_s(server) -> None:
    scripted, url = server
    bench("--url", url, "--model", "other", "--requests", 1, "--warm-up", 0)
    bench("C1", "--url", url, "--model", "third", "--requests", 1, "--warm-up", 0, "--output-len", 3)
    assert {body["model"] for body in scripted.bodies} == {"other", "third"}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--drafter", "lookup", "--tp", "4"), "the server at --url has settings of its own; leave out drafter, tp"),
        (("-p", "no:x"), "leave out blocked_plugins"),
        (("a", "--model", "b"), "two models are named, a and b"),
    ],
)
def test_settings_of_an_engine_are_refused_where_a_server_runs(flags: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        bench("--url", "http://127.0.0.1:9", *flags)


def test_settings_of_the_environment_are_there_for_servers_too(server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINERY_TP", "2")
    assert bench("--url", server[1], "--requests", 1, "--warm-up", 0).exit_code == 0


def test_token_ids_suit_the_model_where_its_folder_is_here(server, tmp_path: Path) -> None:
    scripted, url = server
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 12}))
    scripted.models = {"data": [{"id": "m", "root": str(tmp_path)}]}
    bench("--url", url, "--requests", 2)
    assert {token for body in scripted.bodies for token in body["prompt"]} == {10, 11}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--input-len", "0"), "--input-len is '0', but must be a number, as 512, or two, as 100:1024"),
        (("--output-len", "9:3"), "--output-len"),
        (("--output-len", "x"), "--output-len"),
        (("--shared-prefix", "600"), "less than the 512 tokens of the shortest prompt"),
    ],
)
def test_loads_that_cannot_be_are_refused(flags: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        bench("--url", "http://127.0.0.1:9", *flags)


def test_a_workload_brings_its_lengths_and_runs_all_at_once() -> None:
    (load,) = loads(LoadFlags(), "W5")
    assert (load.lengths, load.concurrency, load.rate, load.shared_prefix) == (WORKLOADS["W5"].lengths, 128, None, 4096)
    (load,) = loads(LoadFlags(rate=[16.0]), "W3")
    assert (load.lengths, load.rate, load.concurrency) == (((512, 256),) * 960, 16.0, 1)
    (load,) = loads(LoadFlags(requests=3, output_len="7"), "W5")
    assert load.lengths == ((4160, 7),) * 3


def test_loads_have_a_size_of_their_own_unless_told() -> None:
    asked = LoadFlags(rate=[2.0], concurrency=[4], input_len="8:10", output_len="5")
    opened, closed = loads(asked, None)
    assert (len(opened.lengths), len(closed.lengths)) == (120, 32)
    assert {length for length, _ in opened.lengths} == {8, 9, 10}
    assert opened.lengths[:32] == closed.lengths
    assert loads(LoadFlags(), None)[0].concurrency == 16


def test_a_shape_gets_a_tokenizer_that_knows_every_id(tmp_path: Path) -> None:
    write_tokenizer(write_shape("llama-125m", tmp_path))
    vocab_size = json.loads((tmp_path / "config.json").read_text())["vocab_size"]
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert all(tokenizer.decode([number], skip_special_tokens=True) for number in (0, 300, vocab_size - 1))
    assert tokenizer.decode(tokenizer.encode("héllo", add_special_tokens=False), skip_special_tokens=True) == "héllo"


def test_a_server_that_does_not_start_is_an_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(EnginError, match="ended with exit status 2 while it started"):
        bench("--no-plugins", "--model", tmp_path)
    assert "has no config.json" in capfd.readouterr().err
