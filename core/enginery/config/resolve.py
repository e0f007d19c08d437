"""From what was asked for to what will be done: a pure function that explains itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from enginery.config.schema import Decision, Dtype, EngineOptions, KVDtype
from enginery.contracts.latent import PrefillStrategy
from enginery.contracts.model import ModelFacts
from enginery.errors import ConfigError

DTYPES: tuple[str, ...] = get_args(Dtype)
KV_DTYPES: tuple[str, ...] = get_args(KVDtype)
MAX_GRAPH_REQUESTS = 512
MAX_RECORDED_REQUESTS = 16  # on a CPU: of more, the products take so long that Python between them does not show
MAX_PIECE_TOKENS = 1024  # of more, the device takes longer than the host takes to launch them
DEFAULT_BATCH_TOKENS = {"cpu": 2048, "cuda": 8192}
PROMPTS_FIRST_TOKENS = 16384  # on a GPU, where no step's length matters: W1 and W7 are 1 % faster, see docs/log.md
DEFAULT_BATCH_REQUESTS = {"cpu": 256, "cuda": 512}
DEFAULT_PREFILL_FRACTION = 0.0625
MOST_THREADS = 1024  # of more, some hosts give none, and end the process
_SHARES = ("memory_fraction", "prefill_fraction")
_POSITIVE = (
    *("page_size", "max_batch_requests", "max_queued_requests", "max_batch_tokens"),
    *("num_pages", "max_model_len", "num_threads", "mla_chunk_tokens", "expected_tokens", "tp", "pp", "dp_attention"),
)
_LEAST = {**dict.fromkeys(_POSITIVE, 1), "profile_steps": 0}


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """Where the engine runs. available_bytes: memory that may be taken now. has_bfloat16: it multiplies such matrices quickly."""

    kind: str
    name: str
    available_bytes: int
    num_threads: int
    compute_capability: tuple[int, int] | None = None
    has_bfloat16: bool = True


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The values that do not depend on memory; the number of pages follows from the memory plan.

    max_graph_requests: decoding steps of so many requests are captured, on a CPU recorded; 0 captures none. max_piece_tokens:
    likewise prefills and mixed steps, in pieces.
    """

    dtype: Dtype
    kv_dtype: KVDtype
    page_size: int
    max_model_len: int
    max_batch_tokens: int
    max_batch_requests: int
    prefill_fraction: float
    prefix_cache: bool
    overlap: bool
    max_graph_requests: int
    max_piece_tokens: int
    mla_prefill: PrefillStrategy | None
    mla_chunk_tokens: int
    decisions: tuple[Decision, ...]


def resolve(
    asked: EngineOptions, device: DeviceFacts, model: ModelFacts, *, config: Mapping[str, object], dtype_from: str = "config.json"
) -> Settings:
    """Settle every "auto" and None. dtype_from: what says that of `config`. Raises `ConfigError` for what cannot be honoured."""
    check(asked)
    _check_layers(asked, model)
    dtype = _dtype(asked, device, config, dtype_from)
    length = _max_model_len(asked, model)
    tokens = _batch_tokens(asked, device)
    requests = min(asked.max_batch_requests or DEFAULT_BATCH_REQUESTS[device.kind], int(tokens.value))
    kv_dtype = _kv_dtype(asked, model, dtype=dtype.value)
    eagerly, sizes = _why_eager(asked, device), _graph_sizes(asked, device, requests=requests, tokens=int(tokens.value))
    max_graph_requests, max_piece_tokens = (0, 0) if eagerly else sizes
    return Settings(
        dtype=dtype.value,  # type: ignore[arg-type]  # checked to be one of them
        kv_dtype=kv_dtype.value,  # type: ignore[arg-type]  # likewise
        page_size=asked.page_size,
        max_model_len=int(length.value),
        max_batch_tokens=int(tokens.value),
        max_batch_requests=requests,
        prefill_fraction=asked.prefill_fraction or DEFAULT_PREFILL_FRACTION,
        prefix_cache=asked.prefix_cache,
        overlap=device.kind != "cpu" if asked.overlap is None else asked.overlap,
        max_graph_requests=max_graph_requests,
        max_piece_tokens=max_piece_tokens,
        mla_prefill=None if asked.mla_prefill == "auto" else PrefillStrategy(asked.mla_prefill),
        mla_chunk_tokens=asked.mla_chunk_tokens or 2 * int(tokens.value),
        decisions=(
            Decision(setting="device", value=device.kind, reason=device.name),
            dtype,
            *((kv_dtype,) if asked.kv_dtype != "auto" else ()),
            length,
            tokens,
            *([Decision(setting="graphs", value="off", reason=eagerly)] if eagerly else []),
        ),
    )


def _why_eager(asked: EngineOptions, device: DeviceFacts) -> str:
    """Why no step is captured; empty: some are."""
    if not asked.graphs:
        return "asked for"
    if asked.check_attention:
        return "--check-attention looks at each call of attention"
    if asked.pp > 1 and device.kind != "cuda":
        return f"the stages of --pp {asked.pp} run their steps eagerly on {device.kind}"
    return ""


def _graph_sizes(asked: EngineOptions, device: DeviceFacts, *, requests: int, tokens: int) -> tuple[int, int]:
    """The largest steps that are captured: requests that decode, and tokens of prefills and mixed steps; 0 captures none."""
    if device.kind != "cuda":
        return min(requests, MAX_RECORDED_REQUESTS), 0
    return min(requests, MAX_GRAPH_REQUESTS), 0 if asked.dp_attention * asked.pp > 1 else min(tokens, MAX_PIECE_TOKENS)


def _batch_tokens(asked: EngineOptions, device: DeviceFacts) -> Decision:
    tokens, reason = DEFAULT_BATCH_TOKENS[device.kind], f"default on {device.kind}"
    if asked.max_batch_tokens:
        tokens, reason = asked.max_batch_tokens, "asked for"
    elif device.kind == "cuda" and asked.prefill_fraction == 1:
        tokens, reason = PROMPTS_FIRST_TOKENS, "default on cuda where prompts go first"
    return Decision(setting="max_batch_tokens", value=str(tokens), reason=reason)


def check(asked: EngineOptions) -> None:
    """Raises `ConfigError` for what no model makes right; ranks are begun behind it."""
    _check_numbers(asked)
    if asked.mla_prefill not in ("auto", *PrefillStrategy):
        raise ConfigError(f"mla_prefill is {asked.mla_prefill!r}, but must be one of auto, {', '.join(PrefillStrategy)}")
    _check_drafts(asked)
    _check_stages(asked)
    _check_placing(asked)
    _check_lanes(asked)
    _check_events(asked)
    if asked.load_format not in ("auto", "dummy"):
        raise ConfigError(f"load_format is {asked.load_format!r}, but must be 'auto' (safetensors) or 'dummy' (random weights)")


def _check_stages(asked: EngineOptions) -> None:
    sizes = None if asked.pp_layers is None else asked.pp_layers.split(",")
    if sizes is not None and not (len(sizes) == asked.pp and all(size.isdecimal() and int(size) for size in sizes)):
        raise ConfigError(f"pp_layers is {asked.pp_layers!r}, but --pp is {asked.pp}; give layers for each stage, as 16,16 for two")
    if asked.pp > 1 and asked.overlap:
        raise ConfigError(f"overlap is on, but with --pp {asked.pp} as many steps are on their way anyway; leave it out")


def _check_placing(asked: EngineOptions) -> None:
    if asked.ep and asked.tp * asked.dp_attention == 1:
        raise ConfigError(
            "--ep divides experts among the ranks of a stage, but there is one; give --tp or --dp-attention, or leave it out"
        )
    if asked.executor != "local" and asked.num_ranks == 1:
        raise ConfigError(
            f"executor is {asked.executor!r}, but there is one rank, which nobody places; give --tp or --pp, or leave it out"
        )
    if asked.num_ranks == 1 and (asked.listen is not None or asked.rank_key_file is not None):
        raise ConfigError("--listen and --rank-key-file are for other ranks, but there is one; give --tp or --pp, or drop both")


def _check_lanes(asked: EngineOptions) -> None:
    given = {
        "--drafter": asked.drafter != "off",
        "--micro-batches": asked.micro_batches,
        "--sparse-coordinator": asked.sparse_coordinator != "off",
    }
    refused = [flag for flag, is_given in given.items() if is_given]
    if asked.dp_attention > 1 and refused:
        raise ConfigError(
            f"--dp-attention {asked.dp_attention} does not run with {' and '.join(refused)} yet; leave one of them out"
        )


def _check_events(asked: EngineOptions) -> None:
    if asked.dp_rank < 0:
        raise ConfigError(f"--dp-rank is {asked.dp_rank}, but replicas are numbered from 0; leave it out for the first")
    for name, address in (("kv_events", asked.kv_events), ("kv_events_replay", asked.kv_events_replay)):
        if address is not None and not address.startswith(("tcp://", "ipc://")):
            raise ConfigError(f"{name} is {address!r}, but must be tcp://HOST:PORT, tcp://*:PORT or ipc://PATH")
    if asked.kv_events is None and (asked.kv_events_replay or asked.kv_events_topic):
        raise ConfigError("kv_events_replay and kv_events_topic are of --kv-events, which is not given; give it, or leave them out")
    if asked.kv_events is not None and not asked.prefix_cache:
        raise ConfigError("--kv-events tells what the prefix cache has, which --no-prefix-cache turns off; leave one of them out")


def _check_drafts(asked: EngineOptions) -> None:
    length = asked.draft_length
    if length != "auto" and not length.isdecimal():
        raise ConfigError(f"draft_length is {length!r}, but must be auto or a number of tokens")
    given = {"draft_length": None if length == "auto" else length, "draft_model": asked.draft_model}
    for name, value in given.items():
        if asked.drafter == "off" and value is not None:
            raise ConfigError(f"{name} is {value}, but nothing drafts; name a drafter with --drafter, or leave it out")


def _check_numbers(asked: EngineOptions) -> None:
    given = {name: value for name, value in vars(asked).items() if value is not None}
    for name, least in _LEAST.items():
        if given.get(name, least) < least:
            raise ConfigError(f"{name} is {given[name]}, but must be at least {least}")
    if given.get("num_threads", 1) > MOST_THREADS:
        raise ConfigError(f"num_threads is {asked.num_threads}, but must be at most {MOST_THREADS}; as many as cores are fastest")
    for name in _SHARES:
        if not 0 < given.get(name, 1) <= 1:
            raise ConfigError(f"{name} is {given[name]}, but must lie in (0, 1]")
    for name in ("kv_memory_gib", "step_deadline"):
        if not 0 < given.get(name, 1) < float("inf"):
            raise ConfigError(f"{name} is {given[name]}, but must be positive, and finite")


def _check_layers(asked: EngineOptions, model: ModelFacts) -> None:
    """Refuse settings for layers that the model does not have: they would be ignored."""
    latents, states = (model.has_latents, "MLA"), (model.has_states, "recurrent")
    softmax = (any(layer.recurrent is None for layer in model.layers), "softmax-attention")
    given = {
        "mla_prefill": (asked.mla_prefill, *latents),
        "mla_chunk_tokens": (asked.mla_chunk_tokens, *latents),
        "linear_attention_backend": (asked.linear_attention_backend, *states),
        "prefill_attention_backend": (asked.prefill_attention_backend, *softmax),
        "decode_attention_backend": (asked.decode_attention_backend, *softmax),
    }
    for name, (value, has_them, layers) in given.items():
        if value not in (None, "auto") and not has_them:
            raise ConfigError(f"{name} is {value!r}, but the model has no {layers} layers; leave it out")


def _dtype(asked: EngineOptions, device: DeviceFacts, config: Mapping[str, object], dtype_from: str) -> Decision:
    slow = {"cpu": ("float16", "bfloat16")[: 2 - device.has_bfloat16]}.get(device.kind, ())
    if asked.dtype != "auto":
        if asked.dtype not in DTYPES:
            raise ConfigError(f"dtype is {asked.dtype!r}, but must be one of auto, {', '.join(DTYPES)}")
        reason = "asked for" + "; float32 is faster on this CPU" * (asked.dtype in slow)
        return Decision(setting="dtype", value=asked.dtype, reason=reason)
    stated = config.get("dtype") or config.get("torch_dtype")
    if stated not in DTYPES:
        reason = f"that of {dtype_from} is {stated or 'none'}, not {' or '.join(DTYPES)}"
        return Decision(setting="dtype", value="float32", reason=reason)
    if stated in slow:
        reason = f"that of {dtype_from} is {stated}, in which this CPU is slow; --dtype {stated} takes half the memory"
        return Decision(setting="dtype", value="float32", reason=reason)
    return Decision(setting="dtype", value=stated, reason=f"that of {dtype_from}")


def _kv_dtype(asked: EngineOptions, model: ModelFacts, *, dtype: str) -> Decision:
    if asked.kv_dtype in ("auto", dtype):
        return Decision(setting="kv_dtype", value=dtype, reason="that of the model")
    name = {"fp8": "float8_e4m3fn"}.get(asked.kv_dtype, asked.kv_dtype)
    if name not in KV_DTYPES:
        raise ConfigError(f"kv_dtype is {asked.kv_dtype!r}, but must be one of auto, fp8, {', '.join(KV_DTYPES)}")
    if model.has_latents:
        raise ConfigError(
            f"kv_dtype is {asked.kv_dtype!r}, but latents of MLA layers are kept in the model's {dtype}; leave it out"
        )
    return Decision(setting="kv_dtype", value=name, reason="asked for")


def _max_model_len(asked: EngineOptions, model: ModelFacts) -> Decision:
    if asked.max_model_len is not None and asked.max_model_len < 2:
        raise ConfigError(f"max_model_len is {asked.max_model_len}, but the shortest request has a token and is given one")
    if asked.max_model_len is None:
        return Decision(setting="max_model_len", value=str(model.max_positions), reason="max_position_embeddings of the model")
    if asked.max_model_len > model.max_positions:
        raise ConfigError(
            f"max_model_len is {asked.max_model_len}, but the model was made for {model.max_positions} positions; lower it, or add "
            "rope scaling to config.json"
        )
    return Decision(setting="max_model_len", value=str(asked.max_model_len), reason="asked for")
