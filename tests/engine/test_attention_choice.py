"""Which attention backends are chosen for which steps, from descriptors alone; those for one request beside those for more."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from offers import offering

from enginery.config.schema import EngineOptions
from enginery.contracts.attention import (
    AttnBackendSpec,
    AttnLayerFacts,
    AttnNeeds,
    Capabilities,
    KVGeometry,
    LatentFacts,
)
from enginery.contracts.batch import FULL, Phase
from enginery.contracts.drafting import DrafterSpec
from enginery.contracts.memory import RecurrentFacts
from enginery.contracts.versions import HookGroup
from enginery.errors import Unsupported
from enginery.plugin.records import Offer
from enginery.plugin.registry import Registry
from enginery.worker.attention_choice import (
    AttentionChoice,
    choose_attention,
    choose_first,
    missing_kernels,
    unless_attention_changes,
)
from enginery.worker.drafts.choice import ChosenDrafter
from enginery.worker.needs import LayerNeeds, verifying
from enginery.worker.paths.capture import _most_starts
from enginery_attn_flashinfer.spec import make_spec as flashinfer
from enginery_attn_flashinfer_mla import spec as flashinfer_mla
from enginery_attn_triton.spec import make_spec as triton

EVERY_PHASE = frozenset({Phase.PREFILL, Phase.DECODE, Phase.MIXED})
VERIFIES = EVERY_PHASE | {Phase.VERIFY}
MLA = AttnLayerFacts(
    num_heads=16, num_kv_heads=1, head_dim=576, latent=LatentFacts(rank=512, rope_dim=64, nope_dim=128, value_dim=128)
)
GROUPED = AttnLayerFacts(num_heads=32, num_kv_heads=8, head_dim=128)
DELTA = RecurrentFacts(rule="delta", decay="channel", key_heads=2, value_heads=2, key_dim=8, value_dim=8)
RECURRENT = AttnLayerFacts(num_heads=2, num_kv_heads=2, head_dim=8, recurrent=DELTA)
ASKED = EngineOptions()


class Store:
    """Has to compile as long as `late`."""

    late = True

    def missing(self, needs: AttnNeeds, options: object | None) -> Sequence[str]:
        return ["kernel"] if self.late else []

    def compile(self, needs: AttnNeeds, options: object | None) -> None: ...


def spec(
    name: str, priority: int, *, phases: frozenset[Phase] = EVERY_PHASE, causal: bool = True, **more: object
) -> AttnBackendSpec:
    can = Capabilities(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({"bfloat16"}),
        kv_dtypes=frozenset({"bfloat16"}),
        phases=phases,
        causal=causal,
        mla=causal,
        recurrences=frozenset() if causal else frozenset({("delta", "channel")}),
        graphs=True,
    )
    return AttnBackendSpec(name=name, api=(2, 0), priority=priority, capabilities=can, summary="", **more)  # type: ignore[arg-type]


def registry(*specs: AttnBackendSpec) -> Registry:
    offers = tuple(
        Offer(spec=each, group=HookGroup.ATTN_BACKEND, name=each.name, plugin=each.name, distribution=each.name, version="1")
        for each in specs
    )
    return offering(Registry.load(no_plugins=True), AttnBackendSpec, *offers)


def needs(*layers: AttnLayerFacts) -> LayerNeeds:
    softmax = AttnNeeds(
        device="cuda",
        dtype="bfloat16",
        kv_dtype="bfloat16",
        page_size=16,
        layers=tuple(layer for layer in layers if layer.recurrent is None),
        compute_capability=(9, 0),
    )
    recurrent = tuple(layer for layer in layers if layer.recurrent is not None)
    return LayerNeeds(softmax, dataclasses.replace(softmax, layers=recurrent))


def names(chosen: AttentionChoice) -> dict[str, str]:
    return {role: offer.name for role, offer in chosen.by_role.items()}


def chosen(*specs: AttnBackendSpec, of: LayerNeeds | None = None, **asked: object) -> dict[str, str]:
    return names(choose_attention(dataclasses.replace(ASKED, **asked), registry(*specs), of or needs(MLA))[0])


MANY, ONE, READER = spec("many", 60), spec("one", 50, single_priority=70), spec("reader", 10, prefill_priority=90)


def test_a_third_backend_is_chosen_where_the_best_for_one_request_is_another() -> None:
    assert chosen(MANY) == {"softmax": "many"}
    assert chosen(MANY, ONE) == {"softmax": "many", "single": "one"}
    assert chosen(MANY, ONE, READER) == {"prefill": "reader", "decode": "many", "single": "one"}
    assert chosen(MANY, dataclasses.replace(ONE, single_priority=None)) == {"softmax": "many"}
    assert chosen(MANY, dataclasses.replace(ONE, single_priority=55)) == {"softmax": "many"}
    assert chosen(dataclasses.replace(MANY, single_priority=80), ONE) == {"softmax": "many"}


def test_one_that_also_prefills_best_has_both_roles() -> None:
    both = dataclasses.replace(ONE, prefill_priority=99)
    assert chosen(MANY, both) == {"prefill": "one", "decode": "many", "single": "one"}


def test_hybrids_have_it_for_their_softmax_layers_alone() -> None:
    linear = spec("linear", 5, causal=False, single_priority=90)
    assert chosen(MANY, ONE, linear, of=needs(MLA, RECURRENT)) == {"softmax": "many", "single": "one", "recurrent": "linear"}
    assert chosen(MANY, ONE, linear, of=needs(RECURRENT)) == {"recurrent": "linear"}


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"attention_backend": "many"}, {"softmax": "many"}),
        ({"attention_backend": "one"}, {"softmax": "one"}),
        ({"decode_attention_backend": "many"}, {"prefill": "many", "decode": "many"}),
        ({"decode_attention_backend": "one"}, {"prefill": "many", "decode": "one"}),
        ({"attention_backend": "one", "decode_attention_backend": "many"}, {"prefill": "one", "decode": "many"}),
        ({"attention_backend": "many", "prefill_attention_backend": "one"}, {"prefill": "one", "decode": "many"}),
        ({"prefill_attention_backend": "many"}, {"prefill": "many", "decode": "many", "single": "one"}),
        ({"prefill_attention_backend": "one"}, {"prefill": "one", "decode": "many", "single": "one"}),
        ({"attention_backend": "one", "decode_attention_backend": "auto"}, {"prefill": "one", "decode": "many", "single": "one"}),
    ],
)
def test_what_decodes_by_name_decodes_one_request_too(asked: dict[str, object], expected: dict[str, str]) -> None:
    assert chosen(MANY, ONE, **asked) == expected


@pytest.mark.parametrize("flag", ["", "decode", "prefill", "linear"])
def test_what_refuses_says_which_flag_named_it(flag: str) -> None:
    told = f"{flag}_attention_backend".removeprefix("_")
    host = dataclasses.replace(MANY, name="host", capabilities=dataclasses.replace(MANY.capabilities, devices=frozenset({"cpu"})))
    with pytest.raises(Unsupported, match=f"Name another with --{told.replace('_', '-')}, or leave the choice with auto"):
        chosen(MANY, host, spec("linear", 5, causal=False), of=needs(MLA, RECURRENT), **{told: "host"})


def test_the_decision_says_what_it_is_for() -> None:
    _, decisions = choose_attention(ASKED, registry(MANY, ONE), needs(MLA))
    assert [(each.setting, each.value) for each in decisions] == [("attention", "many"), ("attention of one request", "one")]


def test_it_verifies_if_the_one_for_decoding_has_to() -> None:
    many = spec("many", 60, phases=VERIFIES)
    wanted = needs(MLA)._replace(softmax=verifying(needs(MLA).softmax))
    assert chosen(many, ONE, of=wanted) == {"softmax": "many"}
    assert chosen(many, spec("one", 50, phases=VERIFIES, single_priority=70), of=wanted) == {"softmax": "many", "single": "one"}


def test_a_drafter_by_auto_does_not_change_which_backend_decodes() -> None:
    """The names of all are the same with it and without: it is who decodes that differs."""
    one = spec("one", 50, phases=VERIFIES, single_priority=70)
    offer = next(offer for offer in Registry.load().offers(DrafterSpec) if offer.name == "lookup")
    drafter, both = ChosenDrafter(offer, 3, "it is there"), registry(MANY, one)
    of = needs(MLA)
    verifying_too = of._replace(softmax=verifying(of.softmax))
    plain, drafted = (choose_attention(ASKED, both, each)[0] for each in (of, verifying_too))
    assert (names(plain), names(drafted)) == ({"softmax": "many", "single": "one"}, {"prefill": "many", "decode": "one"})
    assert plain.name == drafted.name
    assert unless_attention_changes(drafter, ASKED, both, of).offer is None
    able = registry(spec("many", 60, phases=VERIFIES), one)
    assert unless_attention_changes(drafter, ASKED, able, of) is drafter


@pytest.mark.parametrize("late", ["many", "one", "both"])
def test_while_kernels_are_compiled_what_needs_none_begins(late: str) -> None:
    store, rest = Store(), spec("rest", 1)
    many = dataclasses.replace(MANY, kernel_store=store if late != "one" else None)
    one = dataclasses.replace(ONE, kernel_store=store if late != "many" else None)
    there, of = registry(many, one, rest), needs(MLA)
    chosen, _ = choose_attention(ASKED, there, of)
    assert names(chosen) == {"softmax": "many", "single": "one"}
    wishes = missing_kernels(chosen, there, of)
    assert [wish.backend for wish in wishes] == (["many", "one"] if late == "both" else [late])
    assert [wish.needs.single for wish in wishes] == [wish.backend == "one" for wish in wishes]
    first, _ = choose_first(ASKED, there, wishes, needs=of)
    assert first is not None
    assert names(first) == {"softmax": {"many": "one", "one": "many", "both": "rest"}[late]}


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Registry:
    """As on a machine with CUDA, FlashInfer and Triton."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(flashinfer_mla, "missing_software", list)
    monkeypatch.setattr("enginery_attn_flashinfer.spec.importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("enginery_attn_triton.spec.find_spec", lambda name: name)
    return registry(flashinfer(), flashinfer_mla.make_spec(), triton())


@pytest.mark.parametrize("capability", [(9, 0), (8, 0)])
def test_of_latents_with_few_heads_triton_decodes_one_request(on_a_gpu: Registry, capability: tuple[int, int]) -> None:
    def choice(layer: AttnLayerFacts, *, verifies: bool = False) -> dict[str, str]:
        softmax = dataclasses.replace(needs(layer).softmax, compute_capability=capability)
        of = needs(layer)._replace(softmax=verifying(softmax) if verifies else softmax)
        return names(choose_attention(ASKED, on_a_gpu, of)[0])

    for heads in (8, 16, 32):
        assert choice(dataclasses.replace(MLA, num_heads=heads)) == {"softmax": "flashinfer-mla", "single": "triton"}
    for heads in (64, 128):
        assert choice(dataclasses.replace(MLA, num_heads=heads)) == {"softmax": "flashinfer-mla"}
    assert choice(MLA, verifies=True) == choice(MLA)  # so a drafter that is left to `auto` changes nothing
    prefills = {"prefill": "flashinfer", "decode": "triton"} if capability == (9, 0) else {"softmax": "triton"}
    assert choice(GROUPED) == prefills


@pytest.mark.parametrize(
    ("heads", "asked", "expected"),
    [
        (16, {}, 1),  # Triton verifies one request, FlashInfer more
        (128, {}, 0),
        (16, {"attention_backend": "triton"}, 64),
        (128, {"prefill_attention_backend": "flashinfer-mla", "decode_attention_backend": "triton"}, 64),
        (16, {"decode_attention_backend": "flashinfer-mla"}, 0),
        (None, {}, 64),  # FlashInfer only prefills
    ],
)
def test_verifications_of_whose_requests_the_device_finds_where_they_begin(
    on_a_gpu: Registry, heads: int | None, asked: dict[str, str], expected: int
) -> None:
    """What only prefills is not asked for it, and a draft model's own backends are."""
    layer = GROUPED if heads is None else dataclasses.replace(MLA, num_heads=heads)
    of, found = needs(layer), list[AttentionChoice]()
    for on_device in (False, True):  # the target's, and a draft model's
        wanted = of._replace(softmax=verifying(of.softmax, device_lengths=on_device))
        found.append(choose_attention(dataclasses.replace(ASKED, **({} if on_device else asked)), on_a_gpu, wanted)[0])
    target, own = found
    geometry = KVGeometry(pages={FULL: 9}, page_size=16, layers=(layer,), dtype="bfloat16")

    def starts(target: AttentionChoice, own: AttentionChoice, first: AttentionChoice | None = None) -> int:
        settings = SimpleNamespace(max_graph_requests=64)
        attentions = [each for each in (target, first) if each is not None]
        choice = SimpleNamespace(attentions=attentions, settings=settings, parallel=SimpleNamespace(num_ranks=1))
        draft = SimpleNamespace(choice=SimpleNamespace(attention=own))
        return _most_starts(choice, SimpleNamespace(pool=SimpleNamespace(geometry=geometry)), draft)  # type: ignore[arg-type]

    assert starts(target, own) == expected
    no_lengths, _ = choose_attention(ASKED, registry(spec("many", 60)), of)
    assert starts(target, no_lengths) == starts(target, own, no_lengths) == 0
