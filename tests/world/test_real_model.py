# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A released model, dense and with experts, against transformers: `make real-model` writes both."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.real_model import DENSE, MOE
from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.models.model_files import write_model_files
from tests.support.family_parity import responses_of_trainer
from tests.support.family_reference import (
    ModelOutputs,
    Response,
    assert_same_experts,
    files_beside,
    greedy_responses,
    logit_difference,
    outputs_of_trainer,
    reference_outputs,
    tensors_in,
    trainer_of,
)
from tests.support.gloo_ranks import run_ranks
from tests.support.lora_models import lora
from tests.support.tiny_model import layout, parallel_job, shard_of_rank, tiny_batch, tiny_policy


@dataclass(frozen=True)
class RealRun:
    """What a trainer makes of a folder on rank 0: its outputs, and greedy responses."""

    outputs: ModelOutputs
    responses: list[Response]


def run_real(folder: str, policy: PolicyConfig, prompts: Sequence[Sequence[int]], exported: str) -> RealRun | None:
    """Run on every rank: outputs and responses of a folder's weights, which are then exported."""
    with parallel_job(policy):
        trainer = trainer_of(Path(folder), policy)
        outputs = outputs_of_trainer(trainer)
        responses = responses_of_trainer(trainer, prompts)
        trainer.save_weights(Path(exported), files_beside(Path(folder)))
        return None if outputs is None else RealRun(outputs, responses)


def run_adapter(folder: str, policy: PolicyConfig, merged: str) -> Any:
    """Run on every rank: outputs of a model with a fresh adapter, and after two steps, whose weights are written."""
    from nemo_rl_moe.models.megatron.lora.merge import merge_adapters
    from nemo_rl_moe.models.megatron.weights.hf_export import save_weights

    with parallel_job(policy):
        trainer = trainer_of(Path(folder), policy, num_steps=2)
        fresh = outputs_of_trainer(trainer)
        place, batch = trainer.coordinates, tiny_batch(11, trainer.hf_config.vocab_size)
        shard = shard_of_rank(batch, place.data_parallel_rank, place.data_parallel_size)
        for _ in range(2):
            trainer.train([shard], sft_loss)
        trained = outputs_of_trainer(trainer)
        merge_adapters(trainer.chunks, trainer.config)
        write_beside = partial(write_model_files, files_beside(Path(folder)))
        save_weights(trainer.chunks, trainer.config, trainer.hf_config, Path(merged), write_beside)
        return fresh, trained


pytestmark = [
    pytest.mark.skipif(not MOE.is_dir(), reason=f"{MOE} is not there: make real-model writes it"),
    pytest.mark.timeout(1800),
]
FOLDERS = {"dense": DENSE, "moe": MOE}
# Logits of up to 34: largest seen 1.9e-4.
LOGITS_TOLERANCE = 5e-4
LOGPROBS_TOLERANCE = 1e-4  # largest seen: 1.7e-5
QUESTIONS = ("What is the capital of France?", "Name three colours.", "Write one line about the sea.")


@dataclass(frozen=True)
class Case:
    """A layout that holds the model: it has nine heads, and 30 layers."""

    world_size: int = 1
    sizes: dict[str, int] = field(default_factory=dict)


CASES = {
    "one_rank": Case(),
    "ep2": Case(2, {"ep": 2}),
    "pp2": Case(2, {"pp": 2}),
    "dp2": Case(2),
    "tp3": Case(3, {"tp": 3}),
}


@cache
def prompts() -> tuple[tuple[int, ...], ...]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DENSE)
    return tuple(
        tuple(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
            )
        )
        for question in QUESTIONS
    )


@cache
def reference(name: str) -> tuple[ModelOutputs, list[Response]]:
    """What transformers computes in float32, and its greedy responses."""
    return reference_outputs(FOLDERS[name]), greedy_responses(FOLDERS[name], prompts())


@pytest.mark.parametrize(
    ("name", "where"),
    [(name, where) for name in FOLDERS for where, case in CASES.items() if name == "moe" or "ep" not in case.sizes],
)
def test_released_weights_are_those_of_transformers(name: str, where: str, tmp_path: Path) -> None:
    case = CASES[where]
    expected, responses = reference(name)
    policy = tiny_policy(case.world_size, **layout(**case.sizes))
    ours, *_ = run_ranks(
        run_real, case.world_size, str(FOLDERS[name]), policy, prompts(), str(tmp_path / "exported"), timeout_s=900
    )
    difference = logit_difference(ours.outputs, expected)
    logprobs = max(
        abs(mine - theirs)
        for found, wanted in zip(ours.responses, responses, strict=True)
        for mine, theirs in zip(found.logprobs, wanted.logprobs, strict=True)
    )
    print(f"{name}, {where}: logits differ by {difference:.1e}, log-probabilities of responses by {logprobs:.1e}")
    assert difference < LOGITS_TOLERANCE
    assert [response.token_ids for response in ours.responses] == [response.token_ids for response in responses]
    assert logprobs < LOGPROBS_TOLERANCE
    assert_same_experts(ours.outputs, expected)
    # Written in float32, which holds every number of bfloat16.
    found, original = tensors_in(tmp_path / "exported"), tensors_in(FOLDERS[name])
    assert found.keys() == original.keys()
    assert all(torch.equal(found[key], tensor.float()) for key, tensor in original.items())


def test_model_with_experts_says_what_the_dense_one_says() -> None:
    (dense, said), (moe, said_by_experts) = reference("dense"), reference("moe")
    assert logit_difference(dense, moe) < LOGITS_TOLERANCE
    assert [response.token_ids for response in said] == [response.token_ids for response in said_by_experts]


@pytest.mark.parametrize("name", FOLDERS)
def test_merged_adapter_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    policy = tiny_policy(**lora("per_expert" if name == "moe" else "none"))
    ((fresh, trained),) = run_ranks(run_adapter, 1, str(FOLDERS[name]), policy, str(tmp_path / "merged"), timeout_s=900)
    assert logit_difference(fresh, reference(name)[0]) < LOGITS_TOLERANCE
    assert logit_difference(trained, fresh) > 100 * LOGITS_TOLERANCE
    difference = logit_difference(trained, reference_outputs(tmp_path / "merged"))
    print(f"{name}: logits of the merged weights differ by {difference:.1e}")
    assert difference < LOGITS_TOLERANCE
