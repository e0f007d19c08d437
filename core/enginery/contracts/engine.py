"""The engine as the server, the CLI and the Python API see it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Final, Protocol

from enginery.contracts.request import GenerationRequest, RequestOutput
from enginery.contracts.schedule import LaneCounts, PageCounts


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """What a live engine is; also what its process tells the HTTP front when it is ready.

    model_name: what it is served as, the first of served_names. tokenizer_folder: empty if it is the model's. note: what must be
    said about the checkpoint. decisions: (setting, value, reason) of all that was chosen. considered: attention backends by
    role and sets of operations, each with why it was refused. memory_plan: the plan of one rank, for people. num_pages: of all
    lanes. phases_s: seconds of each phase of the start.
    """

    model_name: str
    folder: str
    max_model_len: int
    vocab_size: int
    dtype: str
    attn_backend: str
    note: str
    num_pages: int
    page_size: int
    eos_token_ids: tuple[int, ...]
    decisions: tuple[tuple[str, str, str], ...]
    considered: tuple[str, ...] = ()
    memory_plan: str = ""
    phases_s: Mapping[str, float] = field(default_factory=dict)
    served_names: tuple[str, ...] = ()
    tokenizer_folder: str = ""


@dataclass(frozen=True, kw_only=True)
class KernelState:
    """Of attention kernels that are compiled while the engine runs with others. compiling: their names, empty when none is left.

    failure: why they are not to be had. seconds: since compiling began, or what it took.
    """

    compiling: tuple[str, ...] = ()
    failure: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class BuildProgress:
    """How far the start of an engine is. phase: the part that is being built. Bytes are of weights; of 0 in all nothing is told."""

    phase: str
    done_bytes: int = 0
    total_bytes: int = 0


ReportProgress = Callable[[BuildProgress], None]


def report_to_nobody(progress: BuildProgress) -> None:
    """The `ReportProgress` of a start that nobody watches."""


STEP_SIZES: Final = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True, kw_only=True)
class DraftCounts:
    """Of speculation, since the start.

    verifications: one for each request whose drafts a step verified. told: tokens that these told; one that ends a request amid
    right guesses tells no token beside them. drafted: tokens that were guessed. accepted: those of them that were told.
    by_position: of these, how many were at each place of a draft, the first place first. failure: why nothing is guessed any more.
    """

    verifications: int = 0
    told: int = 0
    drafted: int = 0
    accepted: int = 0
    by_position: tuple[int, ...] = ()
    failure: str = ""

    @property
    def acceptance_length(self) -> float:
        """Tokens that a verification told on average; 0 before the first."""
        return self.told / self.verifications if self.verifications else 0.0


@dataclass(frozen=True, kw_only=True)
class ExpertCounts:
    """Of experts that ranks have whole, in the steps that were looked at: a row counts once for each expert that it is routed to.

    by_rank: what the experts of each were given, in all layers. busiest: in each layer and step that of the rank that was given
    most, for which the others wait.
    """

    by_rank: tuple[int, ...] = ()
    busiest: int = 0

    @property
    def balancedness(self) -> float:
        """The mean over ranks as a part of the most: 1 where all are given the same; 1 before anything was counted."""
        return sum(self.by_rank) / (len(self.by_rank) * self.busiest) if self.busiest else 1.0


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """How an engine does: what is so now, and after `free_pages` totals since it was built.

    cached_pages: of the prefix cache, in use by requests or not; like free_pages, of all kinds of memory together. pages: of each
    kind. num_tokens: rows of all batches. steps_by_size: steps of up to so many tokens as `STEP_SIZES` says, and last those of
    more. num_graph_steps: run by a captured graph. host_s: of scheduling, building, planning and launching. num_failed_steps:
    given up with their requests. num_nan: requests that ended for NaN logits. steps_by_backend: steps by the attention backends
    they ran. attn_backend: those that run now. lanes: how each is; none where there is one. experts: with `--ep`.
    """

    num_running: int = 0
    num_waiting: int = 0
    cached_pages: int = 0
    free_pages: int = 0
    num_steps: int = 0
    num_graph_steps: int = 0
    num_failed_steps: int = 0
    num_tokens: int = 0
    num_preempted: int = 0
    num_nan: int = 0
    steps_by_size: tuple[int, ...] = (0,) * (len(STEP_SIZES) + 1)
    host_s: float = 0.0
    plan_s: float = 0.0
    run_s: float = 0.0
    attn_backend: str = ""
    steps_by_backend: Mapping[str, int] = field(default_factory=dict)
    kernels: KernelState = field(default_factory=KernelState)
    pages: Mapping[str, PageCounts] = field(default_factory=dict)
    drafts: DraftCounts = DraftCounts()
    lanes: tuple[LaneCounts, ...] = ()
    experts: ExpertCounts = ExpertCounts()


class EngineMeter(Protocol):
    """What an engine tells of its steps."""

    def stats(self) -> EngineStats: ...

    def profile(self, num_steps: int) -> str:
        """Trace what the host does in the next steps. Returns the path of the file it will be in."""


class EngineHandle(Protocol):
    """A running engine, in a process of its own, as the HTTP routes of plugins see it. Used inside the server's event loop."""

    @property
    def state(self) -> str:
        """loading, restarting, ready, silent, stopping or dead, as `/health` tells."""

    @property
    def stats(self) -> EngineStats:
        """How it does, as last reported, several times a second."""

    async def ready(self) -> EngineFacts:
        """Wait until it is ready. Raises `EngineDied` if it does not start."""

    def generate(self, requests: Sequence[GenerationRequest]) -> AbstractAsyncContextManager[AsyncIterator[RequestOutput]]:
        """Send requests, whose ids no other request may have: `async with engine.generate([request]) as outputs`.

        Inside the context all are queued, and `async for output in outputs` gives what they bring, until all have ended. On leaving
        it, those that have not are aborted. Entering raises `RequestError` or `QueueFull` if one is rejected, then none runs, and
        `EngineDied`.
        """

    async def abort(self, request_id: str) -> bool:
        """End a request; its client is told. Returns False if there is none of that id."""


class EngineLike(Protocol):
    """An engine in this process. One thread drives it."""

    @property
    def facts(self) -> EngineFacts: ...

    @property
    def has_work(self) -> bool:
        """Whether `step` would do something."""

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request, or put it aside until its grammar is compiled: then `step` answers (`RequestOutput.is_answer`).

        Raises `RequestError` for one that can never be served, `QueueFull` for one too many.
        """

    def abort(self, request_id: str) -> None:
        """End a request at whatever stage it is; unknown and finished ones are ignored. Nothing more comes of it."""

    def step(self) -> list[RequestOutput]:
        """Run one step and return what it added; empty when idle."""

    def recover(self, error: Exception) -> list[RequestOutput]:
        """After `step` raised `error`: what the requests that it gave up are told. Raises it again where nothing can go on."""

    @property
    def meter(self) -> EngineMeter: ...

    def flush_prefix_cache(self) -> int:
        """Free the cached pages that no request uses. Returns how many."""

    def prepare(self) -> bool:
        """Use a moment without work to make later steps faster. Says whether there was something to do."""
