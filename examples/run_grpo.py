# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""GRPO, with the arguments of `nemo-rl-moe grpo`, for example:

python examples/run_grpo.py --config examples/configs/grpo_tiny_moe.yaml grpo.max_num_steps=5
"""

import sys

from nemo_rl_moe.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "grpo")
    sys.exit(main())
