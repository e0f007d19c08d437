"""Linear layers for decoding: below a measured number of rows, kernels that read the weight once at the memory's speed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Final

import torch
import torch.nn.functional as F

from enginery.api import LinearFn
from enginery.nn import reference_ops
from enginery_ops_triton.gluon_kernels import gluon_kernels
from enginery_ops_triton.kernels import linear
from enginery_ops_triton.kernels.launch import next_power_of_2
from enginery_ops_triton.matvec import MATVEC_ROWS, Matvec, Norming, OfNorm, bind_normed, matvec_shape
from enginery_ops_triton.persistent_rows import PERSISTENT_ROWS, bind_persistent
from enginery_ops_triton.shared_memory import HOPPER_BYTES, fitting_stages, shared_bytes
from enginery_ops_triton.stream_k import bind_stream_k, serves
from enginery_ops_triton.unit_rows import bind_unit_row

DIRECT_ROWS: Final = 8
FEW_ROWS: Final = 16
MOST_ROWS: Final = 64
SEVERAL_ROWS: Final = (DIRECT_ROWS, FEW_ROWS, 32, MOST_ROWS)
"""Each is the most of a product that is chosen for itself."""
LEAST_COLUMNS, MOST_COLUMNS = 16, 32768
LEAST_DIRECT_COLUMNS, MOST_DIRECT_OUTPUTS = 2048, 16384
MOST_OUTPUTS_OF_SHORT_ROWS: Final = 32768  # of LEAST_DIRECT_COLUMNS, for several rows of x


@dataclass(frozen=True, kw_only=True)
class DirectShape:
    """A program's outputs, columns that a warp takes at once, and how many such blocks are on their way, of the weight and of x.

    registers: the most that a thread may have, so that several programs run on a multiprocessor.
    """

    block_n: int
    block_k: int
    num_warps: int
    ahead: int
    x_ahead: int
    registers: int


@dataclass(frozen=True, kw_only=True)
class FewRowsShape:
    """Outputs and columns of a program's block, programs that share the columns, blocks in flight."""

    block_n: int
    block_k: int
    split: int
    stages: int


def direct_shape(outputs: int, columns: int, rows: int, *, multiprocessors: int) -> DirectShape | None:
    """From docs/benchmarks/kernels-direct-rows.json, up to `DIRECT_ROWS` rows. None: others are faster, or programs too few.

    Where all outputs are on the device at once, a multiprocessor has one program, which needs many warps if it has few outputs.
    More than `MOST_DIRECT_OUTPUTS` are for several rows of 2048 columns, as of DeepSeek-V2-Lite's first layer: cuBLAS clears
    memory in front of that product, for which a captured step waits.
    """
    if rows == 1:
        serves = _serves_one_row(outputs, columns, multiprocessors=multiprocessors)
    else:
        serves = columns >= LEAST_DIRECT_COLUMNS and outputs >= 8 * multiprocessors
    if not serves or columns % 16:
        return None
    if columns > 4096 or outputs <= 16 * multiprocessors:
        return _direct(block_n=16, num_warps=16, ahead=4, columns=columns, registers=128)
    if outputs <= 24 * multiprocessors:
        return _direct(block_n=32, num_warps=8, ahead=5, columns=columns, registers=255)
    if outputs <= 32 * multiprocessors:
        return _direct(block_n=32, num_warps=16, ahead=2, columns=columns, registers=128)
    if outputs <= (MOST_OUTPUTS_OF_SHORT_ROWS if columns == LEAST_DIRECT_COLUMNS and rows > 1 else MOST_DIRECT_OUTPUTS):
        return _direct(block_n=32, num_warps=8, ahead=2, columns=columns, registers=128)
    return None


def _serves_one_row(outputs: int, columns: int, *, multiprocessors: int) -> bool:
    """Whether it is faster than `Matvec`: kernels-direct-rows.json, and kernels-one-row.json for no more than 16 outputs each."""
    if outputs <= 16 * multiprocessors:
        return outputs >= 7 * multiprocessors and 512 <= columns <= 8192
    return LEAST_DIRECT_COLUMNS < columns <= 4096 if outputs <= 32 * multiprocessors else columns == LEAST_DIRECT_COLUMNS


def _direct(*, block_n: int, num_warps: int, ahead: int, columns: int, registers: int) -> DirectShape:
    """No more blocks on their way than there are."""
    ahead = min(ahead, -(-columns // (64 * num_warps)))
    return DirectShape(block_n=block_n, block_k=64, num_warps=num_warps, ahead=ahead, x_ahead=min(ahead, 4), registers=registers)


def few_rows_shape(
    outputs: int, columns: int, rows: int, *, multiprocessors: int, available: int = HOPPER_BYTES
) -> FewRowsShape | None:
    """available: bytes of shared memory that a program can have, which as many blocks are on their way as fit into."""
    shape = _fastest_of_few(outputs, columns, rows, multiprocessors=multiprocessors)
    if shape is None:
        return None
    block_bytes = 2 * (shape.block_n + max(FEW_ROWS, rows)) * shape.block_k
    return replace(shape, stages=fitting_stages(shape.stages, block_bytes, available))


def _fastest_of_few(outputs: int, columns: int, rows: int, *, multiprocessors: int) -> FewRowsShape | None:
    """From docs/benchmarks/kernels-few-rows.json and kernels-few-rows-gpt-oss.json. None: cuBLAS is faster.

    What is fastest keeps all programs on the device at once.

    For up to `FEW_ROWS` rows a multiprocessor has room for two programs with three blocks in flight, or three with two. More rows
    leave room for one with five. So few outputs as a router has leave the device to many programs of 16 each.
    """
    if columns <= 3072 and outputs <= 512 and FEW_ROWS < rows <= 32:
        return FewRowsShape(block_n=16, block_k=256, split=-(-columns // 256), stages=2)
    if columns <= 3072 and outputs <= 4096:  # a program has one block, which is on its way before x is there
        block_k = min(512, next_power_of_2(columns))
        split = -(-columns // block_k)
        return FewRowsShape(block_n=32, block_k=block_k, split=split, stages=3) if rows <= FEW_ROWS else None
    if rows <= FEW_ROWS and columns > 2048:
        programs = -(-outputs // 64) * 4
        stages = 3 if programs <= 2 * multiprocessors else 2
        return FewRowsShape(block_n=64, block_k=256, split=4, stages=stages) if programs <= 3 * multiprocessors else None
    programs = -(-outputs // 32)
    least = multiprocessors * 2 // 3 if rows <= 32 else multiprocessors * 3 // 4
    if not FEW_ROWS < rows <= MOST_ROWS or not least <= programs <= multiprocessors or columns < 4096:
        return None
    if rows <= 32:
        return FewRowsShape(block_n=32, block_k=256, split=1, stages=5)
    return FewRowsShape(block_n=64, block_k=128, split=2, stages=5)


def bind_small_linear(weight: torch.Tensor, bias: torch.Tensor | None, *, dependent_launch: bool) -> LinearFn:
    """y = x W^T + b. weight [out, in] keeps its layout, and must not change while kernels run: it is read ahead of its turn."""
    outputs, columns = weight.shape
    if weight.is_meta or weight.stride(1) != 1 or not LEAST_COLUMNS <= columns <= MOST_COLUMNS or outputs == 0:
        return Product(weight, bias, {})
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16) or (bias is not None and bias.dtype != weight.dtype):
        return Product(weight, bias, {})
    by_rows: dict[int, LinearFn] = {  # the most rows of each
        MATVEC_ROWS: Matvec(weight, bias, matvec_shape(columns), dependent_launch=dependent_launch)
    }
    multiprocessors, is_short = _multiprocessors(weight.device), weight.dtype is not torch.float32
    if is_short and dependent_launch:
        by_rows |= _bind_in_gluon(weight, bias, multiprocessors=multiprocessors)
    for most in SEVERAL_ROWS if is_short else ():
        if most in by_rows:
            continue
        if shape := few_rows_shape(outputs, columns, most, multiprocessors=multiprocessors, available=shared_bytes(weight.device)):
            by_rows[most] = FewRows(weight, bias, shape, dependent_launch=dependent_launch)
        else:
            by_rows[most] = functools.partial(F.linear, weight=weight, bias=bias)
    in_order = dict(sorted(by_rows.items()))
    of_norm = bind_unit_row(weight, bias) if is_short and dependent_launch else None
    return Product(weight, bias, in_order, of_norm=of_norm or bind_normed(weight, bias, dependent_launch=dependent_launch))


def _bind_in_gluon(weight: torch.Tensor, bias: torch.Tensor | None, *, multiprocessors: int) -> dict[int, LinearFn]:
    """What is written in Gluon, by the most rows of each."""
    (outputs, columns), by_rows = weight.shape, dict[int, LinearFn]()
    shapes = {most: direct_shape(outputs, columns, most, multiprocessors=multiprocessors) for most in (MATVEC_ROWS, DIRECT_ROWS)}
    if weight.stride(0) % 16 == 0 and (kernels := gluon_kernels("linear_few")):
        for most, shape in shapes.items():
            if shape:
                by_rows[most] = DirectRows(weight, bias, shape, kernels=kernels, dependent_launch=True)
    is_direct = DIRECT_ROWS in by_rows
    if persistent := bind_persistent(weight, bias, is_direct=is_direct, multiprocessors=multiprocessors):
        by_rows[PERSISTENT_ROWS] = persistent
    if in_shares := bind_stream_k(weight, bias, multiprocessors=multiprocessors):
        for most in SEVERAL_ROWS:
            if serves(outputs, columns, most, programs=in_shares.programs):
                by_rows[most] = in_shares
    return by_rows


def bind_router(weight: torch.Tensor, *, dependent_launch: bool) -> LinearFn:
    """Logits in float32. weight [E, C] keeps its layout, and must not change while kernels run.

    Of several rows, the weight is read once where a program has all columns in registers: up to 4096.
    """
    plain = reference_ops.bind_router(weight)
    columns = weight.shape[1]
    able = weight.dtype in (torch.float32, torch.bfloat16, torch.float16) and not weight.is_meta and weight.stride(1) == 1
    if not able or not LEAST_COLUMNS <= columns <= MOST_COLUMNS:
        return plain
    shape = matvec_shape(columns)
    few = Matvec(weight, None, shape, dtype=torch.float32, dependent_launch=dependent_launch)
    most = DIRECT_ROWS if shape.ahead * shape.block_k >= columns else MATVEC_ROWS
    of_norm = bind_normed(weight, None, dtype=torch.float32, dependent_launch=dependent_launch)
    return Router(plain, few, most, of_norm=of_norm)


def _multiprocessors(device: torch.device) -> int:
    """An H200's where there is no device, as in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


class Router(Norming):
    """Logits: of few rows by one kernel, of more by another product."""

    def __init__(self, plain: LinearFn, few: LinearFn, most: int, *, of_norm: OfNorm | None) -> None:
        """few: of up to `most` rows."""
        super().__init__(of_norm)
        self._plain, self._few, self._most = plain, few, most

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[N, C] -> [N, E] float32."""
        if (made := self._made_of(x)) is not None:
            return made
        return self._few(x) if 0 < x.shape[0] <= self._most and x.stride(1) == 1 else self._plain(x)


class Product(Norming):
    """By what is bound for so many rows, or by torch."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        by_rows: Mapping[int, LinearFn],
        *,
        of_norm: OfNorm | None = None,
    ) -> None:
        """by_rows: by the most rows of each, in order."""
        super().__init__(of_norm)
        self.weight, self.bias, self.by_rows, self.most_rows = weight, bias, by_rows, max(by_rows, default=0)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[N, in] -> [N, out]."""
        if (made := self._made_of(x)) is not None:
            return made
        num_rows = x.shape[0]
        if 0 < num_rows <= self.most_rows and x.dim() == 2 and x.stride(1) == 1 and x.dtype == self.weight.dtype:
            for most, linear in self.by_rows.items():
                if num_rows <= most:
                    return linear(x)
        return F.linear(x, self.weight, self.bias)

    def with_gate(self, gated_silu: Callable[[torch.Tensor], torch.Tensor]) -> LinearFn:
        """[N, in] -> [N, out / 2]; the kernel that norms one row takes its gate too."""
        return GatedProduct(self, gated_silu)

    def into(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """The same of many rows, by torch, written to out [N, out]."""
        if self.bias is None:
            torch.mm(x, self.weight.t(), out=out)
        else:
            torch.addmm(self.bias, x, self.weight.t(), out=out)


class GatedProduct(Norming):
    """silu(gate) * up of a product of gates, and then ups."""

    def __init__(self, product: Product, gated_silu: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(None if product.of_norm is None else product.of_norm.with_gate())
        self._product, self._gated_silu = product, gated_silu

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[N, in] -> [N, out / 2]."""
        made = self._made_of(x)
        return self._gated_silu(self._product(x)) if made is None else made


class DirectRows:
    """For up to DIRECT_ROWS rows, in bfloat16 or float16."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        shape: DirectShape,
        *,
        kernels: ModuleType,
        dependent_launch: bool,
    ) -> None:
        """kernels: `kernels.linear_few`."""
        self.weight = weight
        self.bias = bias
        self.shape = shape
        self.kernels = kernels
        self.dependent_launch = dependent_launch

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[N, in] -> [N, out]."""
        weight, shape, num_rows = self.weight, self.shape, x.shape[0]
        outputs, columns = weight.shape
        out = torch.empty((num_rows, outputs), dtype=x.dtype, device=x.device)
        self.kernels.linear_of_few[(-(-outputs // shape.block_n),)](
            x,
            weight,
            weight if self.bias is None else self.bias,
            out,
            num_rows,
            x.stride(0),
            weight.stride(0),
            outputs,
            COLUMNS=columns,
            BLOCK_N=shape.block_n,
            BLOCK_K=shape.block_k,
            AHEAD=shape.ahead,
            X_AHEAD=shape.x_ahead,
            BIAS=self.bias is not None,
            CHAINED=self.dependent_launch,
            num_warps=shape.num_warps,
            maxnreg=shape.registers,
            launch_pdl=self.dependent_launch,
        )
        return out


class FewRows:
    """For up to MOST_ROWS rows. Owns the counters of its split, so one stream may run it at a time."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, shape: FewRowsShape, *, dependent_launch: bool) -> None:
        self.weight = weight
        self.bias = bias
        self.shape = shape
        self.dependent_launch = dependent_launch
        self.arrived = torch.zeros(-(-weight.shape[0] // shape.block_n), dtype=torch.int32, device=weight.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[N, in] -> [N, out]."""
        weight, shape, num_rows = self.weight, self.shape, x.shape[0]
        outputs, columns = weight.shape
        out = torch.empty((num_rows, outputs), dtype=x.dtype, device=x.device)
        partial = out
        if shape.split > 1:
            partial = torch.empty((shape.split, num_rows, outputs), dtype=torch.float32, device=x.device)
        linear.few_rows[(len(self.arrived), shape.split)](
            x,
            weight,
            weight if self.bias is None else self.bias,
            out,
            partial,
            self.arrived,
            num_rows,
            x.stride(0),
            weight.stride(0),
            outputs,
            COLUMNS=columns,
            BLOCK_M=max(FEW_ROWS, next_power_of_2(num_rows)),
            BLOCK_N=shape.block_n,
            BLOCK_K=shape.block_k,
            SPLIT=shape.split,
            STAGES=shape.stages,
            BIAS=self.bias is not None,
            CHAINED=self.dependent_launch,
            num_warps=4,
            launch_pdl=self.dependent_launch,
        )
        return out
