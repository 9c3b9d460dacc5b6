# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Report of a step's capture, from a running step or from files: agreement statistics, checks, and whether rows belong
to their layer, token and sequence."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from nemo_rl_moe.routing.agreement.expected_agreement import clear_differences, unexplained_disagreement
from nemo_rl_moe.routing.agreement.lag_agreement import LagCounts, lag_agreement_metrics
from nemo_rl_moe.routing.agreement.rank_rows import missing_in_one_rank, rank_anomalies, rank_name
from nemo_rl_moe.routing.agreement.repeated_rows import repeat_anomalies
from nemo_rl_moe.routing.agreement.route_identity import RouteSample, RoutingAnomaly, find_anomalies
from nemo_rl_moe.routing.agreement.statistics import (
    AgreementTotals,
    RoutingReport,
    Row,
    agreement_metrics,
    row_anomalies,
)
from nemo_rl_moe.shapes import Int


@dataclass(frozen=True)
class CheckTotals:
    """A step's counts over all ranks, on the host.

    Attributes:
        by_slot: Number of captured rows of each kind (`Row`) for each data-parallel rank, see `rows_by_rank`.
        is_exact: Whether rollout and training compute in float32. If so, their routers choose different experts with
            the same weights only in near ties.
    """

    repeats: Int[Tensor, " kinds"]
    by_slot: Int[Tensor, "slots kinds"]
    num_ranks: int
    is_exact: bool
    rank_names: Sequence[str] = ()
    by_lag: LagCounts | None = None

    def metrics(self) -> dict[str, float]:
        """Return the agreement by lag of the tokens. A faulty step has more metrics, such as missing rows of a rank."""
        found = {} if self.by_lag is None else lag_agreement_metrics(self.by_lag)
        if self.is_exact and not self.has_older_weights:
            rows = self.by_slot.sum(0).tolist()
            if (differing := rows[Row.USABLE] - rows[Row.LIVE_SAME]) > 0:
                found["routing/float32_flips_share"] = differing / rows[Row.USABLE]
        if (missing := missing_in_one_rank(self.by_slot)) is not None:
            found["routing/rows_missing_in_one_rank"] = missing.share
            found["routing/rank_with_missing_rows"] = float(missing.slot)
        return found

    def anomalies(self, num_layers: int) -> list[RoutingAnomaly]:
        """Report rows that repeat the experts of the previous token, and a data-parallel rank with wrong routes.

        Ranks are compared only if one version of the weights chose all experts. Otherwise one rank may have most of the
        rows of older weights, which agree less.
        """
        found = repeat_anomalies(self.repeats)
        return found if self.has_older_weights else found + rank_anomalies(self.by_slot, num_layers, self._name_of)

    @property
    def has_older_weights(self) -> bool:
        """Whether older weights than those in training chose some of the experts."""
        return self.by_lag is not None and bool(self.by_lag[1:].any())

    def _name_of(self, slot: int) -> str:
        return self.rank_names[slot] if self.rank_names else rank_name(slot, self.num_ranks)


def routing_report(
    layers: tuple[int, ...],
    totals: AgreementTotals,
    checked: CheckTotals,
    sample: RouteSample | None,
    sequences: Sequence[str] = (),
    *,
    num_experts: int,
    per_layer: bool,
    more_anomalies: Sequence[RoutingAnomaly] = (),
) -> RoutingReport:
    """Return the statistics of a step's capture, and its anomalies.

    Weights change between rollout and training if tokens have a lag. Disagreement alone is then no anomaly: after a few
    fast updates, routers may choose other experts for most tokens.
    """
    same_weights = not checked.has_older_weights
    anomalies = [*more_anomalies, *row_anomalies(totals, layers), *checked.anomalies(len(layers))]
    if sample is not None:
        anomalies += find_anomalies(
            sample, num_experts, layers, sequences, totals.of_experts, same_weights=same_weights
        )
    metrics = agreement_metrics(totals, layers, per_layer=per_layer) | checked.metrics()
    if same_weights:
        if not (of_routes := [anomaly for anomaly in anomalies if anomaly.kind != "logprobs"]):
            anomalies += (of_routes := unexplained_disagreement(totals, layers))
        if not of_routes:
            metrics |= clear_differences(totals, layers)
    metrics["routing/anomalies"] = float(len(anomalies))
    return RoutingReport(layers, totals, metrics, tuple(anomalies))
