"""`engine generate`: one prompt, answered on standard output as it is generated."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from enginery.cli.flags.engine import GivenSampling, with_engine_flags, with_sampling_flags
from enginery.config.schema import EngineOptions
from enginery.contracts.request import SamplingParams
from enginery.errors import ConfigError, EnginError

if TYPE_CHECKING:
    from enginery.engine.engine import Engine
    from enginery.llm.prompts import Encoded
    from enginery.text.text_side import TextSide
    from enginery.text.tokenizer import Tokenizer


@with_engine_flags
@with_sampling_flags
def generate(
    sampling: GivenSampling,
    options: EngineOptions,
    *,
    prompt: Annotated[str | None, typer.Argument(help="The text to continue; standard input if it is - or left out.")] = None,
) -> None:
    """Continue a text."""
    prompt = None if prompt == "-" else prompt
    if prompt is None and sys.stdin.isatty():
        print("reading the prompt from the terminal; Ctrl-D on a new line ends it", file=sys.stderr)
    try:
        text = sys.stdin.buffer.read().decode() if prompt is None else prompt
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input is no UTF-8 text: {error}") from error
    check_text("the prompt", text)
    if not text:
        raise ConfigError("there is no prompt; give it as an argument or on standard input")
    from enginery.llm.prompts import Encoded

    engine, side = build_engine(options)
    params = SamplingParams(**(side.defaults.given() | dict(sampling)))
    token_ids = tuple(side.tokenizer.encode(text, add_special_tokens=True))
    for piece in stream_text(engine, side.tokenizer, Encoded(token_ids, token_ids[-1:]), params):
        print(piece, end="", flush=True)
    print()


def check_text(what: str, text: str) -> None:
    """Raises `ConfigError` for an argument that was not UTF-8: Python hides its bad bytes in the text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{what} is no UTF-8 text: {error}") from error


def build_engine(options: EngineOptions) -> tuple[Engine, TextSide]:
    """An engine in this process, and its text side; says on standard error what must be said about it, and what its start took."""
    from enginery.config.sources import registry_for
    from enginery.engine.engine import Engine
    from enginery.engine.process_age import phases_text, process_age_s
    from enginery.text.text_side import TextSide
    from enginery.worker.choice import find_checkpoint

    imports_s = process_age_s()
    registry = registry_for(options)
    plugins_s = process_age_s() - imports_s
    found = find_checkpoint(options, registry)
    side = TextSide.load(found.folder, tokenizer_folder=found.tokenizer_folder, chat_template=options.chat_template)
    engine = Engine.build(options, registry, found=found)
    note = f" ({engine.facts.note})" if engine.facts.note else ""
    print(f"{engine.facts.model_name}{note}", file=sys.stderr)
    phases = {"imports": imports_s, "plugins": plugins_s, **engine.facts.phases_s}
    print(f"ready {phases_text(process_age_s(), phases)}", file=sys.stderr)
    return engine, side


def stream_text(engine: Engine, tokenizer: Tokenizer, prompt: Encoded, params: SamplingParams) -> Iterator[str]:
    """Answer one prompt alone; what is left of it is aborted when the iterator is closed. Raises `EnginError`."""
    from enginery.llm.interrupts import interrupts_later
    from enginery.llm.open_requests import OpenRequests

    requests = OpenRequests(engine, tokenizer)
    with interrupts_later():
        (answer,) = requests.submit("0", prompt, params)
    try:
        while not answer.is_over:
            with interrupts_later():
                requests.step()
            if answer.error is not None:
                raise EnginError(str(answer.error))
            if (delta := answer.take()) is not None:
                yield delta.text
    finally:
        with interrupts_later():
            requests.abort([answer])
