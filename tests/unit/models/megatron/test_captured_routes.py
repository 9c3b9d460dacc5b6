# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Routed experts that generation captures: those of each sequence alone, however its batch shrinks meanwhile."""

import dataclasses

import numpy as np
import pytest
import torch

from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.distributed.batch import TokenBatch
from nemo_rl_moe.models.megatron.training import captured_routes
from tests.support.gloo_ranks import run_ranks
from tests.support.tiny_model import parallel_job, tiny_grpo_policy
from tests.support.training_run import SAMPLING, build_trainer, prompts, request_of

ALL = tuple(range(6))
ENDS = dataclasses.replace(SAMPLING, max_new_tokens=24, temperature=1.0, stop_token_ids=tuple(range(6)))


def captured_and_own(policy: PolicyConfig, passes_kept: int | None) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return, for each sequence, the routes of generation, and those of a pass over it alone.

    Routes are brought together after so many passes; None stands for the shipped number.
    """
    with parallel_job(policy), pytest.MonkeyPatch.context() as patch:
        if passes_kept is not None:
            patch.setattr(captured_routes, "_MOST_PASSES_KEPT", passes_kept)
        trainer = build_trainer(policy)
        found = []
        for prompt, sequence in zip(prompts(), trainer.generate(request_of(ALL, ENDS), None), strict=True):
            assert sequence.routed_experts is not None
            (piece,) = sequence.routed_experts.pieces
            ids = torch.tensor([[*prompt, *sequence.token_ids.tolist()]])
            batch = TokenBatch(ids, torch.tensor([ids.shape[1]]), ids >= 0, ("one",))
            found.append((piece.source, trainer.logprobs_and_routes([batch])[1][0].pieces[0].source))
        return found


@pytest.mark.parametrize("passes_kept", [None, 3])
@pytest.mark.parametrize("layer_spec", ["auto", pytest.param("local", marks=pytest.mark.full)])
def test_routes_are_those_of_each_sequence_alone(layer_spec: str, passes_kept: int | None) -> None:
    """Prompts of several lengths, and responses that end one by one, at which rows leave the batch."""
    (found,) = run_ranks(captured_and_own, 1, tiny_grpo_policy(1, layer_spec=layer_spec), passes_kept)
    assert len({len(captured) for captured, _ in found}) > 3
    for captured, own in found:
        assert captured.dtype == np.int16
        np.testing.assert_array_equal(np.sort(captured, -1), np.sort(own, -1))


def nbytes_kept(policy: PolicyConfig) -> tuple[int, int]:
    """Bytes of the array that all sequences' routes are parts of, and of the parts."""
    with parallel_job(policy):
        made = build_trainer(policy).generate(request_of(ALL, ENDS), None)
        arrays = [rows.pieces[0].source for each in made if (rows := each.routed_experts) is not None]
        (base,) = {id(array.base): array.base for array in arrays}.values()
        return base.nbytes, sum(array.nbytes for array in arrays)


def test_routes_keep_nothing_but_themselves_alive() -> None:
    ((kept, needed),) = run_ranks(nbytes_kept, 1, tiny_grpo_policy(1))
    assert kept == needed
