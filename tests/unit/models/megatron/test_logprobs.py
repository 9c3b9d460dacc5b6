# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of the policy and of its reference: right in every layout, in pieces, and leaving no trace."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.distributed.batch import GlobalBatchShard, TokenBatch, per_sequence, per_token
from nemo_rl_moe.metrics import Reduction, concatenate
from nemo_rl_moe.models.interfaces import LossInputs, LossOutputs
from nemo_rl_moe.models.megatron.training.measurements import token_score_norms
from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer
from tests.support.gloo_ranks import run_ranks
from tests.support.quick_list import full, slow
from tests.support.tiny_model import (
    MICROBATCHES,
    layout,
    parallel_job,
    shard_of_rank,
    tiny_batch,
    tiny_grpo_policy,
    tiny_hf_config,
)
from tests.unit.models.megatron.test_chunked_head import LargestLogits
from tests.unit.models.megatron.tiny_trainers import EXPERT_BIAS, PACKED, ZERO_1, shard_for

# Of float32 logits of up to 3.
TOLERANCE = 1e-5
TEMPERATURE = 0.7
# No other dimension of the tiny model.
VOCABULARY = 61
HIDDEN = 32
MODEL = {"vocab_size": VOCABULARY}
Array = np.ndarray[Any, Any]


def batch() -> TokenBatch:
    return tiny_batch(3, vocabulary_size=VOCABULARY)


def policy_for(world_size: int = 1, **changes: Any) -> PolicyConfig:
    return tiny_grpo_policy(world_size, **{"generation__temperature": TEMPERATURE, **changes})


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("model"))
    run_ranks(write_model, 1, folder)
    return folder


@pytest.fixture(scope="module")
def expected(model_folder: str) -> tuple[Array, Array]:
    """Return the log-probabilities and score norms of transformers' model, the softmax in float64."""
    ((logprobs, norms),) = run_ranks(logprobs_of_transformers, 1, model_folder)
    return np.asarray(logprobs), np.asarray(norms)


def write_model(folder: str) -> None:
    from transformers import Qwen3MoeForCausalLM

    torch.manual_seed(5)
    Qwen3MoeForCausalLM(tiny_hf_config(**MODEL)).save_pretrained(folder)


def logprobs_of_transformers(folder: str) -> tuple[Array, Array]:
    """Log-probability of each token given those before it, and the squared norm of its gradient by the logits, of the
    difference of a one-hot vector and the probabilities; 0 for the first and on padding."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    ids, lengths = batch().input_ids, batch().lengths
    found, norms = torch.zeros(2, *ids.shape, dtype=torch.float64)
    with torch.no_grad():
        for row, length in enumerate(lengths.tolist()):
            logprobs = (model(ids[row : row + 1, :length]).logits[0].double() / TEMPERATURE).log_softmax(-1)
            found[row, 1:length] = logprobs[:-1].gather(-1, ids[row, 1:length, None])[:, 0]
            scores = torch.nn.functional.one_hot(ids[row, 1:length], VOCABULARY) - logprobs[:-1].exp()
            norms[row, 1:length] = scores.square().sum(-1)
    return found.numpy(), norms.numpy()


@contextmanager
def in_job(policy: PolicyConfig, folder: str | None = None, **arguments: Any) -> Iterator[MegatronTrainer]:
    with parallel_job(policy):
        path = None if folder is None else Path(folder)
        yield MegatronTrainer(policy, tiny_hf_config(**MODEL), path, num_steps=10, **arguments)


def own_indices(trainer: MegatronTrainer) -> Sequence[Sequence[int]]:
    place = trainer.coordinates
    count = len(MICROBATCHES) // place.data_parallel_size
    return MICROBATCHES[place.data_parallel_rank * count :][:count]


def measured(trainer: MegatronTrainer, measure: Callable[[Any], list[Tensor]]) -> Array:
    """Return this rank's log-probabilities at their places in the whole batch, NaN elsewhere and on padding."""
    whole = batch()
    indices = own_indices(trainer)
    found = measure([whole.select(rows) for rows in indices])
    assert len(found) == (len(indices) if trainer.coordinates.reports_loss else 0)
    result = np.full(whole.input_ids.shape, np.nan)
    for rows, logprobs in zip(indices, found, strict=False):
        selected = whole.select(rows)
        assert logprobs.shape == selected.input_ids.shape
        assert not logprobs.requires_grad
        for row, values, length in zip(rows, logprobs, selected.lengths.tolist(), strict=True):
            result[row, :length] = values[:length].numpy()
    return result


def logprobs_of_rank(policy: PolicyConfig, folder: str) -> tuple[Array, Array, Array]:
    """All at once, and three tokens at a time; the score norms."""
    with in_job(policy, folder) as trainer:
        whole = measured(trainer, trainer.logprobs)
        for chunk in trainer.chunks:
            chunk.logprob_chunk_size = 3
        norms = partial(trainer.measure, measurement=token_score_norms)
        return whole, measured(trainer, trainer.logprobs), measured(trainer, norms)


def joined(parts: Sequence[Array]) -> Array:
    """One array out of the ranks'; where two ranks have a value, they must agree."""
    result = parts[0]
    for part in parts[1:]:
        both = ~np.isnan(result) & ~np.isnan(part)
        np.testing.assert_allclose(result[both], part[both], atol=1e-6)
        result = np.where(np.isnan(result), part, result)
    return result


@pytest.mark.parametrize(
    ("world_size", "changes"),
    [
        slow(1, {}),
        full(1, PACKED),
        (1, {"layer_spec": "local"}),
        slow(2, {}),
        full(2, layout(tp=2)),
        slow(2, PACKED | layout(tp=2)),
        slow(2, layout(pp=2)),
        (2, PACKED | layout(pp=2)),
        slow(2, layout(pp=2, vpp=2)),
        full(2, layout(ep=2)),
    ],
)
def test_are_those_of_transformers_whole_and_in_pieces(
    world_size: int, changes: dict[str, Any], model_folder: str, expected: tuple[Array, Array]
) -> None:
    policy = policy_for(world_size, **changes)
    found = run_ranks(logprobs_of_rank, world_size, policy, model_folder)
    logprobs, norms = expected
    for parts, wanted in zip(zip(*found, strict=True), (logprobs, logprobs, norms), strict=True):
        ours = joined(parts)
        real = ~np.isnan(ours)
        assert real.sum() == batch().lengths.sum()
        assert not ours[:, 0].any()
        np.testing.assert_allclose(ours[real], wanted[real], atol=TOLERANCE, rtol=0)


def largest_logits(policy: PolicyConfig, folder: str) -> int:
    with in_job(policy, folder) as trainer:
        with LargestLogits(VOCABULARY, HIDDEN) as watch:
            trainer.logprobs([batch()])
        return watch.largest


@pytest.mark.parametrize("packed", [False, True])
def test_logits_of_the_whole_batch_never_exist(packed: bool, model_folder: str) -> None:
    changes = PACKED if packed else {}
    chunked = policy_for(logprob_chunk_size=10, **changes)
    assert run_ranks(largest_logits, 1, chunked, model_folder) == [10 * VOCABULARY]
    num_tokens = int(batch().lengths.sum()) if packed else batch().input_ids.numel()
    whole = policy_for(logprob_chunk_size=None, **changes)
    assert run_ranks(largest_logits, 1, whole, model_folder) == [num_tokens * VOCABULARY]


class Listening:
    """A loss that keeps what it was given."""

    def __init__(self) -> None:
        self.heard: list[LossInputs] = []

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        self.heard.append(replace(inputs, logprobs=inputs.logprobs.detach().clone()))
        return sft_loss(inputs)


def training_inputs(policy: PolicyConfig, folder: str) -> list[tuple[Array, Array, Array, dict[str, Array]]]:
    """Return, for each microbatch, log-probabilities of training and of `logprobs`, the mask, and the columns."""
    with in_job(policy, folder) as trainer:
        whole = batch()
        whole = whole.with_columns(
            ids=per_token(whole.input_ids.float()),
            row=per_sequence(torch.arange(float(len(whole)))),
            mask=per_token(whole.token_mask),
        )
        shard, loss = shard_of_rank(whole), Listening()
        before = trainer.logprobs(shard.microbatches)
        trainer.train([shard], loss)
        found = []
        for inputs, logprobs in zip(loss.heard, before, strict=True):
            columns = {name: column.values.numpy() for name, column in inputs.columns.items()}
            found.append((inputs.logprobs.numpy(), logprobs[:, 1:].numpy(), inputs.token_mask.numpy(), columns))
        return found


IN_BFLOAT16 = {"precision": "bfloat16", "generation__temperature": 0.7}


@pytest.mark.parametrize("changes", [full({}), PACKED, slow({"generation__temperature": 1.0}), full(IN_BFLOAT16)])
def test_training_sees_the_same_and_columns_in_line(changes: dict[str, Any], model_folder: str) -> None:
    (microbatches,) = run_ranks(training_inputs, 1, policy_for(**changes), model_folder)
    assert len(microbatches) == len(MICROBATCHES)
    for rows, (trained, logprobs, mask, columns) in zip(MICROBATCHES, microbatches, strict=True):
        np.testing.assert_allclose(trained[mask], logprobs[mask], atol=1e-6)
        targets = batch().select(rows).input_ids[:, 1:].numpy()
        np.testing.assert_array_equal(columns["ids"], targets, "the column of a token stands at its place as a target")
        np.testing.assert_array_equal(columns["mask"], mask)
        np.testing.assert_array_equal(columns["row"], rows)


def reference_run(policy: PolicyConfig) -> tuple[list[Array], list[bool], list[float], list[float]]:
    """Reference log-probabilities before and after two updates, whether they left the weights as they were, and the
    losses of the run and of one without any of it."""
    with in_job(policy, keep_reference=True) as trainer:
        found, unchanged, losses = [measured(trainer, trainer.logprobs)], [], []
        for step in range(2):
            losses.append(trainer.train([shard_of_step(trainer, step)], sft_loss).global_loss)
            before = weights_of(trainer)
            found.append(measured(trainer, trainer.reference_logprobs))
            unchanged.append(all(map(torch.equal, before, weights_of(trainer))))
        found.append(measured(trainer, trainer.logprobs))
        alone = MegatronTrainer(policy, tiny_hf_config(**MODEL), None, num_steps=10)
        losses_alone = [alone.train([shard_of_step(alone, step)], sft_loss).global_loss for step in range(2)]
        return found, unchanged, losses, losses_alone


def shard_of_step(trainer: MegatronTrainer, step: int) -> GlobalBatchShard:
    return shard_for(trainer, tiny_batch(200 + step, vocabulary_size=VOCABULARY))


def weights_of(trainer: MegatronTrainer) -> list[Tensor]:
    """Weights, persistent buffers, and the optimizer's own copies."""
    tensors = [tensor for chunk in trainer.chunks for tensor in chunk.state_dict().values()]
    masters = [tensor for group in trainer.optimizer.param_groups for tensor in group["params"]]
    return [tensor.detach().clone() for tensor in [*tensors, *masters] if isinstance(tensor, Tensor)]


@pytest.mark.parametrize(
    ("world_size", "changes"),
    [
        slow(1, {}),
        full(1, EXPERT_BIAS),
        full(2, ZERO_1),
        (2, layout(pp=2)),
        slow(2, layout(ep=2)),
        full(1, {"precision": "bfloat16"}),
    ],
)
def test_reference_is_the_model_of_the_start_and_leaves_no_trace(world_size: int, changes: dict[str, Any]) -> None:
    ranks = run_ranks(reference_run, world_size, policy_for(world_size, **changes))
    for found, unchanged, losses, losses_alone in ranks:
        start, after_one, after_two, own = found
        np.testing.assert_array_equal(after_one, start)
        np.testing.assert_array_equal(after_two, start)
        if not np.isnan(own).all():
            assert np.nanmax(np.abs(own - start)) > 1e-3, "the policy itself has moved"
        assert unchanged == [True, True]
        assert losses == losses_alone, "training goes on as if nobody had looked"


def two_global_batches(policy: PolicyConfig) -> tuple[dict[str, Any], float, list[float], int]:
    with in_job(policy) as both:
        result = both.train([shard_of_step(both, step) for step in range(2)], share_loss)
        each = MegatronTrainer(policy, tiny_hf_config(**MODEL), None, num_steps=10)
        losses = [each.train([shard_of_step(each, step)], share_loss).global_loss for step in range(2)]
        return result.microbatch_metrics, result.global_loss, losses, both.num_updates


def share_loss(inputs: LossInputs) -> LossOutputs:
    """`sft_loss` with a metric of each kind."""
    outputs = sft_loss(inputs)
    share = inputs.token_mask.sum() / inputs.global_valid_tokens
    ones = torch.ones(())
    metrics = {"share": (share, Reduction.SHARE), "microbatches": (ones, Reduction.SUM)}
    return replace(outputs, metrics=outputs.metrics | metrics)


@pytest.mark.full
@pytest.mark.parametrize(("world_size", "changes"), [*(slow(ranks, {}) for ranks in (1, 2)), (2, layout(pp=2))])
def test_shares_of_several_global_batches_are_shares_of_one_mean(world_size: int, changes: dict[str, Any]) -> None:
    ranks = run_ranks(two_global_batches, world_size, policy_for(world_size, **changes))
    series = [metrics for metrics, *_ in ranks if metrics]
    assert len(series) == (1 if changes else world_size)
    reduced = {name: concatenate([rank[name] for rank in series]).reduce() for name in series[0]}
    sizes = [tiny_batch(200 + step).num_valid_tokens() for step in range(2)]
    assert reduced.pop("loss") == pytest.approx(ranks[0][1])
    assert reduced == {
        "share": pytest.approx(1.0, abs=1e-6),
        "microbatches": 2.0 * len(MICROBATCHES),
        "num_valid_tokens": sum(sizes),
    }
    for _, global_loss, losses, num_updates in ranks:
        assert global_loss == pytest.approx(np.average(losses, weights=sizes), rel=1e-6)
        assert losses[0] != losses[1]
        assert num_updates == 2
