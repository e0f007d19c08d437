"""How much memory everything will take, worked out before any of it is allocated; and the shape of its pages."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from enginery.config.resolve import DeviceFacts, Settings
from enginery.config.schema import EngineOptions
from enginery.contracts.attention import KVGeometry
from enginery.contracts.batch import FULL, STATE, WINDOW, MemoryKind
from enginery.contracts.model import ModelFacts
from enginery.errors import OutOfMemory
from enginery.kv.kinds import most_window_pages, reach_of
from enginery.worker.choice import Choice
from enginery.worker.sampling import PROMPT_LOGPROB_ROWS
from enginery.worker.weights.shares import stage_of

MIB, GIB = 1 << 20, 1 << 30
DEFAULT_HOST_KV_BYTES = 4 * GIB  # a CPU's memory is shared with everything else on the machine
SAMPLING_COPIES = 4  # of the logits, in float32: scaled, their softmax or sort, and what the reference sampling makes of them
CUDA_LIBRARY_BYTES = 240 * MIB  # kernels that were loaded, and for each of two streams cuBLAS's workspace; measured on an H200
NCCL_BYTES = 512 << 20  # of a rank on a GPU, for buffers and kernels of all its groups: estimated, not measured


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """All sizes in bytes. budget_bytes is what all parts may take together.

    num_pages, page_bytes: of the kind `full`. window_pages, state_pages: of the other kinds, 0 where the model has none of it.
    state_bytes: of all recurrent states. window: the model's largest, in tokens, where windows have memory of their own.
    """

    budget_bytes: int
    weights_bytes: int
    workspace_bytes: int
    page_bytes: int
    num_pages: int
    page_size: int
    state_bytes: int = 0
    state_pages: int = 0
    window_pages: int = 0
    window_page_bytes: int = 0
    window: int | None = None

    @property
    def kv_bytes(self) -> int:
        """All pages and the scratch pages, but for states."""
        return (self.num_pages + 1) * self.page_bytes + (self.window_pages + 1) * self.window_page_bytes

    def __str__(self) -> str:
        parts = {"weights": self.weights_bytes, "KV": self.kv_bytes, "states": self.state_bytes, "workspace": self.workspace_bytes}
        sizes = ", ".join(f"{name} {_readable(size)}" for name, size in parts.items() if size)
        tokens = self.num_pages * self.page_size
        others = {"window": self.window_pages, "state": self.state_pages}
        besides = "".join(f", {count:,} {kind} pages" for kind, count in others.items() if count)
        return (
            f"{sizes} of {_readable(self.budget_bytes)}; KV holds {tokens:,} tokens in {self.num_pages:,} pages of "
            f"{self.page_size}{besides}"
        )


def _readable(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.1f} MiB"


def workspace_bytes(
    settings: Settings, model: ModelFacts, *, backend_bytes: int, itemsize: int, sampling_copies: int, num_lanes: int = 1
) -> int:
    """Activations of the largest step, its logits or a prompt's, keys and values of latents, angles, graphs, and backends' memory.

    sampling_copies: `SAMPLING_COPIES`, or 0 where a plugin samples without copies of the logits, but for rows with penalties.
    num_lanes: whose rows are in a feed-forward, and are sampled, together.
    """
    activations = num_lanes * settings.max_batch_tokens * model.activation_width * itemsize
    logits = num_lanes * settings.max_batch_requests * model.vocab_size * (itemsize + 4 * max(sampling_copies, 1))
    latents = ((layer.num_heads, layer.latent) for layer in model.layers if layer.latent is not None)
    told = min(PROMPT_LOGPROB_ROWS, settings.max_batch_tokens) * model.vocab_size * (itemsize + 8)  # and in float32, twice
    # of one latent: each head's key and value in one piece, then its key with the rotary part
    values = (heads * (2 * each.nope_dim + each.rope_dim + each.value_dim) for heads, each in latents)
    made = max(values, default=0) * settings.mla_chunk_tokens * itemsize
    captured = num_lanes * max(settings.max_graph_requests, settings.max_piece_tokens) * model.activation_width * itemsize
    captured += settings.max_graph_requests * 2 * model.vocab_size * itemsize  # one buffer, one copy
    return activations + max(logits, told) + made + captured + rotary_bytes(settings, model, itemsize) + backend_bytes


def rotary_bytes(settings: Settings, model: ModelFacts, itemsize: int) -> int:
    """A row of angles for each position, as wide as a head at most; one table of layers with windows and one of the others."""
    widths = Counter[MemoryKind]()
    for layer in model.layers:
        if layer.recurrent is None:
            widths[layer.kind] = max(widths[layer.kind], layer.head_dim if layer.latent is None else layer.latent.rope_dim)
    return settings.max_model_len * widths.total() * itemsize


@dataclass(frozen=True, kw_only=True)
class OtherKinds:
    """What a page of the kinds beside `full` takes, in bytes; 0 where the model has none of it. window: its largest, in tokens."""

    window: int | None = None
    window_page_bytes: int = 0
    state_bytes: int = 0


NO_OTHER_KINDS: Final = OtherKinds()


def _split(asked: EngineOptions, settings: Settings, others: OtherKinds, *, bound: int, page_bytes: int) -> tuple[int, int]:
    """Pages of windows and of states: for as many typical requests as fit with their full pages and the resume points of each.

    A fixed split. Each kind holds the largest request that may come, at least. Requests that ran count too: what they left in the
    prefix cache is worth nothing without a resume point, so where memory is ample there are more than can run at once.
    """
    size, length = asked.page_size, settings.max_model_len
    reach = 0 if others.window is None else reach_of(others.window, size)
    chunk = math.ceil(min(settings.max_batch_tokens, length) / size)
    typical = math.ceil(min(asked.expected_tokens, length) / size)
    points = _num_points(typical * page_bytes, reach * others.window_page_bytes + others.state_bytes)
    full = 0 if asked.num_pages else typical * page_bytes
    held = (asked.num_pages or 0) * page_bytes + page_bytes
    each = full + ((1 + points) * reach + 2) * others.window_page_bytes + (1 + points) * others.state_bytes
    fixed = held + (chunk + 1) * others.window_page_bytes + 2 * others.state_bytes
    useful = asked.num_pages or settings.max_batch_requests * math.ceil(length / size)
    count = min(max((bound - fixed) // max(each, 1), 1), max(settings.max_batch_requests, useful // typical))
    window = 0
    if others.window is not None:
        least = most_window_pages(length, settings.max_batch_tokens, reach=reach, page_size=size)
        window = max(least, min(count * ((1 + points) * reach + 2) + chunk, useful))
    return window, (1 + points) * count if others.state_bytes else 0


def _num_points(request_bytes: int, point_bytes: int) -> int:
    """Resume points for each typical request, whose full pages take `request_bytes`: those that take an eighth of them, 2 to 8.

    docs/benchmarks/kinds_hour.py: cheap points run out before full pages do if there are 2, dear ones cost more than they bring.
    """
    return min(max(request_bytes // (8 * max(point_bytes, 1)), 2), 8)


def plan_memory(
    asked: EngineOptions,
    settings: Settings,
    device: DeviceFacts,
    *,
    weights: int,
    workspace: int,
    page_bytes: int,
    others: OtherKinds = NO_OTHER_KINDS,
) -> MemoryPlan:
    """Give the KV memory what weights and workspace leave, up to what could ever be used. Raises `OutOfMemory`.

    weights, workspace, page_bytes: in bytes. A model whose layers are all recurrent has pages that take nothing.
    """
    workspace += CUDA_LIBRARY_BYTES if device.kind == "cuda" else 0
    budget = int(device.available_bytes * asked.memory_fraction)
    useful = settings.max_batch_requests * math.ceil(settings.max_model_len / asked.page_size)
    left = budget - weights - workspace
    bound = left
    if asked.kv_memory_gib is not None:
        bound = int(asked.kv_memory_gib * GIB)
    elif device.kind == "cpu":
        bound = min(left, DEFAULT_HOST_KV_BYTES)
    window_pages, state_pages = _split(asked, settings, others, bound=bound, page_bytes=page_bytes)
    states = (state_pages + 2) * others.state_bytes
    bound -= (window_pages + 1) * others.window_page_bytes + states
    num_pages = asked.num_pages or min(bound // max(page_bytes, 1) - 1, useful)
    plan = MemoryPlan(
        budget_bytes=budget,
        weights_bytes=weights,
        workspace_bytes=workspace,
        page_bytes=page_bytes,
        num_pages=max(num_pages, 0),
        page_size=asked.page_size,
        state_bytes=states,
        state_pages=state_pages,
        window_pages=window_pages,
        window_page_bytes=others.window_page_bytes,
        window=others.window,
    )
    if num_pages < 1 or plan.kv_bytes + plan.state_bytes > left:
        raise _too_little(asked, settings, device, plan)
    return plan


def _too_little(asked: EngineOptions, settings: Settings, device: DeviceFacts, plan: MemoryPlan) -> OutOfMemory:
    if not plan.num_pages and asked.kv_memory_gib is not None:
        size = f"a page of {asked.page_size} tokens, {_readable(plan.page_bytes)}"
        return OutOfMemory(f"--kv-memory-gib {asked.kv_memory_gib} has no room for {size}; raise it")
    flag = "--num-pages" if asked.num_pages else "--kv-memory-gib"
    wanted = f"{flag} {asked.num_pages or asked.kv_memory_gib}" if plan.num_pages else "a single page of KV memory"
    return OutOfMemory(
        f"{wanted} does not fit: {plan}. Available on {device.name}: {device.available_bytes / GIB:.2f} GiB, of which "
        f"--memory-fraction {asked.memory_fraction} may be used. Raise that, or lower {f'{flag}, ' if plan.num_pages else ''}"
        f"--max-batch-tokens ({settings.max_batch_tokens}), --max-batch-requests ({settings.max_batch_requests}) or "
        f"--max-model-len ({settings.max_model_len}); a smaller --dtype halves the weights"
    )


def no_pages(choice: Choice) -> KVGeometry:
    """The shape of a page, before it is known how many there are."""
    settings = choice.settings
    layers = stage_of(choice.facts, choice.parallel).memory
    pages = {} if largest_window(choice) is None else {WINDOW: 0}
    size, own = settings.page_size, settings.dtype  # the inputs of a convolution are no keys
    return KVGeometry(pages=pages, page_size=size, layers=layers, dtype=settings.kv_dtype, state_dtype=own)


def with_pages(geometry: KVGeometry, memory: MemoryPlan, *, max_requests: int, asked: Mapping[MemoryKind, int]) -> KVGeometry:
    """The same, and how many there are of each kind: as many as were asked for, or as planned."""
    pages = {FULL: memory.num_pages, STATE: memory.state_pages or max_requests, WINDOW: memory.window_pages, **asked}
    return dataclasses.replace(geometry, pages={kind: count for kind, count in pages.items() if count}, num_seats=max_requests)


def largest_window(choice: Choice) -> int | None:
    """The largest window of the model's layers; None if no window ever drops a token: then it needs no memory of its own."""
    windows = [layer.sliding_window for layer in choice.facts.layers if layer.sliding_window is not None]
    return max(windows) if windows and max(windows) < choice.settings.max_model_len else None
