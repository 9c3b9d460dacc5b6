# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Memory of a training step: its peak, from given values in place of CUDA's allocator, and the tensors that stay."""

import gc

import pytest
import torch

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.metrics import MetricSeries, Reduction, concatenate
from nemo_rl_moe.models.megatron.training.trainer import peak_memory_metrics
from tests.support.gloo_ranks import run_ranks
from tests.support.tiny_model import layout, tiny_policy
from tests.support.training_run import RunSettings, shard_of_step, tiny_trainer

GPU = torch.device("cuda", 1)


def use_allocator(monkeypatch: pytest.MonkeyPatch, peaks: dict[str, int]) -> None:
    """Peaks of one device, that fall to what is held when they are reset."""

    def peak(name: str, device: torch.device) -> int:
        assert device == GPU
        return peaks[name]

    def reset(device: torch.device) -> None:
        assert device == GPU
        peaks.update(allocated=2 * 10**9, reserved=3 * 10**9)

    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak("allocated", device))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: peak("reserved", device))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)


def test_each_step_has_its_own_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = {"allocated": 61_500_000_000, "reserved": 70 * 10**9}
    use_allocator(monkeypatch, peaks)
    assert peak_memory_metrics(GPU) == {
        "max_memory_allocated_gb": MetricSeries((61.5,), Reduction.MAX),
        "max_memory_reserved_gb": MetricSeries((70.0,), Reduction.MAX),
    }
    peaks["allocated"] = 40 * 10**9
    second = peak_memory_metrics(GPU)
    assert {name: series.reduce() for name, series in second.items()} == {
        "max_memory_allocated_gb": 40.0,
        "max_memory_reserved_gb": 3.0,
    }


def test_the_fullest_rank_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = []
    for allocated in (5, 9, 7):
        use_allocator(monkeypatch, {"allocated": allocated * 10**9, "reserved": 10**10})
        ranks.append(peak_memory_metrics(GPU)["max_memory_allocated_gb"])
    assert concatenate(ranks).reduce() == 9.0


def test_cpus_have_none() -> None:
    assert peak_memory_metrics(torch.device("cpu")) == {}


def graphs_after_a_step(settings: RunSettings) -> list[torch.Size]:
    """Run on every rank: return the shapes of the tensors that keep a graph alive after a training step.

    Tensors that earlier tests have left in the process do not count.
    """
    earlier = tensors_with_graphs()
    with tiny_trainer(settings.policy, settings.model) as trainer:
        trainer.train([shard_of_step(trainer, settings, 0)], sft_loss)
        known = set(map(id, earlier))
        return [found.shape for found in tensors_with_graphs() if id(found) not in known]


def tensors_with_graphs() -> list[torch.Tensor]:
    gc.collect()
    tensors = [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]
    return [found for found in tensors if found.grad_fn is not None]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_nothing_of_the_last_microbatch_stays_after_a_step(num_ranks: int) -> None:
    recompute = {"activation_checkpointing": "moe"}
    settings = RunSettings(tiny_policy(num_ranks, **layout(ep=num_ranks), **recompute))
    assert run_ranks(graphs_after_a_step, num_ranks, settings) == [[]] * num_ranks
