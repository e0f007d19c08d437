"""engine doctor on checkpoints: sound ones, and with seeded faults."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from core.cli.doctor_machine import PLUGIN, examine, failed, plugins, sound
from safetensors.torch import save_file

from enginery.cli import doctor as doctor_module
from enginery.plugin import discovery

__all__ = ["plugins", "sound"]


@pytest.fixture
def checkpoint(tmp_path: Path, folder: Path, plugins: Callable[..., None], sound) -> Path:
    """Sound, and its family is installed."""
    plugins("family", PLUGIN.replace("NAME", "family").replace("ARCHITECTURE", "ThisForCausalLM"))
    (folder / "config.json").write_text(json.dumps({"architectures": ["ThisForCausalLM"]}))
    save_file({"a": torch.zeros(100), "b": torch.zeros(50)}, folder / "model.safetensors")
    return folder


def test_a_sound_checkpoint_is_told_so(checkpoint: Path) -> None:
    rows = examine("--model", str(checkpoint), code=0)
    assert [rows[name]["status"] for name in ("model", "model family", "tokenizer", "weights")] == ["ok"] * 4
    assert rows["weights"]["detail"] == "2 tensors in 1 files"


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def cut_deep(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x00\x10")


def lose_a_shard(folder: Path) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def lose(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def damage(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


@pytest.fixture
def without_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint is looked at in this process: the tests of sound ones have that of the doctor."""
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(discovery, "distributions", discovery.distributions)
    asked = doctor_module._ask

    def ask(code: str, *arguments: str, **more: Any) -> tuple[Any, str]:
        if code != doctor_module._ASK_MODEL:
            return asked(code, *arguments, **more)
        said = io.StringIO()
        monkeypatch.setattr(sys, "argv", ["-c", *arguments])
        with contextlib.redirect_stdout(said):
            exec(code, {})
        return json.loads(said.getvalue()), ""

    monkeypatch.setattr(doctor_module, "_ask", ask)


OTHER_FAMILY = damage("config.json", '{"architectures": ["ThatForCausalLM"]}')


@pytest.mark.parametrize(
    ("faults", "told"),
    [
        ((cut, lose("tokenizer.json")), {"weights": "is cut off: tensor", "tokenizer": "tokenizer.json is missing"}),
        (
            (lose_a_shard, damage("tokenizer.json", "{")),
            {"weights": "model-2.safetensors does not exist", "tokenizer": "download the checkpoint again"},
        ),
        ((cut_deep, OTHER_FAMILY), {"weights": "is cut off or no safetensors file", "model family": "ThatForCausalLM"}),
        ((lose("model.safetensors"),), {"weights": "--load-format dummy"}),
        ((damage("config.json", "{"),), {"model family": "config.json cannot be read", "tokenizer": "config.json cannot be read"}),
    ],
)
def test_a_damaged_checkpoint_is_told(
    checkpoint: Path, without_processes: None, faults: tuple[Callable[[Path], object], ...], told: dict[str, str]
) -> None:
    for fault in faults:
        fault(checkpoint)
    rows = examine("-m", str(checkpoint), code=1)
    assert failed(rows) == told.keys()
    for row, words in told.items():
        assert words in rows[row]["detail"]


def test_a_checkpoint_that_is_not_here_is_told_and_not_downloaded(checkpoint: Path) -> None:
    assert "HF_HUB_OFFLINE" in examine("-m", "nobody/nothing", code=1)["model"]["detail"]
