"""What may enter, and in which order: the checks of a new request and the bounded queue."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from itertools import count
from operator import attrgetter

import numpy as np

from enginery.config.schema import ScheduleSettings
from enginery.contracts.ops import LEAST_TEMPERATURE
from enginery.contracts.request import GenerationRequest, check_token_ids
from enginery.contracts.schedule import QueuedFacts, SchedulePolicySpec
from enginery.contracts.step import pack_params
from enginery.errors import RequestError
from enginery.kv.manager import SequenceKV
from enginery.kv.prefix import TOKEN_TYPECODE
from enginery.schedule.adjustments import Adjustments
from enginery.schedule.request import NEVER, Request

_order = attrgetter("order")


class WaitingQueue:
    """Requests that wait, in order, those that were preempted among them. num_tokens: all that they have to compute, cached or not.

    A request's place among all others is the policy's key when it arrived, then its arrival. It never changes, so a preempted
    request comes back to where it was: to the head, under first come, first served.
    """

    def __init__(self, settings: ScheduleSettings, policy: SchedulePolicySpec, eos_token_ids: frozenset[int]) -> None:
        self._settings = settings
        self._policy = policy
        self._eos_token_ids = eos_token_ids
        self._numbers = count()
        self._requests: list[Request] = []
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def head(self) -> Request:
        """The next to be admitted. There must be one."""
        return self._requests[0]

    def accept(self, asked: GenerationRequest, arrival_s: float) -> Request:
        """Make a request of what a sender asks for, ready to be added. Raises `RequestError` if it can never run."""
        limit = token_limit(asked, self._settings)
        token_ids, params = prompt_tokens(asked, self._settings.vocab_size), asked.params
        num_prompt = len(token_ids)
        facts = QueuedFacts(
            request_id=asked.request_id,
            priority=asked.priority,
            arrival_s=arrival_s,
            num_tokens=num_prompt,
            salt=asked.cache_salt,
        )
        eos = frozenset[int]() if params.ignore_eos else self._eos_token_ids
        is_greedy = params.temperature < LEAST_TEMPERATURE and not params.reads_tokens and not params.logit_bias
        return Request(
            asked=asked,
            token_ids=token_ids,
            limit=limit,
            stop_ids=eos.union(params.stop_token_ids),
            order=(self._policy.key(facts), arrival_s, next(self._numbers)),
            num_prompt_tokens=num_prompt,
            num_expected=num_prompt,
            greedy_from=num_prompt + params.min_tokens if is_greedy else NEVER,
            reads_tokens=params.reads_tokens,
            reports_logprobs=params.logprobs is not None or params.prompt_logprobs is not None,
            adjusts=params.reads_tokens or bool(params.logit_bias) or params.min_tokens > 0,
            adjustments=Adjustments(params, token_ids, num_prompt),
            packed_params=pack_params(params),
            kv=SequenceKV(token_ids=token_ids, salt=asked.cache_salt),
        )

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=_order)
        self.num_tokens += request.num_expected

    def remove(self, request: Request) -> None:
        """Take it out. It must be there."""
        place = bisect_left(self._requests, request.order, key=_order)
        assert self._requests[place] is request, f"{request.request_id} is not waiting"
        del self._requests[place]
        self.num_tokens -= request.num_expected


def prompt_tokens(asked: GenerationRequest, vocab_size: int) -> array[int]:
    """Those of the prompt, of int32. Raises `RequestError` if one is none of the vocabulary's."""
    ids = asked.prompt_token_ids
    try:
        tokens = array(TOKEN_TYPECODE, ids)
    except TypeError as error:
        raise RequestError(f"the prompt contains something that is no token id: {error}", param="prompt") from error
    except OverflowError:
        check_token_ids("prompt", ids, vocab_size=vocab_size)
        raise
    numbers = np.asarray(tokens)  # 25 times as fast as to compare Python's
    if numbers.min(initial=0) < 0 or numbers.max(initial=0) >= vocab_size:
        check_token_ids("prompt", ids, vocab_size=vocab_size)
    return tokens


def token_limit(asked: GenerationRequest, settings: ScheduleSettings) -> int:
    """How many tokens, prompt and output, the request may come to. Raises `RequestError` if not one more than its prompt.

    `max_tokens` is clamped to what `max_model_len` leaves and to what the whole pool holds: the last token needs no slot, as
    nothing follows it. Nor does it need a position, so a request for its prompt alone may have one more than the context.
    """
    num_prompt, num_slots = len(asked.prompt_token_ids), settings.num_pages * settings.page_size
    most = settings.max_model_len + asked.prompt_only
    if not num_prompt:
        raise RequestError("the prompt is empty; it needs at least one token", param="prompt")
    if num_prompt > most - 1:
        less = "" if asked.prompt_only else ", less one to generate"
        more = "a larger --max-model-len" if settings.max_model_len < num_slots else "more KV memory: its pages hold no more"
        raise RequestError(
            f"the prompt has {num_prompt:,} tokens, but at most {most - 1:,} fit (max_model_len "
            f"{settings.max_model_len:,}{less}); shorten it, or start the engine with {more}",
            param="prompt",
        )
    if num_prompt > num_slots:
        raise RequestError(
            f"the prompt of {num_prompt:,} tokens needs {-(-num_prompt // settings.page_size):,} KV pages, but the engine has "
            f"{settings.num_pages:,} of {settings.page_size} tokens; shorten it, or give the engine more memory or --num-pages",
            param="prompt",
        )
    return min(num_prompt + asked.params.max_tokens, most, num_slots + 1)
