# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The output layer in chunks: numbers and gradients are those of whole logits, which never exist."""

import weakref
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_rl_moe.models.megatron.training.chunked_head import chunked_token_statistics
from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer
from tests.support.gloo_ranks import run_ranks
from tests.support.quick_list import full, slow
from tests.support.tiny_model import layout, parallel_job, tiny_batch, tiny_hf_config, tiny_policy
from tests.unit.models.megatron.test_entropy_head import EntropyBonus
from tests.unit.models.megatron.tiny_trainers import shard_for

# Columns times rows are no multiple of the chunk; a row of the vocabulary is padding.
COLUMNS, ROWS, HIDDEN, VOCABULARY, CHUNK, TEMPERATURE = 8, 3, 6, 17, 7, 0.7
PADDED = VOCABULARY + 1


@dataclass(frozen=True)
class Numbers:
    """Random inputs of a head, and the gradients that come back to what it computes."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    of_logprobs: Tensor
    of_entropy: Tensor


def numbers(dtype: torch.dtype = torch.float64) -> Numbers:
    generator = torch.Generator().manual_seed(8)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return Numbers(
        2 * normal(COLUMNS, ROWS, HIDDEN),
        normal(PADDED, HIDDEN),
        torch.randint(0, VOCABULARY, (ROWS, COLUMNS), generator=generator),
        normal(ROWS, COLUMNS),
        normal(ROWS, COLUMNS),
    )


def whole_logits(given: Numbers) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states and weight that gradients come back to, and all logits at a time, in float64."""
    hidden, weight = (values.double().requires_grad_() for values in (given.hidden, given.weight))
    return hidden, weight, (hidden @ weight[:VOCABULARY].T / TEMPERATURE).transpose(0, 1)


def as_arrays(*values: Tensor | None) -> tuple[np.ndarray, ...]:
    return tuple(value.detach().numpy() for value in values if value is not None)


def by_autograd(given: Numbers) -> tuple[np.ndarray, ...]:
    """Log-probabilities, greedy matches, entropies, gradients of hidden states and weight."""
    hidden, weight, logits = whole_logits(given)
    log_p = logits.log_softmax(-1)
    logprobs = log_p.gather(-1, given.labels[..., None])[..., 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    ((logprobs * given.of_logprobs).sum() + (entropy * given.of_entropy).sum()).backward()
    return as_arrays(logprobs, log_p.argmax(-1) == given.labels, entropy, hidden.grad, weight.grad)


def masked(rank: int, world_size: int) -> Any:
    def mask_logits(logits: Tensor) -> Tensor:
        column = torch.arange(logits.shape[-1]) + rank * (PADDED // world_size)
        return logits.masked_fill(column >= VOCABULARY, torch.finfo(logits.dtype).min)

    return mask_logits


@dataclass(frozen=True)
class RankHead:
    """The output layer of one rank, and the hidden states that it is given."""

    model: Any
    hidden: Tensor
    weight: Tensor

    @classmethod
    def of(cls, rank: int, world_size: int, given: Numbers, *, sequence_parallel: bool) -> "RankHead":
        hidden = given.hidden.chunk(world_size)[rank] if sequence_parallel else given.hidden
        weight = given.weight.chunk(world_size)[rank].clone().requires_grad_()
        model = SimpleNamespace(
            config=SimpleNamespace(sequence_parallel=sequence_parallel),
            share_embeddings_and_output_weights=False,
            output_layer=SimpleNamespace(weight=weight),
            mask_logits=masked(rank, world_size),
            logprob_chunk_size=CHUNK,
        )
        return cls(model, hidden.clone().requires_grad_(), weight)

    def statistics(self, given: Numbers, candidate_ids: Tensor | None = None) -> Any:
        return chunked_token_statistics(
            self.model, self.hidden, given.labels, TEMPERATURE, with_entropy=True, candidate_ids=candidate_ids
        )


def in_chunks(world_size: int, dtype: torch.dtype, sequence_parallel: bool) -> tuple[np.ndarray, ...]:
    with parallel_job(tiny_policy(world_size, **layout(tp=world_size))) as rank:
        given = numbers(dtype)
        head = RankHead.of(rank, world_size, given, sequence_parallel=sequence_parallel)
        found = head.statistics(given)
        ((found.logprobs * given.of_logprobs).sum() + (found.entropy * given.of_entropy).sum()).backward()
        values = (found.logprobs, found.greedy_matches, found.entropy, head.hidden.grad, head.weight.grad)
        return tuple(value.detach().double().numpy() for value in values if value is not None)


def assert_same_head(ranks: list[Any], expected: tuple[np.ndarray, ...], *, sequence_parallel: bool) -> None:
    """Numbers of tokens are the same on each rank; the gradient of hidden states is perhaps cut, that of weights is."""
    for others in ranks[1:]:
        for ours, theirs in zip(ranks[0][: -2 if sequence_parallel else -1], others, strict=False):
            np.testing.assert_array_equal(ours, theirs)
    hidden = np.concatenate([rank[-2] for rank in ranks]) if sequence_parallel else ranks[0][-2]
    found = (*ranks[0][:-2], hidden, np.concatenate([rank[-1] for rank in ranks]))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(("world_size", "sequence_parallel"), [full(1, False), full(2, False), (2, True)])
def test_numbers_and_gradients_are_those_of_whole_logits(world_size: int, sequence_parallel: bool) -> None:
    ranks = run_ranks(in_chunks, world_size, world_size, torch.float64, sequence_parallel)
    expected = by_autograd(numbers())
    assert 0 < expected[1].sum() < expected[1].size
    assert_same_head(ranks, expected, sequence_parallel=sequence_parallel)


def test_bfloat16_adds_chunks_up_in_float32() -> None:
    (ours,) = run_ranks(in_chunks, 1, 1, torch.bfloat16, False)
    expected = by_autograd(numbers(torch.bfloat16))
    for found, wanted in zip(ours[3:], expected[3:], strict=True):
        # Logits of up to 10 are rounded to 2^-8 of themselves, divided by 0.7, and stand in the exponent.
        assert np.abs(found - wanted).max() < 0.03 * np.abs(wanted).max()


class LargestLogits(TorchDispatchMode):
    """Notes how many numbers the largest tensor with so many columns holds, but for one of so many rows.

    Attributes:
        most: Of such tensors at a time.
    """

    def __init__(self, columns: int, rows_of_weight: int) -> None:
        super().__init__()
        self.largest, self.most, self._columns, self._rows_of_weight = 0, 0, columns, rows_of_weight
        self._made: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if (
                isinstance(tensor, Tensor)
                and tensor.shape[1:] == (self._columns,)
                and len(tensor) != self._rows_of_weight
            ):
                self.largest = max(self.largest, tensor.numel())
                self._made.append(weakref.ref(tensor))
                existing = (each() for each in self._made)
                self.most = max(self.most, len({each.data_ptr() for each in existing if each is not None}))
        return result


def memory_of_head() -> tuple[int, int, int]:
    """Numbers of the largest tensor of logits, forward and backward, how many exist at a time, and bytes kept for the
    backward pass."""
    with parallel_job(tiny_policy()):
        given, kept = numbers(), {}

        def note(tensor: Tensor) -> Tensor:
            kept[tensor.data_ptr()] = tensor.nbytes
            return tensor

        head = RankHead.of(0, 1, given, sequence_parallel=False)
        with LargestLogits(PADDED, HIDDEN) as watch:
            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                found = head.statistics(given)
            found.logprobs.sum().backward()
        return watch.largest, watch.most, sum(kept.values()) - head.hidden.nbytes - head.weight.nbytes


def test_logits_of_all_tokens_never_exist() -> None:
    # Of each token a label, the logarithm of its sum and its entropy stay, 8 bytes each.
    assert run_ranks(memory_of_head, 1) == [(CHUNK * PADDED, 2, 3 * 8 * COLUMNS * ROWS)]


def updated(world_size: int, changes: dict[str, Any], tied: bool) -> list[tuple[list[Any], float, dict[str, float]]]:
    """Weights after an update, the gradient's norm and all metrics, with whole logits and in chunks."""
    found = []
    with parallel_job(tiny_policy(world_size, **changes)) as rank:
        for chunk in (None, 7):
            policy = tiny_policy(world_size, logprob_chunk_size=chunk, **changes)
            hf_config = tiny_hf_config(vocab_size=61, tie_word_embeddings=tied)
            trainer = MegatronTrainer(policy, hf_config, None, num_steps=10)
            shard = shard_for(trainer, tiny_batch(3, vocabulary_size=61))
            result = trainer.train([shard], EntropyBonus())
            weights = [p.detach().float().numpy() for model in trainer.chunks for p in model.parameters()]
            metrics = {name: value for name, value in result.moe_metrics.items() if not name.endswith("seconds")}
            found.append((weights, result.grad_norm, metrics if rank == 0 else {}))
    return found


ROUTERS_GRADIENTS = {"router_gradients__every_n_steps": 1}


@pytest.mark.parametrize(
    ("world_size", "changes", "tied"),
    [
        full(1, {"sequence_packing__enabled": True, **ROUTERS_GRADIENTS}, True),
        full(2, layout(tp=2) | ROUTERS_GRADIENTS, False),
        (2, layout(pp=2), True),
        slow(2, layout(ep=2), False),
        slow(2, layout(tp=2), True),
    ],
)
def test_updates_and_metrics_are_those_of_whole_logits(world_size: int, changes: dict[str, Any], tied: bool) -> None:
    for whole, chunked in run_ranks(updated, world_size, world_size, changes, tied):
        assert chunked[1] == pytest.approx(whole[1], rel=1e-5)
        # Parts of a gradient that all but cancel, as cosines of sources, keep fewer digits.
        assert chunked[2] == pytest.approx(whole[2], rel=1e-3, abs=1e-4)
        for ours, theirs in zip(chunked[0], whole[0], strict=True):
            np.testing.assert_allclose(ours, theirs, atol=2e-5)
