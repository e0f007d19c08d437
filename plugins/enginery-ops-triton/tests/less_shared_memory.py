"""Compiles products and experts of many rows for less shared memory than Hopper's. Triton refuses what needs more than there is."""

from __future__ import annotations

import compile_only
import torch

from enginery.api import Activation, ExpertNames, ExpertsShape, Routed, StoredWeight
from enginery_ops_triton import experts, small_linear
from enginery_ops_triton.experts_float4 import Float4Experts
from enginery_ops_triton.spec import FLOAT4_BLOCKS, FLOAT8_BLOCKS

EXPERTS, COLUMNS, INNER, TOP_K = 4, 256, 256, 2
SHAPE = ExpertsShape(names=ExpertNames(), count=EXPERTS, inner=INNER, hidden=COLUMNS, activation=Activation())


def stored(rows: int, columns: int) -> StoredWeight:
    values = torch.zeros(EXPERTS, rows, columns).to(torch.float8_e4m3fn)
    return StoredWeight(scheme=FLOAT8_BLOCKS, values=values, scales=torch.ones(EXPERTS, -(-rows // 128), -(-columns // 128)))


def packed(rows: int, columns: int) -> StoredWeight:
    values = torch.zeros(EXPERTS, rows, columns // 2, dtype=torch.uint8)
    scales = torch.full((EXPERTS, rows, columns // 32), 120, dtype=torch.uint8)
    return StoredWeight(scheme=FLOAT4_BLOCKS, values=values, scales=scales.view(torch.float8_e8m0fnu))


def main() -> None:
    plain = [torch.zeros(EXPERTS, *shape, dtype=torch.bfloat16) for shape in ((2 * INNER, COLUMNS), (COLUMNS, INNER))]
    float8 = [stored(2 * INNER, COLUMNS), stored(COLUMNS, INNER)]
    float4 = [packed(2 * INNER, COLUMNS), packed(COLUMNS, INNER)]
    for capability, most in compile_only.LESS_SHARED.items():
        compile_only.install(capability=capability)
        experts.shared_bytes = lambda device, most=most: most
        for weights in (plain, float4, float8) if capability >= 89 else (plain, float4):
            bound = experts.bind_experts(*weights, SHAPE, dependent_launch=False)
            assert isinstance(bound, experts.Experts | Float4Experts)
            for num_tokens in (1, 20, 40, 64, 256):  # of several, tiles of 16, 32, 64 and 128 pairs
                ids = torch.zeros(num_tokens, TOP_K, dtype=torch.int32)
                bound(torch.zeros(num_tokens, COLUMNS, dtype=torch.bfloat16), Routed(ids, torch.ones(num_tokens, TOP_K)))
        for outputs, columns, rows in ((4096, 4096, 32), (4096, 4096, 64), (2048, 4096, 16), (1024, 2048, 16)):
            shape = small_linear.few_rows_shape(outputs, columns, rows, multiprocessors=128, available=most)
            assert shape is not None
            product = small_linear.FewRows(torch.zeros(outputs, columns, dtype=torch.bfloat16), None, shape, dependent_launch=False)
            product(torch.zeros(rows, columns, dtype=torch.bfloat16))


if __name__ == "__main__":
    main()
