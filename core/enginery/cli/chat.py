"""`engine chat`: a conversation in the terminal, with an engine in this process or with a server."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import os
import re
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Final, Protocol

import typer

from enginery.cli.flags.engine import GivenSampling, model_of_server, with_engine_flags, with_sampling_flags
from enginery.cli.generate import build_engine, check_text, stream_text
from enginery.config.schema import EngineOptions
from enginery.contracts.request import SamplingParams
from enginery.errors import EnginError, RequestError

if TYPE_CHECKING:
    from enginery.engine.engine import Engine
    from enginery.text.text_side import TextSide

Message = dict[str, str]
_HOPELESS: Final = (401, 403, 404, 405)  # the key, the model or the server is wrong, so every further question would fail too
_HELP: Final = "/exit ends, /reset begins a new conversation, /help says this, Ctrl-C stops an answer"
_TEXT: Final = "A single /word is a command; with more words, or as /usr/bin, it is text for the model."


class Partner(Protocol):
    """Who answers in a conversation."""

    def reply(self, messages: Sequence[Message]) -> Generator[str, None, None]:
        """The answer, piece by piece. Raises `EnginError`."""
        ...


@with_engine_flags
@with_sampling_flags
def chat(
    sampling: GivenSampling,
    options: EngineOptions,
    *,
    url: Annotated[
        str | None,
        typer.Option(help="Talk to this server, as http://127.0.0.1:8000; its key is ENGINERY_API_KEY."),
    ] = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
) -> None:
    """Talk with a model.

    A single /word is a command, and /help names them; with more words, or as /usr/bin, it is text for the model.
    Where standard input is no terminal, each line is a question, and the status is 1 if any was not answered.
    With --url, --model is a name of that server's, and other settings of the engine are refused.
    """
    check_text("--system", system or "")
    partner: Partner
    if url is None:
        partner = LocalPartner(*build_engine(options), sampling)
    else:
        partner = ServerPartner(url, model_of_server(options), sampling)
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # gives input() a history and line editing
    is_typed = sys.stdin.isatty()
    if isinstance(sys.stdin, io.TextIOWrapper):  # else a bad byte takes with it what was read of other lines
        sys.stdin.reconfigure(errors="surrogateescape")
    if is_typed:
        _tell(_HELP)
    all_answered = converse(partner, [] if system is None else [{"role": "system", "content": system}], is_typed=is_typed)
    if not all_answered and not is_typed:
        raise typer.Exit(1)


def converse(partner: Partner, opening: Sequence[Message], *, is_typed: bool) -> bool:
    """Until /exit or the end of the input; whether all was answered. Standard output has the answers alone.

    A failed or interrupted answer takes its question out of the conversation. is_typed: show a prompt; Ctrl-C stops an answer.
    """
    messages, all_answered = list(opening), True
    for said in _lines(is_typed=is_typed):
        if said == "/help":
            _tell(f"{_HELP}\n{_TEXT}")
        elif said == "/reset":
            messages = list(opening)
        elif wrong := _wrong(said):
            _tell(f"({wrong})")
            all_answered = False
        else:
            asked = [*messages, {"role": "user", "content": said}]
            answer = _answer(partner, asked, is_typed=is_typed)
            messages = messages if answer is None else [*asked, {"role": "assistant", "content": answer}]
            all_answered &= answer is not None
    return all_answered


def _lines(*, is_typed: bool) -> Iterator[str]:
    """What is said, until /exit or the end."""
    prompt = "> " if is_typed and sys.stdout.isatty() else ""
    ends = (EOFError, KeyboardInterrupt) if is_typed else EOFError
    while True:
        try:
            said = input(prompt).strip()
        except ends:
            print(end="\n" if prompt else "", file=sys.stderr)
            return
        if said in ("/exit", "/quit"):
            return
        if said:
            yield said


def _wrong(said: str) -> str:
    """Why a line is neither a command nor text for the model; empty if it is one."""
    try:
        said.encode()
    except UnicodeEncodeError:
        return "this is no UTF-8 text"
    return f"there is no {said}: {_HELP}. {_TEXT}" if re.fullmatch(r"/\w+", said) else ""


def _tell(words: str) -> None:
    print(words, file=sys.stderr)


def _answer(partner: Partner, messages: Sequence[Message], *, is_typed: bool) -> str | None:
    pieces = []
    try:
        with contextlib.closing(partner.reply(messages)) as reply:
            for piece in reply:
                print(piece, end="", flush=True)
                pieces.append(piece)
    except KeyboardInterrupt:
        if not is_typed:
            raise
        _tell(" (stopped)")
        return None
    except RequestError as error:
        print(end="\n" if pieces else "", flush=True)
        _tell(f"({error})")
        return None
    print()
    return "".join(pieces)


class LocalPartner:
    """Answers with an engine in this process."""

    def __init__(self, engine: Engine, text: TextSide, sampling: GivenSampling) -> None:
        self._engine, self._text = engine, text
        self._sampling = text.defaults.given() | dict(sampling)

    def reply(self, messages: Sequence[Message]) -> Generator[str, None, None]:
        from enginery.llm.prompts import Encoded

        text = self._text.template.render(messages)
        token_ids = tuple(self._text.tokenizer.encode(text, add_special_tokens=False))
        room = max(1, self._engine.facts.max_model_len - len(token_ids))
        params = SamplingParams(**{"max_tokens": room, **self._sampling})
        yield from stream_text(self._engine, self._text.tokenizer, Encoded(token_ids), params)


class ServerPartner:
    """A server with OpenAI's API. Without a name its first model is used."""

    def __init__(self, url: str, model: str | None, sampling: GivenSampling) -> None:
        self._url = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
        self._sampling = sampling
        with self._open("/v1/models", None) as response:
            told = response.read()
        try:
            names = [str(each["id"]) for each in json.loads(told)["data"]]
            self._model = model or names[0]
        except (ValueError, LookupError, TypeError) as error:
            raise EnginError(f"{self._url}/v1/models names no model; is it a server with OpenAI's API?") from error
        if self._model not in names:  # some take more names than they list; the others say here what is wrong
            self._open(f"/v1/models/{urllib.parse.quote(self._model)}", None).close()

    def reply(self, messages: Sequence[Message]) -> Generator[str, None, None]:
        body = {"model": self._model, "messages": list(messages), "stream": True, **self._sampling}
        try:
            with self._open("/v1/chat/completions", body) as response:
                yield from self._pieces(response)
        except (OSError, ValueError, TypeError, AttributeError, http.client.HTTPException) as error:
            raise RequestError(f"{self._url} broke off: {error}") from error

    @staticmethod
    def _pieces(response: Iterable[bytes]) -> Iterator[str]:
        for data in (line[5:].strip() for line in response if line.startswith(b"data:")):  # others are comments, or names of events
            if data == b"[DONE]":
                return
            event = json.loads(data or b"{}")
            if event.get("error"):
                raise RequestError(_message(data))
            yield from map(_text, event.get("choices") or ())
        raise ValueError("the end of the answer is missing")

    def _open(self, path: str, body: Mapping[str, object] | None) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if keys := os.environ.get("ENGINERY_API_KEY", "").split():
            headers["Authorization"] = f"Bearer {keys[0]}"
        request = urllib.request.Request(self._url + path, data=data, headers=headers)
        try:
            response: http.client.HTTPResponse = urllib.request.urlopen(request)
            return response
        except urllib.error.HTTPError as error:
            with error:
                kind = EnginError if error.code in _HOPELESS else RequestError
                raise kind(f"{self._url} answers {error.code}: {_message(error.read())}") from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            why = error.reason if isinstance(error, urllib.error.URLError) else error
            raise EnginError(f"{self._url} cannot be reached: {why}; is engine serve running there?") from error


def _text(choice: Mapping[str, Mapping[str, str | None] | None]) -> str:
    return (choice.get("delta") or {}).get("content") or ""


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:500]
