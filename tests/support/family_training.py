# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Training steps of tiny models, by this project in any layout and by transformers, from the same weights.

Adam's epsilon is far above all gradients, so that an update is in proportion to them: changes of weights show each
gradient, where Adam's own scale would hide their size.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.distributed.batch import TokenBatch
from nemo_rl_moe.runs.folder.artifacts import EXPERT_LOAD
from tests.support.family_parity import or_why_not
from tests.support.family_reference import (
    has_recurrent_layers,
    other_chunks,
    read_model,
    routers_of_transformers,
    save_model,
    tensors_in,
    trainer_of,
    write_reference,
)
from tests.support.tiny_model import MICROBATCHES, forget_recorded_losses, parallel_job, shard_of_rank, tiny_batch

Counts = npt.NDArray[np.int64]
LossOfModel = Callable[[Any, TokenBatch], Tensor]

NUM_STEPS = 4
SETTINGS = {
    "moe_aux_loss_coeff": 0.0,
    "max_grad_norm": None,
    "optimizer__lr": 0.2,
    "optimizer__adam_eps": 1.0,
    "optimizer__weight_decay": 0.0,
    "scheduler__lr_decay_style": "constant",
    "moe_metrics__mode": "detailed",
}
"""Of `tiny_policy`: without an auxiliary loss, which transformers defines in another way."""
TRAINED = "trained"
"""Folder of the trained weights, beside the files of those that training starts from."""


@dataclass(frozen=True)
class Rounding:
    """Largest differences, relative, of transformers from itself with another chunk size of the gated delta rule."""

    loss: float = 0.0
    grad_norm: float = 0.0
    change: float = 0.0


@dataclass(frozen=True)
class TrainingRun:
    """Loss, gradient norm and expert load of each step; the load is `[layers, experts]`, None of a dense model."""

    losses: list[float]
    grad_norms: list[float]
    loads: list[Counts | None]
    rounding: Rounding = Rounding()

    def num_same_loads(self, other: "TrainingRun") -> int:
        """Return the number of steps before experts get other numbers of tokens, if any; of a dense model all.

        Rounding grows from step to step, and turns a close choice at last; from there the runs part.
        """
        for number, (mine, theirs) in enumerate(zip(self.loads, other.loads, strict=True)):
            if not np.array_equal(mine, theirs):
                return number
        return len(self.loads)


def write_and_train_reference(name: str, folder: Path, policy: PolicyConfig) -> TrainingRun:
    """Write a model's folder, train its weights with transformers and torch's Adam, and write them below it."""
    write_reference(name, folder)
    model = read_model(folder)
    batch = tiny_batch(100, model.config.vocab_size)
    found = steps_of_transformers(model, policy, batch, _loss)
    save_model(model, folder / TRAINED)
    if not has_recurrent_layers(model):
        return found
    other = read_model(folder)
    with other_chunks(other, chunk_size=4):
        again = steps_of_transformers(other, policy, batch, _loss)
    save_model(other, folder / "other_chunks")
    losses, norms = (
        max(abs(mine / theirs - 1) for mine, theirs in zip(*pair, strict=True))
        for pair in ((again.losses, found.losses), (again.grad_norms, found.grad_norms))
    )
    return replace(found, rounding=Rounding(losses, norms, difference_of_changes(folder / "other_chunks", folder)))


def steps_of_transformers(model: Any, policy: PolicyConfig, batch: TokenBatch, loss_of: LossOfModel) -> TrainingRun:
    """Take the steps with torch's Adam, each on the same batch."""
    chosen = policy.megatron_cfg.optimizer
    adam = torch.optim.AdamW(
        model.parameters(),
        lr=chosen.lr,
        betas=(chosen.adam_beta1, chosen.adam_beta2),
        eps=chosen.adam_eps,
        weight_decay=0.0,
    )
    losses, norms, loads = [], [], []
    for _ in range(NUM_STEPS):
        adam.zero_grad()
        with _counted(model, batch) as counts:
            loss = loss_of(model, batch)
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        losses.append(loss.item())
        norms.append(torch.nn.utils.get_total_norm(gradients).item())
        loads.append(np.stack(counts) if counts else None)
        adam.step()
    return TrainingRun(losses, norms, loads)


@contextmanager
def _counted(model: Any, batch: TokenBatch) -> Iterator[list[Counts]]:
    """Count the tokens that each router of transformers gives to each expert, padding left out."""
    real = torch.arange(batch.input_ids.shape[1]) < batch.lengths[:, None]
    counts: list[Counts] = []

    def count(router: Any, arguments: Any, output: Any) -> None:
        logits, _, experts = output
        chosen = experts.reshape(*real.shape, -1)[real]
        counts.append(np.bincount(chosen.flatten().numpy(), minlength=logits.shape[-1]))

    handles = [router.register_forward_hook(count) for router in routers_of_transformers(model)]
    yield counts
    for handle in handles:
        handle.remove()


def _loss(model: Any, batch: TokenBatch) -> Tensor:
    logprobs = model(batch.input_ids, use_cache=False).logits[:, :-1].log_softmax(-1)
    of_tokens = logprobs.gather(-1, batch.input_ids[:, 1:, None]).squeeze(-1)
    mask = batch.token_mask[:, 1:]
    return -of_tokens[mask].mean()


def train_family(folder: Path, policy: PolicyConfig, exports: Path) -> TrainingRun:
    """Train a folder's weights, and write them; every rank of a job calls it, in `parallel_job`."""
    forget_recorded_losses()
    trainer = trainer_of(folder, policy, num_steps=NUM_STEPS)
    found = steps_of_trainer(trainer, tiny_batch(100, trainer.hf_config.vocab_size))
    trainer.save_weights(exports, {})
    return found


def steps_of_trainer(
    trainer: Any, batch: TokenBatch, microbatches: Sequence[Sequence[int]] = MICROBATCHES
) -> TrainingRun:
    """Take the steps with this rank's trainer; only the first rank gets the loads."""
    place = trainer.coordinates
    shard = shard_of_rank(batch, place.data_parallel_rank, place.data_parallel_size, microbatches)
    results = [trainer.train([shard], sft_loss) for _ in range(NUM_STEPS)]
    loads = [EXPERT_LOAD.of(result.artifacts) for result in results]
    return TrainingRun(
        [result.global_loss for result in results],
        [result.grad_norm for result in results],
        [None if load is None else load.counts.numpy().copy() for load in loads],
    )


def difference_of_changes(exported: Path, folder: Path) -> float:
    """Return the largest difference of two trained weights, relative to the largest change of each tensor.

    What rounding of a weight alone can make is left out: some changes are far smaller than their weights.
    """
    before, theirs, ours = tensors_in(folder), tensors_in(folder / TRAINED), tensors_in(exported)
    assert ours.keys() == theirs.keys() == before.keys()
    found = 0.0
    for name, start in before.items():
        change, difference = theirs[name] - start, (ours[name] - theirs[name]).abs()
        rounding = NUM_STEPS * torch.finfo(start.dtype).eps * theirs[name].abs()
        excess = (difference - rounding).clamp_min(0).max()
        # One that training leaves alone must not have changed at all.
        found = max(found, float(excess / change.abs().max().clamp_min(1e-30)))
    return found


# ---- what the ranks of a job run, for many models ----


def write_and_train_references(names: Sequence[str], root: str, policy: PolicyConfig) -> dict[str, Any]:
    """Run on one rank: `write_and_train_reference` of each model to `root/NAME`, or why it fails."""
    return {name: or_why_not(partial(write_and_train_reference, name, Path(root, name), policy)) for name in names}


def train_families(names: Sequence[str], root: str, policy: PolicyConfig, exports: str) -> dict[str, Any]:
    """Run on every rank of a job: `train_family` of `root/NAME`, exported to `exports/NAME`, or why it fails."""
    with parallel_job(policy):
        return {
            name: or_why_not(partial(train_family, Path(root, name), policy, Path(exports, name))) for name in names
        }
