"""What a model says of its weights, as data: products, experts, and the formats that checkpoints store them in.

Sizes are the checkpoint's. Which rank has which part of a product, and in what form, is decided behind `WeightSource`.
E experts, I an expert's inner size, C columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

from enginery.contracts.parallel import Cut
from enginery.contracts.versions import ApiVersion

if TYPE_CHECKING:
    import torch

    from enginery.contracts.attention import Reason
    from enginery.contracts.ops import Routed

EachT = TypeVar("EachT")


# Products


@dataclass(frozen=True)
class RowOrder:
    """Rows change places: row i of each `len(places)` rows in memory is row `places[i]` of as many in the checkpoint.

    Attention is the same for every order of the rotated dims that q and k share, so a model that rotates pairs (2i, 2i + 1) has
    its rows moved to where kernels rotate (i, i + R / 2): see `split_pairs`.
    """

    places: tuple[int, ...]

    @classmethod
    def split_pairs(cls, size: int, *, first: int, count: int) -> RowOrder:
        """Of each `size` rows, the `count` from `first` on: the even ones, then the odd ones. The others stay."""
        last = first + count
        return cls((*range(first), *range(first, last, 2), *range(first + 1, last, 2), *range(last, size)))


@dataclass(frozen=True, kw_only=True)
class LinearPart:
    """One part of a product: a matrix of the checkpoint, or so many rows of one that is packed.

    name: of its module. first_row: of the part in a packed matrix of `packed_rows`.
    """

    name: str
    rows: int
    first_row: int
    packed_rows: int
    cut: Cut
    unit: int
    bias: bool
    order: RowOrder | None
    factor: float


@dataclass(frozen=True, kw_only=True)
class LinearShape:
    """y = f (x (g W)^T + b), W [sum of rows, columns], stacked from one or more modules of the checkpoint.

        LinearShape(names=("q_proj", "k_proj", "v_proj"), rows=(H * D, K * D, K * D), columns=C, cut=Cut.ROWS, unit=D)
        LinearShape(names=("gate_up_proj",), rows=(I, I), columns=C, cut=Cut.ROWS)    # packed: each part is cut by itself
        LinearShape(names=("qkv", "qkv", "qkv", "z"), rows=(K, K, V, V), columns=C, cut=Cut.ROWS)    # packed, beside another
        LinearShape(names=("o_proj",), rows=(C,), columns=H * D, cut=Cut.COLUMNS, unit=D)

    names: without ".weight"; parts of a packed matrix follow each other under its name. rows: of each part, whole. cut: which axis
    ranks may share; ROWS gives each rank some of the outputs, COLUMNS a partial sum of all. unit: a rank has a multiple of so many
    rows (or columns); where there are fewer units than ranks, as of KV heads, several ranks have the same one. complete: of
    COLUMNS, whether the sum over ranks is taken here; if not, the caller takes it, with `Collectives.add_rms_norm`. padded: rows
    that the ranks cannot share evenly are filled up with zeros, for a head whose columns `Collectives.gather_columns` cuts off
    again. factor: f; input_factor: g; both are taken into what is bound. cut, unit, bias, order, factor: one for all parts, or one
    each.
    """

    names: tuple[str, ...]
    rows: tuple[int, ...]
    columns: int
    cut: Cut | tuple[Cut, ...] = Cut.NONE
    unit: int | tuple[int, ...] = 1
    bias: bool | tuple[bool, ...] = False
    order: RowOrder | tuple[RowOrder | None, ...] | None = None
    factor: float | tuple[float, ...] = 1.0
    input_factor: float = 1.0
    complete: bool = True
    padded: bool = False

    def __post_init__(self) -> None:
        if len(self.names) not in (1, len(self.rows)):
            raise ValueError(f"a product has one name, or one for each of its parts: {self.names=}, {self.rows=}")
        for field in ("cut", "unit", "bias", "order", "factor"):
            value = vars(self)[field]
            if isinstance(value, tuple) and len(value) != len(self.rows):
                raise ValueError(f"{field} must be one value, or one for each part: {field}={value}, {self.rows=}")
        if Cut.COLUMNS in (cuts := {part.cut for part in self.parts}) and len(cuts) > 1:
            raise ValueError(f"all parts of a product have the same columns: they are all cut by columns or none is: {self.cut=}")

    @property
    def changes(self) -> bool:
        """Whether rows are filled up, put in another order or multiplied, which plain numbers alone can be."""
        moved = any(part.order is not None or part.factor != 1.0 for part in self.parts)
        return self.padded or self.input_factor != 1.0 or moved

    @property
    def parts(self) -> tuple[LinearPart, ...]:
        """One for each of `rows`."""
        count = len(self.rows)
        names = self.names * count if len(self.names) == 1 else self.names
        sizes = [(name, rows) for name, rows in zip(names, self.rows, strict=True)]
        return tuple(
            LinearPart(
                name=names[index],
                rows=rows,
                first_row=sum(each for name, each in sizes[:index] if name == names[index]),
                packed_rows=sum(each for name, each in sizes if name == names[index]),
                cut=_each(self.cut, count)[index],
                unit=_each(self.unit, count)[index],
                bias=_each(self.bias, count)[index],
                order=_each(self.order, count)[index],
                factor=_each(self.factor, count)[index],
            )
            for index, rows in enumerate(self.rows)
        )


def _each(value: EachT | tuple[EachT, ...], count: int) -> tuple[EachT, ...]:
    return value if isinstance(value, tuple) else (value,) * count


class Linear(Protocol):
    """A product bound to this rank's weights. rows: of each part, on this rank: the only sizes that a block may use."""

    @property
    def rows(self) -> tuple[int, ...]: ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[N, columns] -> [N, sum of rows]; of a COLUMNS product, x has this rank's columns."""


# Experts


@dataclass(frozen=True, kw_only=True)
class Activation:
    """What becomes of a gated MLP's gate and up: [.., I] each -> [.., I].

    silu: silu(gate) * up. gelu, gelu_tanh: gelu(gate) * up, exact or by tanh. clamped_swiglu (gpt-oss): with gate at most `limit`
    and up within -limit and limit, gate * sigmoid(alpha * gate) * (up + 1).
    """

    kind: Literal["silu", "gelu", "gelu_tanh", "clamped_swiglu"] = "silu"
    alpha: float = 1.702
    limit: float = 7.0


SILU = Activation()


@dataclass(frozen=True, kw_only=True)
class ExpertNames:
    """What checkpoints call a mixture of experts in a layer, an expert's projections, and the expert that every token has.

    router, correction: of the block, the module of the scores' product and the tensor that is added to the scores to choose.
    """

    block: str = "mlp"
    router: str = "gate"
    correction: str = "gate.e_score_correction_bias"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_experts"

    @property
    def stacked(self) -> dict[str, tuple[str, ...]]:
        """`ModelSpec.stacked_weights`: how transformers 5 has experts in memory, and stores them where it is told to."""
        stem = f".{self.block}.experts.{{}}."
        of_router = () if self.block == "mlp" else (f"{self.router}.weight", self.correction)
        return {f".mlp.{name}": (f".{self.block}.{name}",) for name in of_router} | {
            ".mlp.experts.gate_up_proj": (f"{stem}{self.gate}.weight", f"{stem}{self.up}.weight"),
            ".mlp.experts.down_proj": (f"{stem}{self.down}.weight",),
        }


@dataclass(frozen=True, kw_only=True)
class ExpertsShape:
    """`count` gated MLPs of one size: gate and up [inner, hidden], down [hidden, inner], in modules `experts.{i}.{name}`.

    bias: each of the three has one. order: whether an expert's gate and up are stored one after the other, or in one module
    `names.gate` with rows taking turns, gate first (`names.up` is then not asked for). turned: plain matrices are stored the other
    way, [columns, rows]. joined: so many experts more are cut out of the MLP `names.shared`, whose inner size is joined * inner;
    they come last. In memory gates are always before ups.
    """

    names: ExpertNames
    count: int
    inner: int
    hidden: int
    bias: bool = False
    activation: Activation = SILU
    order: Literal["halves", "interleaved"] = "halves"
    turned: bool = False
    joined: int = 0


class Experts(Protocol):
    """Experts bound to this rank's weights.

    add_joined(out [T, C], x [T, C], gate [T, 1] or None): adds the output of the joined experts, times the gate, to `out`, which
    it returns: as plain products, which for many tokens is faster than sending every token to them. None: there are none, or only
    the experts' own kernels can.
    """

    @property
    def add_joined(self) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor] | None: ...

    def __call__(self, x: torch.Tensor, routed: Routed) -> torch.Tensor:
        """The weighted sum of each token's experts, [T, C] -> [T, C]; with several ranks a partial sum."""


# Formats


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """What a kernel must know of weights that are stored in another form than the model's dtype.

    values: of each weight. block: rows and columns that share a scale; 0 means all: (1, 0) is a scale for each row. zeros: blocks
    have zero points. inputs: in what form a kernel wants x.
    """

    values: Literal["f8e4m3", "i4", "i8", "mxfp4", "nvfp4"]
    block: tuple[int, int]
    zeros: bool = False
    inputs: Literal["as_is", "f8_row", "f8_tensor", "f8_128"] = "as_is"

    def __str__(self) -> str:
        rows, columns = (str(size) if size else "all" for size in self.block)
        return f"{self.values} in blocks of {rows} x {columns}" + (", with zero points" if self.zeros else "")


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredWeight:
    """A weight [rows, columns], or [E, rows, columns], in the form that kernels take.

    values  [.., rows, columns]                          one scale for each block, rounded up at the ends:
    scales  [.., rows / block rows, columns / block columns] float32          weight = value * scale

    mxfp4: values [.., rows, columns / 2] uint8, two to a byte, the low half first; scales float8_e8m0fnu, powers of two. zeros,
    input_scale, global_scale: of other formats, between whose plugin and that of the operations they are; the core reads none.
    """

    scheme: Scheme
    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    input_scale: torch.Tensor | None = None
    global_scale: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class StoredPart:
    """One tensor of the checkpoint among those that a matrix is stored in.

    suffix: behind the module's name. dtype: as safetensors spell it; floating point of 16 bits or more is read from any such.
    per_element: the rows and columns of the matrix that one element stands for, 0 for all; the shape, and where ranks cut it,
    follow from that. role: what random weights put there.
    """

    suffix: str
    dtype: str
    per_element: tuple[int, int] = (1, 1)
    role: Literal["values", "scales"] = "values"


@dataclass(frozen=True, kw_only=True)
class FormatNeeds:
    """Where weights of a format will be used. config: `quantization_config` of config.json."""

    config: Mapping[str, object]
    device: str
    dtype: str
    compute_capability: tuple[int, int] | None = None


class WeightFormat(Protocol):
    """How a format's tensors become weights."""

    def parts(self, scheme: Scheme) -> Sequence[StoredPart]:
        """The tensors that a matrix is stored in, the values first."""

    def unpack(self, parts: Mapping[str, torch.Tensor], scheme: Scheme) -> StoredWeight:
        """The weight from its parts by suffix, each [rows, columns] / `per_element`, with several matrices stacked along rows.

        Runs on the model's device. May keep the tensors it is given.
        """


@dataclass(frozen=True, kw_only=True)
class WeightFormatSpec:
    """A quantised checkpoint format on offer: asked when config.json has a `quantization_config`.

    methods: the values of `quant_method` that it knows. reads: `quantization_config` and a module's full name -> how that
    module is stored; None: plain (ignore lists). refuse: why it cannot read what config.json states, or not for this device.
    """

    name: str
    api: ApiVersion
    priority: int
    summary: str
    methods: tuple[str, ...]
    reads: Callable[[Mapping[str, object], str], Scheme | None]
    refuse: Callable[[FormatNeeds], list[Reason]]
    load: Callable[[], WeightFormat]
