"""generate and chat over the fake engine, and the console command as a whole."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from fake_engine import FAIL
from quick_processes import run_python
from tokenizers_made import byte_fallback

from enginery import __version__
from enginery.cli import chat, generate
from enginery.cli.main import main
from enginery.contracts.request import SamplingParams
from enginery.errors import EnginError
from enginery.llm.prompts import Encoded
from enginery.text.text_side import TextSide
from enginery.text.tokenizer import Tokenizer


def asked(tokenizer, text, **params):
    return Encoded(tuple(tokenizer.encode(text, add_special_tokens=False))), SamplingParams(**params)


class Terminal:
    """A file that says it is one."""

    def __init__(self, file):
        self.buffer = file.buffer

    def isatty(self):
        return True


@pytest.fixture
def console(engine, monkeypatch, capsys):
    """The command with the fake engine: (standard output, standard error, exit code)."""
    built = engine, TextSide.load(engine.facts.folder)
    monkeypatch.setattr("enginery.cli.generate.build_engine", lambda options: built)
    monkeypatch.setattr("enginery.cli.chat.build_engine", lambda options: built)

    def run(*arguments, lines=()):
        """lines: what is said, without what reads it; None: it is read."""
        said = iter([*(lines or ()), EOFError])

        def read(prompt=""):
            print(prompt, end="")
            line = next(said)
            if not isinstance(line, str):
                raise line
            return line

        if lines is not None:
            monkeypatch.setattr("builtins.input", read)
        with pytest.raises(SystemExit) as ended:
            main(["--no-plugins"] if not arguments else list(arguments))
        return (*capsys.readouterr(), ended.value.code)

    return run


def test_text_streams_out_of_an_engine(engine, folder):
    tokenizer = Tokenizer.from_folder(folder)
    pieces = list(generate.stream_text(engine, tokenizer, *asked(tokenizer, "hello 😀 world")))
    assert "".join(pieces) == "hello 😀 world"
    assert len(pieces) > 3
    assert not engine.has_work


def test_a_stop_string_leaves_nothing_running(engine, folder):
    tokenizer = Tokenizer.from_folder(folder)
    pieces = generate.stream_text(engine, tokenizer, *asked(tokenizer, "hello world", stop=("o w",)))
    assert "".join(pieces) == "hell"
    assert not engine.has_work


def test_a_failed_request_is_an_error(engine, folder):
    tokenizer = Tokenizer.from_folder(folder)
    with pytest.raises(EnginError, match="NaN"):
        list(generate.stream_text(engine, tokenizer, *asked(tokenizer, "hello world", seed=FAIL)))


def test_generate_continues_its_argument(console):
    assert console("generate", "hello world", "--max-tokens", "40") == ("hello world\n", "", 0)


@pytest.mark.parametrize("make", [byte_fallback])
def test_generate_keeps_the_blank_behind_a_prompt_and_chat_begins_without(console):
    assert console("generate", "the fox", "--max-tokens", "40") == (" the fox\n", "", 0)
    assert console("chat", "--max-tokens", "40", lines=["the fox"])[0] == "<user>the fox\n"


@pytest.mark.parametrize("prompt", [(), ("-",)])
def test_generate_reads_standard_input(console, monkeypatch, tmp_path, prompt):
    path = tmp_path / "prompt"
    path.write_text("from a pipe")
    with path.open() as file:
        monkeypatch.setattr("sys.stdin", file)
        assert console("generate", *prompt, "--stop", "pipe")[0] == "from a \n"


def test_a_prompt_that_is_no_utf_8_is_refused(console, monkeypatch, tmp_path):
    path = tmp_path / "prompt"
    path.write_bytes(b"\xff")
    with path.open(errors="surrogateescape") as file:  # as in the C locale
        monkeypatch.setattr("sys.stdin", file)
        out, err, code = console("generate")
    assert (out, code) == ("", 2)
    assert err.startswith("engine: standard input is no UTF-8 text")


@pytest.mark.parametrize(
    ("command", "words"), [(("generate", "a\udcff"), "the prompt"), (("chat", "--system", "\udcff"), "--system")]
)
def test_an_argument_that_is_no_utf_8_is_refused_before_an_engine_is_built(console, monkeypatch, command, words):
    monkeypatch.setattr(f"enginery.cli.{command[0]}.build_engine", None)
    out, err, code = console(*command)
    assert (out, code) == ("", 2)
    assert err.startswith(f"engine: {words} is no UTF-8 text: ")


@pytest.mark.parametrize("command", [("generate", "x"), ("chat",)])
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--top-p", "7"), "top_p is 7.0"),
        (("--max-tokens", "0"), "max_tokens is 0"),
        (("--temperature", "nan"), "temperature is nan"),
        (("--stop", ""), "stop has an empty string"),
    ],
)
def test_wrong_sampling_is_refused_before_an_engine_is_built(console, monkeypatch, command, flags, words):
    monkeypatch.setattr(f"enginery.cli.{command[0]}.build_engine", None)
    out, err, code = console(*command, *flags)
    assert (out, code) == ("", 2)
    assert err.startswith(f"engine: {words}")


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_what_is_wrong_with_the_text_side_is_told_before_weights_are_read(command, folder, tmp_path, capsys, monkeypatch):
    (folder / "config.json").write_text('{"architectures": ["NobodyServesThis"]}')
    template = tmp_path / "template.jinja"
    template.write_text("{% for %}")
    monkeypatch.setattr("sys.stdin", Terminal(sys.stdin))
    for flags, told in (
        (("--chat-template", str(template)), "template.jinja is broken in line 1: "),
        ((), "tokenizer.json is missing, and only that format is read"),
    ):
        with pytest.raises(SystemExit) as ended:
            main([command, "--model", str(folder), *flags, *(["x"] if command == "generate" else [])])
        assert told in capsys.readouterr().err
        assert ended.value.code == 2
        (folder / "tokenizer.json").unlink(missing_ok=True)


@pytest.fixture
def typed(console, monkeypatch):
    """The same, with a terminal before it."""
    monkeypatch.setattr("sys.stdin", Terminal(sys.stdin))
    return console


def test_chat_keeps_the_conversation(typed):
    out, err, code = typed("chat", "--system", "s", lines=("hi", "", "again", "/help", "/reset", "new", "/quit"))
    assert err.splitlines() == [chat._HELP, chat._HELP, chat._TEXT]
    assert (out.splitlines(), code) == (
        [
            "<system>s<user>hi",
            "<system>s<user>hi<assistant><system>s<user>hi<user>again",
            "<system>s<user>new",
        ],
        0,
    )


@pytest.mark.parametrize("wrong", ["x " * 2000, "/rest", "\udcff"], ids=ascii)
def test_chat_in_a_pipe_prints_answers_alone_and_its_status_says_whether_all_are_there(console, monkeypatch, wrong):
    for lines, status in ((("hi", "/reset", "so"), 0), (("hi", wrong, "/reset", "so"), 1)):
        out, err, code = console("chat", lines=lines)
        assert (out, code) == ("<user>hi\n<user>so\n", status)
        assert bool(err) == bool(status)


def test_chat_answers_all_lines_of_a_pipe_but_those_with_bad_bytes(console, monkeypatch):
    given = io.TextIOWrapper(io.BytesIO(b"hi\n\xff\n/reset\nso\n"), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", given)
    assert console("chat", lines=None) == ("<user>hi\n<user>so\n", "(this is no UTF-8 text)\n", 1)


@pytest.mark.parametrize("when", ["line", "answer"])
@pytest.mark.parametrize(("is_typed", "status"), [(True, 0), (False, 130)])
def test_ctrl_c_stops_an_answer_at_a_terminal_and_the_command_in_a_pipe(console, monkeypatch, when, is_typed, status):
    if is_typed:
        monkeypatch.setattr("sys.stdin", Terminal(sys.stdin))
    if when == "answer":
        monkeypatch.setattr("enginery.cli.chat.stream_text", lambda *asked: (_ for _ in ()).throw(KeyboardInterrupt))
    assert console("chat", lines=["hi"] if when == "answer" else [KeyboardInterrupt])[2] == status


def test_chat_says_what_is_wrong_and_goes_on(typed):
    out, err, code = typed("chat", lines=("x " * 2000, "hi", "/exit"))
    assert (out, code) == ("<user>hi\n", 0)
    assert "(the prompt is too long)" in err


def test_chat_takes_a_mistyped_command_for_none_of_the_text(typed):
    out, err, code = typed("chat", lines=("/rest", "/Exit", "/help", "/exit"))
    assert (out, code) == ("", 0)
    told = err.splitlines()
    assert told[1:3] == [f"(there is no {said}: {told[0]}. {chat._TEXT})" for said in ("/rest", "/Exit")]
    assert told[3:] == [told[0], chat._TEXT]


@pytest.mark.parametrize("said", ["/usr/bin", "/etc is full", "/ 2", "/", "//"])
def test_chat_takes_paths_and_sentences_that_begin_with_a_slash_for_text(console, said):
    assert f"<user>{said}" in console("chat", lines=(said, "/exit"))[0]


def test_chat_takes_no_bad_bytes(typed):
    out, err, code = typed("chat", lines=("\udcff", "hi", "/exit"))
    assert (out, code) == ("<user>hi\n", 0)
    assert err.splitlines()[1:] == ["(this is no UTF-8 text)"]


def test_a_server_s_address_needs_no_scheme(console):
    assert "http://127.0.0.1:9 cannot be reached" in console("chat", "--url", "127.0.0.1:9")[1]


def test_chat_with_an_absent_server_is_an_error(console):
    out, err, code = console("chat", "--url", "http://127.0.0.1:9")
    assert (out, code) == ("", 1)
    assert "http://127.0.0.1:9 cannot be reached" in err
    assert "engine serve" in err


@pytest.fixture
def server():
    """Answers GET and POST with what its `bodies` say for a path, and keeps the keys that it was sent."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body, cut = self.server.bodies[self.path]
            self.server.keys.append(self.headers.get("Authorization"))
            self.send_response(self.server.statuses.get(self.path, 200))
            self.send_header("Content-Length", str(len(body) + cut))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_):
            pass

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.keys, made.statuses, made.bodies = [], {}, {"/v1/models": (b'{"data": [{"id": "m"}]}', 0)}
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def test_chat_sends_the_key_of_the_environment(console, server, monkeypatch):
    monkeypatch.setenv("ENGINERY_API_KEY", " one two")
    server.bodies["/v1/chat/completions"] = (b'data: {"choices": [{"delta": {"content": "yes"}}]}\n\ndata: [DONE]\n\n', 0)
    out, _, code = console("chat", "--url", f"127.0.0.1:{server.server_port}", lines=("hi", "/exit"))
    assert (out, code) == ("yes\n", 0)
    assert server.keys == ["Bearer one"] * 2


def test_settings_of_an_engine_are_refused_where_a_server_answers(console, server, tmp_path, monkeypatch):
    monkeypatch.setenv("ENGINERY_TP", "2")  # of servers that are started here
    server.bodies["/v1/chat/completions"] = (b"data: [DONE]\n\n", 0)
    assert console("chat", "--url", f"127.0.0.1:{server.server_port}", lines=("hi", "/exit"))[1:] == ("", 0)
    (tmp_path / "settings.toml").write_text("page_size = 8")
    asked = ("chat", "--url", f"127.0.0.1:{server.server_port}", "--drafter", "lookup", "-p", "no:x")
    for given, names in ((asked, "drafter, blocked_plugins"), ((*asked[:3], "--config", f"{tmp_path}/settings.toml"), "page_size")):
        told = f"engine: the server at --url has settings of its own; leave out {names}\n"
        assert console(*given, lines=("hi", "/exit")) == ("", told, 2)


def test_a_server_that_is_none_of_ours_is_an_error(console, server):
    server.bodies["/v1/models"] = (b"<html>", 0)
    out, err, code = console("chat", "--url", f"127.0.0.1:{server.server_port}")
    assert (out, code) == ("", 1)
    assert "/v1/models names no model; is it a server with OpenAI's API?" in err


def test_an_answer_that_breaks_off_leaves_the_conversation_going(typed, server):
    whole = b'data: {"choices": [{"delta": {"content": "yes"}}]}\n\n'
    for body in (whole, whole[:-12]):
        server.bodies["/v1/chat/completions"] = (body, 9)
        out, err, code = typed("chat", "--url", f"127.0.0.1:{server.server_port}", lines=("hi", "/exit"))
        assert (out, code) == ("yes\n" if body is whole else "", 0)
        assert "broke off" in err


def test_a_model_that_the_server_does_not_have_ends_the_chat_with_its_words(console, server):
    server.bodies["/v1/models/wrong"] = (b'{"error": {"message": "there is no model wrong; served is m"}}', 0)
    server.statuses["/v1/models/wrong"] = 404
    out, err, code = console("chat", "--url", f"127.0.0.1:{server.server_port}", "--model", "wrong")
    assert (out, code) == ("", 1)
    assert "answers 404: there is no model wrong; served is m" in err


@pytest.mark.parametrize(("status", "expected"), [(401, 1), (403, 1), (404, 1), (400, 0), (429, 0), (503, 0)])
def test_a_refusal_that_every_question_would_get_ends_the_chat(typed, server, status, expected):
    server.bodies["/v1/chat/completions"] = (b'{"error": {"message": "no such thing"}}', 0)
    server.statuses["/v1/chat/completions"] = status
    out, err, code = typed("chat", "--url", f"127.0.0.1:{server.server_port}", lines=("hi", "/exit"))
    assert (out, code) == ("", expected)
    assert f"answers {status}: no such thing" in err


def test_a_name_that_is_served_but_not_listed_is_taken(console, server):
    server.bodies["/v1/models/other"] = (b'{"id": "other"}', 0)
    server.bodies["/v1/chat/completions"] = (b'data: {"choices": [{"delta": {"content": "yes"}}]}\n\ndata: [DONE]\n\n', 0)
    out, _, code = console("chat", "--url", f"127.0.0.1:{server.server_port}", "-m", "other", lines=("hi", "/exit"))
    assert (out, code) == ("yes\n", 0)


def test_generate_says_that_it_waits_for_a_prompt(console, monkeypatch, tmp_path):
    path = tmp_path / "prompt"
    path.write_text("typed")
    with path.open() as file:
        monkeypatch.setattr("sys.stdin", Terminal(file))
        out, err, code = console("generate", "--max-tokens", "40")
    assert (out, code) == ("typed\n", 0)
    assert "Ctrl-D" in err


def test_a_server_s_words_reach_the_terminal():
    assert chat._message(b'{"error": {"message": "no"}}') == "no"
    assert chat._message(b"<html>") == "<html>"


def test_version_and_help_are_quick_and_import_no_torch():
    code = "import sys, enginery.cli.main as m\ntry: m.main([sys.argv[1]])\nfinally: assert 'torch' not in sys.modules"
    for flag, words in (("--version", __version__), ("--help", "list-backends")):
        done = run_python("-c", code, flag, kind="light", capture_output=True, text=True, check=True)
        assert words in done.stdout


@pytest.mark.parametrize(("own", "spins"), [({}, "10000"), ({"OMP_WAIT_POLICY": "passive"}, "0"), ({"GOMP_SPINCOUNT": "77"}, "77")])
def test_threads_of_a_cpu_engine_spin_for_less_unless_the_environment_says_otherwise(own: dict[str, str], spins: str) -> None:
    """What torch's OpenMP says it took: it reads the environment once, when torch is imported."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    environ = {**kept, "OMP_DISPLAY_ENV": "VERBOSE", "OMP_NUM_THREADS": "1", **own}
    code = "from enginery.cli.main import main; main(['generate', 'Hi', '--max-tokens', '1'])"
    done = run_python("-c", code, kind="light", env=environ, capture_output=True, text=True, timeout=150, check=True)
    assert f"GOMP_SPINCOUNT = '{spins}'" in done.stderr


def test_a_wrong_setting_exits_with_two(console):
    out, err, code = console("plugins", "-p", "no:absent")
    assert (out, code) == ("", 2)
    assert err.startswith("engine: plugin 'absent'")


def test_the_core_cannot_be_blocked(console):
    out, err, code = console("plugins", "-p", "no:core")
    assert (out, code) == ("", 2)
    assert err.startswith("engine: core is no plugin and cannot be blocked")


def test_the_checkpoint_is_looked_for_once(monkeypatch, capsys):
    from enginery.worker import choice

    looked_for, find = [], choice.find_checkpoint

    def count(*asked):
        looked_for.append(asked)
        return find(*asked)

    monkeypatch.setattr(choice, "find_checkpoint", count)
    with pytest.raises(SystemExit) as ended:
        main(["generate", "Hi", "--max-tokens", "1", "--num-pages", "64"])
    assert (ended.value.code, len(looked_for)) == (0, 1)


def test_a_full_disk_is_told_without_a_traceback() -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-u", "-m", "enginery", "plugins"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (ended.returncode, ended.stderr) == (1, "engine: [Errno 28] No space left on device; make room there\n")


@pytest.mark.parametrize("name", ["typing", "enginery.cli.serve", "numpy"])
def test_ctrl_c_amid_an_import_ends_the_command_without_a_word(name: str) -> None:
    """torch drops what is raised in the middle of numpy's import, and half a numpy fails in the first step."""
    code = (
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        name == {name!r} and os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from enginery.__main__ import main\n"
        "sys.argv = ['engine', 'generate', 'Hi', '--max-tokens', '1']\n"
        "main()\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")
