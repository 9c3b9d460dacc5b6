# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""DPO of the demo's model in TRL with the routing metrics, as the counterpart of dpo_tiny_moe.yaml.

python examples/trl/dpo.py --model results/sft_tiny_moe/final --data data/addition --steps 20
"""

from argparse import ArgumentParser

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

from nemo_rl_moe.routing.hooks.trainer import RoutingCallback

parser = ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--data", required=True)
parser.add_argument("--steps", type=int, default=20)
arguments = parser.parse_args()

trainer = DPOTrainer(
    AutoModelForCausalLM.from_pretrained(arguments.model),
    ref_model=AutoModelForCausalLM.from_pretrained(arguments.model),
    args=DPOConfig(
        output_dir="results/trl_dpo",
        max_steps=arguments.steps,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        learning_rate=3e-4,
        adam_beta2=0.95,
        warmup_steps=5,
        beta=0.1,
        max_length=64,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
    ),
    train_dataset=load_dataset("json", data_files=f"{arguments.data}/preferences.jsonl", split="train"),
    processing_class=AutoTokenizer.from_pretrained(arguments.model),
)
RoutingCallback().attach(trainer)
trainer.train()
