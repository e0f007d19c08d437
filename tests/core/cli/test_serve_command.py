"""What `engine serve` hands to the server."""

from __future__ import annotations

import contextlib
import errno
import json
import os

import pytest
from typer.testing import CliRunner

from enginery.cli.flags.server import SERVER_KINDS
from enginery.cli.main import build_app
from enginery.config.schema import EngineOptions
from enginery.config.sources import engine_options
from enginery.errors import ConfigError
from enginery.serve.http.listening import _no_listener, bind
from enginery.serve.settings import ServeSettings


@pytest.fixture(autouse=True)
def output_without_a_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `CliRunner` has it."""
    monkeypatch.setattr("enginery.cli.serve.in_background", lambda note: contextlib.nullcontext())


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch):
    """Runs `engine serve` with arguments; returns the server's settings."""
    taken: list[ServeSettings] = []
    monkeypatch.setattr("enginery.serve.server.serve", lambda options, registry, settings, display: taken.append(settings))

    def run(*arguments: str) -> ServeSettings:
        result = CliRunner().invoke(build_app(), ["serve", "--no-plugins", *arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == 0, result.output
        return taken.pop()

    return run


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch):
    """Runs `engine serve` with arguments; returns the options that would be served."""
    taken: list[EngineOptions] = []
    monkeypatch.setattr("enginery.serve.server.serve", lambda options, *rest: taken.append(options))

    def run(*arguments: str) -> EngineOptions:
        result = CliRunner().invoke(build_app(), ["serve", "--no-plugins", *arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == 0, result.output
        return taken.pop()

    return run


def test_the_model_may_be_named_with_or_without_its_flag(served) -> None:
    assert served("folder").model == served("--model", "folder").model == served("-m", "folder").model == "folder"
    assert served().model is None


def test_two_models_are_refused(served) -> None:
    with pytest.raises(ConfigError, match="two models are named, a and b"):
        served("a", "-m", "b")


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("192.0.2.1", ["--host 192.0.2.1 is no address of this machine", "127.0.0.1", "0.0.0.0"]),
        ("nowhere.invalid", ["--host nowhere.invalid is no address and no name of one"]),
    ],
)
def test_an_address_of_another_machine_is_told(host: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        bind(host, 0)
    for word in words:
        assert word in str(caught.value)
    assert "--port" not in str(caught.value)


def test_a_port_that_is_taken_is_told() -> None:
    with contextlib.closing(bind("127.0.0.1", 0)) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} of 127.0.0.1 cannot be used: .*; choose another with --port"):
            bind("127.0.0.1", port)


def test_a_port_of_root_is_told() -> None:
    denied = OSError(errno.EACCES, "Permission denied")
    assert "port 80 is kept for root" in _no_listener("127.0.0.1", 80, denied)


EVERY = {  # a value of every setting of the server that is not its default, as a key of the file
    "host": "::1",
    "port": 9000,
    "generation_config": "none",
    "tool_parser": "hermes",
    "reasoning_parser": "none",
    "route": ["web", "other"],
    "api_key": ["k1", "k2"],
    "api_key_file": "keys",
    "admin_key": ["a1"],
    "admin_key_file": "admins",
    "allow_origin": ["http://a", "http://b"],
    "ssl_certfile": "cert",
    "ssl_keyfile": "key",
    "drain_s": 2.5,
    "watchdog_s": 30,
    "restarts": 3,
    "dp": 2,
    "receive_s": 1.5,
    "send_s": 2,
    "max_body_bytes": 1_000_000,
    "max_total_body_bytes": 5_000_000,
    "trust_request_chat_template": True,
    "log_format": "json",
    "log_level": "debug",
    "otlp_endpoint": "http://c:4318",
}


@pytest.fixture
def key_files(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `EVERY` names, in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "keys").write_text("k3\n")
    (tmp_path / "admins").write_text("a2\n")
    monkeypatch.setattr("ssl.SSLContext.load_cert_chain", lambda *_: None)


def as_flags() -> list[str]:
    pairs = [(f"--{name.replace('_', '-')}", value) for name, value in EVERY.items()]
    flags = []
    for flag, value in pairs:
        each = [[]] if value is True else [[str(one)] for one in (value if isinstance(value, list) else [value])]
        flags += [text for words in each for text in (flag, *words)]
    return flags


@pytest.mark.usefixtures("key_files")
def test_every_server_setting_may_come_from_the_file_and_the_environment(settings, tmp_path, monkeypatch) -> None:
    assert set(EVERY) == set(SERVER_KINDS), "a new flag is a setting too; add it here"
    wanted = settings(*as_flags())
    assert wanted != settings()
    file = tmp_path / "server.toml"
    file.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in EVERY.items()))
    assert settings("--config", str(file)) == wanted
    for name, value in EVERY.items():
        separator = " " if name in ("api_key", "admin_key") else ","
        monkeypatch.setenv(f"ENGINERY_{name.upper()}", separator.join(value) if isinstance(value, list) else str(value))
    assert settings() == wanted


def test_a_flag_comes_before_the_environment_and_that_before_the_file(settings, tmp_path, monkeypatch) -> None:
    file = tmp_path / "server.toml"
    file.write_text('port = 1\ndrain_s = 1\nhost = "1.1.1.1"\napi_key = ["of-the-file"]\npage_size = 32\n')
    monkeypatch.setenv("ENGINERY_DRAIN_S", "2")
    monkeypatch.setenv("ENGINERY_HOST", "2.2.2.2")
    monkeypatch.setenv("ENGINERY_API_KEY", "of-the-environment")
    found = settings("--config", str(file), "--host", "127.0.0.1")  # the flag's default, and given all the same
    assert (found.port, found.drain_s, found.host, found.api_keys) == (1, 2.0, "127.0.0.1", ("of-the-environment",))


def test_both_kinds_of_settings_are_in_one_file(served, tmp_path) -> None:
    file = tmp_path / "all.toml"
    file.write_text('port = 9000\npage_size = 32\nmodel = "folder"\n')
    options = served("--config", str(file))
    assert (options.model, options.page_size) == ("folder", 32)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot = 9000", "server.toml has the key 'prot', and there is no such setting; did you mean port"),
        (
            'uvicorn_log_level = "info"',
            "server.toml has the key 'uvicorn_log_level', and there is no such setting; here it is log_level$",
        ),
        ('option = ["eagle.trees=true"]', "there is no such setting; here it is plugin_options$"),
        ("data_parallel_size = 2", "that is dp, engines behind one server$"),
        ("port = 90000", r"port in .*server.toml is 90000: .*65535"),
        ('port = "9000"', "port in .*server.toml is '9000'.*int"),
        ('log_format = "xml"', "log_format in .*server.toml is 'xml'.*"),
        ("drain_s = -1", "drain_s in .*server.toml is -1"),
        ('allow_origin = "http://a"', "allow_origin in .*server.toml is 'http://a'.*array"),
    ],
)
def test_a_wrong_key_of_the_server_is_named(settings, text, words, tmp_path) -> None:
    file = tmp_path / "server.toml"
    file.write_text(text + "\n")
    with pytest.raises(ConfigError, match=words):
        settings("--config", str(file))


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("ENGINERY_PROT", "1", "ENGINERY_PROT is set.*did you mean ENGINERY_PORT"),
        ("ENGINERY_PORT", "http", "ENGINERY_PORT is 'http'.*int"),
        ("ENGINERY_PORT", "-1", "ENGINERY_PORT is -1"),
    ],
)
def test_a_wrong_variable_of_the_server_is_named(settings, variable, value, words, monkeypatch) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=words):
        settings()


def test_other_commands_take_the_same_file_and_environment(tmp_path, monkeypatch) -> None:
    file = tmp_path / "all.toml"
    file.write_text("port = 9000\nnum_pages = 8\n")
    monkeypatch.setenv("ENGINERY_DRAIN_S", "2")
    assert engine_options({}, os.environ, file, others=SERVER_KINDS).num_pages == 8
    result = CliRunner().invoke(build_app(), ["generate", "--no-plugins", "--config", str(file), "-m", str(tmp_path / "none"), "x"])
    assert "no such setting" not in str(result.exception)
