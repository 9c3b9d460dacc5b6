# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning, with the arguments of `nemo-rl-moe sft`, for example:

python examples/run_sft.py --config examples/configs/sft_tiny_moe.yaml sft.max_num_steps=50
"""

import sys

from nemo_rl_moe.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "sft")
    sys.exit(main())
