"""Process start to first token of a checkpoint on disk: the first start, which compiles kernels, and the starts after it.

python docs/benchmarks/gpu_startup.py --folder /dev/shm/8b -- --attention-backend triton > gpu-startup.json

Writes the checkpoint if the folder has none: a shape of `shapes.json` in bfloat16 shards of random values. `engine bench
startup`, which gets the flags after `--`, does the rest.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

BLOCK_VALUES = 1 << 25
BYTES_PER_VALUE = 2

Shapes = Mapping[str, tuple[int, ...]]


def wanted_shapes(folder: Path) -> Shapes:
    """Of all tensors that the model in `folder` asks for."""
    from enginery.config.schema import EngineOptions
    from enginery.plugin.registry import Registry
    from enginery.worker.choice import choose
    from enginery.worker.loading import check_weights

    asked = EngineOptions(model=str(folder), load_format="dummy", device="cpu", dtype="bfloat16")
    pieces = check_weights(choose(asked, Registry.load())).record.pieces
    return {source.name: source.whole for piece in pieces for part in piece.slices for source in part.sources}


def write_checkpoint(shape: str, folder: Path, *, num_shards: int) -> None:
    """config.json, the shards and their index."""
    import torch

    from enginery.bench.workloads import write_shape

    folder.mkdir(parents=True, exist_ok=True)
    write_shape(shape, folder)
    shapes = wanted_shapes(folder)
    total = sum(map(math.prod, shapes.values()))
    files = [f"model-{number + 1:05}-of-{num_shards:05}.safetensors" for number in range(num_shards)]
    shards: dict[str, dict[str, tuple[int, ...]]] = {file: {} for file in files}
    before = 0
    for name, size in shapes.items():
        shards[files[before * num_shards // total]][name] = size
        before += math.prod(size)
    values = torch.randn(BLOCK_VALUES, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(torch.bfloat16)
    block = memoryview(values.view(torch.uint8).numpy())
    with ThreadPoolExecutor(num_shards) as pool:
        list(pool.map(lambda file: write_shard(folder / file, shards[file], block), files))
    weight_map = {name: file for file, named in shards.items() for name in named}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def write_shard(file: Path, shapes: Shapes, block: memoryview) -> None:
    """A safetensors file of bfloat16 tensors: `block` over and over, and ones for vectors."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + BYTES_PER_VALUE * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            left = BYTES_PER_VALUE * math.prod(shape)
            if len(shape) == 1:
                stream.write(b"\x80\x3f" * math.prod(shape))
                continue
            while left:
                left -= stream.write(block[: min(left, len(block))])


def measure(folder: Path, flags: Sequence[str], *, repeats: int, environment: Mapping[str, str]) -> dict[str, Any]:
    """What `engine bench startup --json` prints."""
    command = [sys.executable, "-m", "enginery", "bench", "startup", "--model", str(folder), "--repeats", str(repeats), "--json"]
    done = subprocess.run([*command, *flags], env=environment, stdout=subprocess.PIPE, check=True)
    report: dict[str, Any] = json.loads(done.stdout)
    print(report["rows"][0]["measured"], report["rows"][0]["details"]["phases_s"], file=sys.stderr, flush=True)
    return report


def main() -> None:
    """Print JSON; what is measured goes to stderr as it comes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="where the checkpoint is, or is written")
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3, help="starts after the first")
    parser.add_argument("--commit", help="where there is no repository to ask")
    parser.add_argument("flags", nargs="*", help="after --: flags of engine bench startup")
    asked = parser.parse_args()
    if not (asked.folder / "model.safetensors.index.json").exists():
        began = time.monotonic()
        write_checkpoint(asked.shape, asked.folder, num_shards=asked.shards)
        print(f"wrote {asked.folder} in {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    environment = {**os.environ, "TRITON_CACHE_DIR": str(asked.folder / "triton")}  # empty at the first start
    first = measure(asked.folder, asked.flags, repeats=1, environment=environment)
    warm = measure(asked.folder, asked.flags, repeats=asked.repeats, environment=environment)
    report = {
        "command": " ".join(sys.argv),
        "commit": asked.commit or first["commit"],
        "device": first["device"],
        "versions": first["versions"],
        "shape": asked.shape,
        "checkpoint_bytes": sum(path.stat().st_size for path in asked.folder.glob("*.safetensors")),
        "num_cpus": os.cpu_count(),
        "first_start": first["rows"][0],
        "warm_starts": warm["rows"][0],
    }
    json.dump(report, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
