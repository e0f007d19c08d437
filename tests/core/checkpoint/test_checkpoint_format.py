"""Formats that cannot be read: each is called by its name, with what to do instead, before anything else is looked at."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from enginery.checkpoint import formats
from enginery.checkpoint.folder import find_folder, read_config
from enginery.contracts.weights import FormatNeeds
from enginery.errors import CheckpointError
from enginery.plugin.registry import Registry

FILES = {"tokenizer.json": "{}"}


def write(folder: Path, *names: str) -> str:
    for name in names:
        (folder / name).write_text("{}")
    return str(folder)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ((), ["has no config.json", "Hugging Face layout", "it holds nothing"]),
        (("notes.txt",), ["has no config.json", "it holds notes.txt"]),
        (("model-Q4_K_M.gguf",), ["model-Q4_K_M.gguf", "GGUF", "llama.cpp", "take the model that it was made from"]),
        (("adapter_config.json", "adapter_model.safetensors", "tokenizer.json"), ["is a LoRA adapter", "merge_and_unload"]),
        (("consolidated.safetensors", "params.json", "tokenizer.json"), ["Mistral's", "consolidated", "config.json"]),
        (("consolidated.00.pth", "params.json"), ["Meta's", "config.json"]),
        (("pytorch_model.bin",), ["pickle of PyTorch", "weights_only=True"]),
        (("rank0.engine",), ["TensorRT-LLM"]),
        (("model_index.json",), ["diffusers"]),
    ],
)
def test_a_folder_of_another_format_is_told_by_its_name(site, tmp_path: Path, names: tuple[str, ...], words: list[str]) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    with pytest.raises(CheckpointError) as caught:
        find_folder(write(folder, *names), Registry.load())
    for word in (str(folder), *words):
        assert word in str(caught.value)
    with pytest.raises(CheckpointError, match=r"config\.json|LoRA|diffusers"):
        read_config(folder)


@pytest.mark.parametrize(("name", "words"), [("m.gguf", "GGUF, the format of llama.cpp"), ("m.pth", "pickle"), ("m.onnx", "ONNX")])
def test_a_file_of_another_format_is_told_by_its_name(site, tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=words):
        find_folder(str(tmp_path / name), Registry.load())


def refused(config: dict[str, Any]) -> None:
    """Choose among no formats at all."""
    formats = pytest.importorskip("enginery.worker.weights.formats")
    stated = formats.stated_quantization(config)
    formats.choose_format(stated, [], FormatNeeds(config=stated, device="cpu", dtype="float32"))


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ({"quant_method": "awq", "bits": 4}, "quantised with AWQ"),
        ({"quant_method": "gptq", "bits": 4}, "quantised with GPTQ"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quantised with bitsandbytes"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "quantised with compressed-tensors"),
        ({"quant_method": "mxfp4"}, "quantised with MXFP4"),
        ({"quant_method": "brand-new"}, "quantised with brand-new"),
    ],
)
def test_quantised_weights_are_told_by_their_method(stated: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        refused({"quantization_config": stated})
    assert "not read here yet" in str(caught.value)
    assert "Take the model that it was made from" in str(caught.value)


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ({"quantization_config": {"quant_algo": "NVFP4"}}, "are quantised "),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({"text_config": {"quantization_config": {"quant_method": "compressed-tensors"}}}, "compressed-tensors"),
    ],
)
def test_they_are_told_wherever_config_json_states_them(stated: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=f"{words}.*Take the model that it was made from"):
        refused(stated)


def test_what_to_do_is_not_behind_hundreds_of_names() -> None:
    listed = [f"model.layers.{index}.mlp.gate" for index in range(500)]
    stated = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": listed, "config_groups": {"group_0": {}}}
    with pytest.raises(CheckpointError, match="pack-quantized") as caught:
        refused({"quantization_config": stated})
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("algorithm", ["FP8", "NVFP4", None])
def test_what_modelopt_says_in_a_file_of_its_own_is_told(tmp_path: Path, algorithm: str | None) -> None:
    """Without one, keys and values alone are quantised, and weights are plain."""
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(said))
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["A"]}))
    config = read_config(tmp_path)
    if algorithm is None:
        assert config == {"architectures": ["A"]}
        return
    with pytest.raises(CheckpointError, match=f"with NVIDIA ModelOpt .*{algorithm}"):
        refused(config)


def test_weights_quantised_for_mlx_are_told() -> None:
    with pytest.raises(CheckpointError, match="Apple's MLX"):
        refused({"quantization": {"group_size": 64, "bits": 4}})


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pytorch_model.bin", "pytorch_model.bin is a pickle of PyTorch"),
        ("model.gguf", "model.gguf is GGUF"),
        ("consolidated.safetensors", "consolidated.safetensors is in the layout of Mistral's own programs"),
    ],
)
def test_weights_of_another_format_beside_a_config_are_told(tmp_path: Path, name: str, words: str) -> None:
    scan = pytest.importorskip("enginery.checkpoint.files").scan_checkpoint
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["A"]}))
    (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=words):
        scan(tmp_path)


def test_the_advice_for_pickles_keeps_all_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run as it is told. Tensors that share memory, and columns of others, are what save_file refuses."""
    torch, safetensors = pytest.importorskip("torch"), pytest.importorskip("safetensors")
    importlib.import_module("safetensors.torch")
    table = torch.arange(6.0).reshape(2, 3)
    stored = {"fc.weight": table.T, "embed.weight": table, "head.weight": table}
    pickles = [tmp_path / f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]
    torch.save(stored, pickles[0])
    torch.save({"norm.weight": table[0]}, pickles[1])
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"safetensors.torch.save_file\(.*\)", str(formats.refuse_file(pickles[0])))
    eval(code, {"torch": torch, "safetensors": safetensors, "FILES": pickles})
    found = safetensors.torch.load_file("model.safetensors")
    assert found.keys() == {*stored, "norm.weight"}
    assert all(torch.equal(found[name], stored[name]) for name in stored)
