"""How many variants of its kernels Triton compiles."""

from __future__ import annotations

import pytest
import torch

from enginery.api import SamplingTensors
from enginery_ops_triton.sampling import draw_rows


@pytest.mark.gpu
def test_one_variant_of_each_kernel_serves_any_number_of_rows() -> None:
    """The rows of a table begin at any alignment, and a variant of the longest kernel takes 1.4 s to compile."""
    import triton

    vocab, compiled = 5003, list[str]()  # a vocabulary that no other test has

    def listen(src: object, metadata: dict[str, str], metadata_group: object, times: object, cache_hit: bool) -> None:
        compiled.append(metadata["name"])

    with triton.knobs.compilation.scope():
        triton.knobs.compilation.listener = listen
        for rows in (1, 2, 3, 4, 16, 64):
            logits = torch.randn(rows, vocab, device="cuda")
            table = torch.tensor([0.5, 2.0, 0.5, 0.1, 0.5], device="cuda")[:, None].expand(5, rows).contiguous()
            draw_rows(logits, SamplingTensors(table=table, most_kept=2, cut=True), dependent_launch=False)
    assert sorted(compiled) == ["best_of_blocks", "draw_cut_rows", "look_at_block"]
