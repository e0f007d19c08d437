"""Prints docs/api.md, the page of every endpoint and field: `python docs/make_api_page.py > docs/api.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from enginery.serve.app import ENDPOINTS
from enginery.serve.schemas.completions import NoEffect
from enginery.serve.schemas.openapi import json_schemas

HEAD: Final = """\
# HTTP API

`docs/make_api_page.py` makes this page from the schemas that bodies are checked against; a test fails when it is out of date.

A field that is not listed here is refused by name with status 400. So is a value that cannot be served. `null` is the same as
leaving the field out.

- What is left out: `max_tokens` is 16 in `/v1/completions`, and in chats and responses as many as the context has room for.
  Sampling (`temperature`, `top_p`, `top_k`, `min_p`, `repetition_penalty`) is what the checkpoint's generation_config.json
  recommends; where it has none, and with `--generation-config none`, the temperature is 1 and nothing else is set.
- Ranges: `n` up to 128, `stop` up to 16 strings, log-probabilities of up to 20 tokens, up to 1,024 completions of one request.
- Bodies: up to 8 MiB and 64 bytes for each token of the context, 32 MiB at the most (`--max-body-bytes`; `/server_info` says the
  number), with up to 262,144 texts (names too), arrays and objects and 2,097,152 numbers of up to 100 digits.
- Fields marked + are extensions that OpenAI or Anthropic do not have. They have vLLM's and SGLang's names where there is one.
- Fields marked 0 change no answer. They are accepted because clients send them.

`model` is any of the names that the server was given (`--served-model-name`), and answers repeat it. Without it, the first
one is meant.
In float32 the same `seed`, prompt and sampling give the same tokens, but for rounding: the sums of a larger batch, or of rows
that verify guesses, differ in their last bits. Where two tokens are as good within these, the other may be taken (the embedded
model: none of some 44,000 tokens at temperatures 1 and 1.5). In bfloat16 the sums differ by far more: a request beside others
may get other tokens than alone, also at temperature 0.

Errors have OpenAI's shape, `{"error": {"message", "type", "param", "code"}}`; below `/v1/messages` they have Anthropic's. Statuses:

- 400: something is wrong with the request. Where it does not fit into the context, `code` is `context_length_exceeded`; a prompt
  that does not fit alone is said to be "too long", also below `/v1/messages`. By these, agents see when to shorten a conversation.
- 401: a key is missing, or none that is known.
- 404: another model or path. 405: another method than the path has.
- 413: the body is too large. 408, 431: it came too slowly, its headers are too long ([limits](operations.md#what-happens-when)).
- 429 with `Retry-After`: the queue is full.
- 500: a step, or a plugin, failed.
- 503: the model loads, the server stops, the engine has died, or the process that renders chat templates does not answer.
- 503 with `Retry-After`: the threads that compile grammars are busy with others, or the bodies of all requests together are too
  large (`--max-total-body-bytes`).

These have no body: `GET /v1/models`, `GET /v1/models/{model}`, `GET /tokenizer_info`, and `GET /openapi.json`. The last has the
statuses of every path and the schema of each answer. Those about models have the fields of OpenAI and of Anthropic, whoever asks.
"""

ABOUT: Final = {
    "/v1/completions": (
        "Prompts in, texts out. `prompt`: a text, texts, token ids, or lists of token ids. With `max_tokens` 0 and "
        "`echo` or `prompt_logprobs` prompts are only scored, and may be as long as the context."
    ),
    "/v1/chat/completions": (
        "A conversation in, the assistant's next message out. Tools need a parser (`--tool-parser`) "
        "and, unless a call is forced, a chat template that writes them (Phi 4-mini's does so within the system's "
        "message). Reasoning comes as `reasoning_content` (`--reasoning-parser`). "
        "Arguments of a tool with `strict` true satisfy its schema, whether the model "
        "must call or is free to. A schema or a parser with which that cannot be promised is refused. A forced call of another "
        "tool keeps to what a grammar can say of its schema; `uniqueItems`, `propertyNames`, `not`, `if`, patterns that look "
        "around and the like are left to the model. With `parallel_tool_calls` false the answer ends with the first call.\n\n"
        "A schema of `response_format` with `strict` false is kept to likewise; else what a grammar cannot say of it is "
        "refused.\n\n"
        "With tools and a JSON schema (`response_format`, `guided_json`) in one request, the answer is calls without text around "
        "them, or JSON that satisfies the schema. Reasoning may come first. Calls that are forced are only calls, and with "
        "`tool_choice` none the schema stands alone. The parser `llama3-json` has no grammar for both, because its calls are JSON "
        "too; it and other kinds of grammars beside tools are refused.\n\n"
        "With `tool_choice` `allowed_tools` the model is told about all tools, so that prompts keep their cached prefix, and a "
        "grammar keeps it from calling others than these. What a model wrote as `arguments` of an earlier call may be sent back, "
        "though it is no JSON object: it stands in the prompt as it is.\n\n"
        "Where a stop string or the limit cuts a call that is forced before its name is complete, there is no call: "
        "`finish_reason` is `stop` or `length`, not `tool_calls`. `/v1/messages` says `stop_sequence` or `max_tokens`, and a "
        "response of `/v1/responses` is `incomplete`, with no reason in its `incomplete_details`"
        " where a stop string was the cause, or the model itself left a call unfinished.\n\n"
        "The role `developer` is `system` for a chat template that does not name it. Messages of both at the beginning "
        "are one message, with an empty line between them. Where the template refuses or leaves out what one of them says "
        "further on, as gpt-oss' does, all are one message at the beginning, in their order. A template that leaves out that "
        "one too is refused.\n\n"
        '`chat_template_kwargs` are variables of the chat template, such as `{"enable_thinking": false}`. A variable that the '
        "template does not use is refused, with the names of those that it uses, and so is one for which there is a field, or a "
        "token of the model. `enable_thinking` or `thinking` false is accepted where the model does not reason.\n\n"
        "`reasoning_effort` is given to a template that has a variable of this name. In a template with `enable_thinking` or "
        "`thinking`, `none` switches it off and any other level on. Where the template has neither, a level has no effect, and "
        "`none` is refused if the model reasons; `thinking` `disabled` is not, and the reasoning is left out of the answer. "
        "`reasoning` is the same as OpenRouter's clients and Cline send it, `thinking` as "
        "Anthropic's and GLM's do, `enable_thinking` as Qwen's do: `enabled` or `enable_thinking` false, or `disabled`, is `none`, "
        "whatever else is said, and enabled without an effort is `medium`. `exclude` true, `include_reasoning` false, or `display` "
        "`omitted`, leaves the reasoning out of the answer. `budget_tokens` and `max_tokens` of `reasoning` change nothing. In a "
        "message that has neither `reasoning` nor `reasoning_content` the texts of `reasoning_details` are its reasoning.\n\n"
        "With `continue_final_message` the assistant's last message goes on, and no new one begins. The answer is what comes after "
        "it. `prediction` changes nothing, as it is a hint for speed alone. "
        "`verbosity` is given to a template that has a variable of this name; for others it changes nothing. "
        "`chat_template` replaces the model's, on servers that were started with `--trust-request-chat-template`."
    ),
    "/v1/responses": (
        "OpenAI's later layout of the same. Nothing is stored: `store` is always false. To go on with a conversation, send its "
        "items as `input`. A tool is strict only if it says so. `effort` of `reasoning` is the "
        "`reasoning_effort` of chats. Its `summary` has no effect, because reasoning is given whole. `verbosity` of `text` is that "
        "of chats. With `truncation` `auto` nothing is left out either: what does not fit into the context is refused.\n\n"
        "With `message.output_text.logprobs` in `include`, or `top_logprobs` above 0, texts have the log-probabilities of the "
        "tokens that they are made of. `include` may ask for `reasoning.encrypted_content` too, which is always null: reasoning "
        "is in its item's `content`, as text. "
        "Send that back with the other items. `encrypted_content` that is sent has no effect.\n\n"
        "Tools are functions. Others (`web_search`, `namespace`, `custom`, `mcp`) are refused; "
        "[the quickstart](quickstart.md#codex) has the settings with which Codex sends none of them."
    ),
    "/v1/responses/input_tokens": "How many tokens such a prompt has.",
    "/v1/messages": (
        "Anthropic's layout of the same. `?beta=true` and any header `anthropic-beta` are accepted.\n\n"
        "- `output_config` has the schema that the answer follows. Its `effort` is the `reasoning_effort` of chats.\n"
        "- `thinking`: the effort is none with `disabled`, and medium with `enabled` unless an effort is sent. A model "
        "that nothing keeps from reasoning does, and with `disabled` the text of it is left out. `budget_tokens` "
        "changes nothing. `display` `omitted` leaves the text of thinking out.\n"
        "- `context_management`: the edits `clear_tool_uses_20250919` and `clear_thinking_20251015` are made, and "
        "`compact_20260112` is refused.\n"
        "- A last message of the assistant with text is the beginning of the answer, which goes on behind it.\n"
        "- `cache_control` is accepted everywhere and has no effect: prefixes are cached wherever they are the same.\n"
        "- `redacted_thinking` in messages is left out, as nobody here can read it.\n"
        "- `thread` is refused with the error upon which Anthropic's clients (`tool_runner`) go on with the whole conversation.\n"
        "- In a tool, `eager_input_streaming` has no effect, because its input is always streamed. `allowed_callers` "
        "`direct` says what is so anyway; other values are refused.\n"
        "- A tool with `defer_loading` is left out of the prompt until a result of a call has a `tool_reference` to it, "
        "as a tool of the client's that finds others writes. Anthropic's own search tools are refused."
    ),
    "/v1/messages/count_tokens": "How many tokens such a prompt has, after the edits of `context_management`.",
    "/v1/embeddings": "The last hidden state of the last token of each input. It has length 1 unless `normalize` is false. "
    "An input may be as long as the context.",
    "/tokenize": (
        "The tokens of a text, or of a conversation as the template writes it. The fields about the template are those of chats."
    ),
    "/detokenize": "The text of tokens, special ones written out.",
}

NO_EFFECT: Final = {*NoEffect.__struct_fields__, "prediction", "truncation", "background", "client_metadata", "access_programs"}
ANTHROPIC_NO_EFFECT: Final = {"metadata", "service_tier", "cache_control", "speed"}
SAMPLING: Final = {
    *("ignore_eos", "min_tokens", "top_k", "min_p", "repetition_penalty", "stop_token_ids", "include_stop_str_in_output"),
    *("skip_special_tokens", "add_special_tokens", "prompt_logprobs", "cache_salt", "priority", "speculation"),
    *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
}
TEMPLATE: Final = {"add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs"}
EXTENSIONS: Final = {
    "/v1/completions": SAMPLING | {"response_format", "max_completion_tokens"},
    "/v1/chat/completions": SAMPLING | {"best_of", "reasoning", "thinking", "enable_thinking", "include_reasoning", *TEMPLATE},
    "/v1/embeddings": {"normalize", "add_special_tokens", "cache_salt"},
    "/v1/messages": {"speculation"},
    "/v1/responses/input_tokens": {"chat_template_kwargs"},
    "/v1/responses": {"ignore_eos", "top_k", "min_p", "repetition_penalty", "seed", "stop", "cache_salt", "priority"}
    | {"chat_template_kwargs", "speculation"},
}


def inlined(schema: object, components: Mapping[str, object]) -> object:
    """The schema with its references replaced by what they refer to."""
    if isinstance(schema, list):
        return [inlined(item, components) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return inlined(components[schema["$ref"].rsplit("/", 1)[-1]], components)
    return {key: inlined(value, components) for key, value in schema.items() if key != "discriminator"}


def kind_of(schema: dict[str, Any]) -> str:
    """A schema in a few words; null is always allowed, and not told."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(kind_of(part) for part in schema["anyOf"] if part.get("type") != "null"))
    if "enum" in schema:
        return ", ".join(f"`{msgspec.json.encode(value).decode()}`" for value in schema["enum"] if value is not None)
    if schema.get("type") == "array":
        return f"list of {kind_of(schema['items'])}" if schema.get("items") else "list"
    if schema.get("type") == "object":
        named = ", ".join(f"`{name}`" for name in schema.get("properties", ()))
        return f"object ({named})" if named else "object"
    return str(schema.get("type", "anything"))


def rows(path: str, schema: dict[str, Any]) -> Iterator[str]:
    """A line for each field, the required ones first."""
    required = schema.get("required", ())
    no_effect = ANTHROPIC_NO_EFFECT if path.startswith("/v1/messages") else NO_EFFECT
    for name, field in sorted(schema["properties"].items(), key=lambda item: (item[0] not in required, item[0])):
        mark = "+" if name in EXTENSIONS.get(path, ()) else "0" if name in no_effect else ""
        yield f"| `{name}` | {'required' if name in required else mark} | {kind_of(field)} |"


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for path, (_, kind) in ENDPOINTS.items():
        _, components = json_schemas([kind])
        schema: Any = inlined(components[kind.__name__], components)
        table = "\n".join(["| field | | what it is |", "|---|---|---|", *rows(path, schema)])
        parts.append(f"## POST {path}\n\n{ABOUT[path]}\n\n{table}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(page())
