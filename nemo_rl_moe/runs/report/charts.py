# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Charts of metrics in a report; each caption says what healthy looks like."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from nemo_rl_moe.runs.report.chart import Chart
from nemo_rl_moe.runs.report.staleness_charts import STALENESS_CHARTS

LEARNING = "Learning from rewards and preferences"
_learning = partial(Chart, LEARNING)

REWARD_CHARTS = (
    _learning(
        "Reward",
        "Mean of a step's responses as the environment gave it, and of those to the validation set. Healthy: both "
        "rise, with noise. Sick: training rises and validation does not.",
        {
            "train/reward": "reward",
            "val/reward": "validation reward",
            "train/filtered_reward": "reward of what is trained on",
        },
    ),
    _learning(
        "Rewards by name",
        "Means of the single rewards, before their weights. Healthy: none rises while the one that counts falls.",
        {"train/rewards/*/mean": None},
    ),
    _learning(
        "Accuracy",
        "Share of the responses that count as right; in DPO, of the pairs whose chosen response gained "
        "more. Healthy: it rises, with noise. Stays at 0 where rewards are graded and none is called right.",
        {"train/accuracy": "accuracy", "val/accuracy": "validation accuracy"},
    ),
    _learning(
        "pass@k",
        "Chance that one of k responses to a held-out prompt is right, by k. Healthy: it does not fall while the "
        "accuracy rises; what no response reaches cannot be learned.",
        {"val/pass_at_*": None},
    ),
    _learning(
        "Groups without a spread",
        "Share of the groups whose responses all got the same reward: they teach nothing. Healthy: well below 1; it "
        "rises as the prompts become easy, or are too hard.",
        {"train/frac_zero_std_groups": "groups without a spread"},
        from_zero=True,
    ),
    _learning(
        "Length of responses",
        "In tokens, the end included. Healthy: it changes slowly, and has a reason to. Sick: it grows while the "
        "reward does not, or falls to a few tokens.",
        {
            "train/mean_gen_tokens_per_sample": "mean",
            "train/max_gen_tokens_per_sample": "longest",
            "val/mean_gen_tokens_per_sample": "validation mean",
        },
        from_zero=True,
    ),
    _learning(
        "Truncated responses",
        "Share that reached the most new tokens without an end. Healthy: near 0. Sick: it rises with the length, and "
        "rewards are then those of the limit.",
        {"train/truncation_rate": "truncated", "val/truncation_rate": "validation"},
        from_zero=True,
    ),
    _learning(
        "Entropy",
        "Of the policy, in nats a token. Healthy: it falls slowly. Sick: near 0, where all responses to a prompt are "
        "one, or rising without a bound.",
        {"train/approx_entropy": "of the sampled tokens", "train/entropy": "exact"},
        from_zero=True,
    ),
    _learning(
        "Divergence from the reference (KL)",
        "In nats a token, before its weight; with a penalty alone. Healthy: it grows slowly and flattens.",
        {"train/kl_penalty": "KL"},
        from_zero=True,
    ),
    _learning(
        "Clipped tokens",
        "Share of the tokens whose ratio the loss replaces by a bound. Healthy: some hundredths at most; 0 where each "
        "step is one update.",
        {"train/clip_fraction_low": "low", "train/clip_fraction_high": "high"},
        from_zero=True,
    ),
    _learning(
        "Ratio of new to old probability",
        "Of the sampled tokens. Healthy: the mean is 1, and the extremes do not run away.",
        {"train/probs_ratio": "mean", "train/probs_ratio_min": "smallest", "train/probs_ratio_max": "largest"},
        (1.0, "unchanged"),
    ),
    _learning(
        "Advantages",
        "Of what is trained on. Healthy: on both sides of 0. All at 0: nothing is learned.",
        {"train/advantages/min": "smallest", "train/advantages/mean": "mean", "train/advantages/max": "largest"},
    ),
    _learning(
        "Mismatch of log-probabilities: divergence",
        "Estimate of the divergence between the rollout's and training's log-probabilities of the sampled tokens. "
        "Healthy: small and flat.",
        {"train/gen_kl_error": "gen_kl_error"},
        from_zero=True,
    ),
    _learning(
        "Mismatch of log-probabilities: factor",
        "Mean factor between the probabilities that rollout and training give a sampled token. Healthy: close to 1.",
        {"train/token_mult_prob_error": "token_mult_prob_error"},
        (1.0, "the same"),
    ),
    _learning(
        "Responses without a score",
        "Responses that the environment failed to score. Healthy: 0.",
        {"train/env/num_*": None},
        from_zero=True,
    ),
    _learning(
        "Rewards of pairs",
        "What the chosen and the rejected responses have gained on the reference, and the difference. Healthy: the "
        "difference rises, on held-out pairs too.",
        {
            "train/rewards_chosen_mean": "chosen",
            "train/rewards_rejected_mean": "rejected",
            "train/reward_margin": "difference",
            "val/reward_margin": "validation difference",
        },
        (0.0, "as the reference"),
    ),
    _learning(
        "Log-probabilities of pairs",
        "Of the chosen and the rejected responses. Healthy: the rejected fall; that the chosen fall somewhat too is "
        "usual. Sick: both plunge.",
        {"train/logprobs_chosen_mean": "chosen", "train/logprobs_rejected_mean": "rejected"},
    ),
)


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
                {f"train/moe/{family}/{name}_{part}": part for part in parts},
                from_zero=True,
                bars=True,
            )


ROUTING_CHARTS = (
    _routing(
        "Agreement with the rollouts",
        "Share of the rows (a token in a layer) whose experts are those of the rollout: as training took them, and as "
        "its routers would choose by themselves, which is the same line without replay. Healthy: 1 under replay, by "
        "themselves near 1 and flat.",
        {"train/moe/routing/agreement": "taken", "train/moe/routing/live_agreement": "by themselves"},
    ),
    _routing(
        "Agreement in single experts",
        "Share of the rollout's experts that the routers would choose too, and the same beyond what the experts' "
        "popularity alone explains (0: nothing but that, 1: all). Healthy: above the agreement in whole sets.",
        {"train/moe/routing/slot_agreement": "single experts", "train/moe/routing/slot_kappa": "beyond chance"},
    ),
    _routing(
        "Tokens that differ",
        "Share of the tokens for which the routers of any layer would choose other experts than the rollout. Healthy: "
        "small and flat.",
        {"train/moe/routing/tokens_differing_share": "tokens that differ"},
        from_zero=True,
    ),
    _routing(
        "Near ties",
        "Share of the rows whose last expert leads the first one left out by 0.01 at most: rounding can swap them. "
        "Healthy: flat, or slowly falling.",
        {"train/moe/routing/narrow_margin_share": "near ties"},
        from_zero=True,
    ),
    *_split_charts(),
    _mismatch(
        "Noise floor: other experts",
        "Share of the rows and tokens that get other experts when the trainer runs the same tokens twice, in other "
        "batches. What rollout and training differ in beyond this has another cause.",
        {
            "train/moe/routing_noise/rows_differing_trainer": "rows",
            "train/moe/routing_noise/tokens_differing_trainer": "tokens",
        },
        from_zero=True,
    ),
    _mismatch(
        "Noise floor: log-probabilities",
        "Mean difference of the log-probabilities of two such passes, by the trainer and by the engine.",
        {"train/moe/routing_noise/mean_abs_trainer": "trainer", "train/moe/routing_noise/mean_abs_engine": "engine"},
        from_zero=True,
    ),
    _mismatch(
        "Drift of the routing",
        "Share of the rows and tokens whose experts a step's updates have changed, or that differ from the reference "
        "model's. Healthy: small, and slower than the policy improves.",
        {
            "train/moe/routing_drift/rows_differing_of_step": "rows, by the step's updates",
            "train/moe/routing_drift/tokens_differing_of_step": "tokens, by the step's updates",
            "train/moe/routing_drift/rows_differing_from_reference": "rows, from the reference",
            "train/moe/routing_drift/tokens_differing_from_reference": "tokens, from the reference",
        },
        from_zero=True,
    ),
    _mismatch(
        "Gradient of the routers, by source",
        "Length of the parts of the routers' gradient: of the algorithm's loss, of load balancing, of the z-loss. "
        "Healthy: the first is not drowned by the others.",
        {"train/moe/router_gradient/norm_*": None},
        from_zero=True,
    ),
    _mismatch(
        "Gradient of the routers: direction",
        "Cosine between the algorithm's part and the others. Healthy: near 0; towards -1 they work against each other.",
        {"train/moe/router_gradient/cosine_*": None},
        (0.0, "unrelated"),
    ),
    _mismatch(
        "Experts and advantages",
        "How far some experts have the tokens of good or bad responses, beyond chance (0); by share: beyond what goes "
        "with the length of responses. Healthy: by share near 0, slowly rising at most. The card below shows which.",
        {
            "train/moe/routing_advantage/excess_of_shares": "by share",
            "train/moe/routing_advantage/excess": "by number of tokens",
        },
        (0.0, "by chance"),
    ),
)


MODALITIES = "Image and text tokens"
_modality = partial(Chart, MODALITIES)

MODALITY_CHARTS = (
    _modality(
        "Separation and overlap of image and text",
        "Separation: how far the experts part image tokens from text tokens, beyond chance (Cramér's V): 0 not at all, "
        "1 wholly. Overlap: what the loads of both kinds have in common: 1 all, 0 no expert. Means over the layers. "
        "Healthy: steady.",
        {"train/moe/modality_separation_mean": "separation", "train/moe/modality_overlap_mean": "overlap"},
        from_zero=True,
    ),
    _modality(
        "Share of image tokens",
        "Of all assignments of tokens to experts. Healthy: as the data has it; 0 means that no batch had an image.",
        {"train/moe/image/token_share": "image tokens"},
        from_zero=True,
    ),
    _modality(
        "Busiest expert, of image and of text tokens",
        "Load of the busiest expert over its fair share, minus 1 (max_violation), of each kind alone, mean of the "
        "layers. Healthy: flat. Rising: the kind crowds into few experts.",
        {"train/moe/image/max_violation_mean": "image", "train/moe/text/max_violation_mean": "text"},
        from_zero=True,
    ),
    _modality(
        "Experts in effective use, by image and by text tokens",
        "Share of a layer's experts that a kind's load spreads over, by its entropy: 1 is all of them evenly. Healthy: "
        "flat. Falling: the kind crowds into few experts.",
        {"train/moe/image/expert_diversity_mean": "image", "train/moe/text/expert_diversity_mean": "text"},
    ),
    _modality(
        "Experts without image tokens, without text tokens",
        "Share of the experts that no token of the kind went to in a step, mean of the layers. Healthy: low and flat. "
        "Rising: a kind is left with fewer experts.",
        {
            "train/moe/image/dead_expert_frac_mean": "without image tokens",
            "train/moe/text/dead_expert_frac_mean": "without text tokens",
        },
        from_zero=True,
    ),
)


TRAINING, BALANCE = "Training", "Balance of the experts"
_training = partial(Chart, TRAINING)
_balance = partial(Chart, BALANCE)
_PER_LAYER = re.compile(r"_layer_\d+")

_TRAINING_CHARTS = (
    _training(
        "Loss",
        "Healthy: supervised losses fall and flatten, on validation too; a policy-gradient loss says "
        "little: look at the reward.",
        {"train/loss": "training", "val/loss": "validation"},
    ),
    _training(
        "Gradient norm",
        "Before clipping. Healthy: it settles after the warmup; single spikes are normal, growth is not.",
        {"train/grad_norm": "gradient norm"},
        from_zero=True,
    ),
    _training(
        "Seconds of each phase",
        "How long each phase of a step takes. Healthy: flat; imbalance between ranks shows here as longer training.",
        {"timing/*/seconds": None},
        from_zero=True,
    ),
    _training(
        "Tokens a second",
        "Speed of each phase. Healthy: flat, apart from the first steps.",
        {"timing/*/tokens_per_second": None},
        from_zero=True,
    ),
    _balance(
        "Spread of the expert loads (cv)",
        "Standard deviation of the loads over their mean, average of the layers, beside what random routing of the "
        "same tokens would have. Healthy: it falls towards that line.",
        {"train/moe/cv_mean": "cv", "train/moe/cv_null_mean": "by chance", "train/moe/cv_excess_mean": "beyond chance"},
        from_zero=True,
    ),
    _balance(
        "Overload of the busiest rank",
        "Work of the busiest expert-parallel rank over that of the mean one; the others wait for it. Healthy: near 1.",
        {"train/moe/avg_overload_factor": "average", "train/moe/max_overload_factor": "worst microbatch"},
        (1.0, "no waiting"),
    ),
    _balance(
        "Auxiliary losses",
        "What the optimizer sees of balance, before coefficients. Healthy: load balancing losses settle near 1.",
        {
            "train/moe/load_balancing_loss": "load balancing",
            "train/moe/seq_load_balancing_loss": "load balancing, by sequence",
            "train/moe/global_load_balancing_loss": "load balancing, global",
            "train/moe/z_loss": "z-loss",
        },
        (1.0, "perfect balance"),
    ),
    _balance(
        "Dead experts",
        "Share of the experts that got no token in a step, average of the layers. Healthy: 0.",
        {"train/moe/dead_expert_frac_mean": "dead experts"},
        from_zero=True,
    ),
)


def charts_of(keys: Iterable[str]) -> list[dict[str, Any]]:
    """Return the charts that have any of these metrics, as the page's script reads them."""
    in_order = sorted(keys)
    found = []
    for chart in (*REWARD_CHARTS, *STALENESS_CHARTS, *_TRAINING_CHARTS, *ROUTING_CHARTS, *MODALITY_CHARTS):
        lines = [
            {"key": key, "label": label if label is not None else _wildcard(key, pattern)}
            for pattern, label in chart.lines.items()
            for key in in_order
            if fnmatchcase(key, pattern) and not (label is None and _PER_LAYER.search(key))
        ]
        if lines:
            found.append({**asdict(chart), "lines": lines})
    return found


def _wildcard(key: str, pattern: str) -> str:
    before, *_, after = pattern.split("*")
    return key.removeprefix(before).removesuffix(after)
