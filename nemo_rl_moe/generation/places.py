# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A rule on the machines of engines with a copy of the weights. Imports no torch."""

from typing import TYPE_CHECKING

from nemo_rl_moe.config.schema_run import GENERATION_ROLE

if TYPE_CHECKING:
    from nemo_rl_moe.config.schema import GRPOMasterConfig


def other_kind_of_device(config: "GRPOMasterConfig") -> str | None:
    """Return the problem if only one of policy and engines is on GPUs, else None."""
    if GENERATION_ROLE not in config.cluster.roles:
        return None
    gpus = config.cluster.place_of(GENERATION_ROLE).gpus_per_node
    if (gpus > 0) == (config.cluster.gpus_per_node > 0):
        return None
    expected = (
        "at least 1: the policy is on GPUs" if gpus == 0 else "0: the policy is on CPUs (cluster.gpus_per_node 0)"
    )
    return f"cluster.roles.{GENERATION_ROLE}.gpus_per_node: got {gpus}, expected {expected}"
