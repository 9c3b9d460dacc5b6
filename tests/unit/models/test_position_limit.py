# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Positions of models as their published files state them, each in its own way."""

from typing import Any

import pytest

from nemo_rl_moe.models.position_limit import position_limit


def stretched(positions: int, factor: float, original: int, section: str = "rope_scaling", kind: str = "yarn") -> Any:
    scaling = {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}
    return {"max_position_embeddings": positions, section: scaling}


@pytest.mark.parametrize(
    ("config_json", "limit"),
    [
        # Qwen3: no scaling; and as its authors say to extend it, by factor alone.
        ({"max_position_embeddings": 40960, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 40960),
        ({"max_position_embeddings": 40960, "rope_scaling": None}, 40960),
        (stretched(40960, 4.0, 32768), 131072),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 2.0}}, 8192),
        # DeepSeek-V3 and gpt-oss: the product stands there.
        (
            {
                "max_position_embeddings": 163840,
                "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
            },
            163840,
        ),
        (stretched(131072, 32.0, 4096, "rope_parameters"), 131072),
        # Llama 3.1: the factor is one of frequencies.
        (stretched(131072, 8.0, 8192, kind="llama3"), 131072),
        ({"max_position_embeddings": 64, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 64),
        ({}, None),
        ({"max_position_embeddings": "many"}, None),
    ],
)
def test_positions_by_hand(config_json: dict[str, Any], limit: int | None) -> None:
    assert position_limit(config_json) == limit
