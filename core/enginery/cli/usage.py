"""What a wrong command line is told, in the form of every other error; flags of vLLM, SGLang and llama.cpp by their name here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import typer

from enginery.plugin.near import did_you_mean

# Typer has a click of its own, or takes the one that is installed; the parent of what it exports is what both raise.
UsageError: Any = typer.BadParameter.__mro__[1]

_EVENLY: Final = "--tp N divides every layer evenly, --pp-layers N,N the layers as you like"
_HOSTS: Final = "--executor join waits for ranks of other hosts, which `engine rank` starts there"
_ONE_PROCESS: Final = "one process serves HTTP; --dp N runs several engines behind it"
_QUANTIZED: Final = (
    "float8 in blocks and mxfp4 are known by config.json; other methods, and quantising at the start, are not there yet"
)
_DRAFTER: Final = "--drafter NAME, with --draft-model and --draft-length"
_NO_ADAPTERS: Final = "LoRA adapters are not there yet; merge one into its model (peft: merge_and_unload) and serve that"
_NO_OFFLOADING: Final = "weights and KV cache stay on the device; offloading is not there yet"
_ALWAYS: Final = "that is always so here; leave it out"
_NOT_NAMED: Final = "the parser that suits the model is taken by itself; --tool-parser names another"

FOREIGN: Final = {
    **dict.fromkeys(("--tensor-parallel-size", "--tp-size", "-tp"), "--tp"),
    **dict.fromkeys(("--pipeline-parallel-size", "--pp-size", "-pp"), "--pp"),
    **dict.fromkeys(("--enable-expert-parallel", "--ep-size", "-ep"), "--ep, with --tp or --dp-attention"),
    **dict.fromkeys(("--tensor-split", "--split-mode"), _EVENLY),
    **dict.fromkeys(("--nnodes", "--node-rank", "--dist-init-addr"), _HOSTS),
    "--enable-dp-attention": "--dp-attention N",
    **dict.fromkeys(("--data-parallel-size", "--dp-size", "-dp"), "--dp of engine serve, engines behind one server"),
    **dict.fromkeys(("--data-parallel-rank", "--data-parallel-start-rank"), "--dp-rank"),
    **dict.fromkeys(("--api-server-count", "--workers"), _ONE_PROCESS),
    **dict.fromkeys(("--gpu-memory-utilization", "--mem-fraction-static"), "--memory-fraction, the share of the free memory"),
    **dict.fromkeys(("--max-num-seqs", "--max-running-requests", "--parallel"), "--max-batch-requests"),
    **dict.fromkeys(("--max-num-batched-tokens", "--max-prefill-tokens", "--chunked-prefill-size"), "--max-batch-tokens"),
    **dict.fromkeys(("--context-length", "--ctx-size", "--max-seq-len"), "--max-model-len"),
    **dict.fromkeys(("--max-total-tokens", "--num-gpu-blocks-override"), "--num-pages, of --page-size tokens each"),
    **dict.fromkeys(("--quantization", "-q"), _QUANTIZED),
    **dict.fromkeys(("--kv-cache-dtype", "--cache-type-k", "--cache-type-v"), "--kv-dtype"),
    "--block-size": "--page-size",
    **dict.fromkeys(("--no-enable-prefix-caching", "--disable-radix-cache"), "--no-prefix-cache"),
    **dict.fromkeys(("--enable-prefix-caching", "--enable-chunked-prefill", "--enable-metrics", "--jinja"), _ALWAYS),
    **dict.fromkeys(("--enforce-eager", "--disable-cuda-graph"), "--no-graphs"),
    **dict.fromkeys(("--no-async-scheduling", "--disable-overlap-schedule"), "--no-overlap"),
    **dict.fromkeys(("--scheduling-policy",), "--schedule-policy"),
    "--trust-remote-code": "code of a checkpoint is never run; a model family is a plugin",
    "--model-path": "--model",
    **dict.fromkeys(("--enable-auto-tool-choice", "--enable-reasoning"), _NOT_NAMED),
    "--tool-call-parser": "--tool-parser",
    **dict.fromkeys(("--random-seed",), "--seed"),
    **dict.fromkeys(("--speculative-config", "--speculative-algorithm"), _DRAFTER),
    **dict.fromkeys(("--speculative-draft-model-path", "--model-draft"), "--draft-model, with --drafter standalone or eagle"),
    **dict.fromkeys(("--speculative-num-steps", "--speculative-num-draft-tokens", "--draft-max"), "--draft-length"),
    **dict.fromkeys(("--enable-lora", "--lora-modules", "--lora-paths", "--lora"), _NO_ADAPTERS),
    **dict.fromkeys(("--swap-space", "--cpu-offload-gb", "--n-gpu-layers", "--gpu-layers", "-ngl"), _NO_OFFLOADING),
    "--download-dir": "the variable HF_HUB_CACHE",
    **dict.fromkeys(("--disable-log-requests", "--disable-log-stats", "--no-enable-log-requests"), "--log-level warning"),
    "--uvicorn-log-level": "--log-level",
    "--allowed-origins": "--allow-origin",
    "--threads": "--num-threads",
}


def told(error: Any, given: Sequence[str]) -> str:
    """The message for a `UsageError`, empty if the help was shown instead. given: the command line."""
    is_option = "possibilities" in vars(error)
    text = _no_option(error.option_name, given, error.ctx) if is_option else error.format_message().rstrip(".")
    command = " ".join(["engine", *given[: 1 + (given[:1] == ["bench"])]]) if error.ctx is None else error.ctx.command_path
    return f"{text}\n{command} --help shows how it is used" if text else ""


def _no_option(name: str, given: Sequence[str], context: Any) -> str:
    """The message for an unknown option. Typer looks up only the first of several letters behind one dash."""
    whole = next((each for each in given if each.startswith(name)), name).partition("=")[0]
    if answer := FOREIGN.get(whole.replace("_", "-")):
        return f"there is no option {whole}; {'here it is ' if answer.startswith('--') else ''}{answer}"
    known = [] if context is None else [option for each in context.command.params for option in (*each.opts, *each.secondary_opts)]
    options = [option for option in known if option.startswith("-")]
    return f"there is no option {whole}{did_you_mean(whole, options)}"
