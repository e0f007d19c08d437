"""Prompts as Python callers give them: texts, token ids, conversations."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, SupportsIndex, TypeGuard, cast

from enginery.config.schema import EngineOptions
from enginery.contracts.engine import EngineFacts
from enginery.contracts.parsers import writes_tools
from enginery.contracts.request import SamplingParams
from enginery.errors import CheckpointError, RequestError
from enginery.text.text_side import TextSide
from enginery.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, object]]
_FOR_MESSAGES: Final = "; LLM.chat takes messages"


class Encoded(NamedTuple):
    """A prompt's tokens. after: its last, where the answer's text goes on with the prompt's; see `CompletionText`."""

    ids: tuple[int, ...]
    after: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PromptEncoder:
    """Makes tokens of prompts. text: None for a checkpoint without a tokenizer, which can be used with token ids."""

    folder: str
    text: TextSide | None

    @classmethod
    def load(cls, facts: EngineFacts, asked: EngineOptions) -> PromptEncoder:
        """The encoder for the checkpoint of a running engine. Raises `CheckpointError` for a tokenizer that cannot be read."""
        try:
            text: TextSide | None = TextSide.load(
                facts.folder, tokenizer_folder=facts.tokenizer_folder, chat_template=asked.chat_template
            )
        except CheckpointError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            text = None
        return cls(folder=facts.folder, text=text)

    @property
    def tokenizer(self) -> Tokenizer | None:
        return None if self.text is None else self.text.tokenizer

    def encode(self, prompt: str | tuple[int, ...]) -> Encoded:
        """A text's tokens, with what the model puts around a text; tokens as they are."""
        if isinstance(prompt, str):
            prompt = tuple(self._text("give prompts as lists of token ids").tokenizer.encode(prompt, add_special_tokens=True))
        return Encoded(prompt, prompt[-1:])

    def encode_chat(self, messages: Messages, *, tools: Messages = (), template: str | None = None, **how: Any) -> Encoded:
        """A conversation, a list of {"role": ..., "content": ...}, by the checkpoint's chat template; see `ChatTemplate.render`."""
        if not isinstance(messages, Sequence) or not messages or not all(isinstance(one, Mapping) for one in messages):
            raise RequestError(f"messages are {messages!r}, but must be a list of role and content", param="messages")
        text = self._text("chats need one; use generate with token ids")
        _check_tools(tools, template or text.template.source)
        rendered = text.template.render([_plain(one) for one in messages], tools=tools, template=template, **how)
        ids = tuple(text.tokenizer.encode(rendered, add_special_tokens=False))
        return Encoded(ids, ids[-1:] if how.get("continue_final_message") else ())

    def encode_any(self, prompt: Prompt | Messages) -> Encoded:
        """The tokens of one prompt: text, token ids, or the messages of a chat. Raises `RequestError`."""
        if isinstance(prompt, str):
            return self.encode(prompt)
        if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
            return self.encode_chat(cast("Messages", prompt))
        return self.encode(_token_ids(prompt))

    def params(self, asked: SamplingParams | None) -> SamplingParams:
        """Those asked for, or what the checkpoint's generation_config.json recommends. Raises `RequestError`."""
        if not isinstance(asked, SamplingParams | None):
            raise RequestError(f"params are {asked!r}, but must be SamplingParams, or for prompts a list of them", param="params")
        return asked or SamplingParams(**({} if self.text is None else self.text.defaults.given()))

    def check_pooling(self) -> None:
        """Raises `RequestError` for a checkpoint whose embeddings are not the hidden state of the last token."""
        if self.text is not None:
            self.text.check_pooling()

    def close(self) -> None:
        if self.text is not None:
            self.text.template.close()

    def _text(self, advice: str) -> TextSide:
        if self.text is None:
            raise CheckpointError(f"{self.folder} has no tokenizer.json; {advice}")
        return self.text


def as_batch(prompts: Prompt | Iterable[Prompt]) -> list[str | tuple[int, ...]]:
    """Prompts as a list of texts and tuples of token ids. A single prompt is a batch of one. Raises `RequestError`."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping) or not _is_list(prompts):
        hint = _FOR_MESSAGES if isinstance(prompts, Mapping) else ""
        raise RequestError(f"prompts are {prompts!r:.80}, but must be texts or lists of token ids{hint}", param="prompt")
    batch: list[object] = list(prompts)
    batch = [batch] if batch and _is_whole(batch[0]) else batch  # one prompt of token ids, or several
    return [prompt if isinstance(prompt, str) else _token_ids(prompt) for prompt in batch]


def _plain(message: Mapping[str, object]) -> dict[str, object]:
    """With parts of text as one text, as the server gives them to a template. Raises `RequestError` for other content."""
    content, role = message.get("content"), message.get("role")
    if not isinstance(role, str):
        raise RequestError(f"the role of a message is {role!r:.80}, but must be a text, as user", param="messages")
    parts = content if isinstance(content, list) else []
    texts = [part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
    if not isinstance(content, str | list if role in ("user", "system") else str | list | None) or len(texts) < len(parts):
        raise RequestError(f"the content of a message is {content!r:.80}, but must be text or parts of text", param="messages")
    return {**message, "content": "\n".join(texts) if isinstance(content, list) else content}


def _check_tools(tools: Messages, template: str | None) -> None:
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RequestError(f"tools are {tools!r:.80}, but must be a list of type and function", param="tools")
    if tools and not writes_tools(template):
        raise RequestError("the chat template does not write tools, so the model would not know of them", param="tools")


def _token_ids(prompt: object) -> tuple[int, ...]:
    ids = tuple(prompt) if _is_list(prompt) else (None,)
    if [*map(type, ids)].count(int) == len(ids):  # looking at each in Python takes ten times as long
        return cast(tuple[int, ...], ids)
    if not all(map(_is_whole, ids)):
        hint = _FOR_MESSAGES if any(isinstance(each, Mapping) for each in (prompt, *ids)) else ""
        raise RequestError(f"the prompt {prompt!r:.80} is neither text nor a list of token ids{hint}", param="prompt")
    return tuple(map(operator.index, cast(tuple[SupportsIndex, ...], ids)))


def _is_whole(value: object) -> TypeGuard[SupportsIndex]:
    try:
        operator.index(value)  # type: ignore[arg-type]  # raises for what is none
    except TypeError:
        return False
    return not isinstance(value, bool) and not _is_list(value)  # as a tensor of the shape [1] is


def _is_list(value: object) -> TypeGuard[Iterable[object]]:
    """Whether it has items, and is not bytes. A tensor that is one number has `__iter__` and `__len__` too, which raise."""
    if not isinstance(value, Iterable) or isinstance(value, bytes | bytearray | memoryview):
        return False
    return not isinstance(value, Sized) or operator.length_hint(value, -1) >= 0
