# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A program that waits for hours."""

import time

if __name__ == "__main__":
    time.sleep(10_000)
