"""The frozen settings. `EngineOptions` is what was asked for; the `*Settings` are what `resolve` made of it.

Every field of `EngineOptions` is a flag of `engine serve`, an environment variable `ENGINERY_<FIELD>` and a key of the
configuration file, and a keyword argument of `LLM`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from enginery.errors import ConfigError

Dtype = Literal["float32", "bfloat16", "float16"]
KVDtype = Literal["float32", "bfloat16", "float16", "float8_e4m3fn"]


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What a user may ask for. None and "auto" leave the choice to `resolve`.

    revision: branch, tag or commit of a model from the Hugging Face hub; tokenizer_revision: of its tokenizer's repository.
    served_model_name: several are separated by commas, and the first is the model's. tokenizer: folder or hub id, where it is not
    the model's own. chat_template: file with the template's text, instead of the checkpoint's.
    kv_dtype: of keys and values in memory; auto is the model's, fp8 is float8_e4m3fn. max_batch_tokens: token budget of a step.
    max_batch_requests: requests in a step. prefill_fraction: the part of the waiting prompt tokens that joins a decoding
    step, or all of few (`schedule.planner.MIXED_ROWS`); 1 takes what the budget allows, as `LLM` does. max_model_len:
    longest context in tokens.
    prefill_attention_backend, decode_attention_backend: instead of one for both. micro_batches: each batch in two halves.
    mla_prefill: auto or a `PrefillStrategy`. mla_chunk_tokens: keys and values that an MLA prefill makes from latents at once.
    overlap: prepare a step while the one before runs; None does so where the device is not the host. graphs: capture decoding
    steps on CUDA devices, and record them on a CPU. wait_for_kernels: compile what the best attention backends lack first, instead
    of beginning with others.
    num_pages: KV pages, instead of what memory_fraction leaves. expected_tokens: of a typical request, prompt and answer; how
    memory is divided among the kinds that a model has follows from it. memory_fraction: share of the device's free memory (of the
    host's available memory on a CPU) that weights, KV and workspace may take together. kv_memory_gib: bound of the KV part.
    drafter: off, or the name of what guesses next tokens, which are then verified; auto takes the draft model that comes with the
    model, if any. draft_model: folder, installed checkpoint or hub id of a drafter that is a model. draft_length: tokens that are
    guessed of a request in a step, or auto: as many as pay.
    tp: tensor parallelism, processes that have a part of each layer. pp: pipeline parallelism, stages of some layers each, as many
    steps are on their way; pp_layers: decoder layers of each stage, with commas between them. ep: ranks have some of the experts
    each, not a part of every one. dp_attention: lanes with requests and KV memory of their own, which run attention each and all
    else together; pages, tokens and requests of a step are of each lane. num_threads: of all on a host.
    executor: what places the processes of ranks. listen: address of this host where ranks of other hosts join; rank_key_file: with
    the key of both sides. step_deadline: seconds after which a rank that does not get on is given up, and the engine with it.
    kv_events, kv_events_replay: ZeroMQ addresses where what comes into the prefix cache and goes is published, and published again;
    kv_events_topic: of these messages. dp_rank: the number of this engine among replicas, which these messages tell, of each lane
    one; their ports are so much higher, and requests without a seed draw other tokens than those of other replicas.
    check_attention: look what each call of an attention backend wrote, and that no planned batch changed; slow, and without graphs.
    record_steps: keep so many steps from the start on in a file, which `engine replay` runs again.
    """

    model: str | None = None
    revision: str | None = None
    tokenizer: str | None = None
    tokenizer_revision: str | None = None
    chat_template: str | None = None
    served_model_name: str | None = None
    dtype: str = "auto"
    kv_dtype: str = "auto"
    device: str = "auto"
    load_format: str = "auto"
    attention_backend: str = "auto"
    prefill_attention_backend: str | None = None
    decode_attention_backend: str | None = None
    linear_attention_backend: str = "auto"
    sparse_coordinator: str = "off"
    micro_batches: bool = False
    check_attention: bool = False
    mla_prefill: str = "auto"
    mla_chunk_tokens: int | None = None
    drafter: str = "off"
    draft_model: str | None = None
    draft_length: str = "auto"
    schedule_policy: str = "auto"
    page_size: int = 16
    num_pages: int | None = None
    expected_tokens: int = 4096
    kv_memory_gib: float | None = None
    memory_fraction: float = 0.85
    max_model_len: int | None = None
    max_batch_tokens: int | None = None
    max_batch_requests: int | None = None
    prefill_fraction: float | None = None
    max_queued_requests: int = 4096
    prefix_cache: bool = True
    kv_events: str | None = None
    kv_events_replay: str | None = None
    kv_events_topic: str = ""
    dp_rank: int = 0
    overlap: bool | None = None
    graphs: bool = True
    wait_for_kernels: bool = False
    num_threads: int | None = None
    tp: int = 1
    pp: int = 1
    pp_layers: str | None = None
    ep: bool = False
    dp_attention: int = 1
    executor: str = "local"
    listen: str | None = None
    rank_key_file: str | None = None
    step_deadline: float = 60.0
    seed: int = 0
    record_steps: tuple[int, str] | None = None
    profile_steps: int = 0
    profile_file: str = "enginery-steps.json"
    blocked_plugins: tuple[str, ...] = ()
    no_plugins: bool = False
    plugin_options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        numbers = vars(self) | {"record_steps": self.record_steps[0] if self.record_steps else None}
        for name, value in numbers.items():
            if isinstance(value, int) and not -(2**63) <= value < 2**64:  # what a message to other processes takes
                raise ConfigError(f"{name} is {value}, but must be a whole number of at most 64 bits")

    @property
    def num_ranks(self) -> int:
        """Processes that run the model together."""
        return self.tp * self.pp * self.dp_attention


@dataclass(frozen=True, kw_only=True)
class HostShare:
    """What one of `count` engines on a host may take. num_ranks: of each, here. host_bytes: the host's memory before any began."""

    index: int
    count: int
    num_ranks: int
    host_bytes: int


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One resolved value and why it was chosen; printed at start.

    source: the plugin that brings it, as `Offer.source` names it; empty where no plugin does.
    """

    setting: str
    value: str
    reason: str
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
    """What the scheduler is told. Lengths are in tokens; `prefill_fraction` is explained at `EngineOptions`.

    stages: of a pipeline: so many steps are in flight, none with inputs that are pending. first_seat: of a lane, whose seats follow
    those of the lanes before; pages and requests in a step are its own, `max_queued_requests` is of all lanes.
    """

    page_size: int
    num_pages: int
    max_model_len: int
    max_batch_tokens: int
    max_batch_requests: int
    prefill_fraction: float
    max_queued_requests: int
    prefix_cache: bool
    vocab_size: int
    stages: int = 1
    first_seat: int = 0
