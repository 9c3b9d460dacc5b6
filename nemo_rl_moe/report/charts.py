# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Charts of metrics in a report; each caption says what healthy looks like."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any


@dataclass(frozen=True)
class Line:
    """Line of a chart, or several with one pattern.

    Attributes:
        pattern: A metric's key; `*` stands for anything, and where the label is None for no key of a single layer.
        label: Name in the legend; None: the part of the key that matches the `*`.
    """

    pattern: str
    label: str | None


@dataclass(frozen=True)
class Chart:
    """Chart of a report, left out where the runs lack all of its metrics.

    Attributes:
        section: Heading above it.
        title: A few words.
        caption: Meaning, and what healthy looks like.
        lines: Lines to draw.
        reference: Value of a horizontal line to compare with, and its name.
        from_zero: Whether the axis begins at 0.
        bars: Whether its values are drawn as bars, side by side: of few steps, and parts of a whole.
    """

    section: str
    title: str
    caption: str
    lines: Sequence[Line]
    reference: tuple[float, str] | None = None
    from_zero: bool = False
    bars: bool = False


TRAINING, BALANCE = "Training", "Balance of the experts"
ROUTING, MISMATCH = "Routing under RL", "Routing under RL: mismatch, drift, gradients"
"""Sections of runs with a tape alone."""
_ROUTING_KEYS = "train/moe/rout"
_PER_LAYER = re.compile(r"_layer_\d+")


def _split_charts() -> Iterator[Chart]:
    """Charts of what the mismatch of log-probabilities is made of."""
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
            yield Chart(
                MISMATCH,
                f"{title}, {when}",
                f"{meaning} between rollout and training, of the steps that were measured: all of it, {of}. "
                f"Healthy: {healthy}.",
                [Line(f"train/moe/{family}/{name}_{part}", part) for part in parts],
                from_zero=True,
                bars=True,
            )


CHARTS = (
    Chart(
        TRAINING,
        "Reward and accuracy",
        "Of a step's responses, or of those to the validation set. Healthy: they rise, with noise.",
        [
            Line("train/reward", "reward"),
            Line("train/accuracy", "accuracy"),
            Line("val/accuracy", "validation accuracy"),
        ],
    ),
    Chart(
        TRAINING,
        "Loss",
        "Healthy: supervised losses fall and flatten, on validation too; a policy-gradient loss says "
        "little: look at the reward.",
        [Line("train/loss", "training"), Line("val/loss", "validation")],
    ),
    Chart(
        TRAINING,
        "Gradient norm",
        "Before clipping. Healthy: it settles after the warmup; single spikes are normal, growth is not.",
        [Line("train/grad_norm", "gradient norm")],
        from_zero=True,
    ),
    Chart(
        TRAINING,
        "Seconds of each phase",
        "How long each phase of a step takes. Healthy: flat; imbalance between ranks shows here as longer training.",
        [Line("timing/*/seconds", None)],
        from_zero=True,
    ),
    Chart(
        TRAINING,
        "Tokens a second",
        "Speed of each phase. Healthy: flat, apart from the first steps.",
        [Line("timing/*/tokens_per_second", None)],
        from_zero=True,
    ),
    Chart(
        BALANCE,
        "Spread of the expert loads (cv)",
        "Standard deviation of the loads over their mean, average of the layers, beside what random routing of the "
        "same tokens would have. Healthy: it falls towards that line.",
        [
            Line("train/moe/cv_mean", "cv"),
            Line("train/moe/cv_null_mean", "by chance"),
            Line("train/moe/cv_excess_mean", "beyond chance"),
        ],
        from_zero=True,
    ),
    Chart(
        BALANCE,
        "Overload of the busiest rank",
        "Work of the busiest expert-parallel rank over that of the mean one; the others wait for it. Healthy: near 1.",
        [Line("train/moe/avg_overload_factor", "average"), Line("train/moe/max_overload_factor", "worst microbatch")],
        (1.0, "no waiting"),
    ),
    Chart(
        BALANCE,
        "Auxiliary losses",
        "What the optimizer sees of balance, before coefficients. Healthy: load balancing losses settle near 1.",
        [
            Line("train/moe/load_balancing_loss", "load balancing"),
            Line("train/moe/seq_load_balancing_loss", "load balancing, by sequence"),
            Line("train/moe/global_load_balancing_loss", "load balancing, global"),
            Line("train/moe/z_loss", "z-loss"),
        ],
        (1.0, "perfect balance"),
    ),
    Chart(
        BALANCE,
        "Dead experts",
        "Share of the experts that got no token in a step, average of the layers. Healthy: 0.",
        [Line("train/moe/dead_expert_frac_mean", "dead experts")],
        from_zero=True,
    ),
    Chart(
        ROUTING,
        "Agreement with the rollouts",
        "Share of the rows (a token in a layer) whose experts are those of the rollout: as training took them, and as "
        "its routers would choose by themselves, which is the same line without replay. Healthy: 1 under replay, by "
        "themselves near 1 and flat.",
        [
            Line("train/moe/routing/agreement", "taken"),
            Line("train/moe/routing/live_agreement", "by themselves"),
        ],
    ),
    Chart(
        ROUTING,
        "Agreement in single experts",
        "Share of the rollout's experts that the routers would choose too, and the same beyond what the experts' "
        "popularity alone explains (0: nothing but that, 1: all). Healthy: above the agreement in whole sets.",
        [
            Line("train/moe/routing/slot_agreement", "single experts"),
            Line("train/moe/routing/slot_kappa", "beyond chance"),
        ],
    ),
    Chart(
        ROUTING,
        "Tokens that differ",
        "Share of the tokens for which the routers of any layer would choose other experts than the rollout. Healthy: "
        "small and flat.",
        [Line("train/moe/routing/tokens_differing_share", "tokens that differ")],
        from_zero=True,
    ),
    Chart(
        ROUTING,
        "Near ties",
        "Share of the rows whose last expert leads the first one left out by 0.01 at most: rounding can swap them. "
        "Healthy: flat, or slowly falling.",
        [Line("train/moe/routing/narrow_margin_share", "near ties")],
        from_zero=True,
    ),
    Chart(
        MISMATCH,
        "Mismatch of log-probabilities: divergence",
        "Estimate of the divergence between the rollout's and training's log-probabilities of the sampled tokens. "
        "Healthy: small and flat.",
        [Line("train/gen_kl_error", "gen_kl_error")],
        from_zero=True,
    ),
    Chart(
        MISMATCH,
        "Mismatch of log-probabilities: factor",
        "Mean factor between the probabilities that rollout and training give a sampled token. Healthy: close to 1.",
        [Line("train/token_mult_prob_error", "token_mult_prob_error")],
        (1.0, "the same"),
    ),
    *_split_charts(),
    Chart(
        MISMATCH,
        "Noise floor: other experts",
        "Share of the rows and tokens that get other experts when the trainer runs the same tokens twice, in other "
        "batches. What rollout and training differ in beyond this has another cause.",
        [
            Line("train/moe/routing_noise/rows_differing_trainer", "rows"),
            Line("train/moe/routing_noise/tokens_differing_trainer", "tokens"),
        ],
        from_zero=True,
    ),
    Chart(
        MISMATCH,
        "Noise floor: log-probabilities",
        "Mean difference of the log-probabilities of two such passes, by the trainer and by the engine.",
        [
            Line("train/moe/routing_noise/mean_abs_trainer", "trainer"),
            Line("train/moe/routing_noise/mean_abs_engine", "engine"),
        ],
        from_zero=True,
    ),
    Chart(
        MISMATCH,
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
    Chart(
        MISMATCH,
        "Gradient of the routers, by source",
        "Length of the parts of the routers' gradient: of the algorithm's loss, of load balancing, of the z-loss. "
        "Healthy: the first is not drowned by the others.",
        [Line("train/moe/router_gradient/norm_*", None)],
        from_zero=True,
    ),
    Chart(
        MISMATCH,
        "Gradient of the routers: direction",
        "Cosine between the algorithm's part and the others. Healthy: near 0; towards -1 they work against each other.",
        [Line("train/moe/router_gradient/cosine_*", None)],
        (0.0, "unrelated"),
    ),
    Chart(
        MISMATCH,
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


def charts_of(keys: Iterable[str]) -> list[dict[str, Any]]:
    """Charts that have any of these metrics, as the page's script reads them; a line is a `key` and a `label`.

    Those of routing are left out where the runs have no tape: the rest of them is about any policy.
    """
    in_order = sorted(keys)
    has_tape = any(key.startswith(_ROUTING_KEYS) for key in in_order)
    found = []
    for chart in CHARTS:
        lines = [
            {"key": key, "label": line.label if line.label is not None else _wildcard(key, line.pattern)}
            for line in chart.lines
            for key in in_order
            if fnmatchcase(key, line.pattern) and not (line.label is None and _PER_LAYER.search(key))
        ]
        if lines and (chart.section not in (ROUTING, MISMATCH) or has_tape):
            found.append({**asdict(chart), "lines": lines})
    return found


def _wildcard(key: str, pattern: str) -> str:
    before, *_, after = pattern.split("*")
    return key.removeprefix(before).removesuffix(after)
