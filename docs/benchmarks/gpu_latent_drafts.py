"""Guesses of an MTP module beside plain decoding where layers are MLA: `python docs/benchmarks/gpu_latent_drafts.py > FILE`.

DeepSeek-V3's layers, 8 of them and 32 experts, 128 query heads, random weights, 1,024 tokens in and 256 out; two guesses, each
right four times of five by chance. With `--shape v2-lite` all layers of that size, as V3 computes them, and one guess. Verified by
`flashinfer-mla` and by `triton`, one engine after the other.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gpu_speculation import Case, measured

from enginery.config.schema import EngineOptions

RATE = 0.8
V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 32,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "vocab_size": 129280,
    "num_nextn_predict_layers": 1,
}
V2_LITE = V3 | {
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_shared_experts": 2,
    "n_routed_experts": 64,
    "routed_scaling_factor": 1.0,
    "q_lora_rank": None,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "vocab_size": 102400,
}
SHAPES = {"v3": (V3, 2), "v2-lite": (V2_LITE, 1)}  # and guesses


def rows_of(loads: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """A row for each backend, number of streams, and with guesses and without."""
    config, guesses = SHAPES[loads.shape]
    (folder / "config.json").write_text(json.dumps(config))
    for attention in loads.attention:
        plain = EngineOptions(
            model=str(folder),
            load_format="dummy",
            device="cuda",
            dtype="bfloat16",
            attention_backend=attention,
            max_model_len=4096,
            max_batch_requests=64,
            num_pages=20000,
            wait_for_kernels=True,
        )
        drafting = vars(plain) | {"drafter": "mtp", "draft_length": str(guesses)}
        right = Case(EngineOptions(**drafting), (RATE,) * guesses)
        for name, case in (("plain", Case(plain)), (f"guesses: {guesses}", right)):
            for row in measured({f"{attention}, {name}": case}, loads):
                print(json.dumps(row), file=sys.stderr, flush=True)
                yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--shape", choices=SHAPES, default="v3")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--attention", nargs="+", default=["auto", "triton"], help="auto: flashinfer-mla, where it is installed")
    parser.add_argument("--input-len", type=int, default=1024)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=2)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = list(rows_of(asked, Path(folder)))
    about = {"command": " ".join(sys.argv), "commit": asked.commit, "device": torch.cuda.get_device_name()}
    versions = {"python": sys.version.split()[0], "torch": torch.__version__}
    print(json.dumps({**about, "versions": versions, "rate": RATE, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
