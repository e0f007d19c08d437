"""Chat templates: messages to the text that a model was trained on.

A template is code from a model repository. It runs in a process of its own (`template_process`) without the engine, the network of
the server or its memory, in jinja's sandbox, with a bound on time, memory and output: it can harm nothing but its own answer.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from enginery.config.checkpoint_folder import read_json
from enginery.errors import CheckpointError, RequestError
from enginery.text.template_process import Limits, Rendered, Rendering
from enginery.text.tokenizer import Tokenizer

_COMMAND: Final = (sys.executable, "-P", "-m", "enginery.text.template_process")
_TESTS_FOR_NONE: Final = re.compile(r"content['\"]?\]? is none")


def read_template(folder: Path | str) -> str | None:
    """The template of a checkpoint: chat_template.jinja, or `chat_template` of tokenizer_config.json; None if it has none.

    Of several named ones it is "default". Raises `CheckpointError`.
    """
    path = Path(folder) / "chat_template.jinja"
    if path.exists():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}; download the checkpoint again") from error
    config = Path(folder) / "tokenizer_config.json"
    found = read_json(config).get("chat_template")
    if isinstance(found, list):
        found = {item["name"]: item["template"] for item in found if isinstance(item, dict) and {"name", "template"} <= item.keys()}
    if isinstance(found, dict):
        found = found.get("default")
    if found is not None and not isinstance(found, str):
        raise CheckpointError(
            f"chat_template in {config} is {type(found).__name__}; it must be text or a list of name and template"
        )
    return found


class ChatTemplate:
    """Renders conversations as transformers' `apply_chat_template` does. Threads may share it; they take turns.

    source: None if the checkpoint has none. Its process starts with the first conversation, and again after it was ended for taking
    too much. `close` ends it.
    """

    def __init__(self, template: str | None, *, variables: Mapping[str, str], limits: Limits | None = None) -> None:
        self.source = template
        self._variables = dict(variables)
        self._limits = limits or Limits()
        self._turn = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] | None = None

    @classmethod
    def from_folder(cls, folder: Path | str, tokenizer: Tokenizer) -> ChatTemplate:
        """The template of a checkpoint; rendering without one raises `RequestError`."""
        return cls(read_template(folder), variables=tokenizer.named)

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = (), add_generation_prompt: bool = True
    ) -> str:
        """The conversation as one text. Blocks; raises `RequestError` for everything that a template can do wrong.

        Fields that are None are left out, as transformers does, but for the content where the template asks whether it is none.
        """
        if self.source is None:
            raise RequestError(
                "this model has no chat template; send the whole prompt to /v1/completions, "
                "or put the template into its folder as chat_template.jinja",
                param="messages",
            )
        keeps = {"content"} if _TESTS_FOR_NONE.search(self.source) else set[str]()
        plain = [{key: value for key, value in message.items() if value is not None or key in keeps} for message in messages]
        rendering = Rendering(
            messages=plain, tools=[dict(tool) for tool in tools] or None, add_generation_prompt=add_generation_prompt
        )
        with self._turn:
            rendered = self._exchange(self.source, rendering)
        if rendered.text is None:
            raise RequestError(f"the model's chat template {rendered.error}", param="messages")
        return rendered.text

    def close(self) -> None:
        """End the process, if there is one."""
        self._process = None
        if self._end is not None:
            self._end()

    def _exchange(self, template: str, rendering: Rendering) -> Rendered:
        process = self._process or self._start(template)
        try:
            _write(process, msgspec.msgpack.encode(rendering))
            return msgspec.msgpack.decode(_read(process), type=Rendered)
        except (OSError, EOFError):
            self.close()
            limits = self._limits
            raise RequestError(
                f"the model's chat template took over {limits.cpu_s:g} s or {limits.memory_bytes >> 20} MiB for these messages",
                param="messages",
            ) from None

    def _start(self, template: str) -> subprocess.Popen[bytes]:
        self._process = subprocess.Popen(_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self._end = weakref.finalize(self, _end, self._process)
        start = {"template": template, "variables": self._variables, "limits": msgspec.to_builtins(self._limits)}
        _write(self._process, json.dumps(start).encode())
        return self._process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with contextlib.suppress(OSError):
        process.communicate()


def _write(process: subprocess.Popen[bytes], frame: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(len(frame).to_bytes(8, "big") + frame)
    process.stdin.flush()


def _read(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    head = process.stdout.read(8)
    size = int.from_bytes(head, "big")
    frame = process.stdout.read(size)
    if len(head) < 8 or len(frame) < size:
        raise EOFError
    return frame
