# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What every rank has imported when it starts."""

import gc
import logging
import warnings

import pytest  # noqa: F401
import torch

warnings.filterwarnings("ignore")
logging.getLogger("megatron").setLevel(logging.ERROR)
# Threads do not survive a fork.
torch.set_num_threads(1)

from transformers import Qwen3MoeConfig  # noqa: E402, F401

import nemo_rl_moe.models.megatron.training.trainer  # noqa: E402, F401

# What is here stays; a collection in a fork would touch, and so copy, all of it.
gc.collect()
gc.freeze()
