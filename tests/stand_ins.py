"""Backends of CUDA devices on a CPU, with stand-ins for their kernels that compute in torch, as the conformance kit takes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from few_checks import few
from pairwise import EVERYTHING

from enginery.api import AttnBackend, AttnBackendSpec, AttnLayerFacts, BackendContext, ForwardPlan, HookGroup, LatentFacts, Phase
from enginery.testing.conformance import Check, checks_of
from enginery.testing.rules import compare
from enginery.testing.subject import Offer, Subject
from enginery.testing.suite import AttnBackendSuite
from enginery.testing.workbench import Workbench

LATENT = LatentFacts(rank=512, rope_dim=64, nope_dim=128, value_dim=128)
MLA = AttnLayerFacts(num_heads=4, num_kv_heads=1, head_dim=576, latent=LATENT)


def on_the_cpu(
    spec: AttnBackendSpec, create: Callable[[BackendContext], AttnBackend], options: object = None, **changes: Any
) -> Subject:
    """With the capabilities of the real one, but for the device and changes."""
    anywhere = {"devices": frozenset({"cpu"}), "min_compute_capability": None, "max_compute_capability": None}
    can = dataclasses.replace(spec.capabilities, **anywhere | changes)
    spec = dataclasses.replace(spec, capabilities=can, refuse_also=lambda needs: [])
    offer = Offer(spec=spec, group=HookGroup.ATTN_BACKEND, name=spec.name, plugin="", distribution="", version="0")
    return Subject(offer=offer, create=create, device=torch.device("cpu"), options=options, origin={})


class StandInSuite(AttnBackendSuite):
    """The kit, but for what is about the kernels: the stand-ins are for tests alone, and read values."""

    everything: ClassVar[bool] = EVERYTHING

    @classmethod
    def checks(cls, subject: Subject) -> list[Check]:
        about_kernels = ("another-process", "attend-reads-nothing")
        return few([check for check in checks_of(subject) if check.rule.name not in about_kernels], everything=cls.everything)


def plan_that_is_right(bench: Workbench, lengths: list[tuple[int, int]], phase: Phase) -> ForwardPlan:
    """The plan under which the results of requests of these lengths are right."""
    turns = bench.turns(lengths)
    batch = bench.relay.plan(bench.batch(turns, phase))
    compare(bench.attend(batch, turns), [bench.expected(turn) for turn in turns], dtype="bfloat16", what=f"{lengths}")
    assert batch.plan is not None
    return batch.plan
