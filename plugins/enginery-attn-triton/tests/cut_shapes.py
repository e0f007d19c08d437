"""What tests cut: layers of models, for a device."""

from __future__ import annotations

import numpy as np

from enginery.api import AttnLayerFacts, LatentFacts
from enginery_attn_triton.tiling import Device

H200 = Device(num_units=132, shared_bytes=227 << 10)
LLAMA = AttnLayerFacts(num_heads=32, num_kv_heads=8, head_dim=128)
DEEPSEEK = AttnLayerFacts(
    num_heads=128, num_kv_heads=1, head_dim=576, latent=LatentFacts(rank=512, rope_dim=64, nope_dim=128, value_dim=128)
)


def lens(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)
