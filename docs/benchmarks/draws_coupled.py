"""How often two near distributions give one token, drawn with one number: in the order of indices, and by noise of each token.

Computed, not drawn. The optimum is 1 - total variation. By noise (Gumbel-max) it is the sum over i of
1 / sum_j max(p_j / p_i, q_j / q_i) (arXiv:2408.07978). Needs numpy alone: `python docs/benchmarks/draws_coupled.py`.
"""

from __future__ import annotations

import numpy as np

PAIRS = 60


def in_order(p: np.ndarray, q: np.ndarray) -> float:
    """Where the tokens' shares of [0, 1] overlap."""
    ends, others = np.cumsum(p), np.cumsum(q)
    return float(np.clip(np.minimum(ends, others) - np.maximum(ends - p, others - q), 0, None).sum())


def by_noise(p: np.ndarray, q: np.ndarray) -> float:
    """In the order of p / q the larger of both quotients is q's for all before i, and p's for all behind it."""
    order = np.argsort(p / q)
    p, q = p[order], q[order]
    behind = np.append(np.cumsum(p[::-1])[::-1][1:], 0)
    return float((1 / (np.cumsum(q) / q + behind / p)).sum())


def softmax(logits: np.ndarray) -> np.ndarray:
    weights: np.ndarray = np.exp(logits - logits.max())
    return weights / weights.sum()


def main() -> None:
    random = np.random.default_rng(0)
    print("| tokens | logits differ by | optimum | in order | by noise |\n|--:|--:|--:|--:|--:|")
    for size in (4096, 32_000, 128_256):
        for apart in (0.01, 0.1, 0.3, 0.6, 1.0):
            found = []
            for _ in range(PAIRS):  # Zipf-like, 1.1 to 2.6, in a random order
                logits = -1.6 * np.log(np.arange(1, size + 1) + random.uniform(0, 3)) * random.uniform(0.7, 1.6)
                logits = random.permutation(logits + random.normal(0, 0.5, size))
                p, q = softmax(logits), softmax(logits + random.normal(0, apart, size))
                found.append((np.minimum(p, q).sum(), in_order(p, q), by_noise(p, q)))
            print(f"| {size:,} | {apart} | " + " | ".join(f"{mean:.3f}" for mean in np.mean(found, 0)) + " |")


if __name__ == "__main__":
    main()
