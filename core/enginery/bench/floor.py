"""The least time that a workload takes: bytes over the copy bandwidth, operations over the matrix-product rate.

    prompts    max(weights of all tokens, 2 x parameters of a token x tokens) + attention: operations for each token and key it sees
    a step     max(weights of its tokens, 2 x parameters of a token x requests)
               + keys and values, or latents, of every context, those of a shared prefix once + states of every request, in and out

    parameters of a token   what is dense, and the experts of one token
    weights of n tokens     what is dense, and the experts that n tokens choose, see `sizes`: of E, k a token, E (1 - (1 - k / E)^n)
    attention               2 x heads x (dims of a key + dims of a value)
    a key it sees           of i tokens up to its own min(i, window)

Parts that do not overlap are added. Activations, the writing of keys and values, vectors (norms, biases) and launches cost nothing;
nor do the operations of recurrent layers, and of attention in a step. All requests decode together, and all prompts are one step.
The output head counts for every token, although only the last of a prompt needs it: it is 7 % of an 8B model, and up to 13 % of
what a token uses of the mixtures in shapes.json. Products are at the rate of the model's dtype, whatever weights are stored in;
kernels that multiply float8 may be faster.
"""

from __future__ import annotations

from dataclasses import dataclass

from enginery.bench.sizes import ModelSizes
from enginery.bench.workloads import Workload


@dataclass(frozen=True, kw_only=True)
class DeviceLimits:
    """What the device does at best. copy counts what is read and what is written. dtype: of the matrix product."""

    copy_bytes_per_s: float
    read_bytes_per_s: float
    product_flop_per_s: float
    dtype: str


def floor_s(sizes: ModelSizes, workload: Workload, limits: DeviceLimits) -> float:
    """In seconds, of a model of these sizes. limits: measured, or made up: no device is asked."""
    outputs = [count for _, count in workload.lengths]
    prompt_tokens = workload.shared_prefix + sum(length - workload.shared_prefix for length, _ in workload.lengths)
    steps = [sum(count > step for count in outputs) for step in range(1, max(outputs))]  # a first token comes from the prompt
    products_s = sum(
        max(
            sizes.weight_bytes(num_tokens) / limits.copy_bytes_per_s,
            2 * sizes.token_parameters * num_tokens / limits.product_flop_per_s,
        )
        for num_tokens in (prompt_tokens, *steps)
    )
    attention_flop = sum(layers.key_flop * _seen(workload, layers.window) for layers in sizes.contexts)
    memory_bytes = sum(layers.token_bytes * _read(workload, layers.window) for layers in sizes.contexts)
    memory_bytes += 2 * sizes.state_bytes * sum(steps)
    return products_s + attention_flop / limits.product_flop_per_s + memory_bytes / limits.copy_bytes_per_s


def _seen(workload: Workload, window: int | None) -> int:
    """Keys that the tokens of all prompts see, those of a shared prefix once."""
    shared = _up_to(workload.shared_prefix, window)
    return shared + sum(_up_to(length, window) - shared for length, _ in workload.lengths)


def _read(workload: Workload, window: int | None) -> int:
    """Keys that all steps read: each request's own, and in every step once what any request still sees of a shared prefix."""
    own = [(length - workload.shared_prefix, count) for length, count in workload.lengths]
    read = sum(_up_to(length + count - 1, window) - _up_to(length, window) for length, count in own)
    for step in range(1, max(count for _, count in own)) if workload.shared_prefix else ():
        nearest = min(length + step for length, count in own if count > step)
        read += workload.shared_prefix if window is None else max(0, min(workload.shared_prefix, window - nearest))
    return read


def _up_to(count: int, window: int | None) -> int:
    """1 + 2 + ... + count, no term larger than the window: the keys that so many first tokens of a request see together."""
    largest = count if window is None else min(count, window)
    return largest * (largest + 1) // 2 + (count - largest) * largest
