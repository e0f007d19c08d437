"""The batch of one step. T tokens, B requests, P page-table columns, N rows that need logits.

A batch is a value: nothing of it is set again. A changed copy is another batch, with an identity of its own, and plans name the
identity of the batch that they were made for. What its device tensors hold may be written after planning, before a captured step is
replayed; what its host tensors hold, never.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, TypeVar

if TYPE_CHECKING:
    import torch

    from enginery.contracts.attention import LayerSpec
    from enginery.contracts.plan import ForwardPlan

MemoryKind = str
FULL: Final[MemoryKind] = "full"  # pages of keys and values, or latents, of all tokens
WINDOW: Final[MemoryKind] = "window"  # the same, of tokens that are still in reach
STATE: Final[MemoryKind] = "state"  # pages of one recurrent state each


class Phase(StrEnum):
    """What the requests of a batch are doing. MIXED holds decoding requests first, then prefill chunks."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"
    VERIFY = "verify"
    IDLE = "idle"


DECODING: Final = frozenset({Phase.DECODE, Phase.VERIFY})  # of batches whose requests all have `decode_len` rows


class Axis(StrEnum):
    """Along what a field grows. EACH: a mapping, whose values state theirs."""

    TOKEN = "token"
    REQUEST = "request"
    NONE = "none"
    EACH = "each"


class Fill(StrEnum):
    """What padding fills in. LENGTH: 1 where padding decodes one token a request, else 0. Scratch is memory that nobody owns."""

    ZERO = "zero"
    LENGTH = "length"
    SCRATCH_SLOT = "scratch slot"
    SCRATCH_PAGE = "scratch page"
    SCRATCH_SEAT = "scratch seat"


class Split(StrEnum):
    """What a part of a batch has of a field: its own entries, the same, or None."""

    CUT = "cut"
    SHARED = "shared"
    DROPPED = "dropped"


class Stated(NamedTuple):
    """What a field says of itself. fill: None for what does not grow."""

    axis: Axis
    fill: Fill | None
    split: Split


_GROWING: Final = (Axis.TOKEN, Axis.REQUEST)
new_identity: Final = itertools.count(1).__next__
AnyT = TypeVar("AnyT")


def with_fields(value: AnyT, **changes: object) -> AnyT:
    """The same with some fields changed. As `dataclasses.replace`, which takes five times as long: it sets fields one by one."""
    other = object.__new__(type(value))
    vars(other).update(vars(value), **changes)
    return other


def along(axis: Axis, *, fill: Fill | None = None, split: Split = Split.CUT, **default: Any) -> Any:
    """A dataclass field whose first dimension is `axis`. default: `default` or `default_factory`, as in `dataclasses.field`."""
    return field(metadata={"axis": axis, "fill": fill, "split": split}, **default)


def stated_fields(batch_type: type) -> Mapping[str, Stated]:
    """What each field that is given says of itself.

    Raises TypeError for one that says no axis, or grows and says nothing of padding or splitting, so that none can be forgotten.
    """
    found = {}
    for each in fields(batch_type):
        if not each.init:
            continue
        axis, fill, split = (each.metadata.get(name) for name in ("axis", "fill", "split"))
        name = f"{batch_type.__name__}.{each.name}"
        if not isinstance(axis, Axis):
            raise TypeError(f"{name} states no axis; declare it with along(Axis.TOKEN), REQUEST, NONE or EACH")
        if not isinstance(split, Split):
            raise TypeError(
                f"{name} does not state how it is split; declare it with along(..., split=Split.CUT), SHARED or DROPPED"
            )
        if (axis in _GROWING) != isinstance(fill, Fill):
            raise TypeError(f"{name} is along {axis} and says fill={fill}; what grows states what padding fills in, others nothing")
        if (axis is Axis.NONE) and split is Split.CUT:
            raise TypeError(f"{name} does not grow, so it cannot be cut; declare it with split=Split.SHARED or DROPPED")
        found[each.name] = Stated(axis, fill, split)
    return found


class Whole(NamedTuple):
    """What a part was cut from, a batch or a view, and its tokens and its requests there; None for all of them."""

    owner: ForwardBatch | View | StateView
    rows: slice | None = None
    requests: slice | None = None


class Cuttable:
    """The parent of what `axes` cuts parts of: a field of a part is cut when it is first read.

    A slice costs a microsecond or two, a part of a batch has ten of them, and planning reads three. `whole`: None but in parts.
    """

    whole: ClassVar[Whole | None] = None

    if not TYPE_CHECKING:  # every name would be an attribute

        def __getattr__(self, name: str) -> torch.Tensor:
            """Called for what is not there yet."""
            whole, axis = self.whole, _GROWING_AXES.get(name)
            if whole is None or axis is None:
                raise AttributeError(f"{type(self).__name__} has no attribute {name}", name=name, obj=self)
            part, own = READ[name](whole.owner), whole.rows if axis is Axis.TOKEN else whole.requests
            if own is not None:
                part = part[own]
            vars(self)[name] = part
            return part


@dataclass(frozen=True, kw_only=True, eq=False)
class View(Cuttable):
    """What a batch has in one kind of paged memory. starts_cpu: the first position that is held; None: all are."""

    slots: torch.Tensor = along(Axis.TOKEN, fill=Fill.SCRATCH_SLOT)  # [T] int64, device: where each token's key and value go
    page_table_cpu: torch.Tensor = along(Axis.REQUEST, fill=Fill.SCRATCH_PAGE)  # [B, P] int32; past the last page: not read
    starts_cpu: torch.Tensor | None = along(Axis.REQUEST, fill=Fill.ZERO, default=None)  # [B] int32


@dataclass(frozen=True, kw_only=True, eq=False)
class StateView(Cuttable):
    """The pages that each request's recurrent state is read from and written to: often the same one.

    A request whose tokens are all of this step begins from zero: it reads the page of zeros, which nobody writes to, or none.
    checkpoints_cpu: a page that also gets the state after the first `checkpoint_rows_cpu` rows, fewer than the request has; none
    where that is 0. Of requests that verify drafts if these rows stand (`commit_state`); of prompts for backends that claim
    `prompt_checkpoints`, when `advance` has run. Both are None where no request has one.
    """

    reads_cpu: torch.Tensor = along(Axis.REQUEST, fill=Fill.SCRATCH_PAGE)  # [B] int32
    writes_cpu: torch.Tensor = along(Axis.REQUEST, fill=Fill.SCRATCH_PAGE)  # [B] int32
    checkpoints_cpu: torch.Tensor | None = along(Axis.REQUEST, fill=Fill.SCRATCH_PAGE, default=None)  # [B] int32
    checkpoint_rows_cpu: torch.Tensor | None = along(Axis.REQUEST, fill=Fill.ZERO, default=None)  # [B] int32


ViewT = TypeVar("ViewT", View, StateView)


@dataclass(frozen=True, kw_only=True)
class NamedTensor:
    """An input or output that one family or plugin knows, as data. dims: behind the first, which is along `axis`.

    dtype: a name, "int64". The core keeps one buffer for each, as long as a step can be, so graphs find it where it was.
    """

    name: str
    dims: tuple[int, ...]
    dtype: str
    axis: Axis
    fill: Fill
    split: Split = Split.CUT

    def __post_init__(self) -> None:
        if self.axis is Axis.EACH or (self.axis is Axis.NONE and self.split is Split.CUT):
            raise TypeError(
                f"{self.name} is along {self.axis} and split={self.split}; only what grows is cut, along TOKEN or REQUEST"
            )


class Named(NamedTuple):
    """A named tensor of a batch."""

    values: torch.Tensor
    stated: NamedTensor


@dataclass(frozen=True, kw_only=True, eq=False)
class ForwardBatch(Cuttable):
    """What changes from one forward to the next, and nothing else. Facts about layers are in their `LayerSpec`.

    The tensors named `_cpu` are in host memory: planning reads those and never the device. A request's rows are contiguous, and
    requests follow each other in the same order everywhere. `decode_len`: rows of each of the leading requests that decode.
    `trees`: whether these may branch: what each sees of them is then written to `verify_mask`, and positions are by depth.
    `logits_rows` are the rows that hidden states are needed of, None for all: a model may leave the others out of what follows its
    last attention. `kv_lens`: the true lengths where `kv_lens_cpu` are upper bounds, else None. `views`: by kind of memory.

    identity: of this value, never given. plan: read by the core's `LayerSocket` alone, which hands it on.
    """

    phase: Phase = along(Axis.NONE, split=Split.SHARED)
    input_ids: torch.Tensor = along(Axis.TOKEN, fill=Fill.ZERO)  # [T] int64, device
    positions: torch.Tensor = along(Axis.TOKEN, fill=Fill.ZERO)  # [T] int64, device
    q_lens_cpu: torch.Tensor = along(Axis.REQUEST, fill=Fill.LENGTH)  # [B] int32: tokens of each request in this step
    kv_lens_cpu: torch.Tensor = along(Axis.REQUEST, fill=Fill.LENGTH)  # [B] int32: tokens of each request after this step
    num_logits_cpu: torch.Tensor = along(Axis.REQUEST, fill=Fill.ZERO)  # [B] int32: of the last rows, how many need logits
    seats_cpu: torch.Tensor = along(Axis.REQUEST, fill=Fill.SCRATCH_SEAT)  # [B] int32: the index of each running request
    views: Mapping[MemoryKind, View | StateView] = along(Axis.EACH)
    decode_len: int = along(Axis.NONE, split=Split.SHARED, default=1)
    trees: bool = along(Axis.NONE, split=Split.SHARED, default=False)
    logits_rows: torch.Tensor | None = along(Axis.NONE, split=Split.DROPPED, default=None)  # [N] int64, device
    kv_lens: torch.Tensor | None = along(Axis.REQUEST, fill=Fill.LENGTH, default=None)  # [B] int32, device
    inputs: Mapping[str, Named] = along(Axis.EACH, default_factory=dict)
    outputs: Mapping[str, Named] = along(Axis.EACH, default_factory=dict)
    identity: int = field(init=False, default_factory=new_identity)
    plan: ForwardPlan | None = field(init=False, default=None)

    @functools.cached_property
    def num_tokens(self) -> int:
        """The tokens of the batch: T."""
        return self.input_ids.shape[0]

    @functools.cached_property
    def num_requests(self) -> int:
        """The requests of the batch: B."""
        return self.q_lens_cpu.shape[0]

    @functools.cached_property
    def num_decode_requests(self) -> int:
        """How many requests of `decode_len` tokens there are before the first of another length: they can be decoded together."""
        if self.whole is not None and isinstance(owner := self.whole.owner, ForwardBatch):
            count, own = owner.num_decode_requests, self.whole.requests or slice(0, self.num_requests)
            if own.start <= count:
                return int(min(count, own.stop) - own.start)
        others = self.q_lens_cpu.numpy() != self.decode_len  # [B]
        first = int(others.argmax()) if len(others) else 0
        return first if len(others) and others[first] else self.num_requests

    @property
    def pages(self) -> View:
        """The view of paged memory, of a batch that has one: a leaf is given no other. Raises ValueError if it has not."""
        return self._only(View)

    @property
    def states(self) -> StateView:
        """The view of recurrent states, of a batch that has one. Raises ValueError if it has not."""
        return self._only(StateView)

    @property
    def page_table_cpu(self) -> torch.Tensor:
        """[B, P] int32, of `pages`."""
        return self.pages.page_table_cpu

    @property
    def given(self) -> tuple[str, ...]:
        """What optional parts it has, by name: batches that differ in them cannot be replayed for each other."""
        optional = {"kv_lens": self.kv_lens, "logits_rows": self.logits_rows, "trees": self.trees or None}
        names = (*(name for name, value in optional.items() if value is not None), *self.views, *self.inputs, *self.outputs)
        return tuple(sorted(names))

    def slots_for(self, layer: LayerSpec) -> torch.Tensor:
        """[T] int64, device: where the tokens' keys and values of this layer go."""
        view = self.views.get(layer.kind)
        if view is None and layer.kind == WINDOW:  # where windows are not longer than a context, or of a leaf's own batch
            view = self.views.get(FULL)
        assert isinstance(view, View), f"a layer of kind {layer.kind} keeps no keys and values"
        return view.slots

    def planned(self, plan: ForwardPlan) -> ForwardBatch:
        """The same batch, of the same identity, with its plan."""
        return with_fields(self, plan=plan)

    def _only(self, kind: type[ViewT]) -> ViewT:
        found = [view for view in self.views.values() if isinstance(view, kind)]
        if len(found) != 1:
            raise ValueError(
                f"the batch has {len(found)} views of type {kind.__name__}, of the kinds {', '.join(self.views)}; name one"
            )
        return found[0]


STATED: Final = stated_fields(ForwardBatch)
VIEWS: Final = {view: stated_fields(view) for view in (View, StateView)}
READ: Final = {name: operator.attrgetter(name) for each in (STATED, *VIEWS.values()) for name in each}  # faster than getattr
_GROWING_AXES: Final = {
    name: stated.axis for each in (STATED, *VIEWS.values()) for name, stated in each.items() if stated.axis in _GROWING
}
