# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""How often at least one of k responses to a prompt is right."""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def pass_at_k(correct: Int[Tensor, " prompts"], num_generations: int, k: int) -> Float[Tensor, " prompts"]:
    """Unbiased estimate of the chance that one of `k` responses is right (Chen et al., arXiv:2107.03374, eq. 1).

    Of all ways to take `k` of a prompt's `n` responses, the share that holds a right one: `1 - C(n-c, k) / C(n, k)`.

    Args:
        correct: Right responses of each prompt, `c`.
        num_generations: Responses to each prompt, `n`.
        k: Responses to take, from 1 to `n`.

    Returns:
        One float64 for each prompt.

    Raises:
        ValueError: `k` is not in 1 to `n`.
    """
    if not 1 <= k <= num_generations:
        raise ValueError(f"pass@k needs k from 1 to the number of generations ({num_generations}), got {k}")
    # Whole numbers of any size, divided once: no product of rounded factors.
    ways = math.comb(num_generations, k)
    by_count = [1.0 - math.comb(num_generations - c, k) / ways for c in range(num_generations + 1)]
    return correct.new_tensor(by_count, dtype=torch.float64)[correct]


def pass_at_k_metrics(is_correct: Bool[Tensor, "prompts generations"]) -> dict[str, float]:
    """Mean of `pass_at_k` over the prompts, as `pass_at_{k}` (MLflow takes no `@` in a name).

    Args:
        is_correct: Which responses are right.

    Returns:
        A value for each power of two from 2 up to the number of generations `n`, and for `n`; nothing for one
        generation, as pass@1 is the accuracy.
    """
    num_generations = is_correct.shape[1]
    correct = is_correct.sum(dim=1)
    return {f"pass_at_{k}": float(pass_at_k(correct, num_generations, k).mean()) for k in _values_of_k(num_generations)}


def _values_of_k(num_generations: int) -> list[int]:
    powers_of_two = {2**exponent for exponent in range(1, num_generations.bit_length())}
    return sorted(powers_of_two | {num_generations} - {1})
