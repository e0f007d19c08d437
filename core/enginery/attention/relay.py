"""The way to a backend: its per-layer methods, and its hooks through a plugin manager of its own with one live backend in it.

pluggy finds out which arguments each implementation takes, so a backend that needs fewer than a hook offers is called with fewer.
A relay has one backend for good, so what pluggy found is bound once: its general call, for many plugins that come and go, takes
two microseconds, and the deepest nest of composites makes fourteen calls a step (`engine bench hooks`).

What a backend answers about plans is checked here, whatever the backend is: the plan's type, and that its key names this backend
and this very batch.
"""

from __future__ import annotations

import functools
import inspect
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import pluggy
import torch

from enginery.attention.hookspecs import BackendHooks
from enginery.attention.policies import Dispatching
from enginery.attention.watch import Watch, is_capturing
from enginery.contracts.attention import AttnBackend
from enginery.contracts.batch import DECODING, ForwardBatch, Phase
from enginery.contracts.latent import ChunkPlan, Denied, KVPiece
from enginery.contracts.plan import Advances, Attends, ForwardPlan, PlanKey
from enginery.errors import PluginError, StalePlan, Unsupported
from enginery.plugin.checker import StrictPluginManager, hooks_of

PLANNING: Final = "plan_forward_metadata"
CHUNKS: Final = "init_mha_chunk_metadata"
REFRESH: Final = "refresh_graph_metadata"
MIXED_GRAPHS: Final = "init_mixed_graph_state"
DRAFT_STEPS: Final = "draft_steps_plan"
HOOKS: Final = tuple(hooks_of(BackendHooks))
LAYER_METHODS: Final[Mapping[str, tuple[str, ...]]] = {
    "attend": ("q", "k", "v", "layer", "batch", "plan", "out"),
    "advance": ("mixed", "gates", "layer", "batch", "plan", "out"),
}


class BackendRelay:
    """Registers `backend` and calls it. Raises `PluginError` with every broken rule, before anything runs.

    instance: the id that it was to take. watch: checks that cost time, see `Watch`. methods: `attend` and `advance`, where it has
    them. attend, advance: those, with the watch's checks if there is one; a missing one raises `Unsupported`.
    """

    def __init__(self, backend: AttnBackend, source: str, *, instance: str | None = None, watch: Watch | None = None) -> None:
        if "backend_id" not in dir(backend):
            raise PluginError(f"{source} built {backend!r:.100}, which is no attention backend: it has no backend_id")
        if instance is not None and instance not in backend.backend_id:  # a wrapper has it between brackets
            raise PluginError(f"{source}: backend_id is {backend.backend_id!r}, but context.instance is {instance!r}")
        self.backend, self.backend_id = backend, backend.backend_id
        self.source, self._watch = source, watch
        self.methods = _layer_methods(backend, source)
        self.attend, self.advance = (self._called(name) for name in LAYER_METHODS)
        manager = StrictPluginManager(BackendHooks)
        try:
            manager.register(backend, name=backend.backend_id)
        except PluginError as error:
            raise PluginError(f"{source}: {error}") from None
        manager.freeze()
        hooks = {hook: found[0] for hook in HOOKS if (found := manager.subset_hook_caller(hook, ()).get_hookimpls())}
        if PLANNING not in hooks:
            raise PluginError(
                f"{source}: {type(backend).__name__} has no @hookimpl {PLANNING}(batch, capture); every backend plans"
            )
        self._bound = {hook: _bind(implementation) for hook, implementation in hooks.items()}
        self._planning = _bind_planning(hooks[PLANNING])
        self._refreshed: weakref.WeakSet[ForwardPlan] = weakref.WeakSet()

    def ask(self, hook: str, **arguments: object) -> Any:
        """The backend's answer to the hook of that name. None if it has not got it: what that means is in `BackendHooks`."""
        bound = self._bound.get(hook)
        return None if bound is None else bound(arguments)

    def has(self, hook: str) -> bool:
        """Whether the backend has the hook of that name. Of a composite, which answers for its children, whether they have it."""
        return hook in self._bound and (not isinstance(self.backend, Dispatching) or self.backend.has(hook))

    def plan(self, batch: ForwardBatch, *, capture: bool = False) -> ForwardBatch:
        """The same batch with a plan of this backend; the one it has, if that covers it."""
        plan = batch.plan
        if plan is not None and plan.key.covers(batch, self.backend_id, epoch=plan.key.epoch, capture=capture):
            return batch
        return batch.planned(self.make_plan(batch, capture=capture))

    def plan_steps(self, batches: Sequence[ForwardBatch], *, capture: bool = False) -> list[ForwardBatch]:
        """Several decoding steps of a drafter, each with its own plan, before the first of them runs; see `make_step_plans`."""
        plans = self.make_step_plans(batches, capture=capture)
        return [batch.planned(plan) for batch, plan in zip(batches, plans, strict=False)]

    def make_plan(self, batch: ForwardBatch, *, capture: bool) -> ForwardPlan:
        """The backend's plan for a batch. An eager plan covers no capture, nor the other way round.

        Raises `Unsupported` for a batch that is to be captured and neither is mixed and without requests yet, nor decodes as many
        rows of each.
        """
        alike = batch.phase in DECODING and batch.num_tokens == batch.num_requests * batch.decode_len
        any_mixed = batch.phase is Phase.MIXED and not batch.num_requests and self.has(MIXED_GRAPHS)
        if capture and not (batch.num_tokens and (alike or any_mixed)):
            raise Unsupported(
                f"only steps that decode as many rows of each request are captured; {self.backend_id} was asked to plan a batch of "
                f"{batch.num_requests} requests and {batch.num_tokens} tokens in phase {batch.phase} for a capture"
            )
        return self._checked(self._planning(batch, capture), batch, PLANNING, capture=capture)

    def make_step_plans(self, batches: Sequence[ForwardBatch], *, capture: bool) -> list[ForwardPlan]:
        """A plan for each of several decoding steps: made at once by a backend that can, else one by one.

        A backend that cannot, and lengths that are true on the device alone (`kv_lens`): a plan for the first step only.
        """
        plans = self.ask(DRAFT_STEPS, batches=tuple(batches), capture=capture)
        if plans is None:
            alone = batches if all(batch.kv_lens is None for batch in batches) else batches[:1]
            return [self.make_plan(batch, capture=capture) for batch in alone]
        if not isinstance(plans, Sequence) or len(plans) != len(batches):
            raise self._answered(DRAFT_STEPS, f"{plans!r:.100}, not with a plan for each of the {len(batches)} batches")
        return [self._checked(plan, batch, DRAFT_STEPS, capture=capture) for plan, batch in zip(plans, batches, strict=True)]

    def make_chunk_plan(
        self, batch: ForwardBatch, chunks: tuple[KVPiece, ...], *, disable_ragged: bool
    ) -> ChunkPlan | Denied | None:
        """The backend's plan for the pieces of an MLA prefill, checked; or that it has none."""
        plan = self.ask(CHUNKS, batch=batch, chunks=chunks, disable_ragged=disable_ragged)
        if plan is None or isinstance(plan, Denied):
            return plan
        if not isinstance(plan, ChunkPlan):
            raise self._answered(CHUNKS, f"{plan!r:.100}, neither a ChunkPlan nor Denied")
        if not plan.key.covers(batch, self.backend_id, epoch=plan.key.epoch, capture=False):
            raise self._answered(CHUNKS, f"a plan for {plan.key}, not for this batch")
        return plan

    def refresh(self, plan: ForwardPlan, batch: ForwardBatch) -> None:
        """Bring a captured plan up to date for `batch`; directly precedes the replay.

        Raises `StalePlan` for a plan of another backend, one that was not captured, or captured for batches of another phase, size
        or set of fields.
        """
        if plan.key.backend != self.backend_id or not plan.key.replays(batch):
            wanted = PlanKey.of(batch, self.backend_id, epoch=plan.key.epoch, capture=True)
            raise StalePlan(f"a plan made for {plan.key} cannot be refreshed for {wanted}: all but the batch's identity must agree")
        self._refreshed.add(plan)
        self.ask(REFRESH, plan=plan, batch=batch)

    def needs_none(self, result: object) -> None:
        """Raises `PluginError` for a result of `attend` or `advance` that is returned."""
        if result is not None:
            raise PluginError(f"{self.source}: {self.backend_id} returns a value from attend or advance; it must write to `out`")

    def check_captured(self, plan: ForwardPlan, out: torch.Tensor) -> None:
        """Raises `StalePlan` for a captured plan that was refreshed, outside of a capture: its graph alone may run with it."""
        if plan in self._refreshed and not is_capturing(out):
            raise StalePlan(f"the captured plan for {plan.key} was refreshed for another batch; only its graph may run with it")

    def _called(self, name: str) -> Callable[..., object]:
        method, watch = self.methods.get(name), self._watch

        def refuse(*given: object) -> None:
            raise Unsupported(f"{self.backend_id} has no {name}, and a layer was given to it")

        if method is None or watch is None:
            return method or refuse

        def watched(*given: Any) -> None:
            *rows, layer, batch, plan, out = given
            watch.before(batch, plan, out)
            self.needs_none(method(*rows, layer, batch, plan, out))
            watch.after(rows, batch, out, self.backend_id)

        return functools.update_wrapper(watched, method)

    def _checked(self, plan: object, batch: ForwardBatch, hook: str, *, capture: bool) -> ForwardPlan:
        if not isinstance(plan, ForwardPlan):
            raise self._answered(hook, f"{plan!r:.100}; a ForwardPlan is needed for every batch")
        if not plan.key.covers(batch, self.backend_id, epoch=plan.key.epoch, capture=capture):
            wanted = PlanKey.of(batch, self.backend_id, epoch=plan.key.epoch, capture=capture)
            advice = "make its key with PlanKey.of(batch, self.backend_id, capture=capture)"
            raise self._answered(hook, f"a plan for {plan.key} instead of {wanted}; {advice}")
        if self._watch is not None:
            self._watch.planned(batch, plan)
        return plan

    def _answered(self, hook: str, what: str) -> PluginError:
        return PluginError(f"{self.source}: {self.backend_id} answered {hook} with {what}")


def _layer_methods(backend: AttnBackend, source: str) -> dict[str, Callable[..., object]]:
    """Those that it has. Raises `PluginError` if there are none, or one takes other parameters than its protocol's."""
    found: dict[str, Callable[..., object]] = {}
    if isinstance(backend, Attends):
        found["attend"] = backend.attend
    if isinstance(backend, Advances):
        found["advance"] = backend.advance
    if not found:
        raise PluginError(f"{source}: {type(backend).__name__} has neither attend nor advance")
    for name, method in found.items():
        if not callable(method):
            raise PluginError(f"{source}: {name} of {type(backend).__name__} is {method!r:.60}, which cannot be called")
        wanted, signature = LAYER_METHODS[name], inspect.signature(method)
        given = signature.parameters.values()
        if tuple(each.name for each in given if each.default is each.empty or each.name in wanted) != wanted:
            takes = ", ".join(wanted)
            raise PluginError(
                f"{source}: {name}{signature} of {type(backend).__name__} must take {takes}, in this order, and need no more"
            )
    return found


def _bind(implementation: pluggy.HookImpl) -> Callable[[Mapping[str, object]], object]:
    """A call of it with those of the hook's arguments that pluggy found it to take."""
    function, names = implementation.function, implementation.argnames
    if len(names) < 2:
        return lambda arguments: function(*[arguments[name] for name in names])
    in_order = operator.itemgetter(*names)
    return lambda arguments: function(*in_order(arguments))


def _bind_planning(implementation: pluggy.HookImpl) -> Callable[[ForwardBatch, bool], object]:
    """The same for planning: the implementation itself where it takes both arguments, which halves what the hook costs."""
    if tuple(implementation.argnames) == ("batch", "capture"):
        function: Callable[[ForwardBatch, bool], object] = implementation.function
        return function
    bound = _bind(implementation)
    return lambda batch, capture: bound({"batch": batch, "capture": capture})
