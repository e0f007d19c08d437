"""`engine plugins`, `engine list-backends`, `engine doctor`."""

from __future__ import annotations

import json
import os
import socket
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from enginery.cli import doctor as doctor_module
from enginery.cli.doctor import doctor
from enginery.cli.list_backends import list_backends
from enginery.cli.plugins import plugins
from enginery.config.resolve import DeviceFacts
from enginery.errors import ConfigError, EnginError
from enginery.plugin.loading import present_devices
from enginery.worker import device

MODEL = """
from enginery.api import AttnLayerFacts, ModelFacts, ModelSpec, hookimpl

def describe(config):
    layer = AttnLayerFacts(num_heads=2, num_kv_heads=1, head_dim=config["head_dim"], sliding_window=config.get("window"))
    return ModelFacts(vocab_size=8, hidden_size=8, max_positions=64, activation_width=8, layers=(layer,))

@hookimpl
def register_models():
    return [ModelSpec(name="tiny", api=(2, 0), architectures=("TinyForCausalLM",), describe=describe, build=print)]
"""


@pytest.fixture
def cli():
    app = typer.Typer()
    app.command()(plugins)
    app.command()(list_backends)
    app.command()(doctor)

    def run(*arguments: str, code: int = 0, columns: str | None = "400") -> str:
        done = CliRunner(env={"COLUMNS": columns}).invoke(app, arguments)
        if isinstance(done.exception, EnginError):
            raise done.exception
        assert done.exit_code == code, done.output
        return done.output

    return run


def write_model(folder, **config: object) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["TinyForCausalLM"], "head_dim": 8, **config}))
    return str(folder)


def test_plugins_shows_each_with_its_status_and_reason(site, cli) -> None:
    site.install("good", site.backend("fa"), version="1.2")
    site.install("bad", "1 / 0")
    shown = cli("plugins")
    assert "good" in shown
    assert "attn-backend:fa" in shown
    assert "plugin bad (bad==1.0) is broken: ZeroDivisionError" in shown
    rows = {row["name"]: row for row in json.loads(cli("plugins", "--json"))}
    assert rows["good"] == {
        "name": "good",
        "distribution": "good",
        "version": "1.2",
        "status": "loaded",
        "reason": "",
        "offers": ["attn-backend:fa"],
    }
    assert rows["bad"]["status"] == "broken"


LONG = "attn-tokenspeed-and-more-mla"


@pytest.mark.parametrize("command", ["plugins", "list-backends"])
@pytest.mark.parametrize("columns", ["60", "80"])
def test_no_word_is_broken_on_a_narrow_terminal(site, cli, monkeypatch, command: str, columns: str) -> None:
    summary = "decoding of latents for Blackwell cards, and other kernels for prefills of prompts"
    site.install(f"enginery-{LONG}", site.backend("tokenspeed-and-more").replace("a fake", summary), name=LONG)
    site.install("bad", "1 / 0")
    shown = cli(command, columns=columns)
    (where,) = (word for word in shown.split() if "bad/__init__" in word)
    assert all(len(line) <= int(columns) for line in shown.splitlines() if where not in line)
    expected = [f"enginery-{LONG}", "tokenspeed-and-more" if command == "list-backends" else "attn-backend:tokenspeed-and-more"]
    for word in [*expected, *(summary.split() if command == "list-backends" else [LONG])]:
        assert word in shown.split()


@pytest.mark.parametrize("command", ["plugins", "list-backends"])
def test_a_pipe_gets_a_row_in_a_line(site, cli, command: str) -> None:
    site.install(f"enginery-{LONG}", site.backend("tokenspeed-and-more").replace("a fake", "word " * 60), name=LONG)
    (line,) = (line for line in cli(command, columns=None).splitlines() if f"enginery-{LONG}" in line)
    assert "tokenspeed-and-more" in line
    assert line.count("word") == (60 if command == "list-backends" else 0)


def test_plugins_that_are_absent_for_one_reason_share_a_paragraph(site, cli) -> None:
    for name in ("one", "two"):
        site.install(name, site.backend(name).replace('"cpu"', '"cuda"'))
    shown = cli("plugins")
    if "cuda" not in present_devices():
        assert shown.count("the backends run on cuda") == 1
        assert "plugins one, two are no-device" in shown


def test_plugins_are_blocked_by_flags(site, cli) -> None:
    site.install("fa", site.backend("fa"))
    rows = json.loads(cli("plugins", "--json", "-p", "no:fa"))
    assert rows[-1]["status"] == "blocked"
    assert json.loads(cli("plugins", "--json", "--no-plugins"))[-1]["status"] == "blocked"
    with pytest.raises(ConfigError):
        cli("plugins", "-p", "no:nope")


def test_list_backends_shows_the_offers_and_who_is_absent(site, cli) -> None:
    site.install("one", site.backend("fa", priority=3))
    site.install("two", site.backend("fb", priority=7))
    site.install("bad", "1 / 0")
    shown = cli("list-backends")
    assert "plugin bad (bad==1.0) is broken" in shown
    data = json.loads(cli("list-backends", "--json"))
    assert [(row["name"], row["plugin"], row["status"], row["priority"]) for row in data["backends"]] == [
        ("fb", "two", "loaded", 7),
        ("fa", "one", "loaded", 3),
    ]
    assert [row["name"] for row in data["absent_plugins"]] == ["bad"]


def test_list_backends_shows_a_conflict(site, cli) -> None:
    site.install("one", site.backend("fa"), name="flash")
    site.install("two", site.backend("fa"), name="flash")
    shown = cli("list-backends")
    assert "There is no attention backend" in shown
    assert "one 1.0 and two 1.0 both provide a plugin named flash" in shown


def test_list_backends_says_why(site, cli, tmp_path) -> None:
    site.install("model", MODEL)
    site.install("plain", site.backend("plain", priority=9))
    site.install("wide", site.backend("wide", priority=1).replace(" dtypes=", " sliding_window=True, dtypes="))
    fine, windowed = write_model(tmp_path / "fine"), write_model(tmp_path / "windowed", window=4)
    assert "-> plain (priority 9): chosen" in cli("list-backends", "--why", fine, "--device", "cpu")
    shown = cli("list-backends", "--why", windowed, "--device", "cpu")
    assert "plain (priority 9): sliding window is needed and not offered" in shown
    assert "-> wide (priority 1): chosen" in shown
    rows = json.loads(cli("list-backends", "--why", windowed, "--device", "cpu", "--json"))["backends"]
    assert [(row["name"], row["softmax"]["chosen"], [reason["rule"] for reason in row["softmax"]["reasons"]]) for row in rows] == [
        ("plain", False, ["sliding window"]),
        ("wide", True, []),
    ]


def test_list_backends_says_which_backends_auto_takes_for_which_steps(site, cli, tmp_path) -> None:
    site.install("model", MODEL)
    site.install("plain", site.backend("plain", priority=9))
    site.install("quick", site.backend("quick", priority=1).replace("priority=1", "priority=1, single_priority=20"))
    asked = ("list-backends", "--why", write_model(tmp_path / "m"), "--device", "cpu")
    every, one = cli(*asked).partition("for softmax attention layers, decoding one request:")[::2]
    assert "for softmax attention layers:" in every
    assert "-> plain (priority 9): chosen" in every
    assert "in prefills" not in every
    assert "-> quick (priority 20): chosen" in one
    rows = json.loads(cli(*asked, "--json"))["backends"]
    assert {row["name"]: (row["softmax"]["chosen"], row["single"]["chosen"]) for row in rows} == {
        "plain": (True, False),
        "quick": (False, True),
    }
    site.install("reader", site.backend("reader", priority=2).replace("priority=2", "priority=2, prefill_priority=30"))
    shown = cli(*asked)
    assert "in prefills" in shown
    assert [line for line in shown.splitlines() if "chosen" in line and line.startswith("->")] == [
        "-> reader (priority 30): chosen",
        "-> plain (priority 9): chosen",
        "-> quick (priority 20): chosen",
    ]


def test_list_backends_fails_when_none_serves_the_model(site, cli, tmp_path) -> None:
    site.install("model", MODEL)
    site.install("plain", site.backend("plain"))
    shown = cli("list-backends", "--why", write_model(tmp_path / "m"), "--device", "cpu", "--dtype", "bfloat16", code=1)
    assert "dtype bfloat16 is not among float32" in shown


@pytest.mark.parametrize(("is_fast", "taken"), [(True, "narrow"), (False, "plain")])
def test_list_backends_asks_for_the_dtype_that_an_engine_takes_on_this_cpu(
    site, cli, tmp_path, monkeypatch: pytest.MonkeyPatch, is_fast: bool, taken: str
) -> None:
    facts = DeviceFacts(kind="cpu", name="a fake", available_bytes=1, num_threads=1, has_bfloat16=is_fast)
    monkeypatch.setattr(device, "device_facts", lambda *_: facts)
    site.install("model", MODEL)
    site.install("plain", site.backend("plain"))
    site.install("narrow", site.backend("narrow").replace("float32", "bfloat16"))
    model = write_model(tmp_path / "m", dtype="bfloat16")
    assert f"-> {taken} (priority" in cli("list-backends", "--why", model, "--device", "cpu")


def test_list_backends_refuses_a_device_that_does_not_exist(site, cli, tmp_path) -> None:
    site.install("model", MODEL)
    with pytest.raises(ConfigError, match="--device is 'gpu'"):
        cli("list-backends", "--why", write_model(tmp_path / "m"), "--device", "gpu")


def test_plugins_and_list_backends_import_no_torch(site) -> None:
    site.install("fa", site.backend("fa"))
    code = "import sys\nfrom enginery.cli.{0} import {0}\n{0}()\nassert 'torch' not in sys.modules, 'torch is imported'"
    for command in ("plugins", "list_backends"):
        done = site.run(code.format(command), is_fresh=True)
        assert done.returncode == 0, done.stderr
        assert "fa" in done.stdout


def rows_of(output: str) -> dict[str, dict[str, str]]:
    return {row["name"]: row for row in json.loads(output)}


@pytest.fixture
def answers(monkeypatch) -> dict[str, object]:
    """What the processes that the doctor starts answer, by the code they run."""
    record = {"name": "fa", "distribution": "fa-dist", "version": "1.0", "status": "loaded", "reason": "", "offers": []}
    found: dict[str, object] = {
        doctor_module._ASK_TORCH: {"version": "2.13", "cuda": None, "devices": ["a GPU"], "gloo": True, "nccl": "", "apart": []},
        doctor_module._ASK_PLUGINS: {"records": [record], "default": None},
    }
    monkeypatch.setattr(doctor_module, "_ask", lambda code, *rest, **more: (found[code], "it says nothing"))
    return found


def test_doctor_finds_nothing_wrong(cli, answers, tmp_path, monkeypatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    answers[doctor_module._ASK_PLUGINS]["default"] = {"name": "tiny", "folder": str(tmp_path)}
    monkeypatch.setattr("resource.getrlimit", lambda limit: (65536, 65536))
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=1 << 40))
    rows = rows_of(cli("doctor", "--json", "--port", "0"))
    assert {row["status"] for row in rows.values()} == {"ok"}
    machine = ["packages", "settings", "model cache", "kernel cache", "temporary folder", "locale", "open files", "port"]
    assert list(rows) == ["python", "torch", "devices", "ranks", "shared memory", "plugin fa", "model", *machine]


def test_doctor_says_what_to_do_about_a_broken_plugin(cli, answers) -> None:
    answers[doctor_module._ASK_PLUGINS]["records"][0] |= {"status": "broken", "reason": "no [wheel]"}
    row = rows_of(cli("doctor", "--json", "--port", "0", code=1))["plugin fa"]
    assert (row["status"], row["detail"]) == ("fail", "fa-dist 1.0 is broken: no [wheel]")
    assert "-p no:fa" in row["advice"]
    assert "no [wheel]" in cli("doctor", "--port", "0", code=1)


def test_doctor_says_what_to_do_without_torch_or_a_gpu_that_torch_can_use(cli, answers, monkeypatch) -> None:
    answers[doctor_module._ASK_TORCH] = None
    assert rows_of(cli("doctor", "--json", "--port", "0", code=1))["torch"]["advice"] == "Run pip install torch."
    answers[doctor_module._ASK_TORCH] = {
        "version": "2.13",
        "cuda": None,
        "devices": [],
        "why": "",
        "gloo": True,
        "nccl": "",
        "apart": [],
    }
    monkeypatch.setattr(doctor_module, "present_devices", lambda: {"cpu", "cuda"})
    assert rows_of(cli("doctor", "--json", "--port", "0", code=1))["devices"]["status"] == "fail"
    monkeypatch.setattr(doctor_module, "present_devices", lambda: {"cpu"})
    assert rows_of(cli("doctor", "--json", "--port", "0"))["devices"]["detail"] == "CPU only"


def test_doctor_finds_a_port_that_is_taken(cli, answers) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        assert rows_of(cli("doctor", "--json", "--port", port, code=1))["port"]["status"] == "fail"


def test_doctor_finds_a_cache_that_cannot_be_written(cli, answers, monkeypatch) -> None:
    monkeypatch.setattr("os.access", lambda *rest: False)
    assert rows_of(cli("doctor", "--json", "--port", "0", code=1))["model cache"]["status"] == "fail"


def test_doctor_survives_a_plugin_that_kills_the_interpreter_and_names_it(site, cli, monkeypatch) -> None:
    site.install("fine", site.backend("fa"))
    site.install("killer", "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    monkeypatch.setenv("PYTHONPATH", str(site.path), prepend=os.pathsep)
    only_fakes = "from enginery.plugin import discovery\nimport importlib.metadata as m\n"
    only_fakes += f"discovery.distributions = lambda: m.distributions(path=[{str(site.path)!r}])\n"
    monkeypatch.setattr(doctor_module, "_ASK_PLUGINS", only_fakes + doctor_module._ASK_PLUGINS)
    monkeypatch.setattr(doctor_module, "_torch", list)
    rows = rows_of(cli("doctor", "--json", "--port", "0", code=1))
    assert "killed by signal 9" in rows["plugin killer"]["detail"]
    assert "plugin fine" not in rows
