# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The demo's data, sums of two 3-digit numbers. The same as `python -m nemo_rl_moe.demo_data`, for example:

python examples/make_demo_data.py --output data/addition --seed 0
"""

import sys

from nemo_rl_moe.demo_data import main

if __name__ == "__main__":
    sys.exit(main())
