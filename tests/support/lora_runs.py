# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Adapters in training: what the ranks of a job compute, and what peft computes of the same."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.config.schema_policy import PolicyConfig
from tests.support.family_outputs import files_beside, outputs_of_trainer, trainer_of
from tests.support.family_reference import COLUMNS, reference_outputs, write_reference
from tests.support.lora_models import Array, Factors, PeftModel, local_factors, lora, set_random, whole_factors
from tests.support.tiny_model import forget_recorded_losses, parallel_job, shard_of_rank, tiny_batch, tiny_policy
from tests.support.training_run import RunSettings, build_trainer, shard_of_step


@dataclass(frozen=True)
class Computed:
    """What a model with adapters computes of eight sequences."""

    logits: Array
    loss: float
    gradients: Factors


@dataclass(frozen=True)
class Comparison:
    """One model by this project, by peft, and merged by transformers."""

    ours: Computed
    peft: Computed
    merged: Array
    base: Array
    ours_without: Array


def one_rank_policy(experts: str, targets: tuple[str, ...] = ("all-linear",), **changes: Any) -> PolicyConfig:
    """Return a policy whose loss is that of the tokens alone, and whose gradients are left as they are."""
    fields = {"moe_aux_loss_coeff": 0.0, "max_grad_norm": None, **lora(experts, targets), **changes}
    return tiny_policy(1, **fields)


def compare_with_peft(name: str, policy: PolicyConfig, root: str) -> Comparison:
    """Run on one rank: a model of `FAMILY_MODELS` with adapters in both implementations."""
    folder, merged = Path(root, name), Path(root, "merged")
    if not folder.exists():
        write_reference(name, folder)
    assert policy.lora is not None
    with parallel_job(policy):
        forget_recorded_losses()
        trainer = trainer_of(folder, policy)
        set_random(trainer.chunks)
        outputs = outputs_of_trainer(trainer)
        with trainer.adapters.off():
            without = outputs_of_trainer(trainer)
        trainer.save_weights(merged, files_beside(folder))
        factors = whole_factors([local_factors(trainer.chunks)])
        shard = shard_of_rank(_batch(trainer.hf_config.vocab_size))
        loss = trainer.train([shard], sft_loss).global_loss
        gradients = whole_factors([local_factors(trainer.chunks, gradients=True)])
    assert outputs is not None
    assert without is not None
    return Comparison(
        Computed(outputs.logits, loss, gradients),
        _of_peft(folder, factors, policy.lora.scale),
        reference_outputs(merged).logits,
        reference_outputs(folder).logits,
        without.logits,
    )


def _batch(vocabulary: int) -> Any:
    return tiny_batch(3, vocabulary, shortest=COLUMNS, longest=COLUMNS)


def _of_peft(folder: Path, factors: Factors, scale: float) -> Computed:
    peft = PeftModel(folder, factors, scale)
    batch = _batch(peft.model.config.vocab_size)
    logits = peft.model(batch.input_ids).logits
    logprobs = logits[:, :-1].log_softmax(-1).gather(-1, batch.input_ids[:, 1:, None]).squeeze(-1)
    mask = batch.token_mask[:, 1:]
    loss = -(logprobs * mask).sum() / mask.sum()
    loss.backward()
    return Computed(logits.detach().numpy(), float(loss), peft.gradients())


@dataclass(frozen=True)
class LoraRun:
    """What one rank saw of some steps; the factors after them."""

    losses: list[float]
    grad_norms: list[float]
    factors: list[Any]
    num_trained: int


def train_adapters(settings: RunSettings) -> LoraRun:
    """Run on every rank of the job: optimizer steps from adapters that show."""
    with parallel_job(settings.policy):
        trainer = build_trainer(settings)
        set_random(trainer.chunks)
        trainer.optimizer.reload_model_params()
        losses, norms = [], []
        for step in range(settings.num_steps):
            result = trainer.train([shard_of_step(trainer, settings, step)], sft_loss)
            losses.append(result.global_loss)
            norms.append(result.grad_norm)
        parameters = [parameter for chunk in trainer.chunks for parameter in chunk.parameters()]
        trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
        return LoraRun(losses, norms, local_factors(trainer.chunks), trained)


def assert_same_run(runs: list[LoraRun], expected: LoraRun) -> None:
    """A job's ranks train as one rank does."""
    found, wanted = whole_factors([run.factors for run in runs]), whole_factors([expected.factors])
    assert found.keys() == wanted.keys()
    for run in runs:
        np.testing.assert_allclose(run.losses, expected.losses, rtol=1e-6)
        np.testing.assert_allclose(run.grad_norms, expected.grad_norms, rtol=5e-6)
    for name, values in wanted.items():
        np.testing.assert_allclose(found[name], values, atol=1e-5, err_msg=name)


def save_adapters(settings: RunSettings, folder: str) -> LoraRun:
    """Run on every rank: one step, a checkpoint, and a step after it, which is what is returned."""
    with parallel_job(settings.policy):
        trainer = build_trainer(settings)
        trainer.train([shard_of_step(trainer, settings, 0)], sft_loss)
        trainer.start_checkpoint(Path(folder), with_optimizer=True)
        assert trainer.finish_checkpoint() is None
        return _one_step(trainer, settings)


def resume_adapters(settings: RunSettings, folder: str) -> LoraRun:
    """Run on every rank: the step after the checkpoint; what was before it must leave no trace."""
    with parallel_job(settings.policy):
        trainer = build_trainer(settings)
        trainer.train([shard_of_step(trainer, settings, 99)], sft_loss)
        trainer.load_checkpoint(Path(folder), with_optimizer=True)
        return _one_step(trainer, settings)


def _one_step(trainer: Any, settings: RunSettings) -> LoraRun:
    result = trainer.train([shard_of_step(trainer, settings, 1)], sft_loss)
    return LoraRun([result.global_loss], [result.grad_norm], local_factors(trainer.chunks), 0)
