# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Ranks that look at different models find out together."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.megatron.model.agreement import agree_on_model
from tests.support.gloo_ranks import run_ranks


def outcome_of_rank(folders: list[str], configs: list[dict[str, Any]], with_weights: bool) -> list[str]:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    try:
        agree_on_model(configs[rank], Path(folders[rank]), with_weights=with_weights)
    except ConfigurationError as error:
        return error.problems
    return []


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    """Files of Hugging Face, and weights in Megatron-Core's format."""
    (tmp_path / "hf").mkdir()
    (tmp_path / "megatron" / "policy").mkdir(parents=True)
    return [str(tmp_path / "hf"), str(tmp_path / "megatron")]


def test_the_same_in_another_folder_is_the_same(folders: list[str]) -> None:
    configs = [{"a": 1, "b": [2]}, {"b": [2], "a": 1}]
    assert run_ranks(outcome_of_rank, 2, folders, configs, False) == [[], []]


def test_other_configurations_and_other_formats_are_reported_on_all_ranks(folders: list[str]) -> None:
    hf, megatron = folders
    assert run_ranks(outcome_of_rank, 2, folders, [{"a": 1}, {"a": 2}], False) == 2 * [
        [
            f"policy.model_name: {megatron}: rank 1 finds another config.json than rank 0 ({hf}); all ranks must read "
            "the same model"
        ]
    ]
    assert run_ranks(outcome_of_rank, 2, folders, [{"a": 1}, {"a": 1}], True) == 2 * [
        [
            f"policy.model_name: {megatron}: rank 1 finds weights in Megatron-Core's format, but rank 0 ({hf}) in "
            "Hugging Face's; all ranks must read the same model"
        ]
    ]
