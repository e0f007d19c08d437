"""From tensors and tables to kernels. S rows, H query heads, K KV heads, D, P, V as in `kernels/tiles.py`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from enginery_attn_triton import few_requests
from enginery_attn_triton.kernels.decode import decode, merge
from enginery_attn_triton.kernels.prefill import prefill
from enginery_attn_triton.launches import Launches
from enginery_attn_triton.plan import Split, Tiles
from enginery_attn_triton.spec import is_interpreted
from enginery_attn_triton.tiling import FEW_ROWS, HeadDims, LayerCut, Tile, keys_of_few

_LOG2_E: Final = math.log2(math.e)
_MERGED_AT_ONCE: Final = 8192  # values of parts
_MERGING: Final = 2048  # programs; most of them find nothing to merge in a large batch
_MANY_ROWS, _FEW_PARTS = 16, 16  # that so many rows have each, about, as the device takes no more programs than a few waves
_DTYPES: Final = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What becomes of q . k. window: None for none. sinks: [H] float32."""

    scale: float
    softcap: float | None = None
    window: int | None = None
    sinks: torch.Tensor | None = None

    @property
    def factors(self) -> tuple[float, float]:
        """What multiplies before the soft cap and after it, in base 2; the first alone without one."""
        if self.softcap is None:
            return self.scale * _LOG2_E, 1.0
        return self.scale / self.softcap, self.softcap * _LOG2_E

    @property
    def kind(self) -> tuple[int | None, bool, bool]:
        """What kernels are compiled for."""
        return self.window, self.softcap is None, self.sinks is None


@dataclass(frozen=True, kw_only=True, eq=False)
class Memory:
    """Paged keys and values: [pages, page size, K, D or V], and the page table, [B * P] int32."""

    k: torch.Tensor
    v: torch.Tensor
    pages: torch.Tensor


def _heads(q: torch.Tensor, out: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, dims: HeadDims) -> dict[str, Any]:
    """Where they are, which all kernels are compiled for. q, out: [S, H, .], k, v: [.., K, .], strided."""
    return dict(
        Q_STRIDE=q.stride(0),
        Q_HEAD=q.stride(1),
        OUT_STRIDE=out.stride(0),
        OUT_HEAD=out.stride(1),
        K_STRIDE=k.stride(-3),
        K_HEAD=k.stride(-2),
        V_STRIDE=v.stride(-3),
        V_HEAD=v.stride(-2),
        NUM_HEADS=dims.num_heads,
        GROUP=dims.group,
        D=dims.main,
        V=dims.value,
    )


def _common(q: torch.Tensor, out: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, dims: HeadDims) -> dict[str, Any]:
    """The arguments of `decode` and `prefill` that are known when they are compiled. Tensors: see `_heads`."""
    block_d, block_p, block_v = dims.blocks
    return dict(
        P=dims.rope,
        BLOCK_D=block_d,
        BLOCK_P=block_p,
        BLOCK_V=block_v,
        SHARED=dims.shared,
        DOT=tl.float32 if is_interpreted() else _DTYPES[q.dtype],  # the interpreter multiplies no bfloat16
        **_heads(q, out, k, v, dims=dims),
    )


def _of_tile(tile: Tile) -> dict[str, Any]:
    return dict(BLOCK_M=tile.rows, BLOCK_N=tile.keys, num_warps=tile.warps, num_stages=tile.stages)


def run_decode(
    q: torch.Tensor,
    memory: Memory,
    out: torch.Tensor,
    *,
    cut: LayerCut,
    split: Split,
    parts: torch.Tensor,
    scores: Scores,
    lengths: torch.Tensor | None = None,
    trees: torch.Tensor | None = None,
) -> None:
    """q, out: [S, H, .], of which the first rows are written. parts: uint8, as large as the cut says.

    lengths: [requests] int32, of their keys, where `split` has more; None: it has them. trees: [requests, N, N] bool, which of its
    last keys each row sees; None: all up to its own.
    """
    dims = cut.dims
    values = parts.view(torch.float32)
    sums = values[cut.decode.parts * dims.num_heads * dims.value :]
    sinks = q if scores.sinks is None else scores.sinks
    is_plain = lengths is None and trees is None and memory.k.dtype == q.dtype
    few = few_requests.kernel_of(cut, len(split.splits) // cut.decode.length) if is_plain else None
    if few is not None:
        split.launches.run(
            few,
            (dims.num_kv_heads, split.items.shape[0]),
            (q, memory.k, memory.v, out, values, sums, split.items, split.splits, memory.pages, sinks),
            scores.factors,
            partial(_of_few, q, memory, out, cut=cut, scores=scores),
            kind=(id(cut), few, scores.kind),
        )
    for items, tile in ((split.tall, cut.tall_tile), (split.items, cut.decode_tile)) if few is None else ():
        if items is None or tile is None:
            continue
        split.launches.run(
            decode,
            (dims.num_kv_heads * -(-dims.group // tile.rows), items.shape[0]),
            (
                q,
                memory.k,
                memory.v,
                out,
                values,
                sums,
                items,
                split.splits,
                memory.pages,
                sinks,
                split.splits if lengths is None else lengths,
                split.splits if trees is None else trees.view(torch.uint8),
            ),
            (cut.decode.length, *scores.factors),
            partial(
                _of_decode,
                q,
                memory,
                out,
                cut=cut,
                tile=tile,
                scores=scores,
                has_lengths=lengths is not None,
                has_trees=trees is not None,
            ),
            kind=(id(cut), tile.rows, scores.kind),
        )
    if split.merged:
        _merge(out, values, sums, split.splits, split.launches, cut=cut, sinks=sinks, has_sinks=scores.sinks is not None)


def _of_few(q: torch.Tensor, memory: Memory, out: torch.Tensor, *, cut: LayerCut, scores: Scores) -> dict[str, Any]:
    """What `decode_few` is compiled for."""
    num_warps = few_requests.num_warps(cut)
    return dict(
        PAGE_SIZE=memory.k.shape[1],
        ROWS=FEW_ROWS,
        KEYS=keys_of_few(cut.dims, cut.decode_tile) // num_warps,
        SOFTCAP=scores.softcap is not None,
        SINKS=scores.sinks is not None,
        CHAINED=cut.chained,
        launch_pdl=cut.chained,
        num_warps=num_warps,
        maxnreg=few_requests.REGISTERS[cut.dims.main],
        **_heads(q, out, memory.k, memory.v, dims=cut.dims),
    )


def _of_decode(
    q: torch.Tensor,
    memory: Memory,
    out: torch.Tensor,
    *,
    cut: LayerCut,
    tile: Tile,
    scores: Scores,
    has_lengths: bool,
    has_trees: bool,
) -> dict[str, Any]:
    """What `decode` is compiled for."""
    return dict(
        PAGE_SIZE=memory.k.shape[1],
        BLOCK_G=tile.group_rows,
        HEAD_BLOCKS=-(-cut.dims.group // tile.rows),
        SOFTCAP=scores.softcap is not None,
        SINKS=scores.sinks is not None,
        VERIFIES=cut.decode.length > 1,
        LENGTHS=has_lengths,
        WINDOW=scores.window or 0 if cut.decode.length > 1 or has_lengths else 0,
        TREES=has_trees,
        CHAINED=cut.chained,
        launch_pdl=cut.chained,
        **_common(q, out, memory.k, memory.v, dims=cut.dims),
        **_of_tile(tile),
    )


def _merge(
    out: torch.Tensor,
    values: torch.Tensor,
    sums: torch.Tensor,
    splits: torch.Tensor,
    launches: Launches,
    *,
    cut: LayerCut,
    sinks: torch.Tensor,
    has_sinks: bool,
) -> None:
    """The rows that have parts: splits [rows, 2]. values, sums: of the parts, float32."""
    dims, num_rows = cut.dims, len(splits)
    few = num_rows >= _MANY_ROWS

    def constants() -> dict[str, Any]:
        return dict(
            OUT_STRIDE=out.stride(0),
            OUT_HEAD=out.stride(1),
            NUM_HEADS=dims.num_heads,
            V=dims.value,
            BLOCK_S=_FEW_PARTS if few else max(16, _MERGED_AT_ONCE // dims.blocks[2]),
            BLOCK_V=dims.blocks[2],
            SINKS=has_sinks,
            CHAINED=cut.chained,
            launch_pdl=cut.chained,
            num_warps=1 if few and dims.blocks[2] <= 128 else 4,
        )

    grid = min(dims.num_heads, max(1, _MERGING // num_rows)), num_rows
    launches.run(merge, grid, (out, values, sums, splits, sinks), (), constants, kind=(id(cut), has_sinks))


def run_prefill(
    q: torch.Tensor, memory: Memory, out: torch.Tensor, *, cut: LayerCut, tiles: Tiles, parts: torch.Tensor, scores: Scores
) -> None:
    """q, out: [S, H, .], of which the tiles' rows are written. parts: as of `run_decode`."""
    values = parts.view(torch.float32)
    sums = values[cut.decode.parts * cut.dims.num_heads * cut.dims.value :]
    _run_tiles(
        q,
        memory.k,
        memory.v,
        out,
        dims=cut.dims,
        tiles=tiles,
        scores=scores,
        pages=memory.pages,
        page_size=memory.k.shape[1],
        causal=True,
        lse=None,
        parts=(values, sums),
    )
    if tiles.splits is not None:
        sinks = q if scores.sinks is None else scores.sinks
        _merge(out, values, sums, tiles.splits, tiles.launches, cut=cut, sinks=sinks, has_sinks=scores.sinks is not None)


def run_ragged(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    *,
    dims: HeadDims,
    tiles: Tiles,
    scale: float,
    causal: bool,
    lse: torch.Tensor | None,
) -> None:
    """See `RaggedAttendFn`."""
    scores = Scores(scale=scale)
    _run_tiles(q, k, v, out, dims=dims, tiles=tiles, scores=scores, pages=None, page_size=1, causal=causal, lse=lse)


def _run_tiles(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    *,
    dims: HeadDims,
    tiles: Tiles,
    scores: Scores,
    pages: torch.Tensor | None,
    page_size: int,
    causal: bool,
    lse: torch.Tensor | None,
    parts: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """parts: room for the results of tiles whose keys are split, and for their sums."""
    tile = tiles.tile
    values, sums = (out, out) if parts is None else parts
    blocks = -(-dims.group // tile.group_rows)

    def constants() -> dict[str, Any]:
        return dict(
            PAGE_SIZE=page_size,
            BLOCK_G=tile.group_rows,
            HEAD_BLOCKS=blocks,
            TOKENS=tile.tokens,
            PAGED=pages is not None,
            SOFTCAP=scores.softcap is not None,
            SINKS=scores.sinks is not None,
            CAUSAL=causal,
            WINDOW=scores.window or 0,
            LSE=lse is not None,
            **_common(q, out, k, v, dims=dims),
            **_of_tile(tile),
        )

    tiles.launches.run(
        prefill,
        (dims.num_kv_heads * blocks, tiles.table.shape[0]),
        (
            q,
            k,
            v,
            out,
            out if lse is None else lse,
            values,
            sums,
            tiles.table if tiles.splits is None else tiles.splits,
            tiles.table,
            tiles.table if pages is None else pages,
            q if scores.sinks is None else scores.sinks,
        ),
        scores.factors,
        constants,
        kind=(scores.kind, causal, lse is None),
    )
