# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes `tests/unit/parity/peer_reward_loss.json`: losses of TRL's `RewardTrainer` and their gradients, in float64.

python tests/make_peer_reward_loss.py [--packages FOLDER] [--output FILE]

FOLDER is one that `pip install --no-deps --target FOLDER` has filled with `PACKAGES`. Without it, this is done in a
temporary folder. TRL calls a sequence classifier of transformers on padded sequences of different lengths.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

PACKAGES = ("trl==1.16.0", "accelerate==1.15.0")
OUTPUT = Path(__file__).resolve().parent / "unit/parity/peer_reward_loss.json"
LENGTHS = (5, 9, 3, 12, 7, 7, 12, 4)
"""Tokens of the sequences: the chosen ones of four pairs, then the rejected ones."""
MARGINS = (0.5, 0.0, 2.0, -1.0)
VOCABULARY, PADDING = 32, 0
CASES = (
    {"has_margins": False, "center_rewards_coefficient": None},
    {"has_margins": True, "center_rewards_coefficient": None},
    {"has_margins": False, "center_rewards_coefficient": 0.01},
    {"has_margins": True, "center_rewards_coefficient": 0.5},
)


def make_classifier() -> Any:
    """Make a sequence classifier with random weights whose scores differ."""
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    torch.manual_seed(65)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        pad_token_id=PADDING,
        num_labels=1,
    )
    model = Qwen3ForSequenceClassification(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64) * parameter.shape[-1] ** -0.5)
        model.score.weight *= 2
    return model


def make_batch() -> dict[str, torch.Tensor]:
    """Make padded sequences, of which those of a pair begin alike."""
    generator = torch.Generator().manual_seed(9)
    ids = torch.full((len(LENGTHS), max(LENGTHS)), PADDING)
    for row, length in enumerate(LENGTHS):
        ids[row, :length] = torch.randint(1, VOCABULARY, (length,), generator=generator)
    half = len(LENGTHS) // 2
    ids[half:, :2] = ids[:half, :2]
    return {"input_ids": ids, "attention_mask": (ids != PADDING).long()}


def call(case: dict[str, Any]) -> dict[str, Any]:
    """Call TRL's loss with an object in place of the trainer, and return the loss with its gradient by the scores."""
    from trl import RewardTrainer

    model, seen = make_classifier(), []

    def scored(**inputs: Any) -> Any:
        assert inputs.pop("use_cache") is False
        inputs.pop("margin", None)
        outputs = model(**inputs)
        outputs.logits.retain_grad()
        seen.append(outputs.logits)
        return outputs

    scored.training = True  # type: ignore[attr-defined]
    same = lambda value: value  # noqa: E731
    stand_in = SimpleNamespace(
        model=scored,
        args=SimpleNamespace(center_rewards_coefficient=case["center_rewards_coefficient"]),
        accelerator=SimpleNamespace(gather=same, gather_for_metrics=same),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = make_batch()
    if case["has_margins"]:
        inputs["margin"] = torch.tensor(MARGINS, dtype=torch.float64)
    loss = RewardTrainer.compute_loss(stand_in, scored, inputs)
    loss.backward()
    (logits,) = seen
    metrics = {name: float(values[0]) for name, values in stand_in._metrics["train"].items() if name != "num_tokens"}
    return {
        **case,
        "loss": loss.item(),
        "gradient": logits.grad[:, 0].tolist(),
        "gradient_of_head": model.score.weight.grad[0].tolist(),
        "scores": logits[:, 0].tolist(),
        "metrics": metrics,
    }


def main() -> None:
    """Install TRL if it is not there, and write the file."""
    parser = argparse.ArgumentParser(description="Writes the values of TRL's reward loss anew.")
    parser.add_argument("--packages", type=Path)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.packages or Path(temporary)
        if arguments.packages is None:
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
            subprocess.run([*pip, *PACKAGES], check=True)
        sys.path.insert(0, str(folder))
        cases = [call(dict(case)) for case in CASES]
        hidden = hidden_at_scores()
    found = {"release": PACKAGES[0], "margins": MARGINS, "hidden": hidden, "cases": cases}
    arguments.output.write_text(json.dumps(found).replace('{"has_margins"', '\n{"has_margins"') + "\n")


def hidden_at_scores() -> list[list[float]]:
    """Return the last hidden state at the token of each sequence's score."""
    model, batch = make_classifier(), make_batch()
    with torch.no_grad():
        hidden = model.model(**batch).last_hidden_state
    last = torch.tensor(LENGTHS) - 1
    found: list[list[float]] = hidden[torch.arange(len(last)), last].tolist()
    return found


if __name__ == "__main__":
    main()
