# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Saving and loading of a rank's training state with Megatron-Core's distributed checkpointing."""

from nemo_rl_moe.models.megatron.checkpoint.load import load_checkpoint
from nemo_rl_moe.models.megatron.checkpoint.save import CheckpointWrite, start_write

__all__ = ["CheckpointWrite", "load_checkpoint", "start_write"]
