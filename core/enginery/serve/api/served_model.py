"""The model as the HTTP server sees it: it checks a body and turns it into requests for the engine."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

from enginery.contracts.engine import EngineFacts
from enginery.contracts.request import GenerationRequest, SamplingParams, check_token_ids, choices_of
from enginery.errors import RequestError
from enginery.serve.api.answer_parsers import NO_PARSERS, Parsers
from enginery.serve.api.chat_templates import TemplateTurns, renderer, ways_to_tell
from enginery.serve.http.caller import caller
from enginery.serve.http.faults import ContextExceeded, NoSuchModel
from enginery.serve.schemas.chat import ChatRequest, FunctionTool
from enginery.serve.schemas.completions import MAX_PROMPTS, CommonRequest, CompletionRequest
from enginery.serve.schemas.structured_outputs import FieldGrammar
from enginery.text.template import TemplateTooSlow
from enginery.text.text_side import TextSide

_INLINE_CHARS: Final = 4096
_LARGE_CHARS: Final = 1 << 18
_MAX_CHARS: Final = 1 << 20  # of a text of which only the tokens are asked for; each takes some 150 bytes meanwhile
_USUAL_CHARS: Final = 4  # of a token
_SAME_NAME: Final = (
    *("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("n", "top_k", "min_tokens", "logit_bias", "ignore_eos", "skip_special_tokens", "speculation"),
)
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt as tokens. text: what they were made of; None if the request sent tokens."""

    token_ids: tuple[int, ...]
    text: str | None = None


@dataclass(frozen=True, kw_only=True)
class Job:
    """One completion: its place among the choices, its prompt's place among the prompts, and the engine's request.

    grammar_field: the field of the body that asked for the request's grammar, if it has one.
    """

    index: int
    prompt_index: int
    prompt: Prompt
    request: GenerationRequest
    grammar_field: str | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class ServedModel:
    """The model that is served, complete once the engine is ready.

    trusts_templates: requests may bring chat templates of their own. few_large: how many large texts become tokens at a time, which
    takes much memory.
    """

    facts: EngineFacts
    text: TextSide
    parsers: Parsers = NO_PARSERS
    trusts_templates: bool = False
    turns: TemplateTurns = field(default_factory=TemplateTurns)
    few_large: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(2))

    @property
    def names(self) -> tuple[str, ...]:
        """The names that requests may use for the model; the first is the one that answers have."""
        return self.facts.served_names or (self.facts.model_name,)

    def check_name(self, model: str | None) -> str:
        """The model's name for an answer: the one that the request used, or the first. Raises `NoSuchModel` for another name."""
        if model is not None and model not in self.names:
            served = " and ".join(map(repr, self.names))
            message = f"the model {model[:200]!r} is not served here; {served} {'is' if len(self.names) == 1 else 'are'}"
            raise NoSuchModel(message, param="model")
        return model or self.names[0]

    async def prompts(
        self, given: str | list[str | int | list[int]], *, add_special_tokens: bool, field: str = "prompt"
    ) -> list[Prompt]:
        """The prompts in a text, texts, token ids, or lists of them. Raises `RequestError`, before it encodes what is too long."""
        parts = self._parts(given, field)
        return await self.apart(
            sum(map(len, parts)), lambda: [self._prompt(part, add_special_tokens=add_special_tokens, field=field) for part in parts]
        )

    async def tokens(self, text: str, *, add_special_tokens: bool, field: str) -> list[int]:
        """The tokens of a text, which may be somewhat longer than the context. Raises `RequestError`."""
        self._check_chars(text, field)
        limit = max(_MAX_CHARS, 2 * _USUAL_CHARS * self.facts.max_model_len)
        if len(text) > limit:
            message = f"the text has {len(text):,} characters, but at most {limit:,} become tokens at once; send it in parts"
            raise RequestError(message, param=field)
        return await self.apart(len(text), lambda: self.text.tokenizer.encode(text, add_special_tokens=add_special_tokens))

    async def apart(self, size: int, work: Callable[[], ResultT]) -> ResultT:
        """Run `work`: on the event loop if it is little, else on a thread. size: of its input, in characters or tokens."""
        if size <= _INLINE_CHARS:
            return work()
        async with self.few_large if size > _LARGE_CHARS else contextlib.nullcontext():
            return await asyncio.to_thread(work)

    async def render(self, asked: ChatRequest, *, tools: Sequence[FunctionTool]) -> str:
        """The conversation as text, with special tokens, by the chat template. tools: those that the model is told about."""
        template, reasons = self.text.template, self.parsers.reasoning is not None
        render = renderer(template, asked, reasons=reasons, trusts_templates=self.trusts_templates)
        refused: RequestError | None = None
        for told, messages in ways_to_tell(asked, tools, asked.chat_template or template.source or "", self.parsers.tools):
            try:
                return await self.turns.render(template, partial(render, messages, tools=told))
            except TemplateTooSlow:
                raise
            except RequestError as error:
                refused = error
        raise refused or AssertionError("there is a way at least")

    async def can_render(self) -> bool:
        """Whether conversations are rendered; true where there is no template."""
        return self.text.template.source is None or await self.turns.can_render(self.text.template)

    def jobs(
        self,
        asked: CommonRequest,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        name: str,
        *,
        grammar: FieldGrammar | None = None,
        prompt_only: bool = False,
    ) -> list[Job]:
        """`params.n` completions for each prompt, as `choices_of` makes them. prompt_only: see `GenerationRequest`.

        name: what the requests' ids begin with. Raises `RequestError` for too many completions, and for a prompt that is too long.
        """
        field = None if grammar is None else grammar.field
        params = params if grammar is None else dataclasses.replace(params, grammar=grammar.grammar)
        if len(prompts) * params.n > MAX_PROMPTS:
            total = f"{len(prompts):,} prompts with n={params.n}"
            raise RequestError(f"{total} make more than {MAX_PROMPTS:,} completions; send several requests", param="n")
        jobs: list[Job] = []
        for prompt_index, prompt in enumerate(prompts):
            _check_length(prompt, asked, 0 if prompt_only else params.max_tokens, limit=self.facts.max_model_len)
            request = GenerationRequest(
                request_id=name,
                prompt_token_ids=prompt.token_ids,
                params=params,
                priority=asked.priority or 0,
                cache_salt=asked.cache_salt or "",
                prompt_only=prompt_only,
                client=caller(),
            )
            jobs += [
                Job(index=index, prompt_index=prompt_index, prompt=prompt, request=choice, grammar_field=field)
                for index, choice in enumerate(choices_of(request, first=len(jobs)), len(jobs))
            ]
        return jobs

    def params(
        self, asked: CommonRequest, *, default_max_tokens: int, logprobs: int | None, prompt_logprobs: int | None
    ) -> SamplingParams:
        """How to sample: what the body asks for, else what the checkpoint recommends. Raises `RequestError`."""
        _refuse_contradictions(asked)
        self._check_ids("logit_bias", asked.logit_bias)
        self._check_ids("stop_token_ids", asked.stop_token_ids)
        given: dict[str, Any] = self.text.defaults.given()
        given |= {field: value for field in _SAME_NAME if (value := getattr(asked, field)) is not None}
        if asked.seed is not None:
            given["seed"] = asked.seed % 2**63
        limits = (asked.max_tokens, asked.max_completion_tokens, default_max_tokens)
        return SamplingParams(
            **given,
            max_tokens=next(limit for limit in limits if limit is not None),
            stop=(asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop or ()),
            stop_token_ids=tuple(asked.stop_token_ids or ()),
            include_stop=bool(asked.include_stop_str_in_output),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    def _parts(self, given: str | list[str | int | list[int]], field: str) -> list[str | list[int]]:
        """Split a `prompt` field into single prompts. Raises `RequestError`; too many are refused before it looks at each."""
        if isinstance(given, str):
            return [given]
        is_one = bool(given) and isinstance(given[0], int)
        if is_one:
            _check_size(len(given), field, limit=self.facts.max_model_len)
        elif len(given) > MAX_PROMPTS:
            raise RequestError(f"{field} has {len(given):,} prompts, at most {MAX_PROMPTS:,} are accepted", param=field)
        if len(set(map(type, given))) != 1:
            what = "mixes texts, tokens and lists" if given else "is an empty list"
            raise RequestError(f"{field} {what}; give a text, a list of texts, token ids, or lists of them", param=field)
        return [given] if is_one else given  # type: ignore[list-item, return-value]  # all are of one type

    def _prompt(self, given: str | list[int], *, add_special_tokens: bool, field: str) -> Prompt:
        if isinstance(given, str):
            self._check_text(given, field)
            return Prompt(token_ids=tuple(self.text.tokenizer.encode(given, add_special_tokens=add_special_tokens)), text=given)
        _check_size(len(given), field, limit=self.facts.max_model_len)
        self._check_ids(field, given)
        return Prompt(token_ids=tuple(given))

    def _check_text(self, text: str, field: str) -> None:
        """Raises `RequestError` for a text that cannot fit. Of a very long text, only the beginning is encoded to see that."""
        self._check_chars(text, field)
        limit = self.facts.max_model_len
        num_chars = limit * _USUAL_CHARS
        while num_chars < len(text):
            num_tokens = self.text.tokenizer.count(text[:num_chars])
            if num_tokens > limit * 5 // 4:  # the cut may have made a few
                message = f"the prompt is too long: over {num_tokens:,} tokens, but the context is {limit:,} tokens"
                raise ContextExceeded(message, param=field)
            num_chars *= 2

    def _check_chars(self, text: str, field: str) -> None:
        if len(text) > (limit := self.facts.max_model_len) * self.text.tokenizer.num_chars_max:
            raise ContextExceeded(f"the prompt is too long: {len(text):,} characters, the context is {limit:,} tokens", param=field)

    def _check_ids(self, field: str, ids: Collection[int] | None) -> None:
        check_token_ids(field, ids or (), vocab_size=self.facts.vocab_size)


def _refuse_contradictions(asked: CommonRequest) -> None:
    """Raises `RequestError` for fields that do not go together."""
    if asked.max_tokens is not None and asked.max_completion_tokens not in (None, asked.max_tokens):
        raise RequestError("max_tokens and max_completion_tokens differ; give one of them", param="max_completion_tokens")
    if asked.best_of not in (None, asked.n or 1):
        raise RequestError(f"best_of is {asked.best_of} and n {asked.n or 1}; only the same as n is supported", param="best_of")
    if asked.stream_options is not None and not asked.stream:
        raise RequestError("stream_options are for streams; set stream to true or leave them out", param="stream_options")
    if asked.prompt_logprobs is not None and asked.stream:
        raise RequestError("prompt_logprobs cannot be streamed; set stream to false", param="prompt_logprobs")


def _check_length(prompt: Prompt, asked: CommonRequest, max_tokens: int, *, limit: int) -> None:
    length = len(prompt.token_ids)
    field = "prompt" if isinstance(asked, CompletionRequest) else "messages"
    if length == 0:
        raise RequestError("the prompt is empty; a model needs one token at least", param=field)
    if length + max_tokens > limit:
        has = "the prompt is too long: it has" if length >= limit else "the prompt has"
        more = f" and {max_tokens:,} are asked for" if max_tokens else ""
        message = f"{has} {length:,} tokens{more}, but the context is {limit:,} tokens"
        raise ContextExceeded(message, param=field if length >= limit else "max_tokens")


def _check_size(num_tokens: int, field: str, *, limit: int) -> None:
    if num_tokens > limit:
        raise ContextExceeded(f"the prompt is too long: {num_tokens:,} tokens, but the context is {limit:,} tokens", param=field)
