# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The colours of load over fair share: half of it is as blue as twice is red, and 1 is nearly white."""

MOST_DOUBLINGS = 2
"""Colours end at the fair share doubled so often, and halved so often."""
ANCHORS = ((33, 102, 172), (146, 197, 222), (247, 247, 247), (244, 165, 130), (178, 24, 43))
"""Red, green and blue, 0 to 255, evenly spaced from the least to the most; the colour-blind can tell them apart."""
