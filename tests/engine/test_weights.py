"""A checkpoint that is incomplete or damaged is refused before anything is served, by file and tensor."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine.pieces_made import piece
from installed import install
from safetensors.torch import save_file

from enginery.checkpoint.files import scan_checkpoint, unstack
from enginery.config.schema import EngineOptions
from enginery.contracts.attention import KVGeometry
from enginery.engine.build import build_parts
from enginery.errors import CheckpointError, EnginError, OutOfMemory, PluginError
from enginery.kv.pool import PagedKVPool
from enginery.nn.parallel import SingleRank
from enginery.nn.reference_ops import reference_ops
from enginery.plugin.registry import Registry
from enginery.worker.choice import choose
from enginery.worker.weights.load import load, random_weights
from enginery.worker.weights.matrices import Matrices, RankSetting
from enginery.worker.weights.rank import RankWeights
from enginery.worker.weights.store import Piece, PieceStore, Slice, WeightRecord, check

CONFIG = dict(
    architectures=["LlamaForCausalLM"],
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=64,
)
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def tensors() -> dict[str, torch.Tensor]:
    shapes = {
        "model.embed_tokens.weight": (32, 16),
        "lm_head.weight": (32, 16),
        "model.norm.weight": (16,),
        "model.layers.0.input_layernorm.weight": (16,),
        "model.layers.0.post_attention_layernorm.weight": (16,),
        Q_PROJ: (16, 16),
        "model.layers.0.self_attn.k_proj.weight": (8, 16),
        "model.layers.0.self_attn.v_proj.weight": (8, 16),
        "model.layers.0.self_attn.o_proj.weight": (16, 16),
        "model.layers.0.mlp.gate_proj.weight": (24, 16),
        "model.layers.0.mlp.up_proj.weight": (24, 16),
        "model.layers.0.mlp.down_proj.weight": (16, 24),
    }
    return {name: torch.randn(shape) for name, shape in shapes.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def build(folder: Path, **changes: object) -> None:
    build_parts(EngineOptions(**{"model": str(folder), "num_pages": 8, "device": "cpu", **changes}), Registry.load())


def write_shards(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    names = sorted(weights)
    halves = {"model-00001-of-00002.safetensors": names[:6], "model-00002-of-00002.safetensors": names[6:]}
    for file, part in halves.items():
        save_file({name: weights[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in halves.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_a_whole_checkpoint_loads_from_one_file_and_from_shards(folder: Path) -> None:
    save_file(tensors(), folder / "model.safetensors")
    build(folder)
    (folder / "model.safetensors").unlink()
    write_shards(folder, tensors())
    build(folder)


def test_loaded_values_are_the_stored_ones_and_merged_ones_are_stacked(folder: Path) -> None:
    weights = tensors()
    save_file(weights, folder / "model.safetensors")
    record = WeightRecord(torch.float32)
    names = [Q_PROJ, "model.layers.0.self_attn.k_proj.weight"]
    both, norm = piece(names, [(16, 16), (8, 16)], torch.float32), piece("model.norm.weight", (16,), torch.float32)
    assert record.tensor(both).shape == (24, 16)
    record.tensor(norm)
    loaded = load(record, scan_checkpoint(folder), torch.device("cpu"))
    assert torch.equal(loaded.tensor(both), torch.cat([weights[name] for name in names]))
    assert torch.equal(loaded.tensor(norm), weights["model.norm.weight"])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda weights: weights.pop(Q_PROJ), f"tensor '{Q_PROJ}' [16, 16] is missing"),
        (lambda weights: weights.update({Q_PROJ: torch.zeros(4, 4)}), f"'{Q_PROJ}' in model.safetensors has shape [4, 4]"),
        (lambda weights: weights.update({"model.extra": torch.zeros(2)}), "'model.extra' in model.safetensors is unexpected"),
        (lambda weights: weights.update({Q_PROJ: torch.zeros(16, 16, dtype=torch.int8)}), "has dtype I8"),
    ],
)
def test_a_wrong_tensor_is_named_with_its_file(
    folder: Path, damage: Callable[[dict[str, torch.Tensor]], object], said: str
) -> None:
    weights = tensors()
    damage(weights)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        build(folder)
    assert said in str(error.value)
    assert str(folder) in str(error.value)


def test_a_truncated_shard_is_named_with_the_tensor_that_is_cut(folder: Path) -> None:
    write_shards(folder, tensors())
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002.safetensors is cut off: tensor '.+' ends at byte"):
        build(folder)


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 100, (5).to_bytes(8, "little") + b"{bad}"])
def test_a_file_that_is_no_safetensors_file_is_named(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model.safetensors (is cut off or no safetensors file|has a damaged header)"):
        build(folder)


def test_a_missing_shard_is_named_with_what_to_do(folder: Path) -> None:
    write_shards(folder, tensors())
    (folder / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002.safetensors does not exist .*--load-format dummy"):
        build(folder)


def test_the_index_of_an_older_model_beside_one_file_is_not_read(folder: Path) -> None:
    """As in transformers: a program for training has put its one file beside what was there."""
    write_shards(folder, {name: tensor[:2] for name, tensor in tensors().items()})
    save_file(tensors(), folder / "model.safetensors")
    build(folder)
    (folder / "model-00001-of-00002.safetensors").unlink()
    build(folder)


def test_an_index_that_names_the_wrong_file_is_refused(folder: Path) -> None:
    write_shards(folder, tensors())
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"][Q_PROJ] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="but it is not"):
        build(folder)


@pytest.mark.parametrize(
    "content", ["{}", '{"weight_map": {}}', '{"weight_map": ["a"]}', '{"weight_map": {"a": 3}}', '{"weight_map": null}']
)
def test_an_index_without_its_map_is_named(folder: Path, content: str) -> None:
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r'index.json has no "weight_map"'):
        build(folder)


def test_what_git_lfs_leaves_in_a_file_s_place_says_what_to_do(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123\n")
    with pytest.raises(CheckpointError, match="git lfs pull"):
        build(folder)


def test_a_file_that_cannot_be_read_is_named(folder: Path) -> None:
    (folder / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"model.safetensors cannot be read: Is a directory"):
        build(folder)


def test_a_header_with_impossible_offsets_is_refused(folder: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match="tensor 'a' is in bytes -8 to 0"):
        build(folder)


def test_a_folder_without_weights_says_that_dummy_would_do(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="--load-format dummy"):
        build(folder)
    build(folder, load_format="dummy")


def test_an_unknown_architecture_names_the_known_ones(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["LlamaForCausalLm"]}))
    with pytest.raises(EnginError, match="LlamaForCausalLM"):
        build(folder)


@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings"])
def test_an_incomplete_config_names_the_key(folder: Path, key: str) -> None:
    (folder / "config.json").write_text(json.dumps({name: value for name, value in CONFIG.items() if name != key}))
    with pytest.raises(CheckpointError, match=key):
        build(folder, load_format="dummy")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "abc"),
        ("hidden_size", -16),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", 1.5),
        ("num_attention_heads", [2]),
        ("vocab_size", True),
        ("rope_theta", "x"),
        ("rms_norm_eps", -1e-5),
        ("rope_scaling", "x"),
        ("eos_token_id", "x"),
    ],
)
def test_a_value_of_the_config_that_cannot_be_is_named(folder: Path, key: str, value: object) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | {key: value}))
    with pytest.raises(CheckpointError, match=rf"{key} .*must be"):
        build(folder, load_format="dummy")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("num_attention_heads", 1000, "leave a head no dims"),
        ("quantization_config", 5, "quantization_config 5; served are"),
        ("rope_scaling", {"rope_type": "linear"}, "without its parameter 'factor'"),
        ("rope_scaling", {"rope_type": "linear", "factor": "x"}, "rope parameters {'factor': 'x'}, which are not usable"),
        ("rope_scaling", {"rope_type": "yarn", "factor": 0.0, "original_max_position_embeddings": -4}, "must be a number above 0"),
        ("rope_scaling", {"rope_type": ["x"]}, r"rope type \['x'\]; known are"),
    ],
)
def test_values_that_do_not_go_together_are_named(folder: Path, key: str, value: object, said: str) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | {key: value, "num_key_value_heads": None}))
    with pytest.raises(CheckpointError, match=said):
        build(folder, load_format="dummy")


def test_more_positions_than_there_is_memory_for_are_told_as_such(folder: Path) -> None:
    """Each has a row of angles."""
    (folder / "config.json").write_text(json.dumps(CONFIG | {"max_position_embeddings": 10**15}))
    with pytest.raises(OutOfMemory, match=r"does not fit: .* --max-model-len \(1000000000000000\)"):
        build(folder, load_format="dummy")


def test_a_config_that_is_no_object_is_named(folder: Path) -> None:
    (folder / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match=r"config\.json holds list where a JSON object is needed"):
        build(folder)


def test_random_weights_depend_on_the_name_and_the_seed_alone() -> None:
    def drawn(names: list[str], seed: int) -> torch.Tensor:
        record = WeightRecord(torch.float32)
        for name in names:
            record.tensor(piece(name, (4, 4), torch.float32))
        return random_weights(record, torch.device("cpu"), seed=seed).tensor(piece("b", (4, 4), torch.float32))

    assert torch.equal(drawn(["a", "b"], 0), drawn(["b"], 0))
    assert not torch.equal(drawn(["b"], 0), drawn(["b"], 1))


def test_ignored_patterns_are_not_unexpected(folder: Path) -> None:
    save_file({"a": torch.zeros(2), "x.inv_freq": torch.zeros(2)}, folder / "model.safetensors")
    record = WeightRecord(torch.float32)
    record.tensor(piece("a", (2,), torch.float32))
    check(record, scan_checkpoint(folder), ("*.inv_freq",), folder=folder)
    with pytest.raises(CheckpointError, match="inv_freq"):
        check(record, scan_checkpoint(folder), (), folder=folder)


def test_the_memory_plan_is_told_before_anything_is_allocated(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def allocate(*_: object, **__: object) -> None:
        raise AssertionError("allocated")

    def pool(geometry: KVGeometry, device: torch.device) -> PagedKVPool:
        return PagedKVPool(geometry, device) if device.type == "meta" else allocate()

    monkeypatch.setattr("enginery.worker.loading.random_weights", allocate)
    monkeypatch.setattr("enginery.engine.build.PagedKVPool", pool)
    with caplog.at_level("DEBUG", "enginery"), pytest.raises(AssertionError, match="allocated"):
        build(folder, load_format="dummy")
    (plan,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("memory plan")]
    for part in ("weights", "KV", "workspace"):
        assert part in plan


def test_a_tensor_may_be_asked_for_in_a_dtype_of_its_own(folder: Path) -> None:
    save_file({"a": torch.tensor([0.1, 0.2]), "b": torch.tensor([0.1, 0.2])}, folder / "model.safetensors")
    record = WeightRecord(torch.bfloat16)
    wide, narrow = piece("a", (2,), torch.float32), piece("b", (2,), torch.bfloat16)
    assert record.tensor(wide).dtype is torch.float32
    record.tensor(narrow)
    assert record.num_bytes() == 2 * 4 + 2 * 2
    loaded = load(record, scan_checkpoint(folder), torch.device("cpu"))
    assert loaded.tensor(wide).tolist() == torch.tensor([0.1, 0.2]).tolist()
    assert loaded.tensor(narrow).dtype is torch.bfloat16


def test_stacked_tensors_are_found_by_the_names_of_their_parts(folder: Path) -> None:
    stack = torch.randn(3, 4, 5)
    save_file({"m.gate_up": stack, "m.router": torch.ones(2)}, folder / "model.safetensors")
    parts = {".gate_up": (".{}.gate", ".{}.up"), ".router": (".gate",)}
    stored = unstack(scan_checkpoint(folder), parts)
    assert set(stored) == {"m.gate"} | {f"m.{index}.{part}" for index in range(3) for part in ("gate", "up")}
    record = WeightRecord(torch.float32)
    up = piece("m.1.up", (2, 5), torch.float32)
    record.tensor(up)
    assert torch.equal(load(record, stored, torch.device("cpu")).tensor(up), stack[1, 2:])
    with pytest.raises(CheckpointError, match=r"'m\.router' .* cannot be 3 matrices"):
        unstack(scan_checkpoint(folder), {".router": (".{}.a", ".{}.b", ".{}.c")})


def test_what_a_format_stores_beside_a_weight_is_renamed_with_it(folder: Path) -> None:
    one, names = torch.ones(2), ("m.mlp.up.weight", "m.mlp.up.weight_scale_inv", "m.mlp.gate.bias", "m.mlp.upper.weight", "bare")
    save_file({name: one.clone() for name in names}, folder / "model.safetensors")
    renames = {".mlp.up.weight": (".moe.up.weight",), ".mlp.gate.bias": (".moe.correction",), ".gate.weight": (".{}.gate.weight",)}
    found = set(unstack(scan_checkpoint(folder), renames))
    assert found == {"m.moe.up.weight", "m.moe.up.weight_scale_inv", "m.moe.correction", "m.mlp.upper.weight", "bare"}


def test_a_tensor_that_is_taken_twice_is_in_memory_once_and_given_away_at_the_end(folder: Path) -> None:
    table = torch.randn(6, 4)
    save_file({"table": table}, folder / "model.safetensors")
    whole, some = (
        piece("table", (6, 4), torch.float32),
        Piece((replace(Slice.all_of("table", (6, 4)), shape=(2, 4)),), torch.float32),
    )
    record = WeightRecord(torch.float32)
    for asked in (whole, whole, some):
        record.tensor(asked)
    assert record.num_bytes() == 6 * 4 * 4
    loaded = load(record, scan_checkpoint(folder), torch.device("cpu"))
    first, second, rows = (loaded.tensor(asked) for asked in (whole, whole, some))
    assert first.data_ptr() == second.data_ptr() == rows.data_ptr()
    assert torch.equal(rows, table[:2])
    assert loaded.tensors == {}
    with pytest.raises(AssertionError, match="table is taken more often than it was when the weights were recorded"):
        loaded.tensor(whole)


def test_integers_are_read_where_they_are_asked_for_and_nowhere_else(folder: Path) -> None:
    table = torch.tensor([[3, 1], [2, 7]])
    save_file({"routes": table, "w": torch.zeros(2, 2, dtype=torch.int64)}, folder / "model.safetensors")
    ops = reference_ops()

    def source(store: PieceStore) -> RankWeights:
        return RankWeights(Matrices(store, RankSetting(ops=ops, comm=SingleRank(ops))))

    record = WeightRecord(torch.float32)
    assert source(record).take("routes", (2, 2), dtype=torch.int64).dtype is torch.int64
    check(record, scan_checkpoint(folder), ("w",), folder=folder)
    assert torch.equal(
        source(load(record, scan_checkpoint(folder), torch.device("cpu"))).take("routes", (2, 2), dtype=torch.int64), table
    )
    source(record).take("w", (2, 2))
    with pytest.raises(CheckpointError, match=r"'w' in model.safetensors has dtype I64; no installed weight format reads it"):
        check(record, scan_checkpoint(folder), (), folder=folder)


SECOND_FAMILY = """
from enginery.api import ModelSpec, hookimpl

@hookimpl
def register_models():
    architectures = ("LlamaForCausalLM",)
    return [ModelSpec(name="another", api=(2, 0), priority={priority}, architectures=architectures, describe=int, build=print)]
"""


@pytest.mark.parametrize(("priority", "chosen"), [(-1, "llama"), (1, "another")])
def test_a_second_family_for_an_architecture_stops_nobody_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, priority: int, chosen: str
) -> None:
    install(tmp_path, "second-family", "second_family", SECOND_FAMILY.format(priority=priority))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "second_family", raising=False)
    registry = Registry.load()
    if chosen == "llama":
        (family,) = (made for made in choose(EngineOptions(device="cpu"), registry).decisions if made.setting == "family")
        assert family.value == "llama"
        assert "before or instead of another (priority -1, plugin second-family (second-family==1.0))" in family.reason
    else:
        with pytest.raises(PluginError, match=r"second-family.* could not describe the model"):
            choose(EngineOptions(device="cpu"), registry)
