"""Wrong command lines: what is told, in one form, and with status 2."""

from __future__ import annotations

import re

import pytest
import typer

from enginery.cli.main import build_app, main
from enginery.cli.usage import UsageError, told
from enginery.config.sources import flags_of_others
from enginery.errors import ConfigError
from enginery.llm.keyword_options import engine_options


def flags(command: str) -> set[str]:
    found = typer.main.get_command(build_app()).commands[command].params
    return {option for parameter in found for option in (*parameter.opts, *parameter.secondary_opts)}


class NoSuchCommand(UsageError):
    """As click's of 8.4, which Typer raises where it has none of its own."""

    def __init__(self, message: str, possibilities: list[str]) -> None:
        super().__init__(message)
        self.possibilities = possibilities


def test_an_unknown_command_that_knows_near_ones_is_no_option() -> None:
    error = NoSuchCommand("No such command 'servee'. Did you mean 'serve'?", ["serve"])
    assert told(error, ["servee"]) == "No such command 'servee'. Did you mean 'serve'?\nengine servee --help shows how it is used"


@pytest.fixture
def run(capsys):
    def run(*arguments: str) -> tuple[str, str, int]:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        return (*capsys.readouterr(), ended.value.code)

    return run


def test_no_foreign_flag_is_one_of_ours_and_what_is_advised_exists() -> None:
    ours = flags("serve")
    assert ours & flags_of_others().keys() == {"--dp"}, "it is there now; take it off the list, unless serve alone has it"
    advised = {flag for text in flags_of_others().values() for flag in re.findall(r"(?<![\w-])--[a-z-]+", text)}
    assert not advised - ours


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("--tensor-parallel-size", "2"), "no option --tensor-parallel-size; here it is --tp\n"),
        (("--tensor_parallel_size=2",), "no option --tensor_parallel_size; here it is --tp"),
        (("-tp", "2"), "no option -tp; here it is --tp"),
        (("--pipeline-parallel-size", "2"), "here it is --pp"),
        (("--ep-size", "2"), "here it is --ep, with --tp or --dp-attention"),
        (("--nnodes", "2"), "--executor join waits for ranks of other hosts"),
        (("--gpu-memory-utilization", "0.9"), "here it is --memory-fraction"),
        (("--mem-fraction-static", "0.9"), "here it is --memory-fraction"),
        (("--max-num-seqs", "9"), "here it is --max-batch-requests"),
        (("--speculative-config", "{}"), "--drafter NAME, with --draft-model and --draft-length"),
        (("--model-draft", "x"), "--draft-model, with --drafter standalone or eagle"),
        (
            ("--quantization", "awq"),
            "float8 in blocks and mxfp4 are known by config.json; other methods, and quantising at the start, are not there yet",
        ),
        (("--data-parallel-size", "2"), "that is engine serve --dp, engines behind one server"),
        (("--context-length", "9"), "here it is --max-model-len"),
        (("--page_sise", "9"), "no option --page_sise; did you mean --page-size?"),
        (("--nothing-like-it",), "no option --nothing-like-it\n"),
    ],
)
def test_a_flag_that_is_not_there_gets_an_answer(run, given: tuple[str, ...], words: str) -> None:
    out, err, code = run("serve", *given)
    assert (out, code) == ("", 2)
    assert err.startswith("engine: there is no option ")
    assert words in err
    assert err.endswith("engine serve --help shows how it is used\n")
    assert "did you mean --page-size" not in err or "sise" in given[0]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("servee",), "No such command 'servee'. Did you mean 'serve'?\nengine --help"),
        (("serve", "--port", "abc"), "Invalid value for '--port'"),
        *((("bench", "serve", "--rate", rate), "Invalid value for '--rate'") for rate in ("nan", "inf", "1e308")),
        (("serve", "--port", "99999"), "Invalid value for '--port'"),
        (("doctor", "--port", "99999"), "Invalid value for '--port'"),
        (("serve", "a", "b"), "unexpected extra argument"),
        (("bench", "latency"), "Missing argument 'MODEL'\nengine bench latency --help"),
        (("bench", "offline"), "Missing argument 'WORKLOAD'"),
        (("test-backend",), "Missing argument 'BACKEND'"),
        (("list-backends", "--why"), "'--why' requires an argument\nengine list-backends --help"),
        (("list-backends", "--device", "cuda"), "--page-size are asked for a model; name it with --why MODEL, or leave them out"),
        (("list-backends", "--dtype", "foo"), "name it with --why MODEL"),
        (("list-backends", "--page-size", "-4"), "name it with --why MODEL"),
        (("test-model", ".", "--load-format", "foo"), "Invalid value for '--load-format'"),
        (("serve", "--record-steps", "5"), "'--record-steps' requires 2 arguments\nengine serve --help"),
        (("bench", "offline", "C1", "--repeats"), "'--repeats' requires an argument\nengine bench offline --help"),
    ],
)
def test_other_slips_are_told_in_the_same_form(run, given: tuple[str, ...], words: str) -> None:
    out, err, code = run(*given)
    assert (out, code) == ("", 2)
    assert err.startswith("engine: ")
    assert words in err
    assert "│" not in err


@pytest.mark.parametrize("given", [(), ("bench",)])
def test_without_a_command_there_is_help(run, given: tuple[str, ...]) -> None:
    out, err, code = run(*given)
    assert (err, code) == ("", 2)
    assert "Commands" in out


@pytest.mark.parametrize(("raised", "code"), [(KeyboardInterrupt, 130), (typer.Exit(3), 3), (typer.Abort, 130)])
def test_a_command_s_end_is_the_status(run, monkeypatch, raised: BaseException, code: int) -> None:
    def end(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.setattr("enginery.cli.plugins.load_registry", end)
    assert run("plugins") == ("", "", code)


def test_ctrl_c_before_the_command_is_known_is_no_traceback(run, monkeypatch) -> None:
    def end(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("enginery.cli.main._load", end)
    assert run("bake") == ("", "", 130)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tensor_parallel_size": 2}, "'tensor_parallel_size'; here it is tp$"),
        ({"gpu_memory_utilization": 0.9}, "here it is memory_fraction, the share of the free memory"),
        ({"speculative_config": {}}, "here it is drafter NAME, with draft_model and draft_length"),
        ({"enforce_eager": True}, "here it is graphs=False"),
        ({"enforce_eager": False}, "here it is graphs=True"),
        ({"enable_prefix_caching": False}, "here it is prefix_cache=False"),
        ({"enable_prefix_caching": True}, "that is always so here; leave it out"),
        ({"tool_call_parser": "x"}, "here it is engine serve --tool-parser"),
        ({"data_parallel_size": 2}, "that is engine serve --dp, engines behind one server"),
        ({"dp": 2}, "one engine is in this process: run engine serve --dp N"),
        ({"page_sise": 1}, r"did you mean page_size\?"),
        ({"xyzzy": 1}, "; known are attention_backend, "),
    ],
)
def test_a_keyword_that_is_another_engines_is_told_by_its_name_here(given: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=f"LLM has no option .*{words}"):
        engine_options("m", given, owner="LLM")


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:65536", "tcp://127.0.0.1", "10.0.0.1"])
def test_a_rank_cannot_join_at_a_port_that_there_is_not(run, address: str, tmp_path) -> None:
    """ZeroMQ would try another without a word, and the rank wait for ten minutes."""
    key = str(tmp_path / "ranks.key")
    assert run("rank", "--new-key", key)[2] == 0
    _, err, code = run("rank", "--join", address, "--rank-key-file", key, "--wait-s", "0.1")
    assert (err, code) == (f"engine: --join is {address!r}, but must be tcp://ADDRESS:PORT, as the engine's --listen\n", 2)


@pytest.mark.parametrize("others", [("--join", "tcp://127.0.0.1:5550"), ("--rank", "1", "--model", "x"), ("--wait-s", "600")])
def test_who_makes_a_key_does_nothing_else(run, others: tuple[str, ...], monkeypatch, tmp_path) -> None:
    """It made the key, and left out what else was asked for."""
    key = tmp_path / "ranks.key"
    _, err, code = run("rank", "--new-key", str(key), *others)
    assert (code, key.exists()) == (2, False)
    assert f"--new-key FILE alone makes a key, and nothing else; leave out {', '.join(others[::2])}" in err
    monkeypatch.setenv("ENGINERY_RANK_KEY_FILE", "elsewhere")
    assert run("rank", "--new-key", str(key)) == ("", "", 0)
