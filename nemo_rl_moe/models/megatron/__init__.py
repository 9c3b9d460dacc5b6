# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""All code that imports Megatron-Core.

This file imports Megatron-Core before any other module does: after `cpu_backend`, and without W&B. Megatron-Core only
needs W&B for logging that this project does not use. W&B would take a third of a second in each process, and create two
temporary folders that stay after a kill.
"""

import sys

import torch

from nemo_rl_moe.distributed.cuda_libraries import prefer_libraries_of_torch
from nemo_rl_moe.models.megatron.cpu import cpu_backend  # noqa: F401  before megatron.core


def _import_without_wandb() -> None:
    is_hidden = "wandb" not in sys.modules
    if is_hidden:
        sys.modules["wandb"] = None  # type: ignore[assignment]  # an import of it raises ImportError
    try:
        import megatron.core.inference_params  # noqa: F401
    finally:
        if is_hidden:
            del sys.modules["wandb"]


if torch.version.cuda is not None:
    prefer_libraries_of_torch()  # Megatron-Core imports Transformer Engine
_import_without_wandb()
