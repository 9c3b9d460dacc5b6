# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains a reward model for grpo_tiny_moe_reward_model.yaml on the demo's data, with transformers only.

    python examples/make_reward_model.py --model results/sft_tiny_moe/final --output results/reward_model_tiny_moe

It learns to score a response with its working higher than one without (Bradley-Terry, as in arXiv:2203.02155, eq. 1).
The pairs are made from the samples for supervised fine-tuning.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer

PAIRS_OF_A_STEP = 32
EMPTY = "<think></think>"


def main() -> None:
    """Train, print how many held-out pairs are in the right order, and write the folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="results/sft_tiny_moe/final", help="folder that it starts from")
    parser.add_argument("--data", type=Path, default=Path("data/addition"), help="folder of the demo's data")
    parser.add_argument("--output", default="results/reward_model_tiny_moe")
    parser.add_argument("--steps", type=int, default=40)
    words = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(words.model)
    model = AutoModelForSequenceClassification.from_pretrained(words.model, num_labels=1, dtype=torch.float32)
    model.config.pad_token_id = tokenizer.pad_token_id
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    def pairs_of(name: str) -> list[tuple[str, str]]:
        """Return pairs of a text with working and a text without."""
        lines = (words.data / name).read_text(encoding="utf-8").splitlines()
        samples = [json.loads(line) for line in lines]
        texts = [sample["prompt"] + sample["completion"] + tokenizer.eos_token for sample in samples]
        return list(zip([t for t in texts if EMPTY not in t], [t for t in texts if EMPTY in t], strict=False))

    def gaps(pairs: Sequence[tuple[str, str]]) -> Tensor:
        """Return the score of the first text of each pair minus the second's."""
        texts = [first for first, _ in pairs] + [second for _, second in pairs]
        scores = model(**tokenizer(texts, return_tensors="pt", padding=True)).logits[:, 0]
        return scores[: len(pairs)] - scores[len(pairs) :]

    pairs = pairs_of("train.jsonl")
    for step in range(words.steps):
        first = step * PAIRS_OF_A_STEP % (len(pairs) - PAIRS_OF_A_STEP + 1)
        loss = -torch.nn.functional.logsigmoid(gaps(pairs[first : first + PAIRS_OF_A_STEP])).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        in_order = (gaps(pairs_of("validation.jsonl")) > 0).float().mean()
    print(f"{words.steps} steps; {in_order:.0%} of the held-out pairs are in the right order")
    model.save_pretrained(words.output)
    tokenizer.save_pretrained(words.output)
    print(f"{words.output}: a {type(model).__name__}")


if __name__ == "__main__":
    main()
