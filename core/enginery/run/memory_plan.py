"""How much memory everything will take, worked out before any of it is allocated."""

from __future__ import annotations

import math
from dataclasses import dataclass

from enginery.config.resolve import DeviceFacts, Settings
from enginery.config.schema import EngineOptions
from enginery.contracts.model import ModelFacts
from enginery.errors import OutOfMemory

MIB, GIB = 1 << 20, 1 << 30
DEFAULT_HOST_KV_BYTES = 4 * GIB  # a CPU's memory is shared with everything else on the machine
LOGITS_COPIES = 4  # in float32: the logits, their softmax or sort, and what sampling makes of them


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """All sizes in bytes. budget_bytes is what the three parts may take together."""

    budget_bytes: int
    weights_bytes: int
    workspace_bytes: int
    page_bytes: int
    num_pages: int
    page_size: int

    @property
    def kv_bytes(self) -> int:
        """All pages and the scratch page."""
        return (self.num_pages + 1) * self.page_bytes

    def __str__(self) -> str:
        parts = (("weights", self.weights_bytes), ("KV", self.kv_bytes), ("workspace", self.workspace_bytes))
        sizes = ", ".join(f"{name} {_readable(size)}" for name, size in parts)
        tokens = self.num_pages * self.page_size
        return (
            f"{sizes} of {_readable(self.budget_bytes)}; KV holds {tokens:,} tokens in {self.num_pages:,} pages of {self.page_size}"
        )


def _readable(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.1f} MiB"


def workspace_bytes(settings: Settings, model: ModelFacts, *, backend_bytes: int, itemsize: int) -> int:
    """Activations of the largest step, its logits, and the backend's scratch memory."""
    activations = settings.max_batch_tokens * model.activation_width * itemsize
    logits = settings.max_batch_requests * model.vocab_size * 4 * LOGITS_COPIES
    return activations + logits + backend_bytes


def plan_memory(
    asked: EngineOptions, settings: Settings, device: DeviceFacts, *, weights: int, workspace: int, page_bytes: int
) -> MemoryPlan:
    """Give the KV memory what weights and workspace leave, up to what could ever be used. Raises `OutOfMemory`.

    weights, workspace, page_bytes: in bytes.
    """
    budget = int(device.available_bytes * asked.memory_fraction)
    pages_per_request = math.ceil(settings.max_model_len / asked.page_size)
    useful = settings.max_batch_requests * pages_per_request
    left = budget - weights - workspace
    bound = left
    if asked.kv_memory_gib is not None:
        bound = int(asked.kv_memory_gib * GIB)
    elif device.kind == "cpu":
        bound = min(left, DEFAULT_HOST_KV_BYTES)
    num_pages = asked.num_pages or min(bound // page_bytes - 1, useful)
    plan = MemoryPlan(
        budget_bytes=budget,
        weights_bytes=weights,
        workspace_bytes=workspace,
        page_bytes=page_bytes,
        num_pages=max(num_pages, 0),
        page_size=asked.page_size,
    )
    if num_pages < 1 or plan.kv_bytes > left:
        wanted = f"{asked.num_pages:,} pages" if asked.num_pages else "a single page"
        raise OutOfMemory(
            f"{wanted} of KV memory do not fit: {plan}. Available on {device.name}: {device.available_bytes / GIB:.2f} GiB, of "
            f"which --memory-fraction {asked.memory_fraction} may be used. Raise --memory-fraction, or lower --max-batch-tokens "
            f"({settings.max_batch_tokens}), --max-batch-requests ({settings.max_batch_requests}) or --num-pages; a smaller "
            "--dtype halves the weights"
        )
    return plan
