# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Fusible operations, which Megatron-Core names in annotations."""

from torch import nn


class FusibleOperation(nn.Module):
    """Never made."""


class Sequential(nn.Sequential):
    """Never made."""
