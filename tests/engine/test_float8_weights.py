"""Checkpoints in float8 blocks: what a rank has of them, what stays float8, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from enginery import LLM
from enginery.api import (
    CheckpointError,
    Cut,
    ExpertNames,
    ExpertsShape,
    FormatNeeds,
    Linear,
    LinearFn,
    LinearShape,
    ParallelFacts,
    Routed,
    Scheme,
    StoredPart,
    StoredWeight,
    Unsupported,
    WeightFormatSpec,
)
from enginery.checkpoint.files import scan_checkpoint
from enginery.nn.parallel import SingleRank
from enginery.nn.reference_ops import REFERENCE_SCHEMES, reference_ops
from enginery.nn.stored import FLOAT8_BLOCKS, spread
from enginery.plugin.records import Offer
from enginery.plugin.registry import Registry
from enginery.testing.fixtures import TINY_CONFIG, write_tiny_checkpoint
from enginery.worker.weights import formats
from enginery.worker.weights.load import load, random_weights
from enginery.worker.weights.matrices import Matrices, RankSetting
from enginery.worker.weights.rank import RankWeights
from enginery.worker.weights.store import WeightRecord, check
from enginery_format_fp8.spec import FP8

CONFIG = {"quant_method": "fp8", "weight_block_size": [128, 128]}
SCALES = "w.weight_scale_inv"


def fp8_offer() -> Offer[WeightFormatSpec]:
    """Of the plugin, as it is installed."""
    return next(offer for offer in Registry.load().offers(WeightFormatSpec) if offer.name == FP8.name)


def quantised(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """float8 with a scale for each block of 128 x 128."""
    rows, columns = weight.shape
    blocks = torch.zeros(-(-rows // 128), -(-columns // 128))
    for row in range(blocks.shape[0]):
        for column in range(blocks.shape[1]):
            block = weight[row * 128 : (row + 1) * 128, column * 128 : (column + 1) * 128]
            blocks[row, column] = block.abs().max() / 448
    narrow = (weight / spread(blocks, weight.shape, (128, 128))).to(torch.float8_e4m3fn)
    return {".weight": narrow, ".weight_scale_inv": blocks}


def plain(stored: dict[str, torch.Tensor]) -> torch.Tensor:
    return stored[".weight"].float() * spread(stored[".weight_scale_inv"].float(), stored[".weight"].shape, (128, 128))


class Checkpoint:
    """A folder with float8 modules, and sources of what a rank takes from it."""

    def __init__(
        self, folder: Path, modules: dict[str, torch.Tensor], scales: torch.dtype = torch.float32, **others: torch.Tensor
    ) -> None:
        self.folder = folder
        self.stored = {name: quantised(weight) for name, weight in modules.items()}
        for stored in self.stored.values():
            stored[".weight_scale_inv"] = stored[".weight_scale_inv"].to(scales)
        self.plain = {name: plain(stored) for name, stored in self.stored.items()} | others
        tensors = {f"{name}{suffix}": part for name, stored in self.stored.items() for suffix, part in stored.items()}
        save_file(tensors | {f"{name}.weight": other for name, other in others.items()}, folder / "model.safetensors")

    def __call__(self, store, parallel: ParallelFacts | None = None):

        offer = fp8_offer()
        reader = formats.FormatReader.load(offer, CONFIG, scan_checkpoint(self.folder))
        ops = reference_ops()
        facts = parallel or ParallelFacts()
        setting = RankSetting(ops=ops, comm=SingleRank(ops), parallel=facts, reader=reader, kept=REFERENCE_SCHEMES)
        return RankWeights(Matrices(store, setting))

    def read(self, ask, parallel: ParallelFacts | None = None):
        """What `ask`, given a source, is answered with when it is asked again after the weights were read."""

        record, stored = WeightRecord(torch.float32), scan_checkpoint(self.folder)
        recording = self(record, parallel)
        ask(recording)
        check(record, stored, (), folder=self.folder)
        return ask(self(load(record, stored, torch.device("cpu"), reader=recording.matrices.setting.reader), parallel))


SCALES_OF_FILES = (torch.float32, torch.bfloat16, torch.float16)  # the hub's Qwen3 has scales of 16 bits, DeepSeek-V3 of 32


@pytest.mark.parametrize("scales", SCALES_OF_FILES)
def test_products_become_plain_numbers_and_what_is_plain_in_the_files_stays_so(tmp_path: Path, scales: torch.dtype) -> None:
    made = Checkpoint(tmp_path, {"a": torch.randn(130, 4)}, scales, b=torch.randn(6, 4))
    linear = made.read(lambda weights: weights.linear(LinearShape(names=("a", "b"), rows=(130, 6), columns=4)))
    x = torch.randn(3, 4)
    torch.testing.assert_close(linear(x), x @ torch.cat((made.plain["a"], made.plain["b"])).T)
    assert torch.equal(
        made.read(lambda weights: (weights.take("b.weight", (6, 4)), weights.take("a.weight", (130, 4))))[1], made.plain["a"]
    )


@pytest.mark.parametrize(("cut", "rank"), [(Cut.ROWS, 0), (Cut.ROWS, 1), (Cut.COLUMNS, 0), (Cut.COLUMNS, 1)])
def test_ranks_cut_between_blocks_and_inside_of_them(tmp_path: Path, cut: Cut, rank: int) -> None:
    made = Checkpoint(tmp_path, {"a": torch.randn(200, 300)})
    parallel = ParallelFacts(tensor_rank=rank, tensor_size=2)
    shape = LinearShape(names=("a",), rows=(200,), columns=300, cut=cut, complete=False)
    linear = made.read(lambda weights: weights.linear(shape), parallel)
    mine = made.plain["a"].chunk(2, dim=0 if cut is Cut.ROWS else 1)[rank]
    x = torch.randn(3, mine.shape[1])
    torch.testing.assert_close(linear(x), x @ mine.T)


@pytest.mark.parametrize(("cut", "rank"), [(Cut.NONE, 0), (Cut.ROWS, 1), (Cut.COLUMNS, 0), (Cut.COLUMNS, 1)])
def test_products_are_multiplied_as_they_are_bound_and_biases_by_what_is_behind_them(tmp_path: Path, cut: Cut, rank: int) -> None:
    """The bias of a partial sum is one rank's."""
    made = Checkpoint(tmp_path, {"a": torch.randn(200, 300)}, b=torch.randn(8, 300))
    biases, file = {"a": torch.randn(200), "b": torch.randn(8)}, tmp_path / "model.safetensors"
    save_file(load_file(file) | {f"{name}.bias": bias for name, bias in biases.items()}, file)
    factors = {"a": 0.5, "b": 3.0}
    shape = LinearShape(
        names=("a", "b"),
        rows=(200, 8),
        columns=300,
        cut=cut,
        bias=True,
        factor=tuple(factors.values()),
        input_factor=0.25,
        complete=False,
    )
    linear = made.read(lambda weights: weights.linear(shape), ParallelFacts(tensor_rank=rank, tensor_size=2))
    x = torch.randn(3, 150 if cut is Cut.COLUMNS else 300)
    expected = []
    for name, factor in factors.items():
        weight, bias = made.plain[name], biases[name]
        if cut is Cut.ROWS:
            weight, bias = weight.chunk(2)[rank], bias.chunk(2)[rank]
        elif cut is Cut.COLUMNS:
            weight, bias = weight.chunk(2, dim=1)[rank], bias * (rank == 0)
        expected.append(factor * (0.25 * x @ weight.T + bias))
    torch.testing.assert_close(linear(x), torch.cat(expected, dim=1))


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_a_stored_product_that_is_multiplied_becomes_plain(tmp_path: Path, factor: float) -> None:
    """What a format stores has no place for the factor of a row."""
    made, given = Checkpoint(tmp_path, {"a": torch.randn(200, 300)}), []

    def ask(weights: RankWeights) -> Linear:
        def bind_linear(weight: torch.Tensor | StoredWeight, bias: torch.Tensor | None) -> LinearFn:
            given.append(type(weight))
            return bind(weight, bias)

        setting = weights.matrices.setting
        bind, ops = setting.ops.bind_linear, dataclasses.replace(setting.ops, bind_linear=bind_linear)
        setting = dataclasses.replace(setting, ops=ops, kept={"bind_linear": frozenset({FLOAT8_BLOCKS})})
        shape = LinearShape(names=("a",), rows=(200,), columns=300, factor=factor)
        return RankWeights(Matrices(weights.matrices.store, setting)).linear(shape)

    linear, x = made.read(ask), torch.randn(3, 300)
    torch.testing.assert_close(linear(x), factor * x @ made.plain["a"].T)
    assert given[-1] is (StoredWeight if factor == 1.0 else torch.Tensor)


def experts_of(inner: int) -> ExpertsShape:
    return ExpertsShape(names=ExpertNames(), count=2, inner=inner, hidden=130)


def expert_modules(inner: int) -> dict[str, torch.Tensor]:
    sizes = {"gate_proj": (inner, 130), "up_proj": (inner, 130), "down_proj": (130, inner)}
    return {f"experts.{expert}.{name}": torch.randn(size) for expert in range(2) for name, size in sizes.items()}


@pytest.mark.parametrize(
    ("inner", "stays", "scales"), [(256, True, torch.float32), (256, True, torch.bfloat16), (96, False, torch.float32)]
)
def test_experts_stay_float8_where_no_block_has_rows_of_gate_and_up(
    tmp_path: Path, inner: int, stays: bool, scales: torch.dtype
) -> None:
    made = Checkpoint(tmp_path, expert_modules(inner), scales)
    experts = made.read(lambda weights: weights.experts(experts_of(inner)))
    x, ids = torch.randn(5, 130), torch.tensor([[0], [1], [1], [0], [1]], dtype=torch.int32)
    out = experts(x, Routed(ids, torch.ones(5, 1)))
    for row, expert in enumerate(ids[:, 0].tolist()):
        gate, up, down = (made.plain[f"experts.{expert}.{name}_proj"] for name in ("gate", "up", "down"))
        expected = (torch.nn.functional.silu(x[row] @ gate.T) * (x[row] @ up.T)) @ down.T
        assert (out[row] - expected).norm() < 1e-5 * expected.norm()

    record = WeightRecord(torch.float32)
    made(record).experts(experts_of(inner))
    assert any(piece.dtype is torch.float8_e4m3fn for piece in record.pieces) == stays


def test_experts_that_ranks_would_cut_inside_of_a_block_are_refused_with_what_would_do(tmp_path: Path) -> None:

    made = Checkpoint(tmp_path, expert_modules(256))
    with pytest.raises(Unsupported, match=": 256 in units of 128, which 4 ranks cannot share; 2 ranks can"):
        made(WeightRecord(torch.float32), ParallelFacts(tensor_size=4)).experts(experts_of(256))


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"w.weight": torch.zeros(130, 4).to(torch.float8_e4m3fn)}, "'w.weight_scale_inv' [2, 1] is missing"),
        (
            {"w.weight": torch.zeros(130, 4).to(torch.float8_e4m3fn), SCALES: torch.zeros(3, 1)},
            "'w.weight_scale_inv' in model.safetensors has shape [3, 1]",
        ),
        ({"w.weight": torch.zeros(130, 4, dtype=torch.int8), SCALES: torch.zeros(2, 1)}, "has dtype I8, the model needs F8_E4M3"),
    ],
)
def test_float8_without_its_scales_is_refused(tmp_path: Path, files: dict[str, torch.Tensor], said: str) -> None:
    save_file(files, tmp_path / "model.safetensors")
    made = Checkpoint.__new__(Checkpoint)
    made.folder = tmp_path
    with pytest.raises(CheckpointError) as error:
        made.read(lambda weights: weights.take("w.weight", (130, 4)))
    assert said in str(error.value)
    assert ("made from" in str(error.value)) == ("I8" in said), "float8 is read here, and these files are damaged"


def test_random_weights_of_a_float8_shape_give_outputs_of_the_size_of_their_inputs(tmp_path: Path) -> None:

    offer = fp8_offer()
    ops = reference_ops()
    reader = formats.FormatReader.load(offer, CONFIG, None)
    setting = RankSetting(ops=ops, comm=SingleRank(ops), reader=reader, kept=REFERENCE_SCHEMES)
    record, shape = WeightRecord(torch.float32), ExpertsShape(names=ExpertNames(), count=1, inner=256, hidden=256)
    RankWeights(Matrices(record, setting)).experts(shape)
    experts = RankWeights(Matrices(random_weights(record, torch.device("cpu"), seed=0), setting)).experts(shape)
    out = experts(torch.randn(64, 256), Routed(torch.zeros(64, 1, dtype=torch.int32), torch.ones(64, 1)))
    assert 0.1 < out.std() < 1


def needs(config: dict[str, object]) -> FormatNeeds:
    return FormatNeeds(config=config, device="cpu", dtype="float32")


def test_it_is_chosen_for_blocks_of_128_and_says_so() -> None:
    offer, why = formats.choose_format(CONFIG, Registry.load().offers(WeightFormatSpec), needs(CONFIG))
    assert (offer.name, why) == ("fp8", "reads quant_method 'fp8'")


@pytest.mark.parametrize("size", [None, [64, 64]])
def test_other_float8_is_refused_with_the_size(size: object) -> None:
    config = {"quant_method": "fp8", "weight_block_size": size}
    with pytest.raises(CheckpointError, match=r"128 x 128, and weight_block_size is.*Take the model that it was made from"):
        formats.choose_format(config, Registry.load().offers(WeightFormatSpec), needs(config))


def test_a_format_whose_plugin_is_not_used_is_named(tmp_path: Path) -> None:
    folder, without = write_tiny_checkpoint(tmp_path, TINY_CONFIG | {"quantization_config": CONFIG}), ("format-fp8",)
    with pytest.raises(CheckpointError, match=r"read here yet.*\nplugin format-fp8 .* might offer it but is blocked"):
        LLM(str(folder), load_format="dummy", blocked_plugins=without)


def test_a_text_model_s_own_quantization_config_counts() -> None:
    assert formats.stated_quantization({"text_config": {"quantization_config": CONFIG}}) == CONFIG


class RowFloat8:
    """Another format: a scale for each row."""

    def parts(self, scheme: Scheme) -> tuple[StoredPart, ...]:
        scales = StoredPart(suffix=".weight_scale", dtype="F32", per_element=(1, 0), role="scales")
        return StoredPart(suffix=".weight", dtype="F8_E4M3"), scales

    def unpack(self, parts: dict[str, torch.Tensor], scheme: Scheme) -> StoredWeight:
        return StoredWeight(scheme=scheme, values=parts[".weight"], scales=parts[".weight_scale"])


@pytest.mark.parametrize(("cut", "rank"), [(Cut.ROWS, 1), (Cut.COLUMNS, 1), (Cut.NONE, 0)])
def test_a_format_may_have_a_scale_for_each_row(tmp_path: Path, cut: Cut, rank: int) -> None:
    narrow, scales = torch.randn(6, 10).to(torch.float8_e4m3fn), torch.rand(6, 1) + 0.5
    save_file({"a.weight": narrow, "a.weight_scale": scales}, tmp_path / "model.safetensors")
    stored, rows = scan_checkpoint(tmp_path), Scheme(values="f8e4m3", block=(1, 0))
    offer = fp8_offer()
    offer = dataclasses.replace(offer, spec=dataclasses.replace(FP8, reads=lambda config, module: rows))
    reader, ops = formats.FormatReader(offer, {}, RowFloat8(), stored), reference_ops()
    setting = RankSetting(ops=ops, comm=SingleRank(ops), parallel=ParallelFacts(tensor_rank=rank, tensor_size=2), reader=reader)
    shape = LinearShape(names=("a",), rows=(6,), columns=10, cut=cut, complete=False)
    record = WeightRecord(torch.float32)
    RankWeights(Matrices(record, setting)).linear(shape)
    check(record, stored, (), folder=tmp_path)
    linear = RankWeights(Matrices(load(record, stored, torch.device("cpu"), reader=reader), setting)).linear(shape)
    whole = narrow.float() * scales
    mine = whole if cut is Cut.NONE else whole.chunk(2, dim=0 if cut is Cut.ROWS else 1)[rank]
    x = torch.randn(3, mine.shape[1])
    torch.testing.assert_close(linear(x), x @ mine.T)
