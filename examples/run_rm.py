# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Training of a reward model, with the arguments of `nemo-rl-moe rm`, for example:

python examples/run_rm.py --config examples/configs/rm_tiny_moe.yaml rm.max_num_steps=50
"""

import sys

from nemo_rl_moe.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "rm")
    sys.exit(main())
