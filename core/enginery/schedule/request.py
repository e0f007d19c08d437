"""A request while the engine works on it."""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

from enginery.contracts.grammars import GrammarState
from enginery.contracts.request import GenerationRequest, TokenLogprob
from enginery.kv.manager import SequenceKV
from enginery.schedule.adjustments import Adjustments

NEVER: Final = sys.maxsize


class RequestStatus(Enum):
    """HELD: it does not wait yet. PREEMPTED: a step in flight still writes to its pages; then they go back and it waits again."""

    HELD = auto()
    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """Everything that changes about one request. Owned by the scheduler: others read.

        token_ids   [ prompt ............... | output ..... ]
        written     [======================]                     keys and values of completed steps
        computed    [=========================]                  ... and of the steps in flight
        expected    [===================================] ? ]    known tokens, and those that steps in flight will sample

    asked: what its sender said. token_ids: array of int32, prompt and output. limit: it ends when it has so many tokens. stop_ids:
    tokens that end it. order: its place among all requests, smallest first. kv: its pages and its seat, which the KV cache manager
    changes. num_computed: in steps completed or in flight. in_flight: steps not completed yet that it is in.
    greedy_from: from so many tokens on its next one is that of the largest logit; `NEVER` if that is adjusted, or drawn.
    reads_tokens: its next token depends on those before. reports_logprobs: log-probabilities go out, of its tokens or its prompt's.
    adjusts: a logit may be changed before its token is chosen, as `adjustments` say. packed_params: how that is drawn, see
    `pack_params`.
    num_unfollowed: of the computed ones, in steps that no draft model followed.
    num_cached_tokens: of its prompt, found in the prefix cache when it was first admitted. prompt_logprobs: those of completed
    steps, until its first token is told. queued_s: how long it had waited when its first chunk was scheduled. grammar: what its
    output must be; has accepted the output.
    """

    asked: GenerationRequest
    token_ids: array[int]
    limit: int
    stop_ids: frozenset[int]
    order: tuple[tuple[float, ...], float, int]
    num_prompt_tokens: int
    num_expected: int
    greedy_from: int
    reads_tokens: bool
    reports_logprobs: bool
    adjusts: bool
    adjustments: Adjustments
    packed_params: bytes
    status: RequestStatus = RequestStatus.WAITING
    kv: SequenceKV
    num_computed: int = 0
    in_flight: int = 0
    num_unfollowed: int = 0
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    num_preemptions: int = 0
    queued_s: float | None = None
    grammar: GrammarState | None = None

    @property
    def request_id(self) -> str:
        return self.asked.request_id

    @property
    def arrival_s(self) -> float:
        """When it was submitted, monotonic clock."""
        return self.order[1]

    @property
    def num_left(self) -> int:
        """Expected tokens that are not computed yet. Of one that runs: 1 if it decodes, or is an embedding that ends; else more."""
        return self.num_expected - self.num_computed

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def wants_prompt_logits(self) -> bool:
        """Whether every row of its prompt needs logits: its prompt log-probabilities go out with its first token."""
        return self.asked.params.prompt_logprobs is not None and len(self.token_ids) == self.num_prompt_tokens
