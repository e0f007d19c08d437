"""Chat templates: messages to the text that a model was trained on.

A template is code from a model repository. It runs in a process of its own (`template_process`) without the engine, the network of
the server or its memory, in jinja's sandbox, with a bound on time, memory and output: it can harm nothing but its own answer.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec
from jinja2.defaults import DEFAULT_NAMESPACE

from enginery.checkpoint.folder import read_json, unreadable
from enginery.errors import CheckpointError, ConfigError, EnginError, RequestError
from enginery.text.renderer import Renderer, RendererDied
from enginery.text.template_process import GIVEN, INSTRUCTS, Limits, Rendered, Rendering, Start, syntax_error
from enginery.text.tokenizer import Tokenizer

_TESTS_FOR_NONE: Final = re.compile(r"content['\"]?\]? (?:is(?: not)?|==|!=) [nN]one")
_READS_A_PART: Final = re.compile(r"content['\"]?\]?\[0\](?:\.|\[['\"])text")
_AS_ONE: Final = (["system", "developer"], ["developer", "system"], ["developer", "developer"])
_MAX_VARIABLES: Final = 64
_MAX_NAME: Final = 64
_RESERVED: Final = GIVEN | {
    *("continue_final_message", "chat_template", "conversation", "raise_exception", "strftime_now"),
    *("tokenize", "tokenizer_kwargs", "padding", "truncation", "max_length", "sanitize_control_tokens"),
    *("return_tensors", "return_dict", "return_assistant_tokens_mask", *DEFAULT_NAMESPACE),
}  # no caller's variables: they have fields of their own, are functions, or are arguments of transformers' `apply_chat_template`


class TemplateStuck(EnginError):
    """The process that renders templates does not answer, by no fault of the conversation. Served as HTTP 503."""


class TemplateTooSlow(RequestError):
    """A template ran out of its time or memory over a conversation; told in another way, it would do so again."""


def read_template(folder: Path | str) -> str | None:
    """The template of a checkpoint; None if it has none. Raises `CheckpointError`.

    It is chat_template.jinja and files of additional_chat_templates, or else `chat_template` of tokenizer_config.json. Of several
    named ones it is "default", and with tools "tool_use", if there is one.
    """
    place, config, texts = Path(folder), Path(folder) / "tokenizer_config.json", dict[str, str]()
    named = [(path.stem, path) for path in place.glob("additional_chat_templates/*.jinja")]
    for name, path in [*(("default", path) for path in place.glob("chat_template.jinja")), *named]:
        try:
            texts[name] = path.read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise unreadable(path, error) from error
    found = _of_named(texts or read_json(config).get("chat_template"))
    if found is not None and not isinstance(found, str):
        raise CheckpointError(f"chat_template in {config} is {type(found).__name__}, not text or a list of name and template")
    return found


def _of_named(found: object) -> object:
    if isinstance(found, list):
        found = {item["name"]: item["template"] for item in found if isinstance(item, dict) and {"name", "template"} <= item.keys()}
    if not isinstance(found, dict):
        return found
    default, with_tools = found.get("default"), found.get("tool_use")
    if not isinstance(default, str) or not isinstance(with_tools, str):
        return default
    first, second = (each.removesuffix("\n") for each in (with_tools, default))  # as jinja reads a whole template
    return f"{{% if tools %}}{first}{{% else %}}{second}{{% endif %}}"


class ChatTemplate:
    """Renders conversations as transformers' `apply_chat_template` does. Threads may share it; they take turns.

    source: None if the checkpoint has none. Its process starts with the first conversation, and again whenever it has ended or is
    stuck. `close` ends it.
    """

    def __init__(self, template: str | None, *, variables: Mapping[str, str], limits: Limits | None = None) -> None:
        self.source = template
        self._variables, self.limits = dict(variables), limits or Limits()
        self._turn = threading.Lock()
        self._renderer: Renderer | None = None

    @classmethod
    def from_folder(cls, folder: Path | str, tokenizer: Tokenizer, *, file: str | None = None) -> ChatTemplate:
        """The template of a checkpoint, or of `file`; rendering without one raises `RequestError`."""
        return cls(read_template(folder) if file is None else _read_file(file), variables=tokenizer.named)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] = (),
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        variables: Mapping[str, object] | None = None,
        switches: Mapping[str, object] | None = None,
        needs_switch: bool = False,
        template: str | None = None,
    ) -> str:
        """The conversation as one text. Blocks; raises `RequestError` for everything that a template can do wrong, `TemplateStuck`.

        Fields that are None are left out, as transformers does, but for the content where the template asks whether it is none.
        add_generation_prompt: begin the answer; None: unless the final message is continued. continue_final_message: the text ends
        where the content of the final message does. variables: of the template, which must use them. switches: variables for the
        templates that use them; needs_switch: it must use one. template: instead of the model's.
        """
        source = self._source(template)
        if continue_final_message:
            _check_final(messages, add_generation_prompt=add_generation_prompt)
        known = _with_known_roles(messages, source)
        rendering = Rendering(
            messages=_told(known, source),
            tools=[dict(tool) for tool in tools] or None,
            add_generation_prompt=not continue_final_message if add_generation_prompt is None else add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=self._checked(variables),
            switches=dict(switches or {}),
            needs_switch=needs_switch,
            template=template,
        )
        rendered = self._rendered(rendering)
        if rendered.text is None and (instructed := _instructed_first(known)) != known:
            rendered = self._rendered(replace(rendering, messages=_told(instructed, source)))
        if rendered.text is None:
            whose = "the model's" if template is None else "the request's"
            raise RequestError(f"{whose} chat template {rendered.error}", param=rendered.param)
        return rendered.text

    def _source(self, template: str | None) -> str:
        """The request's template, or else the model's. Raises `RequestError` if there is none."""
        source = self.source if template is None else template
        if source is None:
            why = "this model has no chat template; send the whole prompt to /v1/completions, start with --chat-template FILE"
            raise RequestError(f"{why}, or put the template into its folder as chat_template.jinja", param="messages")
        return source

    def answers(self, within_s: float) -> bool:
        """Whether the process does, which is started if there is none. One that does not is ended. Blocks."""
        if not self._turn.acquire(timeout=within_s):
            return False
        try:
            return self._ready(self.limits.wall_s).exchange(b"", within_s=within_s) == b""
        except (RendererDied, TemplateStuck):
            self.close()
            return False
        finally:
            self._turn.release()

    def _checked(self, given: Mapping[str, object] | None) -> dict[str, object]:
        """The caller's variables. Raises `RequestError` for names that are taken or that no template can use."""
        variables = dict(given or {})
        if len(variables) > _MAX_VARIABLES:
            message = f"chat_template_kwargs has {len(variables):,} variables, at most {_MAX_VARIABLES} are accepted"
            raise RequestError(message, param="chat_template_kwargs")
        for name in variables:
            why = "is no name of a variable" if len(name) > _MAX_NAME or not name.isidentifier() else ""
            if name in _RESERVED or name in self._variables or name.startswith("_"):
                why = "is not the caller's to set; what it stands for has a field of its own, or is the model's"
            if why:
                raise RequestError(f"chat_template_kwargs: {name[:_MAX_NAME]!r} {why}", param="chat_template_kwargs")
        return variables

    def _rendered(self, rendering: Rendering) -> Rendered:
        """Render, once more with a new process if the old one is stuck or was killed by somebody else."""
        try:
            frame = msgspec.msgpack.encode(rendering)
        except (RecursionError, OverflowError, TypeError, UnicodeEncodeError) as error:
            raise RequestError(f"these messages cannot be given to a template: {error}", param="messages") from error
        limits = self.limits
        if not self._turn.acquire(timeout=2 * limits.wall_s):
            raise TemplateStuck("the conversations before this one take too long to render; try again in a moment")
        try:
            for _ in range(2):
                renderer = self._ready(limits.wall_s)
                try:
                    return msgspec.msgpack.decode(renderer.exchange(frame, within_s=limits.wall_s), type=Rendered)
                except RendererDied as death:
                    if self._renderer is not renderer:  # `close` ended it, and would be waited for once more
                        break
                    self.close()
                    if death.by_itself:
                        raise TemplateTooSlow(
                            f"the chat template took over {limits.cpu_s:g} s or {limits.memory_bytes >> 20} MiB for these messages",
                            param="messages",
                        ) from None
        finally:
            self._turn.release()
        raise TemplateStuck("the process that renders chat templates ended or hung twice; try again in a moment")

    def _ready(self, within_s: float) -> Renderer:
        if self._renderer is not None and self._renderer.has_ended:  # killed by somebody else, between two conversations
            self.close()
        if self._renderer is None:
            start = Start(template=self.source or "", variables=self._variables, limits=self.limits)
            try:
                self._renderer = Renderer(msgspec.msgpack.encode(start), within_s=within_s)
            except (OSError, RendererDied) as error:
                raise TemplateStuck(f"the process that renders chat templates cannot be started: {error}") from error
        return self._renderer

    def close(self) -> None:
        """End the process, if there is one; what another thread renders then fails with `TemplateStuck`."""
        renderer, self._renderer = self._renderer, None
        if renderer is not None:
            renderer.close()


def _with_known_roles(messages: Sequence[Mapping[str, object]], source: str) -> list[Mapping[str, object]]:
    """Many templates take one message of the system, at the beginning; few know the developer's, others leave it out."""
    found = list(messages)
    while [each.get("role") for each in found[:2] if isinstance(each.get("content"), str)] in _AS_ONE:
        found[:2] = [{**found[0], "content": f"{found[0]['content']}\n\n{found[1]['content']}"}]
    return [{**each, "role": "system"} if each.get("role") == "developer" and "developer" not in source else each for each in found]


def _instructed_first(messages: list[Mapping[str, object]]) -> list[Mapping[str, object]]:
    """For a template that refuses or leaves out what is said further on: it as one message at the beginning."""
    said = [each for each in messages if each.get("role") in INSTRUCTS]
    first = [{**each, "content": "\n\n".join(str(each.get("content") or "") for each in said)} for each in said[:1]]
    return [*first, *(each for each in messages if each.get("role") not in INSTRUCTS)]


def _told(messages: Sequence[Mapping[str, object]], source: str) -> list[dict[str, object]]:
    """Without fields that are None, but a content for which the template asks; text as a part where it takes parts alone."""
    keeps = {"content"} if _TESTS_FOR_NONE.search(source) else set[str]()
    told = [{key: value for key, value in message.items() if value is not None or key in keeps} for message in messages]
    if _READS_A_PART.search(source) and "is string" not in source:
        for message in told:
            if isinstance(text := message.get("content"), str):
                message["content"] = [{"type": "text", "text": text}]
    return told


def _check_final(messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool | None) -> None:
    final, why = messages[-1], ""
    if add_generation_prompt:
        why = "goes without add_generation_prompt, which begins a new message"
    elif final.get("role") != "assistant":
        why = f"is for a final message of the role assistant; it is of the role {str(final.get('role'))[:50]}"
    elif final.get("tool_calls"):
        why = "is for a final message without tool_calls"
    elif not isinstance(final.get("content"), str):
        why = "needs text as the content of the final message"
    if why:
        raise RequestError(f"continue_final_message {why}", param="continue_final_message")


def _read_file(file: str) -> str:
    """The template that is asked for, which must be one. The model's own is untrusted, so that only its process looks at it."""
    try:
        text = Path(os.path.expanduser(file)).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"--chat-template {file} cannot be read: {why}; give a file with the template's text") from error
    if told := "is empty" if not text.strip() else syntax_error(text):
        raise ConfigError(f"--chat-template {file} {told}; correct it, or leave it out")
    return text
