"""Compiles what draws tokens for compute capability 9.0, without a GPU, for the vocabularies and types of real models."""

from __future__ import annotations

import compile_only
import torch

from enginery.api import SamplingTensors
from enginery_ops_triton.kernels import sampling
from enginery_ops_triton.sampling import draw_rows


def main() -> None:
    compile_only.install(reads_code=True)
    table = torch.zeros(5, 2)
    for vocab_size, dtype in ((151_936, torch.bfloat16), (128_256, torch.float32), (300, torch.float16)):
        logits = torch.zeros(2, vocab_size, dtype=dtype)
        draw_rows(logits, SamplingTensors(table=table, most_kept=vocab_size, cut=True), dependent_launch=True)
    for kernel in (sampling.look_at_block, sampling.draw_cut_rows):
        ((made, *_),) = kernel.device_caches.values()
        assert len(made) == 3
        for each in made.values():
            assert compile_only.stack_bytes(each.asm["cubin"]) < 16, "next to all of it is in registers"
            ptx = each.asm["ptx"]
            assert "cvt.rn.f32.u32" in ptx, "the hash has no sign"
            assert "shr.u32" in ptx


if __name__ == "__main__":
    main()
