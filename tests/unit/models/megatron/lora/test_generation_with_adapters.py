# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The trainer's engine samples with adapters in every layout what one rank samples, and training goes on after it."""

from typing import Any

import numpy as np
import pytest

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from tests.support.gloo_ranks import run_ranks
from tests.support.lora_models import lora, set_random
from tests.support.quick_list import some_of
from tests.support.tiny_model import layout, tiny_policy
from tests.support.training_run import Response, RunSettings, generator_of, request_of, shard_of_step, tiny_trainer

ALL = tuple(range(6))
TOLERANCE = 1e-5


def generate_and_train(policy: Any, model: Any) -> tuple[dict[int, Response], float]:
    """The responses of this rank, and the loss of a step afterwards."""
    with tiny_trainer(policy, model) as trainer:
        set_random(trainer.chunks)
        sequences = generator_of(trainer).generate(request_of(ALL), weight_version=1)
        responses = [Response(each.token_ids.tolist(), each.logprobs, each.is_truncated) for each in sequences]
        step = trainer.train([shard_of_step(trainer, RunSettings(policy), 0)], sft_loss)
        return dict(enumerate(responses)), step.global_loss


def policy_of(world_size: int, experts: str, **changes: Any) -> Any:
    return tiny_policy(world_size, **{"layer_spec": "auto", **lora(experts, ("all-linear", "router")), **changes})


@pytest.mark.parametrize(
    ("world_size", "sizes", "experts", "model"),
    some_of(
        [
            (2, {"tp": 2}, "shared", {}),
            (2, {"tp": 2, "etp": 2}, "per_expert", {}),
            (2, {"tp": 2, "ep": 2}, "shared", {}),
            (2, {"tp": 2}, "per_expert", "qwen3_5_moe_text"),
        ],
        2,
    ),
)
def test_layout_generates_as_one_rank_does(world_size: int, sizes: dict[str, int], experts: str, model: Any) -> None:
    ((expected, loss),) = run_ranks(generate_and_train, 1, policy_of(1, experts), model)
    ranks = run_ranks(generate_and_train, world_size, policy_of(world_size, experts, **layout(**sizes)), model)
    found = {index: response for responses, _ in ranks for index, response in responses.items()}
    assert found.keys() == expected.keys()
    for index, response in expected.items():
        assert found[index].token_ids == response.token_ids
        np.testing.assert_allclose(found[index].logprobs, response.logprobs, rtol=0, atol=TOLERANCE)
    assert [other for _, other in ranks] == [pytest.approx(loss, rel=1e-5)] * world_size
