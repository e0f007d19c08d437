"""POST /tokenize and /detokenize, as vLLM has them: between texts, or conversations, and the model's tokens."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from enginery.contracts.request import check_token_ids
from enginery.errors import RequestError
from enginery.serve.api.service import Service, large_answer, read_request
from enginery.serve.schemas import chat
from enginery.serve.schemas.completions import MAX_MESSAGES, Int

_OF_THE_TEMPLATE: Final = (
    *("reasoning_effort", "reasoning", "thinking", "enable_thinking", "verbosity", "add_generation_prompt"),
    *("continue_final_message", "chat_template", "chat_template_kwargs"),
)


class TokenizeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of /tokenize: a prompt, or messages with the fields that change how they are written.

    add_special_tokens: true for a prompt and false for messages if left out.
    """

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[chat.ChatMessage], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[chat.FunctionTool], msgspec.Meta(max_length=chat.MAX_TOOLS)] | None = None
    reasoning_effort: chat.Effort | None = None
    reasoning: chat.Reasoning | None = None
    thinking: chat.Thinking | None = None
    enable_thinking: bool | None = None
    verbosity: chat.Verbosity | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, object] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of /detokenize. tokens: ids of the vocabulary."""

    tokens: list[Int]
    model: str | None = None


async def tokenize(service: Service, http: Request) -> Response:
    """The handler of /tokenize. Raises `EnginError`."""
    model = service.model()
    asked = await read_request(http, TokenizeRequest)
    model.check_name(asked.model)
    if (asked.prompt is None) == (asked.messages is None):
        raise RequestError("give either prompt or messages", param="prompt")
    for field in ("tools", *_OF_THE_TEMPLATE):
        if asked.messages is None and getattr(asked, field) is not None:
            raise RequestError(f"{field} goes with messages", param=field)
    text, add_special_tokens, field = asked.prompt or "", asked.add_special_tokens is not False, "prompt"
    if asked.messages is not None:
        body = chat.ChatRequest(messages=asked.messages, **{name: getattr(asked, name) for name in _OF_THE_TEMPLATE})
        text = await model.render(body, tools=asked.tools or ())
        add_special_tokens, field = asked.add_special_tokens is True, "messages"
    tokens = await model.tokens(text, add_special_tokens=add_special_tokens, field=field)

    def reply() -> dict[str, object]:
        token_strs = [model.text.tokenizer.token_text(token) for token in tokens] if asked.return_token_strs else None
        return {"count": len(tokens), "max_model_len": model.facts.max_model_len, "tokens": tokens, "token_strs": token_strs}

    return await large_answer(model, len(tokens), reply)


async def detokenize(service: Service, http: Request) -> Response:
    """The handler of /detokenize, which writes special tokens out. Raises `EnginError`."""
    model = service.model()
    asked = await read_request(http, DetokenizeRequest)
    model.check_name(asked.model)

    def reply() -> dict[str, object]:
        check_token_ids("tokens", asked.tokens, vocab_size=model.facts.vocab_size)
        return {"prompt": model.text.tokenizer.decode(asked.tokens, skip_special_tokens=False)}

    return await large_answer(model, len(asked.tokens), reply)
