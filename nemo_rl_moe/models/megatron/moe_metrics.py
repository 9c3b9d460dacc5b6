# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""MoE metrics of a training step with Megatron-Core, reduced over all ranks and computed on the host.

In any Megatron-Core training loop, once per step and on every rank:

    metrics = get_moe_metrics(1 / num_microbatches, total_loss_dict)
"""

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_rl_moe.models.megatron.layers.router_losses import recorded_share
from nemo_rl_moe.models.megatron.model import parallel_state as project_parallel_state
from nemo_rl_moe.models.megatron.model.releases import clear_auxiliary_losses, recorded_auxiliary_losses
from nemo_rl_moe.models.megatron.model.transformer_config import AUXILIARY_LOSSES, Z_LOSS, auxiliary_loss_names
from nemo_rl_moe.models.megatron.slice_overload import overload_of_rank, rank_capacity_factor
from nemo_rl_moe.routing.metrics.expert_load_recorder import ExpertLoadRecorder, reduce_over_ranks, sum_over_ranks
from nemo_rl_moe.routing.metrics.load_balance_metrics import load_balance_metrics
from nemo_rl_moe.routing.metrics.load_statistics import ExpertLoad
from nemo_rl_moe.routing.metrics.modality_metrics import modality_metrics
from nemo_rl_moe.routing.metrics.overload_factor import (
    OverloadSums,
    numbers_on,
    overload_metrics,
    predictions,
    what_if_metrics,
)
from nemo_rl_moe.routing.routers import moe_layer_indices

MAX_TRACKED_LAYERS = 1024
"""Maximum number of decoder layers in a reduction without a configuration."""


def get_moe_metrics(
    loss_scale: float,
    total_loss_dict: MutableMapping[str, Any] | None = None,
    per_layer_logging: bool = False,
    *,
    config: TransformerConfig | None = None,
    device: torch.device | None = None,
    recorder: ExpertLoadRecorder | None = None,
    detailed: bool = False,
    top_k_experts: int = 5,
    overload: bool = True,
    what_if_expert_parallel_sizes: Sequence[int] = (),
) -> dict[str, float]:
    """Return the MoE metrics since the last call, reduced over all ranks, and clear Megatron-Core's tracker. Every rank
    calls it.

    `get_moe_metrics(loss_scale)` only needs Megatron-Core's tracker and parallel state. All ranks enter one all-reduce
    of a fixed shape with a row for each of Megatron-Core's auxiliary losses, so a pipeline stage without MoE layers
    takes part too. A layer has a loss if a rank recorded a value other than 0.

    With `config`, the model's configuration determines the names of the losses and their layers, and an enabled loss
    that no router recorded is 0. With `recorder`, the same all-reduce includes the load, also of image tokens if the
    recorder distinguishes them. Overload factors are computed in the group of ranks that exchange tokens. The
    all-reduce includes the factors' sums, and a second all-reduce their maxima. The size of both does not depend on the
    number of ranks and microbatches.

    Args:
        loss_scale: `1 / num_microbatches`, with the number of microbatches per step and data-parallel rank.
        total_loss_dict: If given, each auxiliary loss is added to its entry, as in Megatron-LM's training loop.
        per_layer_logging: Whether to add `{name}_layer_{i}` and the overload factors of each MoE layer. `i` is the
            global decoder layer index, 0-based. Without a configuration, layers of multi-token prediction follow the
            decoder's.
        config: The model's effective configuration. It and the arguments after it must be the same on every rank.
        device: Device of the reduction, by default the tracker's or this rank's.
        recorder: Recorder with the counts of this rank's routers, for load balance and overload factors. Its
            `expert_load` is set to the load matrix of all ranks. Needs `config`.
        detailed: Whether to add the load balance of each layer.
        top_k_experts: Number of the most and of the least loaded experts to report.
        overload: Whether to add the overload factors.
        what_if_expert_parallel_sizes: Expert-parallel sizes for which the overload is predicted from the same counts.

    Returns:
        The same dictionary on every rank, with keys without the `moe/` prefix. Auxiliary losses are before their
        coefficients, and `{name}` is the mean over the MoE layers with the loss (not over the tracker's length). A loss
        that is not enabled has no key.

    Raises:
        ValueError: `recorder` is given without `config`. Or, without `config`, the tracker of a rank has more than
            `MAX_TRACKED_LAYERS` layers. Every rank raises the second error.
    """
    if config is None:
        if recorder is not None:
            raise ValueError("a recorder needs the model's configuration too: get_moe_metrics(..., config=config)")
        losses = _reduce_tracker(loss_scale, device or _device_of_tracker())
        clear_auxiliary_losses()
        metrics = _auxiliary_loss_metrics(losses, per_layer_logging)
        _add_to_totals(total_loss_dict, losses, metrics)
        return metrics

    names, layers = auxiliary_loss_names(config), moe_layer_indices(config)
    if not layers or not (names or recorder):
        clear_auxiliary_losses()
        return {}
    what_if = what_if_expert_parallel_sizes if overload else None
    reduced = _reduce(names, layers, config, device or _device_of_tracker(), recorder, what_if)
    clear_auxiliary_losses()
    losses = {
        name: dict(zip(layers, values, strict=True))
        for name, values in zip(names, (reduced.losses * loss_scale).tolist(), strict=True)
    }
    metrics = _auxiliary_loss_metrics(losses, per_layer_logging)
    _add_to_totals(total_loss_dict, losses, metrics)
    if recorder is None:
        return metrics
    assert reduced.load is not None
    recorder.expert_load = load = ExpertLoad(
        tuple(layers), reduced.load, reduced.image_load, int(config.moe_router_topk)
    )
    metrics |= load_balance_metrics(
        load,
        router_topk=config.moe_router_topk,
        aux_losses=next((list(losses[name].values()) for name in names if name != Z_LOSS), None),
        top_k_experts=top_k_experts,
        detailed=detailed,
    )
    metrics |= modality_metrics(load, detailed=detailed)
    if reduced.overload is not None:
        metrics |= overload_metrics(reduced.overload, layers, reduced.peak_ratio, per_layer=per_layer_logging)
        if rank_capacity_factor(config) is not None:
            dropped, routed = reduced.over_capacity
            metrics["rank_capacity_dropped_share"] = dropped / max(routed, 1)
        if what_if_expert_parallel_sizes:
            _, *predicted = predictions(reduced.overload)
            metrics |= what_if_metrics(dict(zip(what_if_expert_parallel_sizes, predicted, strict=True)))
    return metrics


def _auxiliary_loss_metrics(losses: Mapping[str, Mapping[int, float]], per_layer: bool) -> dict[str, float]:
    """Return the mean of each loss over its layers. `losses` is name -> layer -> value."""
    metrics = {}
    for name, by_layer in losses.items():
        metrics[name] = sum(by_layer.values()) / len(by_layer)
        if per_layer:
            metrics |= {f"{name}_layer_{layer}": value for layer, value in by_layer.items()}
    return metrics


def _add_to_totals(
    totals: MutableMapping[str, Any] | None, losses: Mapping[str, Any], metrics: Mapping[str, float]
) -> None:
    if totals is not None:
        for name in losses:
            totals[name] = totals.get(name, 0.0) + metrics[name]


# Metrics from the tracker only


def _device_of_tracker() -> torch.device:
    recorded = recorded_auxiliary_losses()
    return next((values.device for values in recorded.values()), None) or project_parallel_state.device()


def _reduce_tracker(loss_scale: float, device: torch.device) -> dict[str, dict[int, float]]:
    """Return name -> layer -> scaled loss of all ranks, for the layers that a rank recorded."""
    # The shape is fixed, because a stage without MoE layers knows neither the losses nor the number of layers, and
    # asking first would be a second collective. A tracker that is too long raises an error only after the collective,
    # because the other ranks have entered it.
    recorded = recorded_auxiliary_losses()
    losses = torch.zeros(len(AUXILIARY_LOSSES), MAX_TRACKED_LAYERS, dtype=torch.float64, device=device)
    for row, name in enumerate(AUXILIARY_LOSSES):
        if name in recorded:
            values = recorded[name][:MAX_TRACKED_LAYERS]
            losses[row, : len(values)] = values.to(losses) * recorded_share(name)
    too_long = any(len(values) > MAX_TRACKED_LAYERS for values in recorded.values())
    flag = torch.tensor([float(too_long)], device=device)
    totals, contributors, num_too_long = sum_over_ranks([losses, (losses != 0).double(), flag], device)
    if num_too_long.item() > 0:
        raise ValueError(
            f"a tracker has more than {MAX_TRACKED_LAYERS} layers: give the model's configuration to get_moe_metrics"
        )
    scaled = (totals * loss_scale).tolist()
    found = {
        name: {layer: scaled[row][layer] for layer in contributors[row].nonzero()[:, 0].tolist()}
        for row, name in enumerate(AUXILIARY_LOSSES)
    }
    return {name: by_layer for name, by_layer in found.items() if by_layer}


# Metrics with a configuration and a recorder


@dataclass(frozen=True)
class _Reduced:
    losses: Float[Tensor, "names layers"]
    load: Int[Tensor, "layers experts"] | None = None
    image_load: Int[Tensor, "layers experts"] | None = None
    overload: OverloadSums | None = None
    peak_ratio: float | None = None
    over_capacity: tuple[float, ...] = (0.0, 0.0)


def _reduce(
    names: Sequence[str],
    layers: Sequence[int],
    config: TransformerConfig,
    device: torch.device,
    recorder: ExpertLoadRecorder | None,
    what_if_sizes: Sequence[int] | None,
) -> _Reduced:
    sums, maxima = [_own_losses(names, config, device)], list[Tensor]()
    if recorder is not None:
        sums.append(recorder.counts.sum(0))
        if recorder.image_counts is not None:
            sums.append(recorder.image_counts)
        if what_if_sizes is not None:
            share, peak, over = overload_of_rank(recorder, config, what_if_sizes)
            sums += [share.factors, share.routed, over]
            maxima = [share.maxima, peak]
    (losses, *rest), highest = reduce_over_ranks(sums, maxima, device)
    losses = losses.index_select(1, numbers_on(losses.device, tuple(layers)))
    if recorder is None:
        return _Reduced(losses)
    load = rest.pop(0).long()
    image_load = None if recorder.image_counts is None else rest.pop(0).long()
    if not rest:
        return _Reduced(losses, load, image_load)
    factors, routed, over = rest
    overload = OverloadSums(factors, routed, highest[0])
    return _Reduced(losses, load, image_load, overload, highest[1].item(), tuple(over.tolist()))


def _own_losses(names: Sequence[str], config: TransformerConfig, device: torch.device) -> Tensor:
    """Return this rank's losses `[names, decoder layers]`: 0 for layers of other stages and losses without a record."""
    recorded = recorded_auxiliary_losses()
    shares = torch.zeros(len(names), config.num_layers, dtype=torch.float64, device=device)
    for row, name in enumerate(names):
        if name in recorded:
            shares[row] = recorded[name][: config.num_layers].to(shares) * recorded_share(name)
    return shares
