"""Enginery beside transformers and llama.cpp, on one machine in one run: `python docs/benchmarks/cpu_peers.py --output FILE`.

The 125M Llama with random weights, 128 tokens in, 128 out, greedy. The engines take turns, so that a machine whose speed drifts
treats them alike; of each, the best and the median of all rounds are kept. llama.cpp takes part if `xllamacpp` and `gguf` are
installed. `--without PLUGIN` leaves plugins out of Enginery.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

import enginery
from enginery import LLM, SamplingParams
from enginery.bench.workloads import write_shape

Runner = Callable[[list[list[int]], int], int]
INPUT, OUTPUT = 128, 128
PREFILL = 2048
LOADS = {"1 stream": (1, INPUT, OUTPUT), "16 streams": (16, INPUT, OUTPUT), "prefill 2048": (1, PREFILL, 1)}


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(10, 30000, (count, length), generator=generator).tolist()


def enginery_runner(folder: Path, dtype: str, without: tuple[str, ...]) -> Runner:
    llm = LLM(str(folder), load_format="dummy", dtype=dtype, blocked_plugins=without)

    def run(batch: list[list[int]], max_tokens: int) -> int:
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        return sum(len(answer.token_ids) for answer in llm.generate(batch, params, progress=False))

    return run


def llama_cpp_runner(folder: Path, dtype: str) -> Runner:
    """Its server in this process, with 16 slots, and keys and values in float16, which is its default."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(write_gguf(folder, dtype))
    params.n_parallel, params.n_ctx, params.kv_unified, params.cache_prompt = 16, 8192, True, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = torch.get_num_threads()
    server, pool = xllamacpp.Server(params), ThreadPoolExecutor(16)

    def ask(prompt: list[int], max_tokens: int) -> int:
        asked = {"prompt": prompt, "n_predict": max_tokens, "temperature": 0.0, "ignore_eos": True, "cache_prompt": False}
        answer = server.handle_completions(asked)
        return int((json.loads(answer) if isinstance(answer, str) else answer)["usage"]["completion_tokens"])

    return lambda batch, max_tokens: sum(pool.map(lambda prompt: ask(prompt, max_tokens), batch))


def write_gguf(folder: Path, dtype: str) -> Path:
    """The same shape with random weights as llama.cpp reads it. Its vocabulary says nothing."""
    import gguf

    config = json.loads((folder / "config.json").read_text())
    size, inner, kv = config["hidden_size"], config["intermediate_size"], config["num_key_value_heads"] * config["head_dim"]
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(size)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(inner)
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("llama")
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [f"\u2581t{place}" for place in range(len(pieces), config["vocab_size"])]
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL, *[gguf.TokenType.BYTE] * 256]
    writer.add_token_list(pieces)
    writer.add_token_scores([-float(place) for place in range(len(pieces))])
    writer.add_token_types([*kinds, *[gguf.TokenType.NORMAL] * (len(pieces) - len(kinds))])
    stored = gguf.GGMLQuantizationType.BF16 if dtype == "bfloat16" else gguf.GGMLQuantizationType.F32

    def add(name: str, *shape: int) -> None:
        values = torch.randn(shape) * 0.02
        if len(shape) == 1:
            writer.add_tensor(name, (values + 1).numpy())
        else:
            writer.add_tensor(name, gguf.quantize(values.numpy(), stored), raw_dtype=stored)

    add("token_embd.weight", config["vocab_size"], size)
    add("output.weight", config["vocab_size"], size)
    add("output_norm.weight", size)
    for layer in range(config["num_hidden_layers"]):
        shapes = {"attn_q": (size, size), "attn_k": (kv, size), "attn_v": (kv, size), "attn_output": (size, size)}
        shapes |= {"ffn_gate": (inner, size), "ffn_up": (inner, size), "ffn_down": (size, inner)}
        for name, shape in shapes.items():
            add(f"blk.{layer}.{name}.weight", *shape)
        add(f"blk.{layer}.attn_norm.weight", size)
        add(f"blk.{layer}.ffn_norm.weight", size)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "model.gguf"


def transformers_runners(folder: Path, dtype: str) -> dict[str, Runner]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).eval().to(getattr(torch, dtype))
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=None, do_sample=False)

    def generate(batch: list[list[int]], max_tokens: int) -> int:
        ids = torch.tensor(batch)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, min_new_tokens=max_tokens)
        return (out.shape[1] - ids.shape[1]) * len(batch)

    def continuous(batch: list[list[int]], max_tokens: int) -> int:
        config = GenerationConfig(max_new_tokens=max_tokens, do_sample=False, pad_token_id=0, eos_token_id=-1)
        paging = ContinuousBatchingConfig(num_blocks=1024, max_batch_tokens=2048, block_size=32)
        outputs = model.generate_batch(batch, generation_config=config, continuous_batching_config=paging, progress_bar=False)
        return sum(len(output.generated_tokens) for output in outputs.values())

    return {"transformers generate": generate, "transformers continuous batching": continuous}


def measure(dtype: str, rounds: int, loads: list[str], engines: list[str], without: tuple[str, ...]) -> list[dict[str, object]]:
    with tempfile.TemporaryDirectory() as folder:
        shape = write_shape("llama-125m", Path(folder))
        runners = {"enginery": enginery_runner(shape, dtype, without), **transformers_runners(shape, dtype)}
        if find_spec("xllamacpp") and find_spec("gguf"):
            runners["llama.cpp"] = llama_cpp_runner(shape, dtype)
        runners = {name: run for name, run in runners.items() if not engines or name in engines}
        rows = []
        for load in loads:
            count, length, max_tokens = LOADS[load]
            seconds: dict[str, list[float]] = {name: [] for name in runners}
            for turn in range(rounds + 1):
                for name, run in runners.items():
                    batch = prompts(count, length, seed=turn)
                    began = time.perf_counter()
                    assert run(batch, max_tokens) == count * max_tokens
                    if turn:  # the first one warms up
                        seconds[name].append(time.perf_counter() - began)
            tokens = count * (max_tokens if max_tokens > 1 else length)
            for name, taken in seconds.items():
                row = {
                    "load": load,
                    "dtype": dtype,
                    "engine": name,
                    "best_tokens_per_s": round(tokens / min(taken), 1),
                    "median_tokens_per_s": round(tokens / statistics.median(taken), 1),
                    "seconds": [round(one, 3) for one in taken],
                }
                rows.append(row)
                print(*(str(value).ljust(34) for value in list(row.values())[:5]), flush=True)
        return rows


def installed(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--loads", nargs="+", default=[*LOADS], choices=[*LOADS])
    parser.add_argument("--engines", nargs="+", default=[], help="all of those that are installed, if none is named")
    parser.add_argument("--without", nargs="+", default=[], metavar="PLUGIN")
    asked = parser.parse_args()
    transformers.logging.set_verbosity_error()
    rows = [row for dtype in asked.dtypes for row in measure(dtype, asked.rounds, asked.loads, asked.engines, tuple(asked.without))]
    if asked.output:
        output = ("--output", str(asked.output))
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        about = {
            "command": shlex.join(["python", "docs/benchmarks/cpu_peers.py", *(w for w in sys.argv[1:] if w not in output)]),
            "commit": commit,
            "device": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads",
            "versions": {
                "enginery": enginery.__version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "python": platform.python_version(),
                "xllamacpp": installed("xllamacpp"),
            },
            "rows": rows,
        }
        asked.output.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
