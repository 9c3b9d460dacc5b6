# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Texts and options of the command `nemo-rl-moe convert`. Imports no torch."""

import argparse
from pathlib import Path

from nemo_rl_moe.models.model_files import NUMBER_FORMATS, TARGET_FORMATS, WEIGHTS_FORMATS

SUMMARY = "convert a model's folder between Hugging Face's format and Megatron-Core's"
DESCRIPTION = """\
Convert a model's folder between Hugging Face's format and Megatron-Core's.

hf        config.json, tokenizer, and weights in *.safetensors files, with an index if there are several
megatron  config.json, tokenizer, and weights in Megatron-Core's torch_dist format, in the folder 'policy':
          a checkpoint of a run (results/sft_tiny_moe/step_50), or an output of this command
adapter   only the adapter, as peft reads it: --adapter names it, and --input its base

With --adapter and another format, the adapter is merged into the weights.
Runs can start from both hf and megatron folders (policy.model_name=DIR policy.init=pretrained). The output is written
completely or not at all.
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
    """Add the command's options to the parser."""
    parser.add_argument(
        "--from", dest="source_format", choices=WEIGHTS_FORMATS, required=True, help="format of the input"
    )
    parser.add_argument(
        "--to", dest="target_format", choices=TARGET_FORMATS, required=True, help="format of the output"
    )
    parser.add_argument("--input", metavar="DIR", required=True, help="the model's folder")
    parser.add_argument("--output", metavar="DIR", required=True, help="a new folder, or an empty one")
    parser.add_argument("--dtype", choices=NUMBER_FORMATS, help="number format of the output (default: the input's)")
    parser.add_argument(
        "--adapter",
        metavar="DIR",
        help="an adapter of the input: peft's folder, or a checkpoint of a run with policy.lora",
    )
    parser.add_argument(
        "--experts",
        choices=("per_expert", "fused"),
        help="with --to adapter: one tensor per expert (per_expert), or for all experts of a layer (fused, default)",
    )


def run(options: argparse.Namespace) -> None:
    """Run the command with the parsed options."""
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
