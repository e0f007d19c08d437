"""How a layer's work is cut into programs: from the layer's dims and the device alone, so once per layer.

G query heads per KV head, D dims of a key's main part, P of the rest, V of a value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from enginery.api import FULL, AttnLayerFacts, ForwardBatch
from enginery_attn_triton.spec import WORKSPACE_BYTES

SMALL_TILE: Final = 16  # rows; the least that a matrix unit takes
MAX_WAVES: Final = 4  # of items in a decoding step: the last wave is not full, and more of them cost more at their starts
EVEN_ITEMS: Final = 16  # of a request in one wave: more waves would even out less than a captured step's empty items take
TALL_REQUESTS: Final = 64  # a decoding step of so many has a launch of its own for the keys that requests share, in tall tiles
TALL_ROWS: Final = 64
TALL_WAVES: Final = 2
FEW_REQUESTS: Final = 2  # of `kernels.decode_few`
FEW_ROWS: Final = 8  # heads of one KV head, of all requests that may share an item: the matrix units' columns
FEW_RESIDENT: Final = {64: 4, 128: 3, 256: 4}
"""Of its programs, that run on a multiprocessor at once, by dims of a head."""
TILE_BYTES: Final = 32 << 10  # of keys and values in a tile, about
LARGE_BYTES: Final = 160 << 10  # of shared memory, that larger tiles take


@dataclass(frozen=True, kw_only=True)
class Device:
    """What cutting depends on. shared_bytes: shared memory that a program can have. chained: dependent launch is possible."""

    num_units: int
    shared_bytes: int
    chained: bool = False

    @classmethod
    def of(cls, device: torch.device) -> Device:
        """Interpreted, there are few units, so that short requests are split too."""
        if device.type != "cuda":
            return cls(num_units=4, shared_bytes=1 << 20)
        facts = torch.cuda.get_device_properties(device)
        shared_bytes: int = facts.shared_memory_per_block_optin  # type: ignore[attr-defined,unused-ignore]
        return cls(num_units=facts.multi_processor_count, shared_bytes=shared_bytes, chained=facts.major >= 9)


@dataclass(frozen=True, kw_only=True)
class HeadDims:
    """What a kernel sees of a layer's heads. shared: the first V dims of a key are its value."""

    num_heads: int
    num_kv_heads: int
    main: int
    rope: int
    value: int
    itemsize: int
    shared: bool

    @classmethod
    def of(cls, facts: AttnLayerFacts, itemsize: int) -> HeadDims:
        """Of a layer over pages: latents are one head of two parts."""
        main, rope = (facts.head_dim, 0) if facts.latent is None else (facts.latent.rank, facts.latent.rope_dim)
        return cls(
            num_heads=facts.num_heads,
            num_kv_heads=facts.num_kv_heads,
            main=main,
            rope=rope,
            value=facts.value_dim,
            itemsize=itemsize,
            shared=facts.latent is not None,
        )

    @classmethod
    def ragged(cls, facts: AttnLayerFacts, itemsize: int) -> HeadDims:
        """Of an MLA layer whose keys and values were made: as many KV heads as query heads."""
        assert facts.latent is not None
        latent = facts.latent
        return cls(
            num_heads=facts.num_heads,
            num_kv_heads=facts.num_heads,
            main=latent.nope_dim,
            rope=latent.rope_dim,
            value=latent.value_dim,
            itemsize=itemsize,
            shared=False,
        )

    @property
    def group(self) -> int:
        """G."""
        return self.num_heads // self.num_kv_heads

    @property
    def blocks(self) -> tuple[int, int, int]:
        """D, P and V as powers of two."""
        return padded(self.main), padded(self.rope), padded(self.value)

    @property
    def token_bytes(self) -> int:
        """Of one key and its value in a tile."""
        main, rope, value = self.blocks
        return (main + (rope if self.rope else 0) + (0 if self.shared else value)) * self.itemsize


def padded(dim: int) -> int:
    """The next power of two that a matrix unit takes."""
    return max(16, 1 << (dim - 1).bit_length()) if dim else 16


@dataclass(frozen=True, kw_only=True)
class Tile:
    """rows, keys: of a tile. group_rows: of its rows, those of one token. warps and stages as Triton has them."""

    rows: int
    keys: int
    group_rows: int
    warps: int
    stages: int

    @property
    def tokens(self) -> int:
        """Whose rows are in a tile."""
        return self.rows // self.group_rows


def decode_tile(dims: HeadDims, device: Device, *, length: int = 1) -> Tile:
    """The heads of `length` tokens against about 32 KB of keys and values, 64 of long heads and of 32 rows. Of latents, what shared
    memory holds."""
    rows = min(64, padded(dims.group * length))
    if dims.shared and dims.itemsize == 2 and rows > SMALL_TILE and device.shared_bytes >= LARGE_BYTES:
        # a tile's products take as long with 64 keys as with 16: 32 rows are faster in two programs with all keys of an item each
        rows, keys, stages = (SMALL_TILE, 64, 3) if rows == 32 else (rows, 32, 2)
        return Tile(rows=rows, keys=keys, group_rows=min(dims.group, rows), warps=8, stages=stages)
    large = _has_large_tile(dims, rows) and device.shared_bytes >= LARGE_BYTES
    room = 144 << 10 if dims.shared and dims.itemsize == 2 and rows == SMALL_TILE else 2 * TILE_BYTES if large else TILE_BYTES
    keys = _power_below(min(room, device.shared_bytes // 2 + TILE_BYTES) // dims.token_bytes, low=16, high=128)
    warps = 8 if rows * padded(dims.value) > (8192 if dims.shared or dims.itemsize == 4 else 16384) else 4
    stages = 2 if large and keys * dims.token_bytes > TILE_BYTES else 3
    return Tile(rows=rows, keys=keys, group_rows=min(dims.group, rows), warps=warps, stages=stages)


def _has_large_tile(dims: HeadDims, rows: int) -> bool:
    """Where fewer and larger tiles were faster on an H200: of 16 bits, for heads of 256 dims, and for 32 rows of 128."""
    return not dims.shared and dims.itemsize == 2 and (rows == 32 or (rows == SMALL_TILE and dims.main >= 256))


def resident(tile: Tile, dims: HeadDims, device: Device) -> int:
    """Programs that run on a multiprocessor at once, about. One whose rows have values as long as latents takes all registers."""
    if dims.shared and tile.warps == 8:
        return 1
    num_bytes = tile.keys * dims.token_bytes
    most = 4 if tile.rows == SMALL_TILE and num_bytes <= TILE_BYTES else 2
    return max(1, min(most, device.shared_bytes // (num_bytes + (6 << 10))))


def keys_of_few(dims: HeadDims, tile: Tile) -> int:
    """Of a tile, those that a program of `kernels.decode_few` has at once: a tile of the usual size."""
    return min(tile.keys, TILE_BYTES // dims.token_bytes)


def most_of_few(dims: HeadDims, tile: Tile, together: int) -> int:
    """Up to how many `kernels.decode_few` serves: keys and values apart, of 16 bits, of dims that its threads divide among them."""
    apart = not dims.shared and not dims.rope and dims.itemsize == 2
    if not apart or dims.group > FEW_ROWS or dims.main not in FEW_RESIDENT or dims.value != dims.main or tile.keys < 2 * SMALL_TILE:
        return 0
    return FEW_REQUESTS if together == 1 else min(FEW_REQUESTS, FEW_ROWS // dims.group)


def tall_tile(dims: HeadDims, usual: Tile) -> Tile | None:
    """For the heads of several requests. None where registers do not hold it, or the usual tile is full already."""
    if dims.shared or dims.itemsize == 4 or dims.blocks[2] > 128 or 2 * dims.group > TALL_ROWS:
        return None
    return dataclasses.replace(usual, rows=TALL_ROWS, keys=keys_of_few(dims, usual), stages=3)


def prefill_tile(dims: HeadDims, device: Device, *, max_rows: int, paged: bool = True) -> Tile:
    """max_rows: of one request and KV head in the batch. Two sizes, so that few kernels are compiled."""
    wide = max(dims.blocks[0], dims.blocks[2])
    if max_rows <= SMALL_TILE:
        rows = SMALL_TILE
    elif dims.itemsize == 4:
        rows = 64 if wide <= 64 else 32 if wide <= 256 else SMALL_TILE
    else:
        rows = 128 if wide <= 256 else 64
    keys = _power_below((80 << 10 if dims.shared and dims.itemsize == 2 else 40 << 10) // dims.token_bytes, low=16, high=64)
    while rows > SMALL_TILE and _tiles_beside(dims, rows, keys=keys, device=device) < 1:
        rows //= 2
    while keys > SMALL_TILE and _tiles_beside(dims, rows, keys=keys, device=device) < 1:
        keys //= 2
    warps = 8 if rows >= 64 and wide >= 128 else 4
    tiles = _tiles_beside(dims, rows, keys=keys, device=device)
    stages = min(5, 2 * tiles - 1) if paged else min(3, tiles)  # each look-up of pages has a stage of its own
    stages = max(2 if dims.shared else 1, stages)  # in one, keys that are values too would be in shared memory twice
    return Tile(rows=rows, keys=keys, group_rows=min(dims.group, rows), warps=warps, stages=stages)


def _power_below(number: int, *, low: int, high: int) -> int:
    return min(high, max(low, 1 << max(0, number.bit_length() - 1)))


def _tiles_beside(dims: HeadDims, rows: int, *, keys: int, device: Device) -> int:
    """How many tiles of keys and values shared memory holds beside the queries."""
    main, rope, _ = dims.blocks
    queries = rows * (main + (rope if dims.rope else 0)) * dims.itemsize
    return (device.shared_bytes - queries - (4 << 10)) // (keys * dims.token_bytes)


@dataclass(frozen=True, kw_only=True)
class DecodeCut:
    """How decoding requests are split.

    length: rows of a request. programs: for one item. wave: how many items run at once on the whole device. extra, parts: at the
    most, items more than requests, and parts. together: how many rows an item is for, of requests that share its keys or of one
    that has several; 1 where none are. tall_together, tall_wave: the same of the items of tall tiles. few, few_wave: up to how many
    requests `kernels.decode_few` serves, and how many of its items run at once, which is no more than of others.
    """

    window: int | None
    tile_keys: int
    programs: int
    wave: int
    extra: int
    parts: int
    length: int = 1
    together: int = 1
    tall_together: int = 1
    tall_wave: int = 0
    few: int = 0
    few_wave: int = 0

    @property
    def is_one_tile(self) -> bool:
        """Whether the keys that a row sees are one tile, so that they are never split."""
        return self.window is not None and self.length == 1 and self.window <= self.tile_keys

    @property
    def chunks(self) -> int:
        """Of a request's rows, as many as an item is for in each."""
        return -(-self.length // self.together) if self.length > 1 else 1

    def wave_of(self, num_requests: int) -> int:
        """How many items of so many requests run at once."""
        return self.few_wave if 0 < num_requests <= self.few else self.wave

    def most_waves(self, num_requests: int) -> int:
        """Of items. So few requests as a wave has `EVEN_ITEMS` of each are cut evenly into one."""
        return 1 if num_requests * EVEN_ITEMS <= self.wave_of(num_requests) else MAX_WAVES

    def room(self, num_requests: int, *, waves: int = MAX_WAVES) -> int:
        """Items more than so many requests, at the most."""
        waves, wave = min(waves, self.most_waves(num_requests)), self.wave_of(num_requests)
        return min(self.extra, max(waves * wave - num_requests, wave))

    def captured_items(self, num_requests: int) -> int:
        """At the most, of a captured step for so many requests, of which a few alone may decode."""
        chunks = num_requests * self.chunks
        return chunks + max(self.room(chunks), self.few_wave)

    def tall_room(self, num_requests: int) -> int:
        """Items of tall tiles, at the most."""
        return TALL_WAVES * self.tall_wave if num_requests >= TALL_REQUESTS else 0


@dataclass(frozen=True, kw_only=True)
class LayerCut:
    """All of one layer that planning needs. kind: of memory that it is in."""

    kind: str
    dims: HeadDims
    decode: DecodeCut
    decode_tile: Tile
    tall_tile: Tile | None
    chained: bool

    @classmethod
    def of(cls, facts: AttnLayerFacts, *, itemsize: int, device: Device, length: int = 1, kind: str = FULL) -> LayerCut:
        """A request of n items adds n - 1 to `extra` and has n parts for each row of an item, so without sharing there are at most
        2 extra together parts. length: rows of a request, which verify drafts where there are several."""
        dims = HeadDims.of(facts, itemsize)
        tile = decode_tile(dims, device, length=length)
        programs = dims.num_kv_heads * -(-dims.group // tile.rows)
        wave = max(1, resident(tile, dims, device) * device.num_units // programs)
        most = WORKSPACE_BYTES // part_bytes(dims)
        plain = facts.sliding_window is None and length == 1
        shares = plain and not dims.shared and 2 * dims.group <= tile.rows
        tall = tall_tile(dims, tile) if plain else None
        together = min(length, max(1, tile.rows // dims.group)) if length > 1 else tile.rows // dims.group if shares else 1
        extra = min(MAX_WAVES * wave, most // (2 * (together if length > 1 else 1)))
        few = most_of_few(dims, tile, together) if device.chained and length == 1 else 0
        cut = DecodeCut(
            length=length,
            window=facts.sliding_window,
            tile_keys=tile.keys,
            programs=programs,
            wave=wave,
            extra=extra,
            parts=most if shares or tall or length > 1 else 2 * extra,
            together=together,
            tall_together=tall.rows // dims.group if tall else 1,
            tall_wave=max(1, 2 * device.num_units // programs) if tall else 0,
            few=few,
            few_wave=min(extra, max(1, FEW_RESIDENT[dims.main] * device.num_units // programs)) if few else 0,
        )
        return cls(kind=kind, dims=dims, decode=cut, decode_tile=tile, tall_tile=tall, chained=device.chained)

    @property
    def shares(self) -> bool:
        """Whether keys that decoding requests share may be read once."""
        return max(self.decode.together, self.decode.tall_together) > 1

    @property
    def workspace_bytes(self) -> int:
        """Of the results of split requests."""
        return self.decode.parts * part_bytes(self.dims)


class ModelCuts(NamedTuple):
    """Of each layer of a model, one object for equal ones and None of a recurrent one; each once; the workspace for the largest."""

    layers: tuple[LayerCut | None, ...]
    distinct: tuple[LayerCut, ...]
    workspace_bytes: int


class LayerCuts:
    """Of a model's layers, for any number of rows that decoding requests have; made when they are first asked for."""

    def __init__(self, layers: Sequence[AttnLayerFacts], *, itemsize: int, device: Device, kinds: Sequence[str] = ()) -> None:
        """kinds: of memory that each layer is in; none: all are in full pages."""
        self._layers, self._itemsize, self._device = tuple(layers), itemsize, device
        self._kinds = tuple(kinds) or (FULL,) * len(self._layers)
        self._made: dict[int, ModelCuts] = {}

    def of(self, length: int) -> ModelCuts:
        """For requests of so many rows."""
        if length not in self._made:
            distinct = dict[LayerCut, LayerCut]()  # layers whose cuts are equal have the same
            of_kinds = zip(self._layers, self._kinds, strict=True)
            cuts = [None if facts.recurrent is not None else self._of(facts, length, kind) for facts, kind in of_kinds]
            layers = tuple(None if cut is None else distinct.setdefault(cut, cut) for cut in cuts)
            self._made[length] = ModelCuts(layers, tuple(distinct), max((cut.workspace_bytes for cut in distinct), default=0))
        return self._made[length]

    def seen_by(self, batch: ForwardBatch) -> tuple[LayerCut, ...]:
        """The distinct ones of layers whose memory the batch has a view of: others are a backend's for another kind."""
        return tuple(cut for cut in self.of(batch.decode_len).distinct if cut.kind in batch.views)

    def _of(self, facts: AttnLayerFacts, length: int, kind: str) -> LayerCut:
        return LayerCut.of(facts, itemsize=self._itemsize, device=self._device, length=length, kind=kind)


def part_bytes(dims: HeadDims) -> int:
    """Of one part: [H, V] and [H], float32."""
    return 4 * dims.num_heads * (dims.value + 1)
