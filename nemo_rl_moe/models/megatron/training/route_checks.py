# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Further checks of a step's capture: rows that stand twice, rows of each rank, and flips that float32 rules out."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from nemo_rl_moe.config.schema_grpo import generating, rollouts_in_float32
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.models.megatron.cpu import cpu_backend  # noqa: F401  (before megatron.core)
from nemo_rl_moe.routing.agreement.rank_rows import rows_by_rank
from nemo_rl_moe.routing.agreement.repeated_rows import RepeatedRows
from nemo_rl_moe.routing.agreement.report import CheckTotals
from nemo_rl_moe.routing.metrics.expert_load_recorder import sum_over_ranks
from nemo_rl_moe.routing.replay import ReplayRoutes

# isort: split
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig


class RouteChecks:
    def __init__(self, device: torch.device, *, in_float32: bool):
        self._repeats = RepeatedRows(device)
        self._in_float32, self._num_updates = in_float32, 1

    def start(self, num_updates: int) -> None:
        """Start anew. In a step of several updates the weights of the capture are those before the first."""
        self._repeats.counts.zero_()
        self._num_updates = num_updates

    def add(
        self,
        routes: ReplayRoutes,
        live: Int[Tensor, "topk layers tokens"],
        fed: Bool[Tensor, " tokens"],
        distance: int,
        follows: Bool[Tensor, " tokens"],
    ) -> None:
        """Add the forward pass of some layers over a microbatch; as of `RepeatedRows`."""
        self._repeats.add(routes, live, fed, distance, follows)

    def reduced(self, rows: Int[Tensor, "layers kinds"]) -> CheckTotals:
        """Return the sums over all ranks, in one collective; every rank calls it."""
        by_slot = rows_by_rank(rows, parallel_state.get_data_parallel_rank())
        repeats, slots = sum_over_ranks([self._repeats.counts, by_slot], rows.device)
        return CheckTotals(
            repeats.long(),
            slots.long(),
            num_ranks=parallel_state.get_data_parallel_world_size(),
            is_exact=self._in_float32 and self._num_updates == 1,
        )


def computes_in_float32(policy: PolicyConfig, config: TransformerConfig) -> bool:
    """Return whether captures and training passes are known to compute alike: in float32, without dropout."""
    generates = generating(policy)
    if generates is None or config.attention_dropout or config.hidden_dropout:
        return False
    if generates.megatron_cfg.routing_replay == "old_policy":
        return policy.precision == "float32"  # the trainer's own passes
    return rollouts_in_float32(generates)
