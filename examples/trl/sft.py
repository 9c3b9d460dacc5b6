# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning of the demo's model in TRL with the routing metrics, as the counterpart of sft_tiny_moe.yaml.

python examples/trl/sft.py --model results/sft_tiny_moe/final --data data/addition --steps 20
"""

from argparse import ArgumentParser

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from nemo_rl_moe.routing.hooks.trainer import RoutingCallback

parser = ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--data", required=True)
parser.add_argument("--steps", type=int, default=20)
arguments = parser.parse_args()

files = {"train": f"{arguments.data}/train.jsonl", "validation": f"{arguments.data}/validation.jsonl"}
data = load_dataset("json", data_files=files)
trainer = SFTTrainer(
    AutoModelForCausalLM.from_pretrained(arguments.model),
    args=SFTConfig(
        output_dir="results/trl_sft",
        max_steps=arguments.steps,
        per_device_train_batch_size=64,
        gradient_accumulation_steps=2,
        per_device_eval_batch_size=256,
        learning_rate=3e-3,
        adam_beta2=0.95,
        max_length=64,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
    ),
    train_dataset=data["train"],
    eval_dataset=data["validation"],
    processing_class=AutoTokenizer.from_pretrained(arguments.model),
)
RoutingCallback().attach(trainer)
print("validation loss before:", trainer.evaluate()["eval_loss"])
trainer.train()
