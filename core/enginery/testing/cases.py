"""What a backend is tried on: cases that cover what its capabilities claim, and needs that they do not.

Any two claimed values of different factors (a head dim and a dtype, a window and a page size) meet in one case at least.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from enginery.contracts.attention import AttnLayerFacts, AttnNeeds, Capabilities, LatentFacts
from enginery.contracts.batch import Phase
from enginery.contracts.latent import PrefillStrategy
from enginery.contracts.memory import RecurrentFacts
from enginery.kv.pool import TORCH_DTYPES
from enginery.testing.recurrences import Form, recurrence_name, recurrent_factors

Row = tuple[object, ...]
Factors = Mapping[str, Sequence[object]]
ClaimT = TypeVar("ClaimT", int, tuple[int, int])

# What is taken where capabilities allow everything; the first of each is the usual one.
_HEADS: Final = ((4, 2), (4, 4), (6, 1), (14, 2))
_HEAD_DIMS: Final = (64, 16, 80, 128, 256)
_PAGE_SIZES: Final = (16, 1, 3, 64)
_LATENT_DIMS: Final = ((32, 16), (512, 64))


@dataclass(frozen=True, kw_only=True)
class AttnCase:
    """One attention layer. strategy: of an MLA layer's prefills, around the backend; None gives the backend latents as they are."""

    facts: AttnLayerFacts
    page_size: int
    dtype: str
    strategy: PrefillStrategy | None = None

    @property
    def is_ragged(self) -> bool:
        """Whether the backend is given keys and values made from latents."""
        return self.strategy in (PrefillStrategy.ONE_SHOT, PrefillStrategy.CHUNKED)

    @property
    def num_features(self) -> int:
        """How many of window, soft cap, sinks and values of another width the layer has."""
        facts = self.facts
        return (facts.sliding_window is not None) + (facts.softcap is not None) + facts.sinks + (facts.value_dim != facts.head_dim)

    @property
    def leeway(self) -> float:
        """How many times the errors of results that are rounded once are allowed. In chunks a delta rule solves triangular systems,
        and rounds what it writes and the states between chunks, before the result is rounded."""
        rule = self.facts.recurrent
        return 2.0 if rule is not None and rule.rule == "delta" and self.dtype != "float32" else 1.0

    @property
    def traits(self) -> dict[str, str]:
        """What it is about, by name, without what a plain layer has not got."""
        facts = self.facts
        kind = "MLA" if facts.latent is not None else "recurrent" if facts.recurrent is not None else "softmax"
        own = {"kind of layer": kind, "heads": f"{facts.num_heads}/{facts.num_kv_heads}", "head dim": str(facts.head_dim)}
        own |= {"recurrence": recurrence_name(facts.recurrent)} if facts.recurrent is not None else {}
        own |= {"page size": str(self.page_size), "dtype": self.dtype}
        own |= {"sliding window": str(facts.sliding_window)} if facts.sliding_window is not None else {}
        own |= {"soft cap": str(facts.softcap)} if facts.softcap is not None else {}
        own |= {"attention sinks": ""} if facts.sinks else {}
        own |= {"value dim": str(facts.value_dim)} if kind == "softmax" and facts.value_dim != facts.head_dim else {}
        return own | ({"MLA strategy": str(self.strategy)} if self.strategy is not None else {})

    def __str__(self) -> str:
        facts = self.facts
        kind = "softmax" if facts.latent is None else "MLA"
        rule = facts.recurrent
        parts = [
            kind if rule is None else recurrence_name(rule),
            f"heads {facts.num_heads}/{facts.num_kv_heads if rule is None else rule.value_heads}",
        ]
        if facts.latent is not None:
            parts.append(f"rank {facts.latent.rank}+{facts.latent.rope_dim}, {self.strategy or 'bare latents'}")
        else:
            parts.append(f"dim {facts.head_dim}" + (f"->{facts.value_dim}" if facts.value_dim != facts.head_dim else ""))
        parts += [f"page {self.page_size}", self.dtype]
        parts += [f"window {facts.sliding_window}"] if facts.sliding_window is not None else []
        parts += [f"softcap {facts.softcap}"] if facts.softcap is not None else []
        return ", ".join([*parts, *(["sinks"] if facts.sinks else [])])


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of layer: the factors of its cases with the values that are claimed, and a case from one value of each."""

    name: str
    factors: Factors
    make: Callable[..., AttnCase]

    def rows(self) -> Iterator[tuple[Row, AttnCase]]:
        """Every combination, the usual one first."""
        return ((row, self.make(*row)) for row in itertools.product(*self.factors.values()))


def claimed_kinds(can: Capabilities) -> list[Kind]:
    """The kinds of layer that capabilities claim. A dtype is tried where the core has a pool of it."""
    dtypes = tuple(name for name in TORCH_DTYPES if name in can.dtypes & can.kv_dtypes)
    paged: Factors = {"page size": _claimed(can.page_sizes, _PAGE_SIZES), "dtype": dtypes}
    head_dims = _claimed(can.head_dims, _HEAD_DIMS)
    kinds = []
    if can.causal and head_dims:
        factors = {"heads": _HEADS, "head dim": head_dims, **paged, **_softmax_features(can)}
        kinds.append(Kind(name="softmax", factors=factors, make=_softmax_case))
    if can.mla:
        latent_dims = _claimed(can.latent_dims, _LATENT_DIMS)
        factors = {"heads": (4, 1, 16), "latent rank and rope dim": latent_dims, **paged, "strategy": _strategies(can)}
        kinds.append(Kind(name="MLA", factors=factors, make=_latent_case))
    return kinds + [
        Kind(name=" ".join(claim), factors={**own, **paged, "page size": paged["page size"][:1]}, make=_recurrent_case)
        for claim, own in recurrent_factors(can.recurrences, head_dims)
    ]


def _softmax_features(can: Capabilities) -> Factors:
    return {
        "sliding window": (None, 6, 1, 40) if can.sliding_window else (None,),
        "soft cap": (None, 2.0) if can.softcap else (None,),
        "sinks": (False, True) if can.sinks else (False,),
        "value dim": (None, 24, 128) if can.unequal_values else (None,),
    }


def _strategies(can: Capabilities) -> list[PrefillStrategy | None]:
    """The strategies of MLA prefills around a backend; None gives it the latents as they are."""
    ragged = [PrefillStrategy.ONE_SHOT] if can.mla_ragged else []
    chunked = [PrefillStrategy.CHUNKED] if can.mla_ragged and can.lse_base is not None else []
    return [None, PrefillStrategy.ABSORBED, *ragged, *chunked]


def covering(rows: Sequence[Row]) -> list[Row]:
    """Some of the rows, in which any two values meet that meet in one of the rows; greedy, the first row first."""
    bits: dict[object, int] = {}
    pairs = {row: sum(1 << bits.setdefault(pair, len(bits)) for pair in itertools.combinations(enumerate(row), 2)) for row in rows}
    missing, chosen = (1 << len(bits)) - 1, list[Row]()
    while missing:
        best = max(rows, key=lambda row: (pairs[row] & missing).bit_count())
        missing &= ~pairs[best]
        chosen.append(best)
    return chosen


def unclaimed(can: Capabilities, needs: AttnNeeds) -> Iterator[tuple[str, AttnNeeds]]:
    """Needs that differ from `needs`, which are served, in one thing that capabilities do not claim, and what that is."""
    asking = functools.partial(dataclasses.replace, needs)
    yield "device", asking(device="abacus", compute_capability=None)
    yield "dtype", asking(dtype="float1")
    yield "kv dtype", asking(kv_dtype="float1")
    for phase in sorted(set(Phase) - can.phases - {Phase.IDLE}):
        yield f"phase {phase}", asking(phases=frozenset({phase}))
    if can.min_compute_capability is not None:
        yield "compute capability", asking(compute_capability=(0, 0))
    if can.max_compute_capability is not None:
        yield "compute capability", asking(compute_capability=(999, 0))
    yield from _unclaimed_sizes(can, needs)
    yield from _unclaimed_features(can, needs)


def _unclaimed_sizes(can: Capabilities, needs: AttnNeeds) -> Iterator[tuple[str, AttnNeeds]]:
    plain, asking = _plain_layer(can), functools.partial(dataclasses.replace, needs)
    if can.page_sizes is not None:
        yield "page size", asking(page_size=max(can.page_sizes) + 1)
    if can.head_dims is not None and can.causal:
        yield "head dim", asking(layers=(dataclasses.replace(plain, head_dim=max(can.head_dims, default=0) + 1),))
    latent = LatentFacts(rank=max([8, *(rank + 8 for rank, _ in can.latent_dims or ())]), rope_dim=8, nope_dim=8, value_dim=8)
    if not can.mla or can.latent_dims is not None:
        layer = dataclasses.replace(plain, num_kv_heads=1, head_dim=latent.rank + 8, latent=latent)
        yield "MLA", asking(layers=(layer,))


def _unclaimed_features(can: Capabilities, needs: AttnNeeds) -> Iterator[tuple[str, AttnNeeds]]:
    plain = _plain_layer(can)
    changed, asking = functools.partial(dataclasses.replace, plain), functools.partial(dataclasses.replace, needs)
    recurrent = RecurrentFacts(rule="linear", decay="head", key_heads=4, value_heads=4, key_dim=16, value_dim=16)
    offered = {
        "softmax attention": (can.causal, asking(layers=(plain,))),
        "sliding window": (can.sliding_window, asking(layers=(changed(sliding_window=8),))),
        "soft cap": (can.softcap, asking(layers=(changed(softcap=2.0),))),
        "attention sinks": (can.sinks, asking(layers=(changed(sinks=True),))),
        "values of another width": (can.unequal_values, asking(layers=(changed(v_head_dim=plain.head_dim + 8),))),
        "recurrence": (bool(can.recurrences), asking(layers=(changed(num_kv_heads=4, recurrent=recurrent),))),
        "sparse attention": (can.sparse, asking(sparse=True)),
        "ragged MLA prefill": (can.mla_ragged, asking(mla_ragged=True)),
        "batch invariance": (can.batch_invariant, asking(batch_invariant=True)),
        "trees of drafts": (can.trees, asking(trees=True)),
    }
    for name, (has, others) in offered.items():
        if not has:
            yield name, others


def _plain_layer(can: Capabilities) -> AttnLayerFacts:
    return AttnLayerFacts(num_heads=4, num_kv_heads=2, head_dim=min(can.head_dims or (64,)))


def _claimed(claimed: frozenset[ClaimT] | None, usual: tuple[ClaimT, ...]) -> tuple[ClaimT, ...]:
    """What is claimed, the usual values first; of a claim of everything the usual values."""
    if claimed is None:
        return usual
    return tuple(value for value in usual if value in claimed) + tuple(sorted(claimed - set(usual)))


def _softmax_case(
    heads: tuple[int, int],
    head_dim: int,
    page_size: int,
    dtype: str,
    window: int | None,
    softcap: float | None,
    sinks: bool,
    value_dim: int | None,
) -> AttnCase:
    facts = AttnLayerFacts(
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        sliding_window=window,
        softcap=softcap,
        sinks=sinks,
        v_head_dim=value_dim,
    )
    return AttnCase(facts=facts, page_size=page_size, dtype=dtype)


def _latent_case(heads: int, dims: tuple[int, int], page_size: int, dtype: str, strategy: PrefillStrategy | None) -> AttnCase:
    """Head dims in DeepSeek-V2's proportion to the rotary ones."""
    rank, rope_dim = dims
    latent = LatentFacts(rank=rank, rope_dim=rope_dim, nope_dim=2 * rope_dim, value_dim=2 * rope_dim)
    facts = AttnLayerFacts(num_heads=heads, num_kv_heads=1, head_dim=rank + rope_dim, latent=latent)
    return AttnCase(facts=facts, page_size=page_size, dtype=dtype, strategy=strategy)


def _recurrent_case(
    form: Form, heads: tuple[int, int], key_dim: int, value_dim: int, conv: int, page_size: int, dtype: str
) -> AttnCase:
    """A state has nothing to do with the size of pages."""
    recurrent = form.facts(key_heads=heads[0], value_heads=heads[1], key_dim=key_dim, value_dim=value_dim, conv_kernel=conv)
    facts = AttnLayerFacts(num_heads=heads[0], num_kv_heads=heads[0], head_dim=max(key_dim, 1), recurrent=recurrent)
    return AttnCase(facts=facts, page_size=page_size, dtype=dtype)
