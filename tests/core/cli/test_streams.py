"""What commands make of streams: a server's events, standard input that is closed, output that is not UTF-8."""

from __future__ import annotations

import io
import sys

import pytest

from enginery.cli import chat
from enginery.cli.main import main
from enginery.errors import RequestError
from enginery.text.text_side import TextSide

YES = b'data: {"choices": [{"delta": {"content": "yes"}}]}\n\n'
END = b"data: [DONE]\n\n"


@pytest.fixture
def answered(monkeypatch):
    """The answer of a server that sends these bytes."""

    def answered(sent: bytes) -> str:
        models = b'{"data": [{"id": "m"}]}'
        monkeypatch.setattr(chat.ServerPartner, "_open", lambda self, path, body: io.BytesIO(models if body is None else sent))
        return "".join(chat.ServerPartner("", None, {}).reply([]))

    return answered


@pytest.mark.parametrize(
    "line",
    [
        b": OPENROUTER PROCESSING",
        b"event: message",
        b"id: 1",
        b"retry: 9",
        b"data:",
        b"\r",
        b'data: {"usage": {}}',
        b'data: {"choices": null, "error": null}',
        b'data: {"choices": [{"finish_reason": "stop"}]}',
        b'data: {"choices": [{"delta": null}]}',
    ],
)
def test_lines_of_a_stream_that_have_no_text_are_passed_over(answered, line):
    assert answered(line + b"\n" + YES + line + b"\n" + END) == "yes"


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (b'{"error": {"message": "no room"}}', "^no room$"),
        (b'{"error": "no room"}', "no room"),
        (b"[1]", "broke off"),
        (b'{"choices": 1}', "broke off"),
    ],
)
def test_what_a_stream_says_amid_an_answer_is_told(answered, event, why):
    with pytest.raises(RequestError, match=why):
        answered(YES + b"data: " + event + b"\n\n" + END)


@pytest.fixture
def status(engine, monkeypatch):
    """Runs a command with the fake engine."""

    def status(*arguments: str) -> object:
        for command in ("generate", "chat"):
            monkeypatch.setattr(
                f"enginery.cli.{command}.build_engine", lambda options: (engine, TextSide.load(engine.facts.folder))
            )
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        return ended.value.code

    return status


@pytest.mark.parametrize(("command", "code", "told"), [("generate", 2, "engine: there is no prompt"), ("chat", 0, "")])
def test_closed_standard_input_is_empty(status, monkeypatch, capsys, command, code, told):
    monkeypatch.setattr("sys.stdin", None)
    assert status(command) == code
    sys.stdin.close()
    out, err = capsys.readouterr()
    assert (out, err[: len(told) or None]) == ("", told)


def test_what_the_output_s_encoding_lacks_is_replaced(status, monkeypatch):
    shown = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", shown)
    assert status("generate", "na\u00efve \U0001f600", "--max-tokens", "40") == 0
    shown.flush()
    assert shown.buffer.getvalue() == b"na?ve ?\n"
