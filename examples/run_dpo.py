# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Direct preference optimization, with the arguments of `nemo-rl-moe dpo`, for example:

python examples/run_dpo.py --config examples/configs/dpo_tiny_moe.yaml dpo.max_num_steps=50
"""

import sys

from nemo_rl_moe.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "dpo")
    sys.exit(main())
