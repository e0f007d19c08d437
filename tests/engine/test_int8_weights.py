"""A format of a plugin that the core has no kernels for, served as plain numbers: int8 with a scale for each row."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from engine.test_overlap_with_host_drafters import request
from offers import offering
from parity.engine_driver import options
from parity.oracle import FAMILIES, Oracle
from safetensors.torch import load_file, save_file

from enginery.api import FormatNeeds, Reason, Scheme, StoredPart, StoredWeight, WeightFormatSpec
from enginery.engine.engine import Engine
from enginery.plugin.registry import Registry

ROWS = Scheme(values="i8", block=(1, 0))


class RowInt8:
    """As in docs/hooks.md, of whole numbers."""

    def parts(self, scheme: Scheme) -> Sequence[StoredPart]:
        scales = StoredPart(suffix=".row_scale", dtype="F32", per_element=(1, 0), role="scales")
        return StoredPart(suffix=".weight", dtype="I8"), scales

    def unpack(self, parts: Mapping[str, torch.Tensor], scheme: Scheme) -> StoredWeight:
        return StoredWeight(scheme=scheme, values=parts[".weight"], scales=parts[".row_scale"])


def with_rows() -> Registry:
    """In which the format is registered."""

    def reads(config: Mapping[str, object], module: str) -> Scheme | None:
        return None if module == "lm_head" else ROWS

    def refuse(needs: FormatNeeds) -> list[Reason]:
        return []

    spec = WeightFormatSpec(
        name="rows", api=(2, 0), priority=0, summary="int8", methods=("rows",), reads=reads, refuse=refuse, load=RowInt8
    )
    registry = Registry.load()
    other = registry.offers(WeightFormatSpec)[0]
    return offering(registry, WeightFormatSpec, dataclasses.replace(other, spec=spec, name="rows"))


def quantised(oracle: Oracle, folder: Path) -> tuple[Path, Path]:
    """The checkpoint with int8 in each product of its layers, and that in plain numbers again."""
    for kind in ("int8", "plain"):
        shutil.copytree(oracle.folder, folder / kind)
    narrow, plain = {}, {}
    for name, tensor in load_file(oracle.folder / "model.safetensors").items():
        plain[name] = narrow[name] = tensor
        if name.endswith("_proj.weight"):
            scales = tensor.float().abs().amax(1, keepdim=True) / 127
            narrow[name] = (tensor / scales).round().to(torch.int8)
            plain[name] = narrow[name] * scales
            narrow[name.replace(".weight", ".row_scale")] = scales
    save_file(narrow, folder / "int8" / "model.safetensors")
    save_file(plain, folder / "plain" / "model.safetensors")
    config = json.loads((oracle.folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "rows"}}
    (folder / "int8" / "config.json").write_text(json.dumps(config))
    return folder / "int8", folder / "plain"


def prompt_logprobs(model: Path, oracle: Oracle, registry: Registry) -> torch.Tensor:
    """Of a prompt's tokens but the first."""
    engine = Engine.build(options(oracle, model=str(model), dtype="float32"), registry)
    engine.submit(request("r", oracle.prompts[0], max_tokens=1, prompt_logprobs=0))
    (output,) = [output for output in engine.step() if output.prompt_logprobs is not None]
    assert output.prompt_logprobs is not None
    return torch.tensor([each.logprob for each in output.prompt_logprobs if each is not None])


def test_int8_with_a_scale_for_each_row_is_the_float_model_but_for_rounding(
    write_oracle: Callable[..., Oracle], tmp_path: Path
) -> None:
    oracle, registry = write_oracle("llama", FAMILIES["llama"]), with_rows()
    int8, plain = quantised(oracle, tmp_path)
    found = prompt_logprobs(int8, oracle, registry)
    torch.testing.assert_close(found, prompt_logprobs(plain, oracle, registry), rtol=0, atol=1e-5)
    torch.testing.assert_close(found, prompt_logprobs(oracle.folder, oracle, registry), rtol=0, atol=0.2)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(found, prompt_logprobs(oracle.folder, oracle, registry), rtol=0, atol=1e-4)
