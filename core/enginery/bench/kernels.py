"""`engine bench kernels`: attention backends and operations alone, as bytes or operations per second beside the device's limits.

Attention is planned once and attends over one layer's pages, which lie anywhere in memory. Decoding is planned for a graph, and
timed in one where the backend offers that, as operations are; the rest is launched as an eager step launches it.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from enginery.attention.relay import BackendRelay
from enginery.bench.device_limits import device_name, measure_limits, several_s
from enginery.bench.floor import DeviceLimits
from enginery.bench.report import Report, Row, make_report
from enginery.config.schema import EngineOptions
from enginery.contracts.attention import (
    AttnBackendSpec,
    AttnLayerFacts,
    AttnNeeds,
    BackendContext,
    GlobalLayerId,
    KVGeometry,
    LayerSpec,
    LocalLayerId,
)
from enginery.contracts.batch import FULL as PAGED
from enginery.contracts.batch import ForwardBatch, Phase, View
from enginery.contracts.ops import OpNeeds, OpSpec, OpTable
from enginery.kv.arena import DeviceArena
from enginery.kv.pool import TORCH_DTYPES, PagedKVPool
from enginery.kv.states import RecurrentStatePool
from enginery.nn.reference_ops import reference_ops
from enginery.plugin.boundary import inside
from enginery.plugin.records import Offer
from enginery.plugin.registry import Registry
from enginery.plugin.selection import ranked, refusals, select_ops
from enginery.worker.device import device_facts, torch_device
from enginery.worker.paths.cuda_capture import CudaCapture

Run = Callable[[], object]
_PAGE: Final = EngineOptions.page_size
_LAUNCHES: Final = 8  # one after the other, so that the device does not wait for the host
_DIM: Final = 128
_IN_CACHE: Final = 1.1  # times what memory does; no memory was measured then, and a share of it would say nothing
_LAYERS: Final = [
    AttnLayerFacts(num_heads=heads, num_kv_heads=8, head_dim=_DIM) for heads in (32, 16)
]  # of Llama-3.1-8B, Qwen3-0.6B


_CASES: Final = [(facts, phase) for facts in _LAYERS for phase in (Phase.DECODE, Phase.PREFILL)]


class Sizes(NamedTuple):
    """decodes, prefills: requests, and tokens of each. rows: tokens of an operation. hidden, intermediate: of the model."""

    decodes: Sequence[tuple[int, int]]
    prefills: Sequence[tuple[int, int]]
    rows: Sequence[int]
    hidden: int
    intermediate: int


# No cache holds what a GPU is given; the quick ones end within seconds on a CPU.
FULL: Final = Sizes(((1, 32768), (16, 32768), (64, 4096), (256, 1024)), ((4, 4096), (1, 16384)), (16, 8192), 4096, 14336)
QUICK: Final = Sizes(((1, 2048), (4, 512)), ((1, 256),), (16, 256), 1024, 3072)


def bench_kernels(registry: Registry, options: EngineOptions, backends: Sequence[str], *, quick: bool) -> Report:
    """The attention backends named, else all that can run here, and the operations that a model would get."""
    device = torch_device(options.device)
    bench = KernelBench(
        registry=registry,
        sizes=QUICK if quick else FULL,
        device=device,
        needs=OpNeeds(
            device=device.type, dtype=options.dtype, compute_capability=device_facts(options.device, None).compute_capability
        ),
        limits=measure_limits(device, options.dtype),
    )
    with torch.inference_mode():
        rows = [*bench.attention_rows(backends), *bench.operation_rows()]
    return make_report("kernels", device_name(device), rows, options=options, limits=[bench.limits])


@dataclass(frozen=True, kw_only=True)
class KernelBench:
    """needs: where everything runs. limits: of that device."""

    registry: Registry
    sizes: Sizes
    device: torch.device
    needs: OpNeeds
    limits: DeviceLimits

    @property
    def on_cuda(self) -> bool:
        """Whether launches are asynchronous and graphs can be captured."""
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights, keys and values."""
        return TORCH_DTYPES[self.needs.dtype]

    def randn(self, *shape: int) -> torch.Tensor:
        """Small, so that what is added up a thousand times stays finite."""
        return torch.randn(shape, device=self.device, dtype=self.dtype) * 0.01

    def row(self, kernel: str, shape: str, run: Run, *, amount: int, limit: str, graph: bool) -> Row:
        """Time it. amount: what it reads and writes at the least, or computes; limit: what of `DeviceLimits` to set it beside."""
        launches = _LAUNCHES if self.on_cuda else 1

        def together() -> None:
            for _ in range(launches):
                run()

        launch = CudaCapture(self.device)(together).replay if graph else together
        median_s = statistics.median(several_s(launch, self.device, budget_s=0.05)) / launches
        rate = amount / median_s
        unit = "flop_per_s" if limit == "product_flop_per_s" else "bytes_per_s"
        fraction = rate / vars(self.limits)[limit]
        in_cache = unit == "bytes_per_s" and fraction > _IN_CACHE
        return Row(
            what={"kernel": kernel, "shape": shape, "dtype": self.needs.dtype},
            measured={"median_s": median_s},
            derived={unit: rate, "fraction": None if in_cache else fraction},
            details={"limit": limit, "in_graph": graph, "in_cache": in_cache},
        )

    def attention_rows(self, names: Sequence[str]) -> Iterator[Row]:
        """Decoding as bytes of keys and values, prefill as the operations that causality leaves, of all that is not refused.

        Raises `PluginError` for a backend that is named and refuses all of it.
        """
        offers = {offer.name: offer for offer in ranked(self.registry.offers(AttnBackendSpec))}
        for name in names or offers:
            served = self._served(offers.get(name))
            if names and not served:
                self.registry.select_attn_backend(name, self._asked(*_CASES[0]))  # raises with the reasons
            for facts, phase in served:
                graph = phase is Phase.DECODE and self.on_cuda and offers[name].spec.capabilities.graphs
                yield from self._attention_rows(name, facts, phase, graph=graph)

    def _served(self, offer: Offer[AttnBackendSpec] | None) -> list[tuple[AttnLayerFacts, Phase]]:
        """The cases that the backend does not refuse."""
        return [] if offer is None else [case for case in _CASES if not refusals(offer, self._asked(*case))]

    def _attention_rows(self, name: str, facts: AttnLayerFacts, phase: Phase, *, graph: bool) -> Iterator[Row]:
        decodes, heads = phase is Phase.DECODE, facts.num_heads
        for requests, length in self.sizes.decodes if decodes else self.sizes.prefills:
            new = 1 if decodes else length
            run = self._attention(name, facts, requests=requests, length=length, new=new, graph=graph)
            shape = f"heads {heads}/{facts.num_kv_heads}, {requests} x {length}"
            if decodes:
                amount = requests * length * 2 * facts.num_kv_heads * _DIM * self.dtype.itemsize
                yield self.row(f"{name} decode", shape, run, amount=amount, limit="read_bytes_per_s", graph=graph)
            else:
                flop = requests * (length * (length + 1) // 2) * 4 * heads * _DIM
                yield self.row(f"{name} prefill", shape, run, amount=flop, limit="product_flop_per_s", graph=graph)

    def _asked(self, facts: AttnLayerFacts, phase: Phase) -> AttnNeeds:
        where = vars(self.needs)
        return AttnNeeds(**where, kv_dtype=self.needs.dtype, page_size=_PAGE, layers=(facts,), phases=frozenset({phase}))

    def _attention(self, name: str, facts: AttnLayerFacts, *, requests: int, length: int, new: int, graph: bool) -> Run:
        """A launch of it over the last `new` tokens of each request. graph: planned as for a captured step."""
        columns, on = -(-length // _PAGE), self.device
        geometry = KVGeometry(pages={PAGED: requests * columns}, page_size=_PAGE, layers=(facts,), dtype=self.needs.dtype)
        pool = PagedKVPool(geometry, on)
        for stored in pool.layer(LocalLayerId(0)):
            stored.normal_()
        context = BackendContext(
            instance=f"{name}#0",
            geometry=geometry,
            pool=pool,
            states=RecurrentStatePool(geometry, on),
            device=on,
            dtype=self.dtype,
            arena=DeviceArena(on),
            options=self.registry.options_for(name),
        )
        relay = BackendRelay(self.registry.create_attn_backend(name, context), name)
        pages, positions = torch.randperm(geometry.num_pages).view(requests, columns), torch.arange(length - new, length)
        slots = (pages[:, positions // _PAGE] * _PAGE + positions % _PAGE).flatten().to(on)
        each = torch.ones(requests, dtype=torch.int32)
        batch = ForwardBatch(
            phase=Phase.DECODE if new == 1 else Phase.PREFILL,
            input_ids=torch.zeros(requests * new, dtype=torch.int64, device=on),
            positions=positions.repeat(requests).to(on),
            q_lens_cpu=each * new,
            kv_lens_cpu=each * length,
            num_logits_cpu=each,
            seats_cpu=torch.arange(requests, dtype=torch.int32),
            views={PAGED: View(slots=slots, page_table_cpu=pages.to(torch.int32))},
        )
        if graph:
            relay.ask("init_graph_state", max_batch_size=requests, max_num_tokens=requests)
        plan = relay.make_plan(batch, capture=graph)
        if graph:
            relay.ask("device_prologue", plan=plan)
        q, k = (self.randn(requests * new, heads, _DIM) for heads in (facts.num_heads, facts.num_kv_heads))
        layer = LayerSpec(global_id=GlobalLayerId(0), local_id=LocalLayerId(0), facts=facts, scale=_DIM**-0.5)
        return functools.partial(relay.attend, q, k, k, layer, batch, plan, torch.empty_like(q))

    def operation_rows(self) -> Iterator[Row]:
        """Bytes that each operation has to read and to write; of a matrix product of few rows, those of its weight."""
        table, source = reference_ops(), dict.fromkeys((field.name for field in dataclasses.fields(OpTable)), "reference")
        for offer in reversed(select_ops(self.needs, self.registry.offers(OpSpec))):
            with inside(offer, f"load the operations {offer.name!r}"):
                table = dataclasses.replace(table, **offer.spec.load(self.needs))
            source |= dict.fromkeys(offer.spec.provides, offer.name)
        for rows in self.sizes.rows:
            for name, run, amount in self._by_token(table, rows):
                kernel = f"{source[name]} {name}"
                yield self.row(kernel, f"{rows} tokens", run, amount=amount, limit="copy_bytes_per_s", graph=self.on_cuda)
        weight = self.randn(2 * self.sizes.intermediate, self.sizes.hidden)
        linear = table.bind_linear(weight, None)
        for rows in (1, 8, 16):
            run = functools.partial(linear, self.randn(rows, self.sizes.hidden))
            kernel, shape = f"{source['bind_linear']} linear", f"{rows} x {self.sizes.hidden} -> {len(weight)}"
            yield self.row(kernel, shape, run, amount=weight.nbytes, limit="read_bytes_per_s", graph=self.on_cuda)

    def _by_token(self, table: OpTable, rows: int) -> Iterator[tuple[str, Run, int]]:
        hidden, kv_heads, slots = self.sizes.hidden, _LAYERS[0].num_kv_heads, torch.randperm(rows).to(self.device)
        x, residual, keys, values = (self.randn(rows, width) for width in (hidden, hidden, kv_heads * _DIM, kv_heads * _DIM))
        weight, both, cos_sin = self.randn(hidden), self.randn(rows, 2 * self.sizes.intermediate), self.randn(rows, _DIM)
        yield "rms_norm", lambda: table.rms_norm(x, weight, 1e-6), 2 * x.nbytes
        yield "add_rms_norm", lambda: table.add_rms_norm(x, residual, weight, 1e-6), 4 * x.nbytes
        ids = torch.arange(rows, device=self.device)
        yield "embed", lambda: table.embed(x, ids), 2 * x.nbytes
        yield "gated_silu", lambda: table.gated_silu(both), both.nbytes * 3 // 2
        qkv = self.randn(rows, hidden // _DIM + 2 * kv_heads, _DIM)  # [T, H + 2K, D]
        written = {"keys": keys.view(rows, -1, _DIM), "values": values.view(rows, -1, _DIM), "slots": slots}
        rotate = functools.partial(
            table.qk_norm_rotary_write, qkv, self.randn(qkv.shape[1] - kv_heads, _DIM), 1e-6, cos_sin, **written
        )
        yield "qk_norm_rotary_write", rotate, 2 * qkv.nbytes + keys.nbytes + cos_sin.nbytes
