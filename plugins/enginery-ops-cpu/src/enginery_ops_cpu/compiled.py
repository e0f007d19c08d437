"""The operations as the core calls them, by compiled kernels. What these cannot take goes to torch.

A decoding step of a small model calls some hundred of them, and each takes a few microseconds: so what can be known when weights
are bound is, and the rest is addresses and sizes. M rows, N outputs, K columns, T tokens, H heads, D head dim.
"""

from __future__ import annotations

from types import ModuleType
from typing import Final

import torch
import torch.nn.functional as F

from enginery.api import LinearFn, StoredWeight
from enginery.nn import reference_ops

CODES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ALL_ROWS: Final = 1 << 62
FEW_ROWS: Final = 16
# Up to so many rows a product runs in these kernels, by instruction set and dtype, beyond in torch (docs/log.md, 2026-11-23): with
# AVX-512 torch is slower in float32 at every size, and 6 % faster in bfloat16 at a thousand rows; with AMX it is far faster.
MOST_ROWS: Final = {
    ("avx512_bf16", torch.float32): ALL_ROWS,
    ("avx512", torch.float32): ALL_ROWS,
    ("avx512_bf16", torch.bfloat16): 128,
}


class CompiledOps:
    """Each method is an operation of `OpTable`. kernels: the extension."""

    def __init__(self, kernels: ModuleType) -> None:
        self.kernels = kernels
        self.codes = {dtype: code for dtype, code in CODES.items() if dtype is not torch.float16 or kernels.has_float16}

    def embed(self, table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The rows of the table. Raises IndexError for ids that it does not have."""
        if table.stride(1) != 1 or ids.dim() != 1 or not ids.is_contiguous():
            return reference_ops.embed(table, ids)
        (rows, columns), count, size = table.shape, ids.shape[0], table.itemsize
        out = torch.empty((count, columns), dtype=table.dtype)
        self.kernels.embed(table.data_ptr(), ids.data_ptr(), out.data_ptr(), rows, count, columns * size, table.stride(0) * size)
        return out

    def bind_linear(self, weight: torch.Tensor | StoredWeight, bias: torch.Tensor | None) -> LinearFn:
        """y = x W^T + b. The weight stays as it is, row by row, and torch's products of many rows read the same."""
        if isinstance(weight, StoredWeight):
            return reference_ops.bind_linear(weight, bias)
        dtype = weight.dtype
        if weight.is_meta or dtype not in self.codes or 0 in weight.shape or (bias is not None and bias.dtype != dtype):
            return reference_ops.bind_linear(weight, bias)
        weight = weight.contiguous()
        outputs, columns = weight.shape
        most = MOST_ROWS.get((self.kernels.isa, dtype), FEW_ROWS)
        code, product, empty = self.codes[dtype], self.kernels.linear, torch.empty
        at, offset = weight.data_ptr(), 0 if bias is None else bias.data_ptr()

        def linear(x: torch.Tensor) -> torch.Tensor:
            shape = x.shape
            if len(shape) != 2 or shape[0] > most or x.dtype is not dtype or shape[1] != columns or x.stride(1) != 1:
                return F.linear(x, weight, bias)
            rows = shape[0]
            out = empty((rows, outputs), dtype=dtype)
            product(code, x.data_ptr(), at, offset, out.data_ptr(), rows, outputs, columns, x.stride(0))
            return out

        return linear

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Over the last dimension; a weight for each head broadcasts."""
        dtype, shape = x.dtype, x.shape
        per_row = weight.dim() == 1
        heads = 1 if per_row else weight.shape[0]
        fits = per_row or (len(shape) > 1 and weight.shape == shape[-2:])
        if dtype not in self.codes or weight.dtype is not dtype or not fits or not weight.is_contiguous():
            return reference_ops.rms_norm(x, weight, eps)
        size = shape[-1]
        if not x.is_contiguous():
            x = x.contiguous()
        out = torch.empty(shape, dtype=dtype)
        self.kernels.norm(
            self.codes[dtype],
            x.data_ptr(),
            0,
            weight.data_ptr(),
            out.data_ptr(),
            out.numel() // size if size else 0,
            size,
            size,
            0,
            heads,
            eps,
        )
        return out

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """The norm of residual + x; residual keeps the sum."""
        dtype, shape = residual.dtype, residual.shape
        fits = len(shape) == 2 and x.shape == shape and weight.dim() == 1 and x.stride(1) == 1 and residual.stride(1) == 1
        if not fits or dtype not in self.codes or x.dtype is not dtype or weight.dtype is not dtype or weight.stride(0) != 1:
            return reference_ops.add_rms_norm(x, residual, weight, eps)
        rows, size = shape
        out = torch.empty(shape, dtype=dtype)
        self.kernels.norm(
            self.codes[dtype],
            x.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            rows,
            size,
            x.stride(0),
            residual.stride(0),
            1,
            eps,
        )
        return out

    def qk_norm_rotary(self, qk: torch.Tensor, weight: torch.Tensor | None, eps: float, cos_sin: torch.Tensor) -> None:
        """In place on [T, N, D], whose tokens and heads may be any distance apart."""
        if not self._rotates(qk, weight, cos_sin):
            reference_ops.qk_norm_rotary(qk, weight, eps, cos_sin)
            return
        self._rotate(qk, weight, eps, cos_sin)

    def qk_norm_rotary_write(
        self,
        qkv: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        cos_sin: torch.Tensor,
        *,
        keys: torch.Tensor,
        values: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """`qk_norm_rotary` on the first H + K heads, then keys and values to their slots. Raises IndexError for others."""
        strides = keys.stride()
        kept = keys.dtype in self.codes and keys.dtype is values.dtype and strides == values.stride() and strides[2] == 1
        kept = kept and keys.shape == values.shape and (len(slots), keys.shape[2]) == (qkv.shape[0], qkv.shape[2])
        if not kept or not slots.is_contiguous() or not self._rotates(qkv, weight, cos_sin):
            reference_ops.qk_norm_rotary_write(qkv, weight, eps, cos_sin, keys=keys, values=values, slots=slots)
            return
        self._rotate(qkv, weight, eps, cos_sin, (keys, values, slots))

    def _rotates(self, heads: torch.Tensor, weight: torch.Tensor | None, cos_sin: torch.Tensor) -> bool:
        dtype = heads.dtype
        fits = dtype in self.codes and cos_sin.dtype is dtype and heads.stride(2) == 1 and cos_sin.stride(1) == 1
        fits = fits and len(cos_sin) == len(heads)
        return fits and (weight is None or (weight.dtype is dtype and weight.dim() == 2 and weight.stride(1) == 1))

    def _rotate(
        self,
        heads: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        cos_sin: torch.Tensor,
        stored: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        (tokens, count, dim), (token_stride, head_stride, _) = heads.shape, heads.stride()
        angle_stride, rotary = cos_sin.stride(0), cos_sin.shape[1]
        scale, scale_stride = (0, 0) if weight is None else (weight.data_ptr(), weight.stride(0))
        kept, kv, at = heads.dtype, 0, (0, 0, 0, 0)
        slot_strides: tuple[int, ...] = (0, 0)
        if stored is not None:
            keys, values, slots = stored
            kept, at = keys.dtype, (keys.data_ptr(), values.data_ptr(), slots.data_ptr(), keys.shape[0])
            kv, slot_strides = keys.shape[1], keys.stride()[:2]
        self.kernels.rotate(
            self.codes[heads.dtype],
            self.codes[kept],
            heads.data_ptr(),
            scale,
            cos_sin.data_ptr(),
            *at,
            tokens,
            count - kv,
            kv,
            dim,
            rotary,
            token_stride,
            head_stride,
            scale_stride,
            angle_stride,
            *slot_strides,
            eps,
        )

    def gated_silu(self, x: torch.Tensor) -> torch.Tensor:
        """silu(first half) * second half."""
        if x.dtype not in self.codes or x.dim() != 2 or x.stride(1) != 1:
            return reference_ops.gated_silu(x)
        rows, columns = x.shape
        out = torch.empty((rows, columns // 2), dtype=x.dtype)
        self.kernels.gate(self.codes[x.dtype], x.data_ptr(), out.data_ptr(), rows, columns // 2, x.stride(0))
        return out

    def greedy(self, logits: torch.Tensor) -> torch.Tensor:
        """The first largest of each row; of a row with NaN the first NaN, as torch has it."""
        if logits.dtype not in self.codes or logits.dim() != 2 or logits.stride(1) != 1 or not logits.shape[1]:
            return reference_ops.greedy(logits)
        rows, columns = logits.shape
        ids = torch.empty(rows, dtype=torch.int64)
        self.kernels.greedy(self.codes[logits.dtype], logits.data_ptr(), ids.data_ptr(), rows, columns, logits.stride(0))
        return ids
