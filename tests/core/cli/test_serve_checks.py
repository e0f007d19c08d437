"""What `engine serve` refuses before a process is started."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from free_ports import free_ports
from typer.testing import CliRunner

from enginery.cli import serve_checks
from enginery.cli.main import build_app
from enginery.cli.serve_checks import check_before_start
from enginery.config.schema import EngineOptions
from enginery.engine.ranks.ranks import check_ranks
from enginery.errors import ConfigError, Unsupported
from enginery.plugin.registry import Registry
from enginery.serve.engine.replica_options import replica_options


def look(*, dp: int = 1, port: int = 1, **options: object) -> None:
    check_before_start(EngineOptions(**options), host="127.0.0.1", port=port, dp=dp)


@pytest.fixture(scope="module")
def free() -> int:
    return free_ports(12)


def test_the_command_looks_before_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("enginery.cli.serve.in_background", lambda note: contextlib.nullcontext())
    monkeypatch.setattr("enginery.serve.server.serve", lambda *_: pytest.fail("it has begun"))
    given = ["--port", "0", "--dp", "2", "--kv-events", "tcp://*:5557", "--kv-events-replay", "tcp://*:5558"]
    result = CliRunner().invoke(build_app(), ["serve", "--no-plugins", *given])
    assert isinstance(result.exception, ConfigError)
    assert "both take port 5558; write --kv-events-replay tcp://*:5559" in str(result.exception)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--pp", "20"], "20 pipeline stages cannot share 9 decoder layers; --pp may be 9 at the most"),
        (["--tp", "3"], "the attention's query heads: 4, which 3 ranks cannot share; 2 or 4 ranks can"),
        (["--pp", "2", "--pp-layers", "3,3"], "--pp-layers gives 2 stages of 3, 3 layers; the model has 9, and --pp is 2"),
        (["--pp", "9", "--tp", "2"], "it has begun"),
    ],
)
def test_ranks_that_the_model_refuses_are_not_started(monkeypatch: pytest.MonkeyPatch, given: list[str], told: str) -> None:
    """Each imports torch first, which takes many of them half a minute."""

    def begin(*_: object) -> None:
        raise ConfigError("it has begun")

    monkeypatch.setattr("enginery.cli.serve.in_background", lambda note: contextlib.nullcontext())
    monkeypatch.setattr("enginery.serve.server.serve", begin)
    result = CliRunner().invoke(build_app(), ["serve", "--port", "0", *given])
    assert str(result.exception) == told


def test_the_process_that_serves_imports_no_torch_for_it() -> None:
    """It is the engine's, in another process, and takes seconds."""
    code = "import sys, enginery.serve.server, enginery.engine.ranks.ranks; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_of_a_model_that_is_not_here_nothing_is_asked() -> None:
    """It is downloaded first, which the server shows."""
    check_ranks(EngineOptions(model="owner/name", pp=20), Registry.load(no_plugins=True))


def test_a_family_that_cannot_be_cut_into_stages_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["EchoForCausalLM"], "vocab_size": 97, "max_position_embeddings": 256})
    )
    with pytest.raises(Unsupported, match=r"family 'echo' cannot be cut into 2 pipeline stages.*leave --pp out"):
        check_ranks(EngineOptions(model=str(tmp_path), pp=2), Registry.load())


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"dp": 2, "kv_events": "tcp://*:{0}", "kv_events_replay": "tcp://*:{1}"},
            "--kv-events tcp://*:{0} (ports {0} to {1}) and --kv-events-replay tcp://*:{1} (ports {1} to {2}) both take port {1}; "
            "write --kv-events-replay tcp://*:{2}",
        ),
        (
            {"dp_attention": 2, "kv_events": "tcp://*:{0}", "kv_events_replay": "tcp://127.0.0.1:{0}"},
            "both take ports {0} to {1}; write --kv-events-replay tcp://127.0.0.1:{2}",
        ),
        (
            {"dp": 2, "dp_rank": 3, "kv_events": "tcp://*:{0}", "kv_events_replay": "tcp://*:{1}"},
            "both take port {4}; write --kv-events-replay tcp://*:{2}",
        ),
        (  # HTTP has the first that would do
            {"dp": 2, "port": "{3}", "kv_events": "tcp://*:{0}", "kv_events_replay": "tcp://*:{1}"},
            "both take port {1}; write --kv-events-replay tcp://*:{4}",
        ),
        (
            {"dp": 2, "tp": 2, "listen": "tcp://127.0.0.1:{0}", "kv_events": "tcp://*:{1}", "executor": "join"},
            "--listen tcp://127.0.0.1:{0} (ports {0} to {1}) and --kv-events tcp://*:{1} (ports {1} to {2}) both take port {1}",
        ),
        ({"kv_events": "ipc://a", "kv_events_replay": "ipc://a"}, "are both ipc://a; name another for one of them"),
        ({"dp": 2, "kv_events": "tcp://*:0"}, "tcp://*:0 has no port that number 1 could count from"),
        ({"dp": 9, "kv_events": "tcp://*:65530"}, "cannot be published at port 65538: 65535 is the last"),
        ({"tp": 2, "listen": "tcp://127.0.0.1:99999", "executor": "join"}, "takes port 99999, but 65535 is the last"),
        ({"dp": 2, "tp": 2, "listen": "tcp://127.0.0.1:65535", "executor": "join"}, "takes port 65536, but 65535 is the last"),
        (
            {"dp": 6, "kv_events": "tcp://*:65530", "kv_events_replay": "tcp://*:65530"},
            "are both tcp://*:65530; name another for one of them",
        ),
        (
            {"dp": 6, "kv_events": "tcp://*:65530", "kv_events_replay": "tcp://*:65529"},
            "both take ports 65530 to 65534; name ports that lie further apart",
        ),
    ],
)
def test_ports_that_overlap_are_refused_with_what_to_write(free: int, given: dict[str, object], told: str) -> None:
    ports = range(free, free + 12)
    written = {name: value.format(*ports) if isinstance(value, str) else value for name, value in given.items()}
    written["port"] = int(written.get("port", 1))
    with pytest.raises(ConfigError) as refused:
        look(**written)
    assert told.format(*ports) in str(refused.value)


def test_ports_that_do_not_overlap_are_fine(free: int) -> None:
    look(dp=2, kv_events=f"tcp://*:{free}", kv_events_replay=f"tcp://*:{free + 2}", port=free + 4)
    look(dp=2, kv_events=f"tcp://10.0.0.1:{free}", kv_events_replay=f"tcp://*:{free}")  # a subscriber's port
    look(
        dp=2,
        tp=2,
        executor="join",
        listen=f"tcp://127.0.0.1:{free}",
        kv_events_replay=f"tcp://127.0.0.2:{free}",
        kv_events="ipc://a",
    )


def test_a_port_of_any_replica_that_another_process_has_is_told(free: int) -> None:
    with (
        socket.create_server(("127.0.0.1", free + 1)),
        pytest.raises(
            ConfigError, match=rf"port {free + 1} of --kv-events \S+ \(ports .*\) cannot be used: Address already in use"
        ),
    ):
        look(dp=2, kv_events=f"tcp://*:{free}")


def test_more_processes_than_the_memory_holds_are_refused_and_more_than_cores_told(monkeypatch, caplog) -> None:
    monkeypatch.setattr(serve_checks, "available_host_bytes", lambda: 3 << 30)
    with pytest.raises(
        ConfigError, match=r"26 processes of engines would take 6\.5 GiB before they load a model, and 3\.0 GiB are"
    ):
        look(dp=13, tp=2)
    look(dp=6, tp=2)
    look(dp=12, tp=2, executor="join")  # half of them are on other hosts
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    registry = Registry.load(no_plugins=True)
    replica_options(EngineOptions(tp=2), 2, registry)
    replica_options(EngineOptions(tp=2, executor="join"), 4, registry)
    assert not caplog.records
    replica_options(EngineOptions(tp=2), 3, registry)
    assert caplog.messages == ["3 engines of 2 processes each share 4 cores; fewer may be faster"]


def test_other_slips_need_no_engine(free: int) -> None:
    with pytest.raises(ConfigError, match="--dp-rank is -1, but replicas are numbered from 0; leave it out for the first"):
        look(dp=2, dp_rank=-1)
    with pytest.raises(ConfigError, match="--device is cuda:1, one GPU, but --dp 2 needs some for each replica"):
        look(dp=2, device="cuda:1")
