# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Additions as an environment of the verifiers library: load_environment("addition-env")."""

import random
from typing import Any

import verifiers as vf
from datasets import Dataset


def right(completion: Any, answer: str) -> float:
    """Return 1 if the text after any working is the sum."""
    return float(completion[-1]["content"].rpartition("</think>")[2].strip() == answer)


def load_environment(num_digits: int = 2, num_prompts: int = 2000, seed: int = 0) -> vf.Environment:
    """Make the environment. Training and validation have no sums in common."""
    draw, most = random.Random(seed), 10**num_digits
    pairs = list({(draw.randrange(most), draw.randrange(most)): None for _ in range(num_prompts)})
    rows = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs]
    num_held_out = max(1, len(rows) // 20)
    return vf.SingleTurnEnv(
        dataset=Dataset.from_list(rows[num_held_out:]),
        eval_dataset=Dataset.from_list(rows[:num_held_out]),
        rubric=vf.Rubric(funcs=[right]),
    )
