# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Recipes of 8-bit formats: names alone."""

import enum


class Format(enum.Enum):
    """Formats of 8-bit numbers."""

    E4M3 = "e4m3"
    HYBRID = "hybrid"


class DelayedScaling:
    """A recipe that nothing here can follow."""

    def __init__(self, **kwargs: object):
        raise NotImplementedError("no 8-bit formats without a GPU")
