"""Every family computes the same on several ranks as on one: tensor ranks within rounding, pipeline stages bit for bit.

Ranks are threads. With float64 as the truth, the error of several ranks may be a quarter larger than that of one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from engine import hybrid_model
from engine.rank_models import CONFIGS, EXPERTS, LANES, TWO_KEY_HEADS, stated
from pairwise import in_turn, pairwise, spread
from parity.oracle import grouped_expert_shape, latent_shape, shape
from transformers import DeepseekV3Config, LlamaConfig

from enginery.contracts.engine import ExpertCounts
from enginery.contracts.model import ModelFacts, ModelSpec
from enginery.contracts.ops import Routed
from enginery.contracts.parallel import ParallelFacts
from enginery.contracts.weights import ExpertNames, ExpertsShape, WeightFormatSpec
from enginery.errors import Unsupported
from enginery.nn.expert_loads import ExpertLoads
from enginery.nn.moe import OwnExperts
from enginery.nn.reference_ops import reference_ops
from enginery.plugin.registry import Registry
from enginery.testing.kits.model_ranks import tensors_asked_for
from enginery.testing.kits.ranks import RankAnswer, RankThreads, ThreadCollectives
from enginery.testing.kits.weights import WholeTensors, weights_of
from enginery.worker.weights.formats import FormatReader, stated_quantization
from enginery.worker.weights.needed_weights import is_of_expert

IDS = [5, 77, 200, 31, 8, 9, 140, 3, 99, 101, 55, 12, 13, 240, 7, 19, 5, 77, 64, 33, 17, 2, 90, 111]
WORST = 1.25  # of the error of one rank


@pytest.fixture(autouse=True)
def grouped_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch has no grouped products of float64, which is the truth here."""
    grouped = F.grouped_mm

    def product(rows: torch.Tensor, weights: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        if rows.dtype is not torch.float64:
            return grouped(rows, weights, offs=offs)
        parts = rows.tensor_split(offs[:-1].tolist())
        return torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])

    monkeypatch.setattr(F, "grouped_mm", product)


def family_of(registry: Registry, config: dict[str, Any]) -> ModelSpec:
    if config["architectures"] == ["HybridForCausalLM"]:
        (spec,) = hybrid_model.register_models()
        return spec
    offer, _ = registry.find_model(config)
    return offer.spec


def whole_tensors(family: ModelSpec, config: dict[str, Any], reader: FormatReader | None = None) -> dict[str, torch.Tensor]:
    """Random, rounded to bfloat16, so that every dtype has the same numbers; norms that are not 1, biases that are not 0."""
    made: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    for part in tensors_asked_for(family, config, reader).values():
        noise = torch.randn(part.whole, generator=generator)
        if part.fill is not None:
            made[part.name] = noise.abs() * part.fill
        elif part.dtype == "F8_E4M3":
            made[part.name] = noise.to(torch.float8_e4m3fn)
        elif len(part.whole) == 1:
            made[part.name] = (noise * 0.1 + (0.0 if "bias" in part.name else 1.0)).bfloat16()
        else:
            made[part.name] = (noise * (1.0 if "embed" in part.name else part.whole[1] ** -0.5)).bfloat16()
    return made


class OneModel:
    """A family with its weights, for any number of ranks."""

    def __init__(self, registry: Registry, config: dict[str, Any]) -> None:
        self.family, self.config, self.reader = family_of(registry, config), config, None
        if (quantization := stated_quantization(config)) is not None:
            (offer,) = (offer for offer in registry.offers(WeightFormatSpec) if offer.name == "fp8")
            self.reader = FormatReader.load(offer, quantization, None)
        self.tensors = whole_tensors(self.family, config, self.reader)

    def run(
        self,
        dtype: torch.dtype,
        *,
        ids: list[int] = IDS,
        rows: list[int] | None = None,
        beside: Sequence[list[int]] = (),
        **ranks: Any,
    ) -> list[RankAnswer]:
        """beside: what other lanes run. ranks: fields of `RankThreads`."""
        tensors = WholeTensors(self.tensors, dtype, self.reader)
        return RankThreads(family=self.family, config=self.config, tensors=tensors, **ranks).run(ids, rows, beside=beside)


@pytest.fixture(scope="module")
def models() -> dict[str, OneModel]:
    return {}


@pytest.fixture
def model(request: pytest.FixtureRequest, registry: Registry, models: dict[str, OneModel]) -> OneModel:
    if request.param not in models:
        models[request.param] = OneModel(registry, CONFIGS[request.param])
    return models[request.param]


def error(answer: RankAnswer, truth: RankAnswer) -> float:
    return float((answer.logits.double() - truth.logits).norm() / truth.logits.norm())


@in_turn(("model", sorted(CONFIGS)), ("tensor_size", [2, 4]), indirect=["model"])
def test_tensor_ranks_are_as_close_to_float64_as_one(model: OneModel, tensor_size: int) -> None:
    assert_close(model, tensor_size=tensor_size)


@in_turn(("model", EXPERTS), ("tensor_size", [2, 4]), indirect=["model"])
def test_ranks_with_some_of_the_experts_each_are_as_close(model: OneModel, tensor_size: int) -> None:
    assert_close(model, tensor_size=tensor_size, cuts_experts=True)


@in_turn(("model", spread(LANES, 16)), ("tensor_size", [1, 2]), ("cuts_experts", [False, True, True, False]), indirect=["model"])
def test_lanes_compute_each_its_own_sequence(model: OneModel, tensor_size: int, cuts_experts: bool) -> None:
    """Two, and the last layer for some rows alone; feed-forwards and the head are of all ranks."""
    lanes, rows = [IDS, IDS[::-1]], [3, 11, 23]
    asked = {"rows": rows, "beside": lanes[1:], "tensor_size": tensor_size, "cuts_experts": cuts_experts}
    answers, exact = model.run(torch.float32, **asked), model.run(torch.float64, **asked)  # by lane, then by tensor rank
    for lane, ids in enumerate(lanes):
        (truth,), (one,) = model.run(torch.float64, ids=ids, rows=rows), model.run(torch.float32, ids=ids, rows=rows)
        assert error(exact[lane * tensor_size], truth) < 1e-6
        for rank in answers[lane * tensor_size : (lane + 1) * tensor_size]:
            assert error(rank, truth) <= 2 * error(one, truth) + 1e-7  # of three rows rounding differs more
            assert torch.equal(rank.hidden, answers[lane * tensor_size].hidden)
            assert torch.equal(rank.best, one.logits.argmax(-1))


def test_families_say_whether_they_run_in_lanes(registry: Registry) -> None:
    """None that does is left out here."""
    assert sorted(name for name, config in CONFIGS.items() if family_of(registry, config).lanes) == LANES


def assert_close(model: OneModel, **ranks: Any) -> None:
    """Several ranks are as close to float64 as one, and have the same bits. ranks: fields of `RankThreads`."""
    (truth,) = model.run(torch.float64)
    exact = model.run(torch.float64, **ranks)
    assert error(exact[0], truth) < 1e-6  # norms, softmax and angles are float32 in both
    (one,) = model.run(torch.float32)
    several = model.run(torch.float32, **ranks)
    assert error(several[0], truth) <= WORST * error(one, truth) + 1e-7
    assert torch.equal(several[0].logits.argmax(-1), one.logits.argmax(-1))
    for rank in several:
        assert torch.equal(rank.hidden, several[0].hidden), "residuals are the same bits on all ranks"
        assert torch.equal(rank.best, rank.logits.argmax(-1))


# Without experts, as rounding chooses others: full attention, windows, latents, states of two kinds.
IN_BFLOAT16 = ["llama", "mistral", "gemma3", "deepseek-v2", "granite", "bamba", "hybrid"]


@pairwise(("model", IN_BFLOAT16), ("tensor_size", [2, 4]), indirect=["model"])
def test_in_bfloat16_tokens_are_equal_where_rounding_could_not_choose_another(model: OneModel, tensor_size: int) -> None:
    """That is where float64's best logit leads by more than twice what several ranks may be off."""
    (truth,), (one,) = model.run(torch.float64), model.run(torch.bfloat16)
    several = model.run(torch.bfloat16, tensor_size=tensor_size)
    assert error(several[0], truth) <= WORST * error(one, truth)
    bound = 2 * WORST * (one.logits - truth.logits).abs().max()
    first, second = truth.logits.topk(2).values.unbind(-1)
    is_clear = first - second > bound
    assert is_clear.sum() >= 6
    for rank in several:
        assert torch.equal(rank.hidden, several[0].hidden)
        assert torch.equal(rank.best[is_clear], truth.best[is_clear])


@pytest.mark.parametrize("model", ["llama-tied-odd"], indirect=True)
def test_both_sums_of_a_dense_layer_may_begin_within_products(model: OneModel, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, early = [], ThreadCollectives.summed_early
    monkeypatch.setattr(ThreadCollectives, "summed_early", lambda comm, linear: begun.append(linear) or early(comm, linear))
    model.run(torch.float32, tensor_size=2)
    assert len(begun) == 2 * 2 * model.config["num_hidden_layers"]


@in_turn(("model", sorted(CONFIGS)), ("dtype", [torch.float32, torch.bfloat16]), indirect=["model"])
def test_two_pipeline_stages_are_one_bit_for_bit(model: OneModel, dtype: torch.dtype) -> None:
    (one,) = model.run(dtype, rows=[3, 23])
    (two,) = model.run(dtype, num_stages=2, rows=[3, 23])
    assert one.logits.shape == (2, model.config["vocab_size"])
    assert torch.equal(two.hidden, one.hidden)
    assert torch.equal(two.logits, one.logits)


@pytest.mark.parametrize("model", ["deepseek-v3", "glm4", "hybrid", "longcat-flash", "qwen2-moe", "llama-tied-odd"], indirect=True)
def test_stages_of_several_ranks_are_ranks_of_one_stage(model: OneModel) -> None:
    one = model.run(torch.float32, tensor_size=2)
    two = model.run(torch.float32, tensor_size=2, num_stages=2)
    assert all(torch.equal(mine.logits, other.logits) for mine, other in zip(one, two, strict=True))


FLOAT8 = stated(
    DeepseekV3Config(
        **latent_shape(q_lora_rank=128, hidden_size=256, intermediate_size=512, num_hidden_layers=2)
        | grouped_expert_shape(moe_intermediate_size=256, n_routed_experts=8, norm_topk_prob=True)
    )
) | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}


def test_float8_blocks_are_shared_by_two_ranks_and_cut_by_none(registry: Registry) -> None:
    model = OneModel(registry, FLOAT8)
    assert model.tensors["model.layers.1.mlp.experts.0.gate_proj.weight"].dtype is torch.float8_e4m3fn
    (truth,), (one,) = model.run(torch.float64), model.run(torch.float32)
    for ranks in ({}, {"cuts_experts": True}):
        several = model.run(torch.float32, tensor_size=2, **ranks)
        assert error(several[0], truth) <= WORST * error(one, truth) + 1e-7
    with pytest.raises(Unsupported, match=r"experts, which --ep does not divide: 256 in units of 128, which 4 .*; 2 ranks can"):
        model.run(torch.float32, tensor_size=4)


def test_every_family_with_experts_is_among_those_that_are_divided(registry: Registry) -> None:
    asked = {name: tensors_asked_for(family_of(registry, config), config, None) for name, config in CONFIGS.items()}
    of_experts = [name for name, tensors in asked.items() if any(map(is_of_expert, tensors))]
    assert sorted(of_experts) == EXPERTS


def test_experts_that_do_not_divide_are_one_more_on_some_ranks(registry: Registry) -> None:
    """Of six on four ranks two have two; each rank reads its own, and together they read all."""
    model = OneModel(registry, CONFIGS["qwen3-moe"] | {"num_experts": 6})
    assert_close(model, tensor_size=4, cuts_experts=True)
    read = []
    for rank in range(4):
        tensors = WholeTensors(model.tensors, torch.float32)
        parallel = ParallelFacts(tensor_rank=rank, tensor_size=4, cuts_experts=True)
        weights = weights_of(tensors, ops=reference_ops(), parallel=parallel).scope("model.layers.1.mlp")
        weights.experts(ExpertsShape(names=ExpertNames(), count=6, inner=32, hidden=64))
        read.append(sorted({int(name.split(".")[5]) for name in tensors.asked}))
    assert read == [[0], [1, 2], [3], [4, 5]]


def test_more_ranks_than_experts_are_refused(registry: Registry) -> None:
    model = OneModel(registry, CONFIGS["qwen3-moe"] | {"num_experts": 3})
    with pytest.raises(Unsupported, match=r"mlp\.experts: 3, which 4 ranks cannot share; 2 ranks can"):
        model.run(torch.float32, tensor_size=4, cuts_experts=True)


def test_what_another_rank_s_experts_would_give_does_not_count() -> None:
    """Not even where an expert of this rank, in their place, would give infinity."""
    shape = ExpertsShape(names=ExpertNames(), count=2, inner=1, hidden=3)
    experts = OwnExperts(lambda x, routed: routed.weights.sum(-1, keepdim=True) * x, range(2, 4))
    routed = Routed(torch.tensor([[2, 5], [0, 1]], dtype=torch.int32), torch.tensor([[0.5, 0.25], [0.5, 0.5]]))
    assert experts(torch.ones(2, 3), routed).tolist() == [[0.5] * 3, [0.0] * 3]
    bound = reference_ops().bind_experts(torch.full((2, 2, 3), torch.inf), torch.full((2, 3, 1), torch.inf), shape)
    assert not OwnExperts(bound, range(2, 4))(torch.ones(1, 3), Routed(routed.ids[1:], routed.weights[1:])).any()


def test_what_each_rank_s_experts_are_given_is_counted_in_every_sixteenth_step() -> None:
    """Of two layers, by experts [0, 3), [3, 4), [4, 8); one that is none of these pads, and counts nowhere."""
    loads, generator = ExpertLoads(3, torch.device("cpu")), torch.Generator().manual_seed(0)
    layers = [loads.of_layer([0, 3, 4, 8]), loads.of_layer([0, 3, 4, 8])]
    by_rank, busiest = [0, 0, 0], 0
    for step in range(40):
        for note in layers:
            ids = torch.randint(0, 9, (7, 2), generator=generator, dtype=torch.int32)
            note(ids)
            if step in (0, 16, 32):
                given = [
                    sum(first <= expert < stop for expert in ids.flatten().tolist()) for first, stop in ((0, 3), (3, 4), (4, 8))
                ]
                by_rank, busiest = [now + more for now, more in zip(by_rank, given, strict=True)], busiest + max(given)
    assert loads.read() == ExpertCounts(by_rank=tuple(by_rank), busiest=busiest)


REFUSED = {
    "query heads": (
        CONFIGS["llama"],
        8,
        "query heads: 4, which 8 ranks cannot share; 2 or 4 ranks can",
    ),
    "KV heads": (
        stated(LlamaConfig(**shape(num_attention_heads=12, num_key_value_heads=3, hidden_size=96))),
        4,
        "the attention's KV heads: 3, which 4 ranks cannot share",
    ),
    "heads of SmolLM2-135M": (
        stated(LlamaConfig(**shape(num_attention_heads=9, num_key_value_heads=3, hidden_size=144))),
        2,
        "query heads: 9, which 2 ranks cannot share; 3 ranks can",
    ),
    "one query head": (
        stated(LlamaConfig(**shape(num_attention_heads=1, num_key_value_heads=1))),
        2,
        "query heads: 1, which 2 ranks cannot share; it is not for several ranks",
    ),
    "heads of MLA": (CONFIGS["deepseek-v2"], 8, "the attention's query heads: 4"),
    "heads of a recurrence": (CONFIGS["hybrid"] | {"num_attention_heads": 6}, 4, "value heads: 6, which 4 ranks"),
    "key heads of a delta rule": (TWO_KEY_HEADS, 4, "key heads: 2, which 4 ranks cannot share; 2 ranks can"),
    "heads of Mamba2": (
        CONFIGS["bamba"],
        16,
        "value heads: 8, which 16 ranks cannot share; 2 or 4 or 8 ranks can",
    ),
    "groups of Mamba2": (
        CONFIGS["bamba"] | {"mamba_n_heads": 24, "mamba_n_groups": 3, "hidden_size": 192},
        4,
        "key heads: 3, which 4 ranks cannot share",
    ),
    "channels": (
        CONFIGS["lfm2"] | {"hidden_size": 66, "num_attention_heads": 3, "num_key_value_heads": 3},
        4,
        ": 66, which 4 ranks",
    ),
    "inner size": (
        CONFIGS["llama"] | {"intermediate_size": 130},
        4,
        "gate_proj: 130, which 4 ranks cannot share",
    ),
}


@pytest.mark.parametrize(("config", "tensor_size", "said"), REFUSED.values(), ids=REFUSED)
def test_sizes_that_ranks_cannot_share_are_refused_with_what_would_do(
    registry: Registry, config: dict[str, Any], tensor_size: int, said: str
) -> None:
    model = OneModel(registry, config)
    with pytest.raises(Unsupported, match=said):
        model.run(torch.float32, tensor_size=tensor_size)


def test_a_rank_that_fails_frees_the_others(registry: Registry) -> None:
    model = OneModel(registry, CONFIGS["llama"])
    del model.tensors["model.norm.weight"]
    with pytest.raises(KeyError, match=r"model\.norm\.weight"):
        model.run(torch.float32, tensor_size=2)


def test_values_narrower_than_keys_are_values_with_zeros_behind(registry: Registry) -> None:
    """Of 16 dims of a value the last 6 are zero in the wide model; the narrow one has 10, and writes keys and values apart."""
    wide = OneModel(registry, CONFIGS["qwen3"])
    facts = wide.family.describe(wide.config)
    dim, value_dim, heads, kv_heads = facts.layers[0].head_dim, 10, facts.layers[0].num_heads, facts.layers[0].num_kv_heads
    narrow = OneModel(registry, CONFIGS["qwen3"])
    for name, tensor in wide.tensors.items():
        if "v_proj.weight" in name:
            rows = tensor.view(kv_heads, dim, -1)
            rows[:, value_dim:] = 0
            narrow.tensors[name] = rows[:, :value_dim].flatten(0, 1)
        elif "o_proj.weight" in name:
            narrow.tensors[name] = tensor.view(-1, heads, dim)[..., :value_dim].flatten(1)

    def describe(config: Mapping[str, object]) -> ModelFacts:
        layers = tuple(dataclasses.replace(layer, v_head_dim=value_dim) for layer in facts.layers)
        return dataclasses.replace(facts, layers=layers)

    narrow.family = dataclasses.replace(narrow.family, describe=describe)
    (expected,) = wide.run(torch.float64)
    for tensor_size in (1, 2):
        answer = narrow.run(torch.float64, tensor_size=tensor_size)[0]
        torch.testing.assert_close(answer.logits, expected.logits, atol=1e-6, rtol=0)
