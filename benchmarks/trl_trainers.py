# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Steps of TRL's trainers with the benchmarks' small Qwen3-MoE and data. Prints one JSON line.

These are complete trainers, as TRL's users start them, without code of this project: float32, fused AdamW, one process,
no checkpoints, no reports. The work is the same as in our benchmark with the same name.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import numpy as np
import psutil
import torch
import transformers
import trl
from datasets import Dataset, disable_progress_bars
from grpo_throughput import NUM_PROMPTS, add_size_and_model
from small_model import MODEL, TOKENIZER, VOCABULARY, confine, peak_resident_bytes, positive

LENGTH, PROMPT_LENGTH = 128, 32
WORK = ("sft", "dpo", "grpo", "mixed_padded", "mixed_grouped")
COMMON: dict[str, Any] = {
    "learning_rate": 1e-4,
    "lr_scheduler_type": "constant",
    "bf16": False,
    "fp16": False,
    "use_cpu": True,
    "gradient_checkpointing": False,
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "seed": 0,
}


class StepClock(transformers.TrainerCallback):
    """Wall-clock and CPU time at the end of each step."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, float]] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Start the first step."""
        self.ends.append((time.perf_counter(), time.process_time()))

    on_step_end = on_train_begin


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=WORK, help="kind of training")
    parser.add_argument("--steps", type=positive, default=20, metavar="N", help="measured steps (default: 20)")
    parser.add_argument("--warmup", type=positive, default=3, metavar="N", help="steps before these (default: 3)")
    add_size_and_model(parser)
    options = parser.parse_args(arguments)
    confine(1)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    disable_progress_bars()
    clock = StepClock()
    with tempfile.TemporaryDirectory(prefix="trl_trainers_") as scratch:
        trainer = _trainer(options, scratch, clock)
        # TRL prints its logs.
        with contextlib.redirect_stdout(sys.stderr):
            trainer.train()
    wall, cpu = (np.diff([end[which] for end in clock.ends])[options.warmup :] for which in (0, 1))
    logs = [entry for entry in trainer.state.log_history if "num_tokens" in entry]
    if options.work == "grpo":  # generated tokens, like our side, since a response may end before the limit
        tokens_of_steps = [round(NUM_PROMPTS * options.size.group * entry["completions/mean_length"]) for entry in logs]
    else:
        tokens_of_steps = np.diff([0, *(int(entry["num_tokens"]) for entry in logs)]).tolist()
    tokens = tokens_of_steps[options.warmup :]
    print(
        json.dumps(
            {
                "name": f"trl_{options.work}",
                "tokens_per_second": round(sum(tokens) / float(wall.sum()), 1),
                "tokens_per_cpu_second": round(sum(tokens) / float(cpu.sum()), 1),
                "seconds_per_step": {"median": round(statistics.median(wall), 5)},
                "cpu_seconds_per_step": round(float(cpu.mean()), 5),
                "steps": options.steps,
                "peak_gigabytes": round(peak_resident_bytes(psutil.Process()) / 1e9, 2),
                "versions": {module.__name__: module.__version__ for module in (torch, transformers, trl)},
            }
        )
    )


def _trainer(options: argparse.Namespace, folder: str, clock: StepClock) -> transformers.Trainer:
    """Return the trainer of a kind of work."""
    work, steps, size = options.work, options.warmup + options.steps, options.size
    transformers.set_seed(0)
    if options.model is None:
        transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**MODEL)).float().save_pretrained(folder)
    # From a folder, since DPO also reads its reference model there.
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model or folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model or TOKENIZER)
    given = COMMON | {"output_dir": folder, "max_steps": steps}
    generator = np.random.default_rng(0)

    def random_rows(count: int, length: int) -> list[list[int]]:
        rows: list[list[int]] = generator.integers(VOCABULARY, size=(count, length)).tolist()
        return rows

    shared = {"model": model, "processing_class": tokenizer, "callbacks": [clock]}
    if work == "sft":
        data = Dataset.from_dict({"input_ids": random_rows(8 * steps, LENGTH)})
        config = trl.SFTConfig(**given, max_length=LENGTH, per_device_train_batch_size=4, gradient_accumulation_steps=2)
        return trl.SFTTrainer(args=config, train_dataset=data, **shared)
    if work.startswith("mixed"):
        from mixed_lengths import LONGEST, lengths_of

        lengths = lengths_of(steps, seed=0)
        data = Dataset.from_dict({"input_ids": [random_rows(1, length)[0] for length in lengths]})
        strategy = {"train_sampling_strategy": "group_by_length"} if work == "mixed_grouped" else {}
        config = trl.SFTConfig(
            **given, max_length=LONGEST, per_device_train_batch_size=8, gradient_accumulation_steps=2, **strategy
        )
        return trl.SFTTrainer(args=config, train_dataset=data, **shared)
    if work == "dpo":
        text = ["".join(generator.choice(list("0123456789+"), size=160)) for _ in range(3 * 8 * steps)]
        rows = {
            "prompt": [each[:PROMPT_LENGTH] for each in text[0::3]],
            # Longer than the limit, so that each sequence has exactly this length.
            "chosen": text[1::3],
            "rejected": text[2::3],
        }
        config = trl.DPOConfig(**given, max_length=LENGTH, per_device_train_batch_size=8, beta=0.1)
        return trl.DPOTrainer(args=config, train_dataset=Dataset.from_dict(rows), **shared)
    # The tokenizers have a token for each digit.
    prompts = ["".join(generator.choice(list("0123456789"), size=size.prompt)) for _ in range(NUM_PROMPTS * steps)]

    def share_of_a_digit(completions: Sequence[str], **_: Any) -> list[float]:
        return [text.count("1") / max(1, len(text)) for text in completions]

    config = trl.GRPOConfig(
        **given,
        per_device_train_batch_size=NUM_PROMPTS * size.group,
        num_generations=size.group,
        max_completion_length=size.response,
        beta=0.0,
    )
    return trl.GRPOTrainer(
        reward_funcs=share_of_a_digit, args=config, train_dataset=Dataset.from_dict({"prompt": prompts}), **shared
    )


if __name__ == "__main__":
    main()
