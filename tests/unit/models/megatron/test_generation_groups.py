# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Responses to the same prompt: the prompt goes through the model once, and each response is the one made alone."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationBatch
from nemo_rl_moe.models.megatron.generation.forward_passes import ForwardPasses
from tests.support.gloo_ranks import run_ranks
from tests.support.tiny_model import layout, tiny_grpo_policy
from tests.support.training_run import SAMPLING, prompts, tiny_trainer

# Prompts of 3, 7 and 1 tokens, with four, two and one response.
PROMPTS = (0, 1, 0, 2, 1, 0, 0)
ENDS = dataclasses.replace(SAMPLING, max_new_tokens=16, temperature=1.0, stop_token_ids=tuple(range(6)))
CASES: dict[str, tuple[int, dict[str, Any], Any]] = {
    "one": (1, {}, {}),
    "local": (1, {"layer_spec": "local"}, {}),
    "latent attention": (1, {}, "deepseek_v2"),
    "gated delta nets": (1, {}, "qwen3_next"),
    "Mamba-2": (1, {}, "nemotron_h"),
    "tp2": (2, layout(tp=2), {}),
    "pp2": (2, layout(pp=2), {}),
    "ep2": (2, layout(ep=2), {}),
}


def request(rows: list[int]) -> GenerationBatch:
    every = prompts()
    return GenerationBatch(tuple(every[PROMPTS[row]] for row in rows), tuple(200 + row for row in rows), ENDS)


def in_groups_and_alone(
    policy: PolicyConfig, model: Any
) -> tuple[list[GeneratedSequence], list[GeneratedSequence], list[int]]:
    """Return the responses of a batch and those of each request alone, and the rows of the batch's passes."""
    rows: list[int] = []
    run_stages = ForwardPasses._through_all_stages

    def noted(passes: ForwardPasses, token_ids: torch.Tensor, batch: Any) -> Any:
        rows.append(len(token_ids))
        return run_stages(passes, token_ids, batch)

    with tiny_trainer(policy, model) as trainer, pytest.MonkeyPatch.context() as patch:
        alone = [each for row in range(len(PROMPTS)) for each in trainer.generate(request([row]), None)]
        patch.setattr(ForwardPasses, "_through_all_stages", noted)
        return trainer.generate(request(list(range(len(PROMPTS)))), None), alone, rows


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("one", "gated delta nets", "pp2") else pytest.mark.full)
        for name in CASES
    ],
)
def test_a_prompt_is_computed_once_for_all_its_responses(name: str) -> None:
    world_size, changes, model = CASES[name]
    for found, alone, rows in run_ranks(
        in_groups_and_alone, world_size, tiny_grpo_policy(world_size, **changes), model
    ):
        assert rows[:2] == [len(set(PROMPTS)), len(PROMPTS)]
        assert len(found) == len(alone)
        for one, other in zip(found, alone, strict=True):
            assert one.token_ids.tolist() == other.token_ids.tolist()
            np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=5e-6)
            assert one.routed_experts is not None
            assert other.routed_experts is not None
            np.testing.assert_array_equal(*(np.sort(each.routed_experts.pieces[0].source, -1) for each in (one, other)))
