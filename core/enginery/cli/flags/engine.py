"""The flags of every command that builds an engine, made from the fields of `EngineOptions`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Final, TypedDict, get_type_hints

import msgspec
import typer

from enginery.cli.flags import completion
from enginery.cli.flags.plugins import blocked_names
from enginery.cli.flags.server import SERVER_KINDS
from enginery.cli.flags.signature import Kind, flag, with_flags
from enginery.config.schema import EngineOptions
from enginery.config.sources import engine_options
from enginery.contracts.request import SamplingParams
from enginery.errors import ConfigError, RequestError

_MODEL: Final = "Model"
_PARTS: Final = "Device and parts"
_MEMORY: Final = "Memory and batching"
_PLUGINS: Final = "Plugins"
_SAMPLING: Final = "Sampling"


@dataclass(frozen=True)
class _Flag:
    """How a field looks on the command line; its flag is its name unless `names` says otherwise."""

    panel: str
    help: str
    names: tuple[str, ...] = ()
    metavar: str | None = None
    complete: completion.Complete | None = None


_FLAGS: Final = {
    "model": _Flag(_MODEL, "Folder, installed checkpoint or Hugging Face id.", ("--model", "-m"), complete=completion.models),
    "revision": _Flag(_MODEL, "Branch, tag or commit of a Hugging Face id."),
    "tokenizer": _Flag(_MODEL, "Folder or Hugging Face id of the tokenizer, where it is not the model's own."),
    "tokenizer_revision": _Flag(_MODEL, "Branch, tag or commit of --tokenizer."),
    "chat_template": _Flag(_MODEL, "File with the chat template, instead of the tokenizer's.", metavar="FILE"),
    "served_model_name": _Flag(_MODEL, "The name that requests use; several with commas between them.", metavar="NAME[,NAME]"),
    "load_format": _Flag(_MODEL, "auto, or dummy for random weights.", complete=completion.one_of("auto", "dummy")),
    "dtype": _Flag(
        _MODEL, "auto, float32, bfloat16 or float16.", complete=completion.one_of("auto", "float32", "bfloat16", "float16")
    ),
    "max_model_len": _Flag(_MODEL, "Longest context in tokens."),
    "device": _Flag(_PARTS, "auto, cpu, cuda or cuda:INDEX.", complete=completion.one_of("auto", "cpu", "cuda")),
    "attention_backend": _Flag(_PARTS, "auto, or a name that engine list-backends shows.", complete=completion.backends),
    "prefill_attention_backend": _Flag(
        _PARTS, "For prefills, where it is not the one for decoding.", metavar="NAME", complete=completion.backends
    ),
    "decode_attention_backend": _Flag(
        _PARTS, "For decoding, where it is not the one for prefills.", metavar="NAME", complete=completion.backends
    ),
    "linear_attention_backend": _Flag(_PARTS, "For recurrent layers: auto, or a name.", complete=completion.backends),
    "sparse_coordinator": _Flag(_PARTS, "off, or the name of a sparse-KV coordinator.", complete=completion.coordinators),
    "micro_batches": _Flag(_PARTS, "Plan and attend each batch in two halves.", ("--micro-batches",)),
    "check_attention": _Flag(
        _PARTS, "Check what attention backends write and that planned batches stay as they are; slow.", ("--check-attention",)
    ),
    "mla_prefill": _Flag(
        _PARTS,
        "auto (by size), absorbed, one-shot or chunked.",
        complete=completion.one_of("auto", "absorbed", "one-shot", "chunked"),
    ),
    "drafter": _Flag(
        _PARTS,
        "auto, off, or the name of what guesses next tokens; they are verified, so answers stay the same.",
        metavar="NAME",
        complete=completion.drafters,
    ),
    "draft_model": _Flag(_PARTS, "The checkpoint of a drafter that is a model: folder, installed one or hub id.", metavar="MODEL"),
    "draft_length": _Flag(
        _PARTS, "Guesses of a request in a step, as far as --max-batch-requests has room; auto: as many as pay.", metavar="N"
    ),
    "schedule_policy": _Flag(_PARTS, "auto, or the name of a policy.", complete=completion.policies),
    "wait_for_kernels": _Flag(
        _PARTS, "Compile missing attention kernels first, instead of beginning with others.", ("--wait-for-kernels",)
    ),
    "num_threads": _Flag(_PARTS, "Threads of a CPU engine, of all its ranks on this host."),
    "tp": _Flag(_PARTS, "Tensor parallelism: processes that have a part of each layer.", metavar="N"),
    "pp": _Flag(_PARTS, "Pipeline parallelism: stages that have some of the layers.", metavar="N"),
    "pp_layers": _Flag(
        _PARTS, "Decoder layers of each stage of --pp; without it they are divided by what they cost.", metavar="N,N"
    ),
    "ep": _Flag(_PARTS, "Expert parallelism: ranks have some of the experts each, not a part of every one.", ("--ep",)),
    "dp_attention": _Flag(
        _PARTS,
        "Data-parallel attention: lanes with requests and KV memory of their own, which run feed-forwards together.",
        metavar="N",
    ),
    "executor": _Flag(
        _PARTS,
        "What places the processes of ranks: local, join (engine rank --join), or a plugin's.",
        metavar="NAME",
        complete=completion.executors,
    ),
    "listen": _Flag(_PARTS, "Where ranks of other hosts join: an address of a private interface.", metavar="tcp://ADDRESS:PORT"),
    "rank_key_file": _Flag(_PARTS, "The key of ranks that join; engine rank --new-key makes one.", metavar="FILE"),
    "step_deadline": _Flag(_PARTS, "Seconds after which a rank that does not get on ends the engine.", metavar="SECONDS"),
    "seed": _Flag(_PARTS, "Of random weights, and of requests without a seed."),
    "record_steps": _Flag(
        _PARTS, "Keep so many steps from the start on in a file, for engine replay.", ("--record-steps",), metavar="N FILE"
    ),
    "profile_steps": _Flag(_PARTS, "Trace what the host does in so many steps."),
    "profile_file": _Flag(_PARTS, "Where that Chrome trace is written."),
    "kv_dtype": _Flag(
        _MEMORY,
        "Of keys and values: auto (the model's), fp8, float32, bfloat16 or float16.",
        complete=completion.one_of("auto", "fp8", "float32", "bfloat16", "float16"),
    ),
    "mla_chunk_tokens": _Flag(_MEMORY, "Keys and values that an MLA prefill makes at once (twice --max-batch-tokens)."),
    "page_size": _Flag(_MEMORY, "Tokens in a page of the KV cache."),
    "num_pages": _Flag(_MEMORY, "Pages, instead of what the memory leaves."),
    "expected_tokens": _Flag(_MEMORY, "Tokens of a typical request; kinds of memory are sized for it."),
    "kv_memory_gib": _Flag(_MEMORY, "Bound of the KV cache in GiB."),
    "memory_fraction": _Flag(_MEMORY, "Share of the free memory that may be taken."),
    "max_batch_tokens": _Flag(_MEMORY, "Tokens in a step (on a GPU 8192, offline 16384; on a CPU 2048)."),
    "max_batch_requests": _Flag(
        _MEMORY, "Requests in a step (on a GPU 512, on a CPU 256); if guesses are verified, rows: one more than guesses of each."
    ),
    "prefill_fraction": _Flag(
        _MEMORY, "Part of the waiting prompt tokens that joins a decoding step; few join anyway (0.0625; offline 1)."
    ),
    "max_queued_requests": _Flag(_MEMORY, "Waiting requests; one more is refused."),
    "prefix_cache": _Flag(_MEMORY, "Share the KV of equal beginnings.", ("--prefix-cache/--no-prefix-cache",)),
    "kv_events": _Flag(
        _MEMORY, "Publish what the prefix cache has, in vLLM's format, for routers: tcp://*:5557 or ipc://PATH.", metavar="ADDRESS"
    ),
    "kv_events_replay": _Flag(_MEMORY, "Where subscribers ask for events that they missed.", metavar="ADDRESS"),
    "kv_events_topic": _Flag(_MEMORY, "The topic of these messages.", metavar="TOPIC"),
    "dp_rank": _Flag(_MEMORY, "The number of this engine, or of the first of --dp, among replicas.", metavar="N"),
    "overlap": _Flag(_MEMORY, "Prepare a step while the one before runs.", ("--overlap/--no-overlap",)),
    "graphs": _Flag(_MEMORY, "Capture decoding steps as CUDA graphs; on a CPU record them.", ("--graphs/--no-graphs",)),
    "blocked_plugins": _Flag(_PLUGINS, "Do not load plugin NAME. Repeatable.", ("-p",), "no:NAME", complete=completion.blocks),
    "no_plugins": _Flag(_PLUGINS, "Load no plugin at all.", ("--no-plugins",)),
    "plugin_options": _Flag(_PLUGINS, "An option of a plugin's part. Repeatable.", ("--option", "-o"), "NAME.KEY=VALUE"),
}

_SAMPLING_FLAGS: Final = {
    "max_tokens": _Flag(_SAMPLING, "Tokens to generate at the most."),
    "temperature": _Flag(_SAMPLING, "0 always takes the likeliest token."),
    "top_p": _Flag(_SAMPLING, "Keep the likeliest tokens of this share."),
    "top_k": _Flag(_SAMPLING, "Keep this many of the likeliest tokens; 0 keeps all."),
    "min_p": _Flag(_SAMPLING, "Keep tokens of this share of the likeliest one's probability."),
    "repetition_penalty": _Flag(_SAMPLING, "Above 1 discourages tokens that occurred."),
    "seed": _Flag(_SAMPLING, "Same seed, same tokens but for rounding; with other requests in float32 only.", ("--sampling-seed",)),
    "stop": _Flag(_SAMPLING, "Text that ends the output. Repeatable."),
    "ignore_eos": _Flag(_SAMPLING, "Go on after the end-of-sequence token.", ("--ignore-eos",)),
}


class GivenSampling(TypedDict, total=False):
    """The fields of `SamplingParams` that have a flag. Only what was given is in it."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int
    stop: tuple[str, ...]
    ignore_eos: bool


def with_engine_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command, whose first parameter takes the `EngineOptions`, a flag for each field and `--config`.

    Flags come before the environment, and that before the file of `--config`.
    """
    config = Annotated[Path | None, typer.Option("--config", help="TOML file with these settings.", rich_help_panel=_MODEL)]
    kinds = get_type_hints(EngineOptions)
    defaults = {field.name: field.default for field in fields(EngineOptions)}
    flags = [_parameter(name, kinds[name], look, default=defaults[name]) for name, look in _FLAGS.items()]
    flags.append(flag("config", config))

    def options(given: dict[str, Any]) -> EngineOptions:
        file = given.pop("config")
        given["blocked_plugins"] = blocked_names(given["blocked_plugins"] or ()) or None
        given["plugin_options"] = tuple(given["plugin_options"] or ()) or None
        return engine_options(given, os.environ, file, others=SERVER_KINDS)

    return with_flags(command, flags, options)


def with_sampling_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command a flag for each way of sampling; its first parameter takes those that were given, checked."""
    kinds = get_type_hints(SamplingParams)
    flags = [
        _parameter(name, kinds[name], look, default=None).replace(name=f"sampling_{name}") for name, look in _SAMPLING_FLAGS.items()
    ]

    def sampling(given: dict[str, object]) -> GivenSampling:
        named = {name.removeprefix("sampling_"): value for name, value in given.items() if value is not None}
        asked = msgspec.convert(named, GivenSampling)
        try:
            SamplingParams(**asked)
        except RequestError as error:
            raise ConfigError(str(error)) from error
        return asked

    return with_flags(command, flags, sampling)


def naming(options: EngineOptions, named: str | None) -> EngineOptions:
    """The options with a model that is an argument of the command, if there is one. Raises `ConfigError` for two models."""
    if named is None:
        return options
    if options.model not in (None, named):
        raise ConfigError(f"two models are named, {named} and {options.model} (--model, ENGINERY_MODEL or --config); name one")
    return replace(options, model=named)


def model_of_server(options: EngineOptions) -> str | None:
    """The model, for a command with --url. Raises `ConfigError` for other options, but the environment's, which servers have."""
    environ = vars(engine_options({}, os.environ, others=SERVER_KINDS))
    if others := [name for name, value in vars(options).items() if name != "model" and value != environ[name]]:
        raise ConfigError(f"the server at --url has settings of its own; leave out {', '.join(others)}")
    return options.model


def _parameter(name: str, kind: Kind, look: _Flag, *, default: object) -> inspect.Parameter:
    """None means that the flag was not given; the default is told in the help."""
    is_list = kind == tuple[str, ...]
    told = "" if default is None or is_list else f" [dim]\\[default: {default}][/dim]"
    option = typer.Option(
        *(look.names or (f"--{name.replace('_', '-')}",)),
        help=look.help + told,
        metavar=look.metavar,
        autocompletion=look.complete,
        show_default=False,
        rich_help_panel=look.panel,
    )
    return flag(name, Annotated[(list[str] if is_list else kind) | None, option])
