"""The engine as the server, the CLI and the Python API see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from enginery.contracts.request import GenerationRequest, RequestOutput


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """What a live engine is; also what its process tells the HTTP front when it is ready.

    model_name: what it is served as. note: what must be said about the checkpoint. decisions: (setting, value, reason)
    of all that was chosen. memory_plan: the plan, for people. phases_s: seconds of each phase of the start.
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
    memory_plan: str = ""
    phases_s: Mapping[str, float] = field(default_factory=dict)


class EngineLike(Protocol):
    """An engine in this process. One thread drives it."""

    @property
    def facts(self) -> EngineFacts: ...

    @property
    def has_work(self) -> bool:
        """Whether `step` would do something."""
        ...

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request. Raises `RequestError` for one that can never be served, `QueueFull` for one too many."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request at whatever stage it is; unknown and finished ones are ignored. Nothing more comes of it."""
        ...

    def step(self) -> list[RequestOutput]:
        """Run one step and return what it added; empty when idle."""
        ...

    def prepare(self) -> bool:
        """Use a moment without work to make later steps faster. Says whether there was something to do."""
        ...
