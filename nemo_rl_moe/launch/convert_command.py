# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The command `nemo-rl-moe convert`: its words and options. Imports no torch."""

import argparse
from pathlib import Path

from nemo_rl_moe.models.model_files import NUMBER_FORMATS, TARGET_FORMATS, WEIGHTS_FORMATS

SUMMARY = "convert a model's folder between Hugging Face's format and Megatron-Core's"
DESCRIPTION = """\
Convert a model's folder between Hugging Face's format and Megatron-Core's.

hf        config.json, tokenizer, and weights in *.safetensors files, with an index where there are several
megatron  config.json, tokenizer, and weights in Megatron-Core's torch_dist format, in the folder 'policy':
          a checkpoint of a run (results/sft_tiny_moe/step_50), or what this command has written
adapter   an adapter alone, as peft reads it; --adapter names the one to write, beside its base (--input)

With --adapter and another format, the adapter is merged into the weights.
Runs can start from both (policy.model_name=DIR policy.init=pretrained). The output is written completely or not at all.
Needs as much host memory as the weights. A missing or unknown tensor, a wrong shape, or a field of config.json that is
not supported ends with a line that names it, and exit code 2.
"""
EXAMPLES = """\
examples:
  nemo-rl-moe convert --from megatron --to hf --input results/sft_tiny_moe/step_50 --output exported
  nemo-rl-moe convert --from hf --to megatron --input Qwen3-30B-A3B --output Qwen3-30B-A3B-megatron
  nemo-rl-moe convert --from hf --to hf --input float32_model --output bfloat16_model --dtype bfloat16
  nemo-rl-moe convert --from hf --to hf --input BASE --adapter results/sft_tiny_moe_lora/step_40 --output merged
  nemo-rl-moe convert --from hf --to adapter --input BASE --adapter ADAPTER --output named --experts per_expert
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    for option, destination, choices, what in (
        ("--from", "source_format", WEIGHTS_FORMATS, "format of the input"),
        ("--to", "target_format", TARGET_FORMATS, "format of the output"),
    ):
        parser.add_argument(option, dest=destination, choices=choices, required=True, help=what)
    parser.add_argument("--input", metavar="DIR", required=True, help="the model's folder")
    parser.add_argument("--output", metavar="DIR", required=True, help="a folder that is not there yet, or is empty")
    parser.add_argument("--dtype", choices=NUMBER_FORMATS, help="number format of the weights (default: the input's)")
    parser.add_argument(
        "--adapter",
        metavar="DIR",
        help="an adapter beside the input: of peft's, or a checkpoint of a run with policy.lora",
    )
    parser.add_argument(
        "--experts",
        choices=("per_expert", "fused"),
        help="form of the experts' factors with --to adapter (default: fused, as transformers 5 holds them)",
    )


def run(options: argparse.Namespace) -> None:
    """Run the command."""
    from nemo_rl_moe.launch.convert import Conversion, convert

    convert(
        Conversion(
            options.source_format,
            options.target_format,
            Path(options.input),
            Path(options.output),
            options.dtype,
            None if options.adapter is None else Path(options.adapter),
            options.experts,
        )
    )
