"""Formats of models that cannot be read, told by the files of a folder and by config.json: what it is, and what to do instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from enginery.errors import CheckpointError

_HUGGING_FACE: Final = "the Hugging Face layout (config.json, tokenizer.json and *.safetensors)"
_GGUF: Final = (
    f"GGUF, the format of llama.cpp, which is not read here yet; take the model that it was made from, in {_HUGGING_FACE}, "
    "as a folder or by its Hugging Face id"
)
_CONVERT: Final = (
    "not read here, because loading it can run code; what is read is made of all such FILES by safetensors.torch.save_file("
    "{name: each.contiguous().clone() for file in FILES for name, each in "
    'torch.load(file, map_location="cpu", weights_only=True).items()}, "model.safetensors")'
)
_OTHER_WEIGHTS: Final = {  # by the ends of file names
    ".gguf": _GGUF,
    **dict.fromkeys((".pth", ".pt", ".bin"), f"a pickle of PyTorch, {_CONVERT}"),
    ".onnx": f"ONNX, which is not read here; take the model in {_HUGGING_FACE}",
    ".h5": f"TensorFlow's format, which is not read here; take the model in {_HUGGING_FACE}",
    ".msgpack": f"Flax's format, which is not read here; take the model in {_HUGGING_FACE}",
    ".engine": f"an engine of TensorRT-LLM, which is not read here; take the model in {_HUGGING_FACE}",
}
_OTHER_LAYOUTS: Final = {  # by a file that only they have
    "adapter_config.json": (
        "a LoRA adapter (adapter_config.json), not a whole model, and adapters are not served yet; merge it into "
        "its model with peft (merge_and_unload, then save_pretrained) and give the folder that this writes"
    ),
    "params.json": (
        "in the layout of the model's makers (params.json, consolidated.*: Mistral's or Meta's), which is not "
        f"read here; take the same model in {_HUGGING_FACE}, which most of their repositories hold too"
    ),
    "model_index.json": "a pipeline of diffusers (model_index.json); only language models that generate text are served",
}
_QUANTIZATIONS: Final = {  # quant_method of quantization_config
    "fp8": "float8",
    "mlx": "Apple's MLX",
    "awq": "AWQ",
    "gptq": "GPTQ",
    "compressed-tensors": "compressed-tensors (llm-compressor)",
    "fbgemm_fp8": "FBGEMM float8",
    "modelopt": "NVIDIA ModelOpt",
    "mxfp4": "MXFP4",
    "exl2": "ExLlamaV2",
    "exl3": "ExLlamaV3",
    "hqq": "HQQ",
    "quark": "AMD Quark",
}


def refuse_file(path: Path) -> CheckpointError:
    if format_name := _OTHER_WEIGHTS.get(path.suffix):
        return CheckpointError(f"{path} is {format_name}")
    return CheckpointError(f"{path} is a file; give the folder that holds config.json and the weights")


def check_folder(folder: Path) -> None:
    """Raise `CheckpointError` for a folder without config.json, by what it holds instead."""
    if (folder / "config.json").exists() or not folder.is_dir():
        return
    names = sorted(path.name for path in folder.iterdir())
    for name, what in _OTHER_LAYOUTS.items():
        if name in names:
            raise CheckpointError(f"{folder} is {what}")
    for name in names:
        if format_name := _OTHER_WEIGHTS.get(Path(name).suffix):
            raise CheckpointError(f"{folder} has no config.json, and {name} in it is {format_name}")
    held = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    raise CheckpointError(
        f"{folder} has no config.json; it must be a checkpoint folder of {_HUGGING_FACE}, and it holds {held or 'nothing'}"
    )


def other_weights(folder: Path) -> str:
    """What a folder without safetensors holds in their place: a sentence, or nothing."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name.startswith("consolidated") and path.suffix == ".safetensors":
            return f"{path.name} is in the layout of Mistral's own programs, which is not read here; fetch model*.safetensors too"
        if path.name != "training_args.bin" and (format_name := _OTHER_WEIGHTS.get(path.suffix)):
            return f"{path.name} is {format_name}"
    return ""


def refuse_quantization(stated: Mapping[str, object], formats: Sequence[str], said: Sequence[str] = ()) -> CheckpointError:
    """For a quantization_config that none of `formats` reads. said: why those that know its method refuse."""
    method = stated.get("quant_method", "mlx" if "bits" in stated else None)
    name = "" if method is None else f" with {_QUANTIZATIONS.get(str(method), method)}"
    shown = {key: value for key, value in stated.items() if not isinstance(value, list | dict)}  # lists have hundreds of modules
    return CheckpointError(
        f"the weights are quantised{name} (quantization_config of config.json, or hf_quant_config.json: {shown!r})"
        f"{''.join(f'; {each}' for each in said) or ', which is not read here yet'}; served are plain weights"
        f"{''.join(f', and {each}' for each in formats)}. Take the model that it was made from, or install a plugin for the format"
    )
