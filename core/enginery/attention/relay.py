"""The way to a backend's hooks: a plugin manager of its own, with one live backend in it.

pluggy hands each implementation the arguments it takes, so a backend that needs fewer than a hook offers is called with fewer.
"""

from __future__ import annotations

from typing import Any, Final

from enginery.attention.hookspecs import BackendHooks
from enginery.contracts.attention import AttnBackend
from enginery.contracts.batch import ForwardBatch
from enginery.contracts.plan import ForwardPlan
from enginery.errors import PluginError
from enginery.plugin.manager import StrictPluginManager

PLANNING: Final = "plan_forward_metadata"


class BackendRelay:
    """Registers `backend` and calls its hooks. Raises `PluginError` with every broken rule, before anything runs."""

    def __init__(self, backend: AttnBackend, source: str) -> None:
        self.backend = backend
        self._manager = StrictPluginManager(BackendHooks)
        self._manager.register(backend, name=backend.backend_id)
        self._manager.freeze()
        self.hook: Any = self._manager.hook
        if not self.implements(PLANNING):
            raise PluginError(
                f"{source}: {type(backend).__name__} has no @hookimpl {PLANNING}(batch, capture); every backend plans"
            )

    def implements(self, hook: str) -> bool:
        """Whether the backend has this hook; what its absence means is in `BackendHooks`."""
        return self._manager.implements(self.backend.backend_id, hook)

    def plan(self, batch: ForwardBatch, *, capture: bool = False) -> None:
        """Let the backend plan and mark the batch, unless a plan of its own is there already."""
        if not batch.needs_plan(self.backend.backend_id):
            return
        plan: ForwardPlan | None = self.hook.plan_forward_metadata(batch=batch, capture=capture)
        if plan is None:
            raise PluginError(f"{self.backend.backend_id} answered {PLANNING} with None; a plan is needed for every batch")
        batch.mark_planned(plan)
