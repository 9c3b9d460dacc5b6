# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Reports of made captures, counted by the agreement statistics that runs use."""

from collections.abc import Sequence

import torch

from nemo_rl_moe.routing.agreement.route_identity import RoutingAnomaly
from nemo_rl_moe.routing.agreement.statistics import AgreementStatistics, RoutingReport, agreement_metrics
from nemo_rl_moe.routing.replay import UNKNOWN, ReplayRoutes, RoutedTokens

NUM_EXPERTS, TOPK = 8, 2


def routing_report(
    differing: Sequence[int],
    *,
    num_tokens: int = 40,
    missing: Sequence[int] = (),
    zero: Sequence[int] = (),
    margins: Sequence[float] = (0.0005, 0.2),
    layers: Sequence[int] | None = None,
    replays: bool = False,
    anomalies: Sequence[RoutingAnomaly] = (),
) -> RoutingReport:
    """Return the report of a capture of one microbatch, whose last token was fed to no model.

    Args:
        differing: Number of the first tokens for which the router of each layer would choose otherwise.
        num_tokens: Tokens.
        missing: Number of the last tokens fed that each layer has no row of; none where it is shorter.
        zero: Number of those before them that have expert 0 alone.
        margins: Router margins, of the differing rows and of the others.
        layers: Indices of the layers; None: from 0.
        replays: Routers took the capture's experts.
        anomalies: What else is wrong.
    """
    fed = torch.arange(num_tokens) < num_tokens - 1
    chosen = torch.stack([torch.arange(num_tokens) % NUM_EXPERTS, (torch.arange(num_tokens) + 1) % NUM_EXPERTS], 1)
    capture = chosen[:, None].repeat(1, len(differing), 1).to(torch.int16)
    capture[~fed] = UNKNOWN
    seen = []
    for layer, number in enumerate(differing):
        end = num_tokens - 1 - (missing[layer] if layer < len(missing) else 0)
        capture[end : num_tokens - 1, layer] = UNKNOWN
        capture[end - (zero[layer] if layer < len(zero) else 0) : end, layer] = 0
        live = chosen.clone()
        live[:number] = (live[:number] + 2) % NUM_EXPERTS
        margin = torch.where(torch.arange(num_tokens) < number, *map(torch.tensor, margins))
        seen.append(RoutedTokens(live, chosen if replays else live, margin))
    statistics = AgreementStatistics(len(differing), NUM_EXPERTS, torch.device("cpu"))
    statistics.add(0, torch.arange(len(differing)), ReplayRoutes.of(capture, NUM_EXPERTS), fed, seen)
    indices = tuple(layers if layers is not None else range(len(differing)))
    totals = statistics.reduced()
    metrics = agreement_metrics(totals, indices, per_layer=True) | {"routing/anomalies": float(len(anomalies))}
    return RoutingReport(indices, totals, metrics, tuple(anomalies))
