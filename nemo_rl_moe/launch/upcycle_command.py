# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Texts and options of the command `nemo-rl-moe upcycle`. Imports no torch."""

import argparse
from pathlib import Path

_MOST = 10_000
"""Maximum number of experts in a layer."""

SUMMARY = "make a Mixture-of-Experts model of a dense one: copies of its MLPs, or slices of copies, as experts"
DESCRIPTION = """\
Make a Mixture-of-Experts model of a dense one: copies of its MLPs, or slices of copies, as experts.
Llama and Mistral become Mixtral, Qwen3 becomes Qwen3-MoE, Qwen2 (and Qwen2.5) Qwen2-MoE. All other tensors, the
tokenizer and the chat template stay as they are, and so does the number format.

Until it is trained, the new model computes the same function as the dense one:

  --experts 8 --top-k 2                     8 copies of each MLP. The weights of a token's two experts add up to 1.
                                            A token costs two MLPs.
  --experts 16 --top-k 2 --granularity 2    the same 8 copies, each cut into two experts of half the width. The two
                                            halves of a copy have equal rows in the router, so a token takes both
                                            halves of a copy, until training makes them differ. A token costs one MLP.

The second form is the virtual group of He et al., arXiv:2410.07524. --experts and --top-k must be multiples of the
granularity. Routers are random and small (the standard deviation is initializer_range of config.json).

"The same" means up to rounding. In float32 logits differ by about 1e-5 of the largest one. In bfloat16 and float16
  - no weight is rounded if the granularity is a power of two. With other granularities, weights are multiplied by
    factors that round them, such as 1.5 for 3, and a warning is printed.
  - with a granularity above 1, routers must compute in float32: policy.megatron_cfg.moe_router_dtype=fp32, as the
    shipped configurations have it. In bfloat16 two copies can tie, and a token takes a slice of each: with SmolLM2-135M
    and granularity 2 in 0.2% of the routers' choices, and for 6% of the tokens in at least one layer.

Qwen2-MoE has a shared expert with a gate. This expert becomes one more copy of the MLP with a gate of one half, and
the weights of the routed experts add up to the other half.

Then both models compute the logits of 64 random tokens, one after the other, in float32, if the new one takes half of
the free memory or less (--check: always, --no-check: never). The largest difference is printed.

Tensors are read and written one by one, in files of up to 5 GB; the output is written completely or not at all. A model
without a counterpart, numbers that do not divide, missing tensors, and NaN or infinite weights are errors: the command
prints a line, writes no output, and ends with exit code 2.
"""
EXAMPLES = """\
examples:
  nemo-rl-moe upcycle --model Qwen3-0.6B --experts 8 --top-k 2 --output Qwen3-0.6B-8x2
  nemo-rl-moe upcycle --model Llama-3.1-8B --experts 32 --top-k 4 --granularity 4 --seed 1 --output Llama-3.1-8B-32x4
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to the parser."""
    parser.add_argument("--model", metavar="DIR", required=True, help="the dense model's folder")
    parser.add_argument("--output", metavar="DIR", required=True, help="a new folder, or an empty one")
    parser.add_argument("--experts", type=_count, metavar="N", required=True, help="number of experts in each layer")
    parser.add_argument("--top-k", type=_count, metavar="K", required=True, help="number of experts that a token uses")
    parser.add_argument(
        "--granularity",
        type=_count,
        metavar="G",
        default=1,
        help="number of experts into which each copy of an MLP is cut (default: 1)",
    )
    parser.add_argument("--seed", type=_seed, metavar="S", default=0, help="seed of the routers' weights (default: 0)")
    parser.add_argument(
        "--check",
        action=argparse.BooleanOptionalAction,
        help="always or never compare both models' logits (default: if the new model fits in half of the free memory)",
    )


def run(options: argparse.Namespace) -> None:
    """Run the command with the parsed options."""
    from nemo_rl_moe.launch.upcycle import UpcyclingRequest, upcycle
    from nemo_rl_moe.models.upcycling import ExpertShape

    upcycle(
        UpcyclingRequest(
            Path(options.model),
            Path(options.output),
            ExpertShape(options.experts, options.top_k, options.granularity),
            options.seed,
            options.check,
        )
    )


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= _MOST:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number from 1 to {_MOST:,}")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**31:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number from 0 to {2**31 - 1:,}")
    return int(text)
