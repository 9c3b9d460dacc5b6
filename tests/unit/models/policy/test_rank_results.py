# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What ranks report to the driver."""

import pickle
import subprocess
import sys

from nemo_rl_moe.metrics import MetricSeries, Reduction
from nemo_rl_moe.models.flops import ForwardFlops
from nemo_rl_moe.models.rank_results import ParallelCoordinates, RankDescription, RankTrainResult
from nemo_rl_moe.runs.folder.artifacts import EXPERT_LOAD

READ = """
import pickle, sys
description, result = pickle.load(sys.stdin.buffer)
print(description.coordinates.reports_loss, result.num_microbatches)
print(sorted({name.partition(".")[0] for name in sys.modules} & {"megatron", "ray", "transformers"}))
"""


def test_the_driver_reads_them_without_megatron_core() -> None:
    place = ParallelCoordinates(0, 2, pipeline_rank=0, tensor_rank=0, is_last_stage=True)
    description = RankDescription(place, {"moe_router_topk": 2}, forward_flops=ForwardFlops(10, {None: 4}))
    result = RankTrainResult(
        global_loss=0.5,
        grad_norm=1.0,
        lr=1e-3,
        num_microbatches=3,
        microbatch_metrics={"loss": MetricSeries((0.25,), Reduction.SHARE)},
        moe_metrics={"cv_mean": 0.5},
        num_updates=1,
        num_skipped_updates=0,
        skipped_in_a_row=0,
        weight_version=1,
        artifacts={EXPERT_LOAD.name: None},
    )
    read = subprocess.run(
        [sys.executable, "-c", READ], input=pickle.dumps((description, result)), capture_output=True, check=True
    )
    assert read.stdout.decode().splitlines() == ["True 3", "[]"]
