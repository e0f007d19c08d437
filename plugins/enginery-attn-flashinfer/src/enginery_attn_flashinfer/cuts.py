"""What planning needs of a layer, and how much memory its split requests take. H query heads, K KV heads, D head dim."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from enginery.api import AttnLayerFacts


@dataclass(frozen=True)
class Cut:
    """Layers with equal cuts share their plans. window: the layer's own token counts; its scale is given when it runs."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    softcap: float | None

    @classmethod
    def of(cls, facts: AttnLayerFacts) -> Cut:
        """Of a layer of softmax attention."""
        return cls(facts.num_heads, facts.num_kv_heads, facts.head_dim, facts.sliding_window, facts.softcap)

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def window_left(self) -> int:
        """How many tokens before its own a row sees; -1 is all of them."""
        return -1 if self.window is None else self.window - 1

    @property
    def largest_tile(self) -> int:
        """Rows of query heads of a KV head in FlashInfer's largest tile."""
        return 128 if self.head_dim < 256 else 64

    def tile(self, num_rows: int) -> int:
        """Rows of query heads in the tile that FlashInfer takes for so many rows of a request (`FA2DetermineCtaTileQ`)."""
        return next((tile for tile in (16, 64) if num_rows * self.group <= tile), self.largest_tile)

    def workspace_bytes(self, *, num_units: int, captured_requests: int = 0) -> int:
        """The most that results of split requests take, as FlashInfer's `PrefillPlan` lays them out.

        It splits until items fill two tiles per multiprocessor; a captured step has as many as it could ever need.
        """
        items = 2 * num_units // self.num_kv_heads
        captured_tile = self.tile(1)
        captured_items = -(-captured_requests * self.group // captured_tile) + captured_requests - 1
        rows = max(items * self.largest_tile, max(items, captured_items) * captured_tile)
        return 4 * self.num_heads * rows * (self.head_dim + 1) + 256

    def verify_bytes(self, *, num_units: int, num_requests: int, num_rows: int) -> int:
        """The same of a captured step of so many rows of all requests, planned with so many requests, empty ones too."""
        tile = self.tile(num_rows - num_requests + 1)
        items = max(2 * num_units // self.num_kv_heads, -(-num_rows * self.group // tile) + num_requests - 1)
        return 4 * self.num_heads * items * tile * (self.head_dim + 1) + 256


def planned_requests(cuts: Iterable[Cut], *, num_requests: int, length: int) -> int:
    """How many requests a captured step is planned with that verifies `length` rows of each of so many; the others are empty.

    FlashInfer takes it that one request of a captured step may have all rows but one of each other, and chooses its tiles for that.
    Empty requests leave it no more than fit into the tile that `length` rows need.
    """
    tiles = [(cut.tile(length), cut) for cut in cuts]
    fitting = [tile // cut.group for tile, cut in tiles if tile < cut.largest_tile]
    return max([num_requests, *(num_requests * length - rows + 1 for rows in fitting)])
