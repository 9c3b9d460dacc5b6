# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Charts of what a policy learns from rewards (GRPO and its kin) or from preferences (DPO), and how it changes."""

from functools import partial

from nemo_rl_moe.runs.report.chart import Chart, Line

LEARNING = "Learning from rewards and preferences"
_chart = partial(Chart, LEARNING)

REWARD_CHARTS = (
    _chart(
        "Reward",
        "Mean of a step's responses as the environment gave it, and of those to the validation set. Healthy: both "
        "rise, with noise. Sick: training rises and validation does not.",
        [
            Line("train/reward", "reward"),
            Line("val/reward", "validation reward"),
            Line("train/filtered_reward", "reward of what is trained on"),
        ],
    ),
    _chart(
        "Rewards by name",
        "Means of the single rewards, before their weights. Healthy: none rises while the one that counts falls.",
        [Line("train/rewards/*/mean", None)],
    ),
    _chart(
        "Accuracy",
        "Share of the responses that count as right; in DPO, of the pairs whose chosen response gained "
        "more. Healthy: it rises, with noise. Stays at 0 where rewards are graded and none is called right.",
        [
            Line("train/accuracy", "accuracy"),
            Line("val/accuracy", "validation accuracy"),
        ],
    ),
    _chart(
        "pass@k",
        "Chance that one of k responses to a held-out prompt is right, by k. Healthy: it does not fall while the "
        "accuracy rises; what no response reaches cannot be learned.",
        [Line("val/pass_at_*", None)],
    ),
    _chart(
        "Groups without a spread",
        "Share of the groups whose responses all got the same reward: they teach nothing. Healthy: well below 1; it "
        "rises as the prompts become easy, or are too hard.",
        [Line("train/frac_zero_std_groups", "groups without a spread")],
        from_zero=True,
    ),
    _chart(
        "Length of responses",
        "In tokens, the end included. Healthy: it changes slowly, and has a reason to. Sick: it grows while the "
        "reward does not, or falls to a few tokens.",
        [
            Line("train/mean_gen_tokens_per_sample", "mean"),
            Line("train/max_gen_tokens_per_sample", "longest"),
            Line("val/mean_gen_tokens_per_sample", "validation mean"),
        ],
        from_zero=True,
    ),
    _chart(
        "Truncated responses",
        "Share that reached the most new tokens without an end. Healthy: near 0. Sick: it rises with the length, and "
        "rewards are then those of the limit.",
        [Line("train/truncation_rate", "truncated"), Line("val/truncation_rate", "validation")],
        from_zero=True,
    ),
    _chart(
        "Entropy",
        "Of the policy, in nats a token. Healthy: it falls slowly. Sick: near 0, where all responses to a prompt are "
        "one, or rising without a bound.",
        [Line("train/approx_entropy", "of the sampled tokens"), Line("train/entropy", "exact")],
        from_zero=True,
    ),
    _chart(
        "Divergence from the reference (KL)",
        "In nats a token, before its weight; with a penalty alone. Healthy: it grows slowly and flattens.",
        [Line("train/kl_penalty", "KL")],
        from_zero=True,
    ),
    _chart(
        "Clipped tokens",
        "Share of the tokens whose ratio the loss replaces by a bound. Healthy: some hundredths at most; 0 where each "
        "step is one update.",
        [Line("train/clip_fraction_low", "low"), Line("train/clip_fraction_high", "high")],
        from_zero=True,
    ),
    _chart(
        "Ratio of new to old probability",
        "Of the sampled tokens. Healthy: the mean is 1, and the extremes do not run away.",
        [
            Line("train/probs_ratio", "mean"),
            Line("train/probs_ratio_min", "smallest"),
            Line("train/probs_ratio_max", "largest"),
        ],
        (1.0, "unchanged"),
    ),
    _chart(
        "Advantages",
        "Of what is trained on. Healthy: on both sides of 0. All at 0: nothing is learned.",
        [
            Line("train/advantages/min", "smallest"),
            Line("train/advantages/mean", "mean"),
            Line("train/advantages/max", "largest"),
        ],
    ),
    _chart(
        "Mismatch of log-probabilities: divergence",
        "Estimate of the divergence between the rollout's and training's log-probabilities of the sampled tokens. "
        "Healthy: small and flat.",
        [Line("train/gen_kl_error", "gen_kl_error")],
        from_zero=True,
    ),
    _chart(
        "Mismatch of log-probabilities: factor",
        "Mean factor between the probabilities that rollout and training give a sampled token. Healthy: close to 1.",
        [Line("train/token_mult_prob_error", "token_mult_prob_error")],
        (1.0, "the same"),
    ),
    _chart(
        "Responses without a score",
        "Responses that the environment failed to score. Healthy: 0.",
        [Line("train/env/num_*", None)],
        from_zero=True,
    ),
    _chart(
        "Rewards of pairs",
        "What the chosen and the rejected responses have gained on the reference, and the difference. Healthy: the "
        "difference rises, on held-out pairs too.",
        [
            Line("train/rewards_chosen_mean", "chosen"),
            Line("train/rewards_rejected_mean", "rejected"),
            Line("train/reward_margin", "difference"),
            Line("val/reward_margin", "validation difference"),
        ],
        (0.0, "as the reference"),
    ),
    _chart(
        "Log-probabilities of pairs",
        "Of the chosen and the rejected responses. Healthy: the rejected fall; that the chosen fall somewhat too is "
        "usual. Sick: both plunge.",
        [Line("train/logprobs_chosen_mean", "chosen"), Line("train/logprobs_rejected_mean", "rejected")],
    ),
)
