"""What the tests of the three MLA plugins for Blackwell GPUs share. Each brings a stand-in for its kernel, which computes in torch.

Not shared: the stand-in, which checks the arguments of one library's function, and what one plugin refuses and the others do not.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import stand_ins
from stand_ins import StandInSuite, on_the_cpu

from enginery.api import (
    AttnBackendSpec,
    AttnNeeds,
    BackendContext,
    ChunkPlan,
    Denied,
    Phase,
    PrefillStrategy,
)
from enginery.testing.cases import AttnCase
from enginery.testing.rules import compare
from enginery.testing.subject import Subject
from enginery.testing.workbench import Workbench
from enginery_attn_flashinfer_mla.spec import FlashInferMlaOptions
from enginery_attn_flashinfer_mla.table_backend import TableBackend

MLA = dataclasses.replace(stand_ins.MLA, num_heads=128)
NEEDS = AttnNeeds(device="cuda", dtype="bfloat16", kv_dtype="bfloat16", page_size=64, layers=(MLA,), compute_capability=(10, 0))


def needs(num_heads: int = 128, **changes: Any) -> AttnNeeds:
    return dataclasses.replace(NEEDS, layers=(dataclasses.replace(MLA, num_heads=num_heads),), **changes)


# What all three answer, by what they are asked: the rule of the reason, or None for yes.
ALIKE = [
    (needs(), None),
    (needs(compute_capability=(10, 3)), None),
    (needs(compute_capability=(9, 0)), "compute capability"),
    (needs(compute_capability=(11, 0)), "compute capability"),
    (needs(compute_capability=(12, 0)), "compute capability"),
    (needs(device="cpu", compute_capability=None), "compute capability"),
    (needs(kv_dtype="float8_e4m3fn"), "kv dtype"),
    (needs(dtype="float32", kv_dtype="float32"), "dtype"),
    (needs(phases=frozenset({Phase.VERIFY})), "phase"),
]


@dataclass(frozen=True)
class OnTheCpu:
    """One plugin with a stand-in for its kernel. page_size: for the kit, whose requests are longer on larger pages."""

    spec: AttnBackendSpec
    create: Callable[[BackendContext], TableBackend]
    page_size: int

    def subject(self, options: FlashInferMlaOptions | None = None, **changes: Any) -> Subject:
        return on_the_cpu(self.spec, self.create, options, **changes)

    def workbench(self, strategy: PrefillStrategy, **options: Any) -> Workbench:
        case = AttnCase(facts=MLA, page_size=64, dtype="bfloat16", strategy=strategy)
        return Workbench(self.subject(FlashInferMlaOptions(**options)), case, num_tokens=1000)


class AroundTheReference(StandInSuite):
    """The kit, and what all three plan."""

    on_the_cpu: ClassVar[OnTheCpu]

    @classmethod
    def subject(cls) -> Subject:
        return cls.on_the_cpu.subject(page_sizes=frozenset({cls.on_the_cpu.page_size}))

    def test_the_hook_is_called_without_flashinfers_flag(self) -> None:
        bench = self.on_the_cpu.workbench(PrefillStrategy.CHUNKED)
        assert list(inspect.signature(bench.backend.init_mha_chunk_metadata).parameters) == ["batch", "chunks"]
        batch = bench.batch(bench.turns([(20, 4)]), Phase.PREFILL)
        asked = {"batch": batch, "chunks": (), "disable_ragged": False}
        assert isinstance(bench.leaf.ask("init_mha_chunk_metadata", **asked), ChunkPlan)

    @pytest.mark.parametrize("options", [{"skip_prefill": True}, {"chunked_prefix": False}], ids=str)
    def test_without_prefill_kernels_or_chunks_of_a_prefix_results_are_the_same(self, options: dict[str, bool]) -> None:
        bench = self.on_the_cpu.workbench(PrefillStrategy.CHUNKED, **options)
        for phase, lengths in ((Phase.PREFILL, [(0, 5), (31, 3)]), (Phase.DECODE, [(31, 1), (70, 1)])):
            turns = bench.turns(lengths)
            compare(bench.run(turns, phase), [bench.expected(turn) for turn in turns], dtype="bfloat16", what=f"{lengths}")
        batch = bench.batch(bench.turns([(20, 4)]), Phase.PREFILL)
        answer = bench.backend.init_mha_chunk_metadata(batch, ())
        assert isinstance(answer, Denied if "skip_prefill" in options else ChunkPlan)


def told_to_install(spec: AttnBackendSpec, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The commands that a machine without any package is told."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    return [reason.text.split("`")[1] for reason in spec.refuse(NEEDS)]
