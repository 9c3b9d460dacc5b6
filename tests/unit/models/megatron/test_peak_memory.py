# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Peaks of a GPU's memory, with an allocator of given values in the place of CUDA's."""

import pytest
import torch

from nemo_rl_moe.metrics import MetricSeries, Reduction, concatenate
from nemo_rl_moe.models.megatron.training.trainer import peak_memory_metrics

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
