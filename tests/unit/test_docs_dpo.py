# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The table of metrics and the examples of data in `docs/dpo.md` against what the code produces and reads."""

import json

import torch

from nemo_rl_moe.algorithms.losses.supervised import PreferenceLoss
from nemo_rl_moe.algorithms.step_metrics import training_metrics
from nemo_rl_moe.data.preferences import parse_preference
from nemo_rl_moe.metrics import MetricSeries
from nemo_rl_moe.models.interfaces import TrainResult
from tests.unit.algorithms.preference_reference import config_of, inputs_of, random_pairs
from tests.unit.test_docs_examples import DOCS, blocks, documented_keys
from tests.unit.test_docs_grpo_metrics import unfolded

PAGE = DOCS / "dpo.md"


def test_table_has_every_metric_and_no_other() -> None:
    of_loss = PreferenceLoss(config_of())(random_pairs(seed=0, pairs=2, targets=4)).metrics
    series = {name: MetricSeries((float(value.detach()),), reduction) for name, (value, reduction) in of_loss.items()}
    training = training_metrics(TrainResult(0.0, 0.0, 0.0, 1, 1, series, {}))
    table = {key for cell in documented_keys(PAGE) for key in unfolded(cell)}
    assert {key for key in table if key.startswith("train/")} - {"train/moe/..."} == training.keys()
    means = {f"val/{name}" for name in {*of_loss, "loss"} if not name.startswith("num_")}
    assert {key for key in table if key.startswith("val/")} == means


def test_lines_of_data_are_what_they_are_said_to_be() -> None:
    (lines,) = blocks(PAGE, "json")
    records = [parse_preference(json.loads(line), "here") for line in lines.splitlines()]
    assert len(records) == 2
    for record in records:
        assert [message["content"] for message in record.chosen.messages] == ["2+2=", "4"]
        assert [message["content"] for message in record.rejected.messages] == ["2+2=", "5"]


def test_label_smoothing_differs_from_trls_as_the_page_says() -> None:
    """TRL's `sigmoid` loss does not read it; the losses on the page are those of one pair with a margin of 1."""

    def loss(smoothing: float) -> str:
        config = config_of(label_smoothing=smoothing, reference_policy_kl_penalty=1.0)
        logprobs = torch.tensor([[-1.0], [-2.0]], dtype=torch.float64)
        inputs = inputs_of(
            logprobs, torch.ones(2, 1, dtype=torch.bool), torch.tensor([-1.0, -1.0], dtype=torch.float64)
        )
        return f"{float(PreferenceLoss(config)(inputs).loss):.4f}"

    page = (DOCS / "from-trl.md").read_text()
    assert f"with `label_smoothing: 0.1` TRL's loss stays {loss(0.0)} and ours is {loss(0.1)}" in " ".join(page.split())
    assert "`label_smoothing`" in next(line for line in page.splitlines() if "0 for `sigmoid`" in line)
