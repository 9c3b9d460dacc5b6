# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""GRPO of tiny models of families with an expert bias or gated delta nets: ten steps with the rollout's routes replayed
(R3), with indexers their positions too.

The bias moves between steps, so that an engine with a copy of the weights must get it, though it is no parameter.
"""

import json
import shutil
from pathlib import Path

import pytest

from nemo_rl_moe.config.schema_run import GENERATION_ROLE
from tests.functional import grpo_runs, sft_runs
from tests.support.family_models import FAMILY_MODELS
from tests.support.loggers import read_jsonl
from tests.support.tiny_model import layout

pytestmark = [pytest.mark.shared_ray, pytest.mark.slow]

NUM_STEPS = 10
# As the tiny tokenizer has them, and sequences of the tiny recipe.
OF_THE_TOKENIZER = {"vocab_size": 45, "eos_token_id": 1, "pad_token_id": 0}


def make_model_folder(folder: Path, name: str) -> Path:
    """A family's configuration with the shipped tiny tokenizer."""
    shutil.copytree(sft_runs.MODEL, folder)
    fields = FAMILY_MODELS[name].config_json()
    changes = {key: value for key, value in OF_THE_TOKENIZER.items() if key in fields}
    (folder / "config.json").write_text(json.dumps(fields | changes))
    return folder


@pytest.mark.parametrize(
    ("name", "world_size", "sizes", "backend"),
    [
        ("glm4_moe_norms_groups", 2, {"ep": 2}, "megatron"),
        ("glm4_moe_lite", 2, {"pp": 2}, "megatron_separate"),
        ("minimax_m2", 2, {"tp": 2}, "megatron_separate"),
        ("dots1", 2, {"ep": 2}, "megatron_separate"),
        ("solar_open", 2, {"pp": 2}, "megatron"),
        ("kimi_k2", 1, {}, "megatron"),
        ("deepseek_v32", 2, {"ep": 2}, "megatron_separate"),
        ("glm_moe_dsa", 2, {"pp": 2}, "megatron"),
        ("deepseek_v32_sparse", 2, {"ep": 2}, "megatron_separate"),
        ("glm_moe_dsa_sparse", 2, {"pp": 2}, "megatron"),
        ("qwen3_5_moe_text", 2, {"ep": 2}, "megatron"),
        ("qwen3_next", 2, {"tp": 2}, "megatron_separate"),
        ("nemotron_h", 2, {"tp": 2}, "megatron_separate"),
        ("nemotron_h_groups_odd_vocabulary", 2, {"pp": 2}, "megatron"),
    ],
)
def test_ten_steps_with_the_rollouts_routes(
    name: str, world_size: int, sizes: dict[str, int], backend: str, tmp_path: Path
) -> None:
    data = grpo_runs.make_prompts(tmp_path / "data", 40)
    has_bias = "moe_router_enable_expert_bias" in FAMILY_MODELS[name].router_fields
    measurements = {"every_n_steps": 5, "share_of_tokens": 1.0, "save_capture": False}
    megatron = {**layout(**sizes), "routing_replay": "rollout", "routing_measurements": measurements}
    if has_bias:
        megatron["moe_router_bias_update_rate"] = 0.02
    if chooses := name.endswith("_sparse"):
        megatron["indexer_replay"] = "rollout"
    settings = grpo_runs.settings(
        tmp_path,
        data,
        policy__model_name=make_model_folder(tmp_path / "model", name),
        policy__generation__backend=backend,
        policy__train_global_batch_size=8,
        grpo__max_num_steps=NUM_STEPS,
        cluster__cpu_workers_per_node=world_size,
        **sft_runs.only_jsonl(),
        **{f"policy__megatron_cfg__{key}": value for key, value in megatron.items()},
    )
    roles = [f"+cluster.roles.{GENERATION_ROLE}={{cpu_workers_per_node: 1}}"] if backend != "megatron" else []
    (tmp_path / "work").mkdir()
    grpo_runs.run_here([*settings, *roles], tmp_path / "work")
    history = read_jsonl(sft_runs.only_run_folder(tmp_path) / "metrics.jsonl")
    values = {key: [value for _, value in found] for key, found in history.items()}
    assert len(values["train/loss"]) == NUM_STEPS
    assert values["train/moe/routing/rows_usable_share"] == [1] * NUM_STEPS
    assert values["train/moe/routing/anomalies"] == [0] * NUM_STEPS
    if chooses:
        assert values["train/moe/indexer/rows_usable_share"] == [1] * NUM_STEPS
        assert values["train/moe/indexer/agreement"] == [1] * NUM_STEPS
        # The second of two updates has other weights.
        assert min(values["train/moe/indexer/overlap"]) > 0.9
        assert min(values["train/moe/indexer/captured_bytes"]) > 0
    # Of the first of two updates each: the second has moved the weights.
    assert max(values["train/token_mult_prob_error"]) < 1 + 1e-5
    # Of the weights that rolled out, by the experts of either side: rounding alone.
    for part in ("numerics", "routing"):
        split = values[f"train/moe/routing_split/mean_abs_{part}"]
        assert len(split) == 2
        assert max(split) < 1e-5
    if has_bias:
        assert min(values["train/moe/expert_bias/max_abs_change"]) > 0
    else:
        gates = values["train/moe/shared_expert_gate/mean"]
        assert len(set(gates)) == NUM_STEPS
        assert all(0 < gate < 1 for gate in gates)
