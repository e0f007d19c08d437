"""A request as its sender states it, and what comes back. These values also travel between processes (msgpack, never pickle)."""

from __future__ import annotations

import dataclasses
import math
import numbers
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Final, TypeVar

import msgspec

from enginery.contracts.grammars import Grammar
from enginery.errors import RequestError

MAX_STOP_STRINGS = 16
MAX_TOP_LOGPROBS = 20
MAX_COMPLETIONS = 128
LEAST_TOP_P = 1e-6


class FinishReason(StrEnum):
    """Why a completion ended, in OpenAI's words and one of ours."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop. Checked when built; raises `RequestError` with the field's name.

    max_tokens: at the most; the context and the KV memory may end a completion sooner. stop: one text or several. temperature: 0 is
    greedy. top_k: 0 keeps all; -1 becomes 0. top_p, min_p: shares of probability; a top_p of 0 leaves the likeliest token.
    Penalties follow OpenAI (presence, frequency: subtracted from the logits of tokens already generated) and CTRL, arXiv:1909.05858
    (repetition: over prompt and output). logprobs: how many alternatives to report beside each sampled token; None reports nothing.
    prompt_logprobs: the same for the prompt's tokens. seed: the same seed gives the same tokens but for rounding; whatever else
    runs in float32 only, as in bfloat16 the sums of a larger batch round far more, for greedy tokens too; None draws one. grammar:
    what the answer must be. It wins: `logit_bias`, `min_tokens` and `ignore_eos` choose among what it allows, and where that is
    nothing but the end, the answer has ended. speculation: whether the engine's drafter may guess tokens; they stay the same.
    """

    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    n: int = 1
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    grammar: Grammar | None = None
    speculation: bool = True

    def __post_init__(self) -> None:
        self._normalise()
        _check_range("max_tokens", self.max_tokens, 1, math.inf)
        _check_range("min_tokens", self.min_tokens, 0, self.max_tokens)
        _check_range("temperature", self.temperature, 0, 100)
        _check_range("top_k", self.top_k, 0, 2**63 - 1)
        _check_range("top_p", self.top_p, LEAST_TOP_P, 1)
        _check_range("min_p", self.min_p, 0, 1)
        _check_range("repetition_penalty", self.repetition_penalty, 0.01, 100)
        _check_range("presence_penalty", self.presence_penalty, -2, 2)
        _check_range("frequency_penalty", self.frequency_penalty, -2, 2)
        _check_range("n", self.n, 1, MAX_COMPLETIONS)
        _check_range("stop (number of strings)", len(self.stop), 0, MAX_STOP_STRINGS)
        _check_range("logprobs", self.logprobs or 0, 0, MAX_TOP_LOGPROBS)
        _check_range("prompt_logprobs", self.prompt_logprobs or 0, 0, MAX_TOP_LOGPROBS)
        for token, bias in self.logit_bias.items():
            _check_range(f"logit_bias[{token}]", bias, -100, 100)
        if not isinstance(self.grammar, Grammar | None):
            raise RequestError(f"grammar is {self.grammar!r}, but must be a Grammar", param="grammar")
        for name in ("include_stop", "ignore_eos", "skip_special_tokens", "speculation"):
            if not isinstance(value := getattr(self, name), bool):
                raise RequestError(f"{name} is {value!r}, but must be True or False", param=name)
        if any(not text for text in self.stop):
            raise RequestError("stop has an empty string, which would end every completion at once; leave it out", param="stop")

    @cached_property
    def reads_tokens(self) -> bool:
        """Whether a token's choice depends on which tokens came before."""
        penalised = self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        return penalised or self.grammar is not None

    def _normalise(self) -> None:
        """Take lists for tuples, one stop string for a tuple of one, and any kind of whole number; refuse other types by name."""
        numbers_given = {name: getattr(self, name) for name in _WHOLE_NUMBERS}
        whole = {name: _whole(name, value) for name, value in numbers_given.items() if value is not None or name not in _OPTIONAL}
        stop, biases = _texts(self.stop), _of_tokens("logit_bias", self.logit_bias, Mapping)
        ends = tuple(_whole("stop_token_ids", token) for token in _of_tokens("stop_token_ids", self.stop_token_ids, Iterable))
        whole["top_k"] = 0 if whole["top_k"] == -1 else whole["top_k"]
        bias = {_whole("logit_bias (a token id)", token): _real("logit_bias", value) for token, value in biases.items()}
        real = {name: _real(name, getattr(self, name)) for name in _REAL_NUMBERS}
        for name, value in (whole | real | {"stop": stop, "stop_token_ids": ends, "logit_bias": bias}).items():
            object.__setattr__(self, name, value)


KindT = TypeVar("KindT")
_OPTIONAL: Final = ("seed", "logprobs", "prompt_logprobs")
_WHOLE_NUMBERS: Final = ("max_tokens", "min_tokens", "top_k", "n", *_OPTIONAL)
_REAL_NUMBERS: Final = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def _texts(stop: str | Iterable[str]) -> tuple[str, ...]:
    found = (stop,) if isinstance(stop, str) or not isinstance(stop, Iterable) else tuple(stop)
    if not all(isinstance(text, str) for text in found):
        raise RequestError(f"stop is {stop!r}, but must be a text or a list of them", param="stop")
    return found


def _of_tokens(name: str, value: KindT, kind: type) -> KindT:
    if not isinstance(value, kind):
        raise RequestError(f"{name} is {value!r}, and names no token ids", param=name)
    return value


def _whole(name: str, value: object) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]  # raises for what is none
    except TypeError:
        raise RequestError(f"{name} is {value!r}, but must be a whole number", param=_field(name)) from None


def _real(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise RequestError(f"{name} is {value!r}, but must be a number", param=name)
    try:
        return LEAST_TOP_P if name == "top_p" and value == 0 else float(value)
    except OverflowError:
        raise RequestError(f"{name} is more than a float holds", param=name) from None


def _check_range(name: str, value: float, low: float, high: float) -> None:
    """NaN fails too: it is in no range."""
    if not low <= value <= high:
        wanted = f"be at least {low:g}" if high == math.inf else f"lie between {low:g} and {high:g}"
        raise RequestError(f"{name} is {value}, but must {wanted}", param=_field(name))


def _field(name: str) -> str:
    """Of a name that says more: `stop (number of strings)`, `logit_bias[7]`."""
    return name.split("[")[0].split(" ")[0]


def check_token_ids(name: str, ids: Collection[int], *, vocab_size: int) -> None:
    """Raise `RequestError` for the first id of field `name` that is outside of the vocabulary."""
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        wrong = next(token_id for token_id in ids if not 0 <= token_id < vocab_size)
        raise RequestError(f"{name} has token id {wrong}, but the vocabulary has ids 0 to {vocab_size - 1}", param=name)


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One prompt as token ids, ready for the engine; `params.n` must be 1 here; `choices_of` makes n of them.

    priority: lower runs first. cache_salt: prefixes are shared only among equal salts. embed: report the hidden state of the last
    token of the prompt. prompt_only: what the prompt gives is wanted, and it may fill the context; `params.max_tokens` must be 1,
    and that token, which is sampled all the same, is to be ignored. client: whose request it is, so that one alone cannot have all
    threads that compile grammars.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    embed: bool = False
    prompt_only: bool = False
    client: str = ""


def choices_of(request: GenerationRequest, *, first: int = 0) -> list[GenerationRequest]:
    """The `params.n` requests of one prompt, each with an n of 1. Their ids are `request_id`-first, `request_id`-(first + 1), ...

    With a seed, choice i has the seed (seed + i) modulo 2^63: the choices differ from each other, and are the same every time.
    """
    params = request.params
    if params.n == 1:
        return [dataclasses.replace(request, request_id=f"{request.request_id}-{first}")]
    seeds = [None if params.seed is None else (params.seed + index) % 2**63 for index in range(params.n)]
    return [
        dataclasses.replace(
            request, request_id=f"{request.request_id}-{first + index}", params=dataclasses.replace(params, n=1, seed=seed)
        )
        for index, seed in enumerate(seeds)
    ]


def of_length_one(vector: Sequence[float]) -> tuple[float, ...]:
    """An embedding divided by its Euclidean length; zeros stay as they are."""
    length = math.hypot(*vector) or 1.0
    return tuple(value / length for value in vector)


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """The log-probability (natural) of one token at one position and of the likeliest ones there, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What one step added to one request. After the output with a `finish_reason` or an `error` nothing more comes.

    A struct, because a step makes hundreds, and a frozen dataclass takes twenty times as long to make.

    prompt_logprobs: complete, on the first output only; its first entry is None, as nothing precedes the first token. queued_s: how
    long the request waited before it ran. num_drafted: guesses at its tokens that the step verified; num_accepted: those that it
    tells. is_answer: to a request that was put aside to compile its grammar: it is queued now or, with `error`, refused for its
    field `param` or, with `is_overload`, for want of a thread. embedding: of a request with `embed`, [hidden size], with its first
    token.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    queued_s: float = 0.0
    error: str | None = None
    param: str | None = None
    is_answer: bool = False
    is_overload: bool = False
    embedding: tuple[float, ...] | None = None

    def guesses(self, count: int) -> tuple[int, int]:
        """Those verified, and right, where the answer ends behind so many of its tokens: later ones are neither right nor wrong."""
        drafted = self.num_drafted if count == len(self.token_ids) else min(self.num_drafted, count)
        return drafted, min(self.num_accepted, count)

    @property
    def is_last(self) -> bool:
        """Whether nothing more comes to its request."""
        return self.finish_reason is not None or self.error is not None
