# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
from fnmatch import fnmatchcase

import pytest

from nemo_rl_moe.runs.report.charts import SECTIONS, charts_of
from tests.unit.test_docs_examples import DOCS, documented_keys
from tests.unit.test_docs_grpo_metrics import unfolded

DOCUMENTED = {
    key
    for page in ("grpo-reference.md", "dpo.md", "distillation.md", "ppo.md")
    for cell in documented_keys(DOCS / page)
    for outer in unfolded(cell)
    for key in unfolded(outer)
}
# The table says of validations that they have the same metrics as steps.
DOCUMENTED |= {key.replace("train/", "val/", 1) for key in DOCUMENTED}


LEARNING, MODELS_BESIDE = SECTIONS["learning"], SECTIONS["models_beside"]


@pytest.mark.parametrize(
    "pattern",
    sorted({pattern for section in (LEARNING, MODELS_BESIDE) for chart in section.charts for pattern in chart.lines}),
)
def test_every_line_is_a_metric_that_the_pages_report_of(pattern: str) -> None:
    assert [key for key in DOCUMENTED if fnmatchcase(key, pattern)]


def test_a_run_of_grpo_has_the_charts_of_learning_before_all_others() -> None:
    keys = ["train/loss", "train/reward", "val/reward", "train/approx_entropy", "train/kl_penalty"]
    keys += ["train/mean_gen_tokens_per_sample", "train/truncation_rate", "train/clip_fraction_high"]
    keys += ["train/frac_zero_std_groups", "train/rewards/format/mean", "train/rewards/length/mean"]
    charts = charts_of(keys)
    assert [chart["title"] for chart in charts] == [
        "Reward",
        "Rewards by name",
        "Groups without a spread",
        "Length of responses",
        "Truncated responses",
        "Entropy",
        "Divergence from the reference (KL)",
        "Clipped tokens",
        "Loss",
    ]
    assert {chart["section"] for chart in charts[:-1]} == {LEARNING.heading}
    assert [line["label"] for line in charts[0]["lines"]] == ["reward", "validation reward"]
    assert [line["label"] for line in charts[1]["lines"]] == ["format", "length"]


def test_runs_with_a_teacher_or_a_critic_have_charts_of_them() -> None:
    teacher = ["train/teacher_kl", "train/policy_candidate_mass", "train/distillation/share_with_teacher"]
    assert [chart["title"] for chart in charts_of(teacher)] == [
        "Divergence from the teacher",
        "Probability of the candidates",
        "Tokens with a teacher",
    ]
    critic = ["train/critic/value_loss", "train/critic/explained_variance", "train/critic/values/mean"]
    charts = charts_of([*critic, "train/critic/returns/mean"])
    assert [chart["title"] for chart in charts] == [
        "Explained variance of the critic",
        "Loss of the critic",
        "Values and returns",
    ]
    assert [line["label"] for line in charts[2]["lines"]] == ["mean value", "mean return"]
