# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What every rank has imported when it starts."""

import gc
import importlib
import logging
import pkgutil
import warnings

import pytest  # noqa: F401
import torch

warnings.filterwarnings("ignore")
logging.getLogger("megatron").setLevel(logging.ERROR)
# Threads do not survive a fork.
torch.set_num_threads(1)

from transformers import Qwen3MoeConfig  # noqa: E402, F401

import nemo_rl_moe.models.families  # noqa: E402
import nemo_rl_moe.models.megatron  # noqa: E402

# All of them: what a module's import corrects in Megatron-Core is then part of the state that ranks return to.
for package in (nemo_rl_moe.models.megatron, nemo_rl_moe.models.families):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)

# What is here stays; a collection in a fork would touch, and so copy, all of it.
gc.collect()
gc.freeze()
