# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Charts of how rollout and training route, of runs with a capture of the rollouts' experts."""

from collections.abc import Iterator
from functools import partial

from nemo_rl_moe.runs.report.chart import Chart, Line

ROUTING, MISMATCH = "Routing under RL", "Routing under RL: mismatch, drift, gradients"
_routing = partial(Chart, ROUTING)
_mismatch = partial(Chart, MISMATCH)


def _split_charts() -> Iterator[Chart]:
    """Yield the charts of what the mismatch of log-probabilities is made of."""
    parts = ("total", "routing", "numerics", "staleness")
    for family, when, of, healthy in (
        (
            "routing_split",
            "before the updates",
            "what other experts make of it, and what rounding makes",
            "next to nothing is routing; replay takes that part away",
        ),
        (
            "routing_split_end",
            "after the updates",
            "what other experts make of it, what rounding makes, and what the step's updates make (staleness)",
            "most is staleness",
        ),
    ):
        for name, title, meaning in (
            ("mean_abs", "Parts of the mismatch", "Mean size of the difference of log-probabilities"),
            ("kl", "Parts of the divergence", "Estimate of the divergence"),
        ):
            yield _mismatch(
                f"{title}, {when}",
                f"{meaning} between rollout and training, of the steps that were measured: all of it, {of}. "
                f"Healthy: {healthy}.",
                [Line(f"train/moe/{family}/{name}_{part}", part) for part in parts],
                from_zero=True,
                bars=True,
            )


ROUTING_CHARTS = (
    _routing(
        "Agreement with the rollouts",
        "Share of the rows (a token in a layer) whose experts are those of the rollout: as training took them, and as "
        "its routers would choose by themselves, which is the same line without replay. Healthy: 1 under replay, by "
        "themselves near 1 and flat.",
        [
            Line("train/moe/routing/agreement", "taken"),
            Line("train/moe/routing/live_agreement", "by themselves"),
        ],
    ),
    _routing(
        "Agreement in single experts",
        "Share of the rollout's experts that the routers would choose too, and the same beyond what the experts' "
        "popularity alone explains (0: nothing but that, 1: all). Healthy: above the agreement in whole sets.",
        [
            Line("train/moe/routing/slot_agreement", "single experts"),
            Line("train/moe/routing/slot_kappa", "beyond chance"),
        ],
    ),
    _routing(
        "Tokens that differ",
        "Share of the tokens for which the routers of any layer would choose other experts than the rollout. Healthy: "
        "small and flat.",
        [Line("train/moe/routing/tokens_differing_share", "tokens that differ")],
        from_zero=True,
    ),
    _routing(
        "Near ties",
        "Share of the rows whose last expert leads the first one left out by 0.01 at most: rounding can swap them. "
        "Healthy: flat, or slowly falling.",
        [Line("train/moe/routing/narrow_margin_share", "near ties")],
        from_zero=True,
    ),
    *_split_charts(),
    _mismatch(
        "Noise floor: other experts",
        "Share of the rows and tokens that get other experts when the trainer runs the same tokens twice, in other "
        "batches. What rollout and training differ in beyond this has another cause.",
        [
            Line("train/moe/routing_noise/rows_differing_trainer", "rows"),
            Line("train/moe/routing_noise/tokens_differing_trainer", "tokens"),
        ],
        from_zero=True,
    ),
    _mismatch(
        "Noise floor: log-probabilities",
        "Mean difference of the log-probabilities of two such passes, by the trainer and by the engine.",
        [
            Line("train/moe/routing_noise/mean_abs_trainer", "trainer"),
            Line("train/moe/routing_noise/mean_abs_engine", "engine"),
        ],
        from_zero=True,
    ),
    _mismatch(
        "Drift of the routing",
        "Share of the rows and tokens whose experts a step's updates have changed, or that differ from the reference "
        "model's. Healthy: small, and slower than the policy improves.",
        [
            Line("train/moe/routing_drift/rows_differing_of_step", "rows, by the step's updates"),
            Line("train/moe/routing_drift/tokens_differing_of_step", "tokens, by the step's updates"),
            Line("train/moe/routing_drift/rows_differing_from_reference", "rows, from the reference"),
            Line("train/moe/routing_drift/tokens_differing_from_reference", "tokens, from the reference"),
        ],
        from_zero=True,
    ),
    _mismatch(
        "Gradient of the routers, by source",
        "Length of the parts of the routers' gradient: of the algorithm's loss, of load balancing, of the z-loss. "
        "Healthy: the first is not drowned by the others.",
        [Line("train/moe/router_gradient/norm_*", None)],
        from_zero=True,
    ),
    _mismatch(
        "Gradient of the routers: direction",
        "Cosine between the algorithm's part and the others. Healthy: near 0; towards -1 they work against each other.",
        [Line("train/moe/router_gradient/cosine_*", None)],
        (0.0, "unrelated"),
    ),
    _mismatch(
        "Experts and advantages",
        "How far some experts have the tokens of good or bad responses, beyond chance (0); by share: beyond what goes "
        "with the length of responses. Healthy: by share near 0, slowly rising at most. The card below shows which.",
        [
            Line("train/moe/routing_advantage/excess_of_shares", "by share"),
            Line("train/moe/routing_advantage/excess", "by number of tokens"),
        ],
        (0.0, "by chance"),
    ),
)
