"""Metrics, probes, logs, spans, TLS and the server's settings. Attacks on them: `tests/chaos`."""

from __future__ import annotations

import asyncio
import http.server
import json
import logging
import ssl
import sys
import threading
from collections.abc import Iterator

import httpx
import pytest
import quick_processes
import trustme
from fake_engine import FAIL, HELD
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families
from running import PATIENCE_S, started

from enginery.cli.main import main
from enginery.contracts.engine import STEP_SIZES
from enginery.errors import ConfigError
from enginery.serve.http.listening import bind, is_loopback
from enginery.serve.http.logs import JsonLines, TextLines
from enginery.serve.http.metrics import Histogram
from enginery.serve.http.traces import Tracer
from enginery.serve.settings import ServeSettings, read_keys

NAMES = {
    "enginery:engine_restarts": "counter",
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:prompt_tokens": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:num_preemptions": "counter",
    "vllm:admission_rejections": "counter",
    "vllm:corrupted_requests": "counter",
    "vllm:request_success": "counter",
    "vllm:spec_decode_num_drafts": "counter",
    "vllm:spec_decode_num_draft_tokens": "counter",
    "vllm:spec_decode_num_accepted_tokens": "counter",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "counter",
    "enginery:spec_decode_told_tokens": "counter",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:iteration_tokens_total": "histogram",
    "vllm:cache_config_info": "gauge",
    "enginery:kv_pages": "gauge",
    "enginery:kv_pages_free": "gauge",
    "enginery:kv_pages_cached": "gauge",
    "enginery:memory_pages": "gauge",
    "enginery:memory_pages_evicted": "counter",
    "enginery:requests_open": "gauge",
    "enginery:requests_aborted": "counter",
    "enginery:steps": "counter",
    "enginery:steps_failed": "counter",
    "enginery:backend_steps": "counter",
    "enginery:kernels_compiling": "gauge",
    "enginery:graph_hits": "counter",
    "enginery:graph_misses": "counter",
    "enginery:step_host_seconds": "counter",
    "enginery:step_plan_seconds": "counter",
    "enginery:step_run_seconds": "counter",
    "enginery:startup_seconds": "gauge",
    "enginery:plugin_info": "gauge",
    "enginery:http_requests": "counter",
}


async def samples(live) -> dict[str, float]:
    text = (await live.http.get("/metrics")).text
    return {
        sample.name + "".join(f",{name}={value}" for name, value in sample.labels.items() if name != "model_name"): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_names_of_the_metrics_are_those_that_dashboards_know(with_server):
    """A name that changes breaks somebody's dashboard: add the new one, and take the old one away two releases later."""

    async def scenario(live):
        text = (await live.http.get("/metrics")).text
        found = {family.name: family.type for family in text_string_to_metric_families(text)}
        assert {name: kind for name, kind in found.items() if name.startswith(("vllm:", "enginery:"))} == NAMES

    with_server(scenario)


def test_what_guesses_bring_is_told_everywhere(with_server):
    async def scenario(live):
        await live.until(lambda: live.engine.stats.drafts.told)
        now = await samples(live)
        told = {"num_drafts": 4, "num_draft_tokens": 20, "num_accepted_tokens": 8, "told_tokens": 11}
        for name, count in told.items():
            assert now[f"{'enginery' if name == 'told_tokens' else 'vllm'}:spec_decode_{name}_total"] == count
        assert [now[f"vllm:spec_decode_num_accepted_tokens_per_pos_total,position={place}"] for place in range(3)] == [4, 3, 1]
        shown = {"acceptance_length": 2.75, "drafted_tokens": 20, "accepted_tokens": 8}
        for path in ("/server_info", "/health/progress"):
            assert (await live.http.get(path)).json()["speculation"] == shown

    with_server(scenario)


def test_metrics_count_what_clients_got(with_server):
    async def scenario(live):
        await asyncio.gather(*(live.complete([5, 6, 7, 8], max_tokens=4) for _ in range(3)))
        await live.complete([5] * 10, seed=FAIL)
        await live.complete("x", top_p=9)
        now = await samples(live)
        assert now["vllm:request_success_total,finished_reason=length"] == 3
        assert now["vllm:request_success_total,finished_reason=error"] == 1
        assert now["vllm:generation_tokens_total"] == 14
        assert now["vllm:prompt_tokens_total"] == 3 * 4 + 10
        assert now["vllm:prefix_cache_hits_total"] == 3 * 2 + 5
        assert now["vllm:time_to_first_token_seconds_count"] == 4
        assert now["vllm:inter_token_latency_seconds_count"] == 10
        assert now["vllm:e2e_request_latency_seconds_count"] == 3
        assert now["vllm:request_prompt_tokens_sum"] == 3 * 4
        assert now["vllm:request_generation_tokens_bucket,le=5.0"] == now["vllm:request_generation_tokens_count"] == 3
        assert now["vllm:request_generation_tokens_bucket,le=2.0"] == 0
        assert now["vllm:time_to_first_token_seconds_bucket,le=+Inf"] == 4
        assert now["enginery:requests_open"] == 0

    with_server(scenario)


def test_a_stop_string_is_no_abort_and_a_refusal_no_request(with_server):
    async def scenario(live):
        await live.complete("hello world", stop="lo", max_tokens=100)
        tasks = [asyncio.create_task(live.complete("a b c", seed=HELD, max_tokens=50)) for _ in range(4)]
        await live.until(lambda: sum(task.done() for task in tasks) == 2)
        live.release()
        assert sorted([(await task).status_code for task in tasks]) == [200, 200, 429, 429]
        now = await samples(live)
        assert now["vllm:request_success_total,finished_reason=stop"] >= 1
        assert now["enginery:requests_aborted_total"] == 0
        assert now["vllm:admission_rejections_total"] == 2

    with_server(scenario, max_queued_requests=2)


def test_a_histogram_puts_a_bound_itself_below_it():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.add(value)
    assert (histogram.counts, histogram.total) == ([2, 1, 1], 12.0)
    assert list(STEP_SIZES) == sorted(STEP_SIZES)


def test_the_probes_differ(with_server):
    async def scenario(live):
        assert (await live.http.get("/health/live")).json() == {"status": "live"}
        assert (await live.http.get("/health/ready")).json() == {"status": "ready"}
        assert (await live.http.get("/health/progress")).json()["status"] == "idle"
        running = asyncio.create_task(live.complete("a", seed=HELD, ignore_eos=True, max_tokens=40))
        await live.until(lambda: bool(live.said("submit")))
        assert (await live.http.get("/health/progress")).json()["status"] == "moving"
        live.release()
        await running

    with_server(scenario)


@pytest.mark.parametrize(("compiling", "status", "backend"), [("", "compiled", "fake"), ("one two", "compiling", "first")])
def test_attention_kernels_that_are_still_compiled_are_told(with_server, monkeypatch, compiling, status, backend):
    monkeypatch.setenv("FAKE_COMPILING", compiling)

    async def scenario(live):
        await live.until(lambda: bool(live.service.engine.stats.attn_backend))  # the first report
        said = (await live.http.get("/health/progress")).json()
        assert said["attention_backend"] == backend
        assert said["kernels"] == {"status": status, "compiling": compiling.split(), "seconds": 2.5, "failure": None}
        now = await samples(live)
        assert now["enginery:kernels_compiling"] == len(compiling.split())
        assert now["enginery:backend_steps_total,attention_backend=first"] == 3
        assert now["enginery:backend_steps_total,attention_backend=fake"] == 4

    with_server(scenario)


def test_what_runs_is_told_without_secrets(with_server):
    async def scenario(live):
        info = (await live.http.get("/server_info")).json()
        assert info["engine"]["decisions"] == [{"setting": "engine", "value": "fake", "reason": "this is a test"}]
        assert info["plugins"][0]["distribution"] == "enginery"
        assert info["options"]["plugin_options"] == ["a.api_key=***", "b.size=3"]

    with_server(scenario, plugin_options=("a.api_key=hunter2", "b.size=3"))


def record(message, **more):
    made = logging.LogRecord("enginery.test", logging.INFO, "", 0, message, (), None)
    made.__dict__.update(more)
    return made


def test_an_answer_has_the_id_that_its_client_gave_it_or_a_new_one_and_so_has_the_log(folder):
    with started(folder, log_format="json") as (process, url):
        given = []
        for headers, expected in (({"x-request-id": "mine-1"}, "mine-1"), ({"x-request-id": "a b"}, "req_"), ({}, "req_")):
            for path, status in (("/v1/models", 200), ("/none", 404)):
                answer = httpx.get(url + path, headers=headers, timeout=PATIENCE_S)
                given.append(answer.headers["x-request-id"])
                assert (answer.status_code, given[-1].startswith(expected)) == (status, True)
        process.terminate()
        lines = [json.loads(line) for line in process.communicate(timeout=PATIENCE_S)[1].splitlines()]
    assert [line["x_request_id"] for line in lines if "x_request_id" in line] == given


def test_a_line_of_text_cannot_be_broken():
    line = TextLines().format(record("a\nb\r\x1b[31m\u2028c", fields={"path": "/x", "status": 200}))
    assert line.endswith("INFO enginery.test a\\nb\\r\\x1b[31m\\x2028c status=200")
    assert line.count("\n") == 0


def test_a_line_of_json_has_the_fields_and_the_traceback():
    try:
        raise ValueError("x\ny")
    except ValueError:
        said = json.loads(JsonLines().format(record("m", fields={"status": 200}, exc_info=sys.exc_info())))
    assert (said["message"], said["status"], said["level"]) == ("m", 200, "INFO")
    assert said["traceback"].endswith("ValueError: x\ny")


def test_a_line_of_json_has_no_character_that_ends_a_line_for_anybody():
    path = "/a\u2028b\u2029c\x85d\x9be\x7f\n"
    line = JsonLines().format(record("m", fields={"path": path}))
    assert (json.loads(line)["path"], line.isascii(), len(line.splitlines())) == (path, True, 1)


def test_the_log_in_json_is_json_to_the_last_line(folder):
    with started(folder, log_format="json") as (process, url):
        httpx.post(f"{url}/v1/completions", json={"prompt": [5, 6], "max_tokens": 2}, timeout=PATIENCE_S)
        process.terminate()
        lines = [json.loads(line) for line in process.communicate(timeout=PATIENCE_S)[1].splitlines()]
    (told,) = [line for line in lines if line.get("path") == "/v1/completions"]
    assert (told["status"], told["prompt_tokens"], told["output_tokens"], told["reasons"]) == (200, 2, 2, ["length"])


@pytest.fixture
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """An OTLP collector, and what it got."""
    got: list[ExportTraceServiceRequest] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", got
        server.shutdown()
        thread.join()


def test_a_request_is_a_span_of_the_trace_that_it_names(folder, collector):
    endpoint, got = collector
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with started(folder, otlp_endpoint=endpoint) as (process, url):
        asked = {"json": {"prompt": "hi", "max_tokens": 2}, "headers": {"traceparent": parent}}
        httpx.post(f"{url}/v1/completions", **asked, timeout=PATIENCE_S)
        httpx.get(f"{url}/health", timeout=PATIENCE_S)
        process.terminate()
        process.communicate(timeout=PATIENCE_S)
    (span,) = [span for one in got for part in one.resource_spans for scope in part.scope_spans for span in scope.spans]
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == tuple(parent.split("-")[1:3])
    told = {attribute.key: attribute.value for attribute in span.attributes}
    assert told["gen_ai.usage.output_tokens"].int_value == 2
    assert span.end_time_unix_nano > span.start_time_unix_nano


def test_https_is_served_with_a_certificate(folder, tmp_path):
    authority = trustme.CA()
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(tmp_path / "both.pem")
    context = ssl.create_default_context()
    authority.configure_trust(context)
    with started(folder, ssl_certfile=str(tmp_path / "both.pem")) as (_, url):
        assert url.startswith("https://")
        assert httpx.get(f"{url}/health", verify=context, timeout=PATIENCE_S).json() == {"status": "ready"}


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"api_keys": ("",)}, "a key is empty"),
        ({"admin_keys": ("  ",)}, "a key is empty"),
        ({"api_keys": ("a b",)}, "characters that no header carries"),
        ({"admin_keys": ("ü",)}, "characters that no header carries"),
        ({"api_keys": ("a", "b"), "admin_keys": ("b",)}, "a client's .--api-key. and an administrator's .--admin-key."),
        ({"log_level": "loud"}, "debug, info, warning, error"),
        ({"ssl_keyfile": "x"}, "without --ssl-certfile"),
        ({"ssl_certfile": __file__}, "cannot be used: .*; it must be PEM"),
        ({"allow_origins": ("https://a", "b.example")}, "--allow-origin is 'b.example', which no browser sends"),
        ({"allow_origins": ("https://a/",)}, "--allow-origin is 'https://a/', which no browser sends"),
        ({"allow_origins": ("https://A",)}, "--allow-origin is 'https://A', which no browser sends"),
    ],
    ids=str,
)
def test_settings_that_cannot_work_end_the_start(settings, told):
    with pytest.raises(ConfigError, match=told):
        ServeSettings(**settings)


def test_an_origin_is_what_browsers_send_or_a_star():
    origins = ("https://a.example", "http://127.0.0.1:3000", "http://[::1]:80", "chrome-extension://abc", "null", "*")
    assert ServeSettings(allow_origins=origins).allow_origins == origins


def test_a_collector_without_a_scheme_ends_the_start():
    with pytest.raises(ConfigError, match="--otlp-endpoint is 'collector:4318', but must be a URL"):
        Tracer.open("collector:4318")


def test_keys_come_from_a_file_too_and_are_never_shown(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# of the team\nhunter2\n\n hunter3 \n")
    assert read_keys(file) == ("hunter2", "hunter3")
    assert "hunter" not in repr(ServeSettings(api_keys=read_keys(file)))
    file.write_text("hunter2\n", encoding="utf-8-sig")  # with a byte order mark
    assert read_keys(file) == ("hunter2",)
    file.write_text("# none\n \t\n")
    with pytest.raises(ConfigError, match="has no key"):
        read_keys(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(tmp_path / "absent")


def test_the_command_line_takes_a_key_from_the_environment_and_shows_it_nowhere(monkeypatch):
    code = (
        "import enginery.serve.server as server\n"
        "def told(options, registry, settings, display): print(settings.api_keys, settings.admin_keys, settings)\n"
        "server.serve = told\n"
        "from enginery.cli.main import main\n"
        "main(['serve', '--no-plugins', '--admin-key', 'boss'])\n"
    )
    monkeypatch.setenv("ENGINERY_API_KEY", "hunter2 hunter3")
    done = quick_processes.run_python("-c", code, capture_output=True, text=True, timeout=150, check=False)
    assert "\n('hunter2', 'hunter3') ('boss',) ServeSettings(" in done.stdout, done.stderr
    assert done.stdout.count("hunter2") == 1


@pytest.mark.parametrize("variable", ["ENGINERY_API_KEY", "ENGINERY_ADMIN_KEY"])
@pytest.mark.parametrize("value", ["", "  ", "\t\n"])
def test_a_variable_of_keys_without_a_key_ends_the_start(monkeypatch, capsys, variable, value):
    monkeypatch.setenv(variable, value)
    with pytest.raises(SystemExit) as stop:
        main(["serve", "--no-plugins", "--model", "/nowhere", "--port", "0"])
    assert (stop.value.code, f"engine: {variable} is set, but has no key" in capsys.readouterr().err) == (2, True)


def test_a_blank_variable_hurts_nobody_who_gives_a_key_in_another_way(monkeypatch, capfd):
    monkeypatch.setenv("ENGINERY_API_KEY", " ")
    monkeypatch.setattr("enginery.serve.server.serve", lambda options, registry, settings, display: print(settings.api_keys))
    with pytest.raises(SystemExit):
        main(["serve", "--no-plugins", "--port", "0", "--api-key", "hunter2"])
    assert capfd.readouterr().out.splitlines()[-1] == "('hunter2',)"


@pytest.mark.parametrize(
    ("settings", "warns"),
    [({"host": "0.0.0.0"}, True), ({"host": "0.0.0.0", "api_keys": ["k"]}, False), ({"host": "localhost"}, False)],
    ids=str,
)
def test_a_server_that_others_reach_without_a_key_says_so_in_one_line(folder, settings, warns):
    with started(folder, **settings) as (process, _):
        process.terminate()
        lines = process.communicate(timeout=PATIENCE_S)[1].splitlines()
    assert ["WARNING" in line and "asks for no key" in line for line in lines] == [True] * warns


@pytest.mark.parametrize(
    ("host", "is_own"), [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("0.0.0.0", False), ("::", False)]
)
def test_addresses_that_only_this_machine_reaches_are_told_from_others(host, is_own):
    try:
        listener = bind(host, 0)
    except ConfigError:
        pytest.skip(f"there is no {host} on this machine")
    with listener:
        assert is_loopback(listener) == is_own
