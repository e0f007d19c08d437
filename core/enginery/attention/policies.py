"""What a composite does with each member of the backend scope: one table, from which its hooks are generated.

Nothing is forwarded by hand, so a composite cannot forget a hook; and every child is called through its own relay, so each gets
the arguments it takes. A member without a policy fails at import.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Final, Protocol, TypeVar, runtime_checkable

from enginery.attention.hookspecs import BackendHooks
from enginery.plugin.checker import hooks_of
from enginery.plugin.hookspecs import hookimpl


class Policy(StrEnum):
    """Which children answer, and what their answers make. None is the answer of a child that lacks the hook.

    CUT: the composite cuts the batches, and each part is planned by its child. EACH_PART: the child of each part of the plan, with
    the part's plan, batch and requests; True if any did something. JOINED: the same, and the answers are put together; None if a
    part has none. OF_TREES: so of the parts with trees of drafts. BY_PHASE: the first answer of the children that serve the phase
    of the batch. ALL_OF: every child, or the composite has not got it either.
    """

    CUT = "cut"
    EACH_PART = "each_part"
    JOINED = "joined"
    OF_TREES = "of_trees"
    BY_PHASE = "by_phase"
    ALL_OF = "all_of"


POLICIES: Final[Mapping[str, Policy]] = {
    "plan_forward_metadata": Policy.CUT,
    "draft_steps_plan": Policy.CUT,
    "init_mha_chunk_metadata": Policy.BY_PHASE,
    "init_graph_state": Policy.ALL_OF,
    "init_mixed_graph_state": Policy.ALL_OF,
    "refresh_graph_metadata": Policy.EACH_PART,
    "device_prologue": Policy.EACH_PART,
    "commit_state": Policy.EACH_PART,
    "verify_mask": Policy.OF_TREES,
    "indexer_metadata": Policy.JOINED,
}


@runtime_checkable
class Dispatching(Protocol):
    """A composite as its generated hooks see it, see `Composite`."""

    def dispatch(self, policy: Policy, hook: str, arguments: Mapping[str, object]) -> object: ...
    def has(self, hook: str) -> bool: ...


ClassT = TypeVar("ClassT", bound=type[Dispatching])


def derived(specs: type, policies: Mapping[str, Policy]) -> Callable[[ClassT], ClassT]:
    """Give a class a hook implementation for each spec that it does not implement itself.

    Raises TypeError for a spec without a policy and for a policy without a spec.
    """
    members = hooks_of(specs)
    if wrong := members.keys() ^ policies.keys():
        raise TypeError(f"{specs.__name__} and its policies differ in {', '.join(sorted(wrong))}; give each hook one policy")

    def give(composite: ClassT) -> ClassT:
        for name in members.keys() - vars(composite).keys():
            setattr(composite, name, hookimpl(_generated(name, members[name], policies[name])))
        return composite

    return give


def _generated(hook: str, spec: Callable[..., object], policy: Policy) -> Callable[..., object]:
    """A method with the parameters of `spec`: pluggy and the checker read them from the function that it wraps."""
    names = tuple(inspect.signature(spec).parameters)[1:]

    @functools.wraps(spec)
    def dispatch(self: Dispatching, *values: object) -> object:
        return self.dispatch(policy, hook, dict(zip(names, values, strict=True)))

    return dispatch


derived_from_specs: Final = derived(BackendHooks, POLICIES)
