"""What planning needs of a layer, and how much memory its split requests take. H query heads, K KV heads, D head dim."""

from __future__ import annotations

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

    def workspace_bytes(self, *, num_units: int, captured_requests: int = 0) -> int:
        """The most that results of split requests take, as FlashInfer's `PrefillPlan` lays them out.

        It splits until items fill two tiles per multiprocessor; a captured step has as many as it could ever need.
        """
        items = 2 * num_units // self.num_kv_heads
        largest = 128 if self.head_dim < 256 else 64
        captured_tile = 16 if self.group <= 16 else 64 if self.group <= 64 else largest
        captured_items = -(-captured_requests * self.group // captured_tile) + captured_requests - 1
        rows = max(items * largest, max(items, captured_items) * captured_tile)
        return 4 * self.num_heads * rows * (self.head_dim + 1) + 256
