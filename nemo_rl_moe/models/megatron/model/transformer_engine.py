# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The installed Transformer Engine, and whether a policy uses it."""

import importlib.metadata
import importlib.util
import re

from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.distributed.install_transformer_engine import problem_with_extension
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.megatron.cpu import cpu_backend


def has_transformer_engine() -> bool:
    """Return whether Transformer Engine is installed, on a machine with an accelerator."""
    return not cpu_backend.ACTIVE and importlib.util.find_spec("transformer_engine") is not None


def require_transformer_engine() -> None:
    """Raise an error if an accelerator's Transformer Engine is not installed or was compiled for another torch.

    Without Transformer Engine, Megatron-Core 0.16.1 fails in the first MoE layer with a NameError (`te_general_gemm`).
    """
    if cpu_backend.ACTIVE:
        return
    if not has_transformer_engine():
        raise ConfigurationError(
            "cluster.gpus_per_node: training on GPUs needs Transformer Engine, which is not installed: "
            "install it with `make gpu`, or train on CPUs with gpus_per_node=0"
        )
    if problem := problem_with_extension():
        raise ConfigurationError(f"cluster.gpus_per_node: {problem}; or train on CPUs with gpus_per_node=0")


def release() -> tuple[int, ...]:
    """Return the first two numbers of Transformer Engine's release, or zeros if they are unknown."""
    try:
        found = re.match(r"(\d+)\.(\d+)", importlib.metadata.version("transformer-engine"))
    except importlib.metadata.PackageNotFoundError:  # built from its sources, without a package
        found = None
    return (int(found[1]), int(found[2])) if found else (0, 0)


def use_transformer_engine(policy: PolicyConfig) -> bool:
    return policy.megatron_cfg.layer_spec == "auto" and has_transformer_engine()
