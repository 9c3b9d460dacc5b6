# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""GRPO of the demo's model in TRL with the routing metrics, as the counterpart of grpo_tiny_moe.yaml.

python examples/trl/grpo.py --model results/sft_tiny_moe/final --data data/addition --steps 5
"""

from argparse import ArgumentParser
from typing import Any

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from nemo_rl_moe.routing.hooks.trainer import RoutingCallback

parser = ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--data", required=True)
parser.add_argument("--steps", type=int, default=5)
arguments = parser.parse_args()


def is_right(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """Return 1 if the text after the working is the answer, like `env.reward.answer_after: </think>`."""
    found = (completion.rpartition("</think>")[2].strip() for completion in completions)
    return [float(one == other) for one, other in zip(found, answer, strict=True)]


trainer = GRPOTrainer(
    AutoModelForCausalLM.from_pretrained(arguments.model),
    args=GRPOConfig(
        output_dir="results/trl_grpo",
        max_steps=arguments.steps,
        per_device_train_batch_size=64,
        gradient_accumulation_steps=2,
        num_generations=8,
        max_completion_length=31,
        temperature=1.0,
        beta=0.0,
        learning_rate=1e-4,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=5,
        adam_beta2=0.95,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
    ),
    train_dataset=load_dataset("json", data_files=f"{arguments.data}/grpo.jsonl", split="train"),
    processing_class=AutoTokenizer.from_pretrained(arguments.model),
    reward_funcs=is_right,
)
RoutingCallback().attach(trainer)
trainer.train()
