# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks of a step's capture: a sample to identify its rows, repeated rows, counts by rank, flips in float32."""

import torch
import torch.distributed as dist
from jaxtyping import Int
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_rl_moe.config.schema_grpo import generating, rollouts_in_float32
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.models.megatron.training.microbatch import ModelMicrobatch, SequenceCut
from nemo_rl_moe.routing.agreement.lag_agreement import LagAgreement
from nemo_rl_moe.routing.agreement.rank_rows import rows_by_rank
from nemo_rl_moe.routing.agreement.repeated_rows import RepeatedRows
from nemo_rl_moe.routing.agreement.report import CheckTotals
from nemo_rl_moe.routing.agreement.route_identity import RouteSample
from nemo_rl_moe.routing.metrics.expert_load_recorder import sum_over_ranks

NUM_SEQUENCES, NUM_TOKENS = 2, 48
"""Number of sequences in the sample from each rank's first microbatch, and number of tokens from each sequence: the
last tokens that were fed to the engine."""
MOST_RANKS = 8
"""Maximum number of data-parallel ranks in the sample, because the sample must not grow with the job."""
_CAPTURE, _LIVE = 0, 1


class RouteProbe:
    """Sample of one step: captured and freely chosen experts of a few tokens in every MoE layer.

    Each (token, layer) is on only one rank, so a sum over ranks collects the sample.
    """

    def __init__(self, num_layers: int, topk: int, device: torch.device):
        ranks = min(parallel_state.get_data_parallel_world_size(), MOST_RANKS)
        self._rank: int = parallel_state.get_data_parallel_rank()
        self._samples = self._rank < ranks
        # Expert numbers are stored plus one: 0 means that no rank knows the value.
        shape = (2, ranks * NUM_SEQUENCES, NUM_TOKENS, num_layers, topk)
        self._values = torch.zeros(shape, dtype=torch.int32, device=device)

    @property
    def names(self) -> list[str]:
        """Name of each sampled sequence: its index in the first microbatch of its rank."""
        count = self._values.shape[1]
        return [f"{number % NUM_SEQUENCES} (data-parallel rank {number // NUM_SEQUENCES})" for number in range(count)]

    def clear(self) -> None:
        self._values.zero_()

    def add(
        self,
        layers: Int[Tensor, " layers"],
        routes: Int[Tensor, "topk layers tokens"],
        live: Int[Tensor, "topk layers tokens"],
        microbatch: ModelMicrobatch,
        cut: SequenceCut,
    ) -> None:
        if not self._samples:
            return
        lengths = microbatch.batch.counted_lengths[:NUM_SEQUENCES]
        first = (lengths - 1 - NUM_TOKENS).clamp(min=0)[:, None]
        positions = first + torch.arange(NUM_TOKENS, device=lengths.device)
        flat = positions + microbatch.sequence_start[: len(lengths), None]
        tokens = microbatch.router_index(flat, cut)
        num_tokens = routes.shape[-1]
        known = (positions < lengths[:, None] - 1) & (tokens >= 0) & (tokens < num_tokens)
        index = tokens.clamp(0, num_tokens - 1).reshape(-1)
        start = self._rank * NUM_SEQUENCES
        for kind, values in ((_CAPTURE, routes), (_LIVE, live)):
            # The addition turns an unknown expert into 0, in 8 bits too.
            chosen = (values.index_select(2, index) + 1).permute(2, 1, 0).unflatten(0, tokens.shape).int()
            target = self._values[kind, start : start + len(lengths)]
            target.index_copy_(2, layers, chosen.where(known[..., None, None], 0))

    def reduced(self) -> RouteSample:
        """Return the sample of all ranks, in one collective. Every rank calls it."""
        values = self._values.clone()
        if dist.get_world_size() > 1:
            dist.all_reduce(values)
        on_host = (values - 1).cpu().numpy()
        return RouteSample(capture=on_host[_CAPTURE], live=on_host[_LIVE])


class RouteChecks:
    def __init__(self, device: torch.device, *, in_float32: bool):
        self.repeats = RepeatedRows(device)
        self.by_lag = LagAgreement(device)
        self._in_float32, self._num_updates = in_float32, 1

    def start(self, num_updates: int) -> None:
        """Clear the counts for a step with `num_updates` optimizer steps.

        Exact agreement is only expected of one update, because later updates have other weights than the capture.
        """
        self.repeats.counts.zero_()
        self.by_lag.counts.zero_()
        self._num_updates = num_updates

    def reduced(self, rows: Int[Tensor, "layers kinds"]) -> CheckTotals:
        """Return the counts of all checks, summed over all ranks in one collective. Every rank calls it.

        Args:
            rows: This rank's number of captured (token, layer) entries by layer and kind, such as missing entries.
        """
        by_slot = rows_by_rank(rows, parallel_state.get_data_parallel_rank())
        counts = [self.repeats.counts, by_slot, self.by_lag.counts]
        repeats, slots, by_lag = sum_over_ranks(counts, rows.device)
        return CheckTotals(
            repeats.long(),
            slots.long(),
            num_ranks=parallel_state.get_data_parallel_world_size(),
            is_exact=self._in_float32 and self._num_updates == 1,
            by_lag=by_lag.long(),
        )


def computes_in_float32(policy: PolicyConfig, config: TransformerConfig) -> bool:
    """Return whether captures and training passes certainly compute the same: in float32, without dropout."""
    generates = generating(policy)
    if generates is None or config.attention_dropout or config.hidden_dropout:
        return False
    if generates.megatron_cfg.routing_replay == "old_policy":
        return policy.precision == "float32"  # the trainer's own passes
    return rollouts_in_float32(generates)
