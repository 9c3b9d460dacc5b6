# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""All MoE numbers of one `train()` call: one collective over all ranks, one copy to the host, then pure arithmetic."""

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nemo_rl_moe.models.megatron.model.releases import clear_auxiliary_losses, recorded_auxiliary_losses
from nemo_rl_moe.models.megatron.model.transformer_config import (
    GLOBAL_BATCH_LOSS,
    Z_LOSS,
    auxiliary_loss_names,
    moe_layer_indices,
    moe_positions_of_chunks,
)
from nemo_rl_moe.moe.load_balance_metrics import load_balance_metrics_from_matrix
from nemo_rl_moe.moe.load_statistics import ExpertLoad
from nemo_rl_moe.moe.overload_factor import StageEvents, predict_overload, summarise_overload, what_if_metrics
from nemo_rl_moe.moe.recorder import ExpertLoadRecorder, sum_over_ranks

# isort: split
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class MoEReportOptions:
    """What a report contains.

    Attributes:
        per_layer: Auxiliary losses and overload factors for each layer too.
        detailed: Load balance for each layer too.
        top_k_experts: How many of the most and of the least loaded experts to report.
        overload: Overload factors.
        what_if_expert_parallel_sizes: Sizes whose overload is predicted from the same counts.
    """

    per_layer: bool = False
    detailed: bool = False
    top_k_experts: int = 5
    overload: bool = True
    what_if_expert_parallel_sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class MoEReport:
    """What one call measured, the same on every rank.

    Attributes:
        metrics: Keys without the `moe/` prefix.
        expert_load: The assignments of each expert in the call; None without a recorder.
    """

    metrics: dict[str, float]
    expert_load: ExpertLoad | None


@dataclass(frozen=True)
class _Reduced:
    """The sums over all ranks, on the host.

    Attributes:
        losses: Auxiliary losses by name and MoE layer, summed over the microbatches.
        counts: Assignments by expert-data-parallel slice, microbatch, MoE layer and expert.
        events: (kind, chunk, microbatch) of each pipeline stage in the order in which they ran.
    """

    losses: Float[Tensor, "names layers"]
    counts: Int[Tensor, "slices microbatches layers experts"]
    events: Int[Tensor, "stages events 3"]


def collect_moe_report(
    loss_scale: float,
    options: MoEReportOptions,
    *,
    config: TransformerConfig,
    device: torch.device,
    recorder: ExpertLoadRecorder | None = None,
) -> MoEReport:
    """Reduces what all ranks recorded, once, and computes every metric from it. Every rank calls it.

    The number of collectives does not depend on the numbers of layers, experts, microbatches and names. The records are
    cleared.

    Args:
        loss_scale: `1 / num_microbatches` of the call on each data-parallel rank.
        options: What to report.
        config: The model's effective configuration; says which losses and which layers there are.
        device: Where the reduction runs.
        recorder: The counts of this rank; None reports auxiliary losses alone.
    """
    names, layers = auxiliary_loss_names(config), moe_layer_indices(config)
    if not layers or not (names or recorder):
        clear_auxiliary_losses()
        return MoEReport({}, None)
    reduced = _reduce(names, layers, config, device, recorder)
    clear_auxiliary_losses()
    by_layer = dict(zip(names, (reduced.losses * loss_scale).tolist(), strict=True))
    metrics = _auxiliary_loss_metrics(by_layer, layers, options.per_layer)
    if recorder is None:
        return MoEReport(metrics, None)
    counts_LE = reduced.counts.sum((0, 1))
    metrics |= load_balance_metrics_from_matrix(
        counts_LE,
        layers,
        router_topk=config.moe_router_topk,
        aux_losses=next((by_layer[name] for name in names if name != Z_LOSS), None),
        top_k_experts=options.top_k_experts,
        detailed=options.detailed,
    )
    if options.overload:
        metrics |= _overload_metrics(reduced, layers, config, options)
    return MoEReport(metrics, ExpertLoad(tuple(layers), counts_LE))


def _auxiliary_loss_metrics(
    by_layer: dict[str, list[float]], layers: Sequence[int], per_layer: bool
) -> dict[str, float]:
    metrics = {}
    for name, values in by_layer.items():
        metrics[name] = sum(values) / len(layers)
        if per_layer:
            metrics |= {f"{name}_layer_{i}": value for i, value in zip(layers, values, strict=True)}
    return metrics


def _overload_metrics(
    reduced: _Reduced, layers: Sequence[int], config: TransformerConfig, options: MoEReportOptions
) -> dict[str, float]:
    size = config.expert_model_parallel_size
    stages = [
        # Places that a stage did not fill are 0.
        StageEvents([tuple(event) for event in events if event[0]], moe_positions_of_chunks(config, rank))
        for rank, events in enumerate(reduced.events.tolist())
    ]
    metrics = summarise_overload(reduced.counts, size, layers, stages, per_layer=options.per_layer)
    sizes = options.what_if_expert_parallel_sizes
    return metrics | what_if_metrics(predict_overload(reduced.counts, sizes, recorded_expert_parallel_size=size))


def _reduce(
    names: Sequence[str],
    layers: Sequence[int],
    config: TransformerConfig,
    device: torch.device,
    recorder: ExpertLoadRecorder | None,
) -> _Reduced:
    parts = [_own_losses(names, config, device)]
    if recorder is not None:
        parts += [_own_counts(recorder), _own_events(recorder, config, device)]
    losses, *rest = sum_over_ranks(parts, device)
    counts, events = rest or (torch.zeros(0, 0, len(layers), 0), torch.zeros(0, 0, 3))
    return _Reduced(losses[:, list(layers)], counts.long(), events.long())


def _share_of_rank(name: str) -> float:
    """What one rank's recorded loss weighs in the sum over all ranks.

    The routers record: for the micro-batch and sequence losses, this rank's part of a sum over the tensor and context
    ranks; for the global-batch loss, its part of a sum over the data-parallel ranks too; for the z-loss, the mean over
    its own tokens. Reported is the mean over data-parallel ranks.
    """
    if name == GLOBAL_BATCH_LOSS:
        return 1.0
    data_parallel_size: int = parallel_state.get_data_parallel_world_size()
    if name == Z_LOSS:
        return 1.0 / (data_parallel_size * parallel_state.get_tensor_and_context_parallel_group().size())
    return 1.0 / data_parallel_size


def _own_losses(names: Sequence[str], config: TransformerConfig, device: torch.device) -> Tensor:
    """[names, decoder layers]; zeros for layers of other stages and for a loss that this rank did not record."""
    recorded = recorded_auxiliary_losses()
    shares = torch.zeros(len(names), config.num_layers, dtype=torch.float64, device=device)
    for row, name in enumerate(names):
        if name in recorded:
            shares[row] = recorded[name][: config.num_layers].to(shares) * _share_of_rank(name)
    return shares


def _own_counts(recorder: ExpertLoadRecorder) -> Tensor:
    """[slices, microbatches, MoE layers, experts]; this rank fills its slice.

    The ranks of one slice are those that exchange tokens: they share their rank in the expert-data-parallel group, and
    their counts add up, as do those of the pipeline stages, each of which holds other layers.
    """
    num_slices = parallel_state.get_expert_data_parallel_world_size()
    counts = torch.zeros(num_slices, *recorder.counts.shape, dtype=torch.float64, device=recorder.counts.device)
    counts[parallel_state.get_expert_data_parallel_rank()] = recorder.counts
    return counts


def _own_events(recorder: ExpertLoadRecorder, config: TransformerConfig, device: torch.device) -> Tensor:
    """[stages, events, 3]; one rank of each stage fills its row, the others' schedules are the same."""
    chunks = config.virtual_pipeline_model_parallel_size or 1
    stages = config.pipeline_model_parallel_size
    events = torch.zeros(stages, 2 * chunks * recorder.counts.shape[0], 3, dtype=torch.float64, device=device)
    is_first = parallel_state.get_data_parallel_rank() == 0 and parallel_state.get_tensor_model_parallel_rank() == 0
    if is_first and recorder.events:
        own = torch.tensor([tuple(event) for event in recorder.events], dtype=torch.float64)
        events[parallel_state.get_pipeline_model_parallel_rank(), : len(own)] = own.to(device)
    return events


def get_moe_metrics(
    loss_scale: float,
    total_loss_dict: MutableMapping[str, float] | None = None,
    per_layer_logging: bool = False,
    *,
    config: TransformerConfig,
    device: torch.device,
    recorder: ExpertLoadRecorder | None = None,
) -> dict[str, float]:
    """The MoE metrics since the last call, reduced over all ranks. Every rank calls it.

    Args:
        loss_scale: `1 / num_microbatches` of the whole `train()` call on each data-parallel rank.
        total_loss_dict: When given, each auxiliary loss is added to its entry, as in Megatron-LM's training loop.
        per_layer_logging: Adds `{name}_layer_{i}` for each MoE layer; `i` is the global decoder layer index, 0-based.
        config: The model's effective configuration; says which losses and which layers there are.
        device: Where the reduction runs.
        recorder: Adds load balance and overload factors from its counts.

    Returns:
        Auxiliary losses before their coefficients: `{name}` is the mean over the MoE layers (their number, not the
        tracker's length). Keys carry no `moe/` prefix: the training loop adds it. A loss that is not enabled has no
        key. The same dictionary on every rank. Megatron's tracker is cleared.
    """
    options = MoEReportOptions(per_layer=per_layer_logging)
    metrics = collect_moe_report(loss_scale, options, config=config, device=device, recorder=recorder).metrics
    if total_loss_dict is not None:
        for name in metrics.keys() & set(auxiliary_loss_names(config)):
            total_loss_dict[name] = total_loss_dict.get(name, 0.0) + metrics[name]
    return metrics
