# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3.2 and GLM-5: indexers whose weights are kept but not run, and what is refused."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.models.megatron.model.transformer_config import build_transformer_config
from nemo_rl_moe.models.position_limit import too_long_sequences
from tests.support.family_models import FAMILY_MODELS
from tests.support.family_reference import assert_same_tensors, save_model, tensors_in, trainer_of
from tests.support.gloo_ranks import run_ranks
from tests.support.tiny_model import layout, parallel_job, tiny_policy
from tests.support.training_run import tiny_trainer

MODEL = "glm_moe_dsa"


def write_in_bfloat16(folder: Path) -> None:
    """Write weights in bfloat16, but for one norm in float32, with numbers that bfloat16 has not."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(2)
    family_model = FAMILY_MODELS[MODEL]
    model = AutoModelForCausalLM.from_config(family_model.transformers_config(), dtype=torch.bfloat16)
    indexers = [layer.self_attn.indexer for layer in model.model.layers if layer.self_attn.indexer is not None]
    for indexer in indexers:
        for tensor in indexer.parameters():
            tensor.data.normal_()
    for tensor in indexers[1].k_norm.float().parameters():
        tensor.data.normal_()
    save_model(model, folder)


def read_and_save(folder: str, checkpoint: str, policy: PolicyConfig) -> None:
    """Run on every rank: reads a folder that the first rank writes, and saves a checkpoint."""
    if os.environ["RANK"] == "0":
        write_in_bfloat16(Path(folder))
    with parallel_job(policy):
        dist.barrier()
        trainer = trainer_of(Path(folder), policy)
        trainer.start_checkpoint(Path(checkpoint), with_optimizer=False)
        problem = trainer.finish_checkpoint()
        assert problem is None, problem


def load_and_export(checkpoint: str, exported: str, policy: PolicyConfig) -> None:
    """Run on every rank: other weights, then those of the checkpoint, are written."""
    with tiny_trainer(policy, MODEL) as trainer:
        trainer.load_checkpoint(Path(checkpoint), with_optimizer=False)
        trainer.save_weights(Path(exported), {})


@pytest.mark.full
def test_indexers_pass_from_folder_to_checkpoint_to_folder(tmp_path: Path) -> None:
    folder, checkpoint, exported = (tmp_path / name for name in ("folder", "checkpoint", "exported"))
    writer, reader = (
        tiny_policy(2, precision="bfloat16", moe_router_bias_update_rate=0.0, **layout(**sizes))
        for sizes in ({"tp": 2}, {"pp": 2})
    )
    checkpoint.mkdir()
    run_ranks(read_and_save, 2, str(folder), str(checkpoint), writer)
    run_ranks(load_and_export, 2, str(checkpoint), str(exported), reader)
    assert_same_tensors(exported, folder)
    types = {name: tensor.dtype for name, tensor in tensors_in(exported).items() if ".k_norm." in name}
    assert len(types) == 6, "a layer that shares an indexer has none"
    in_float32 = {name for name, dtype in types.items() if dtype is torch.float32}
    assert in_float32 == {f"model.layers.1.self_attn.indexer.k_norm.{kind}" for kind in ("weight", "bias")}


def test_sequences_that_the_indexer_would_choose_from_are_refused_in_one_line() -> None:
    config_json = FAMILY_MODELS[MODEL].config_json()
    policy = tiny_policy(model_name="my/model", max_total_sequence_length=33)
    assert too_long_sequences(policy, config_json) == [
        "policy.max_total_sequence_length: got 33, expected at most 32, the tokens of index_topk of my/model by its"
        " config.json: in longer sequences an indexer chooses the tokens that attention sees, which is not computed"
        " here"
    ]
    assert too_long_sequences(tiny_policy(max_total_sequence_length=32), config_json) == []
    # As transformers has it where the file says nothing; the positions are more.
    del config_json["index_topk"]
    config_json["max_position_embeddings"] = 4096
    assert too_long_sequences(tiny_policy(max_total_sequence_length=2048), config_json) == []
    (line,) = too_long_sequences(tiny_policy(max_total_sequence_length=2049), config_json)
    assert "expected at most 2048, the tokens of index_topk" in line


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_the_layers_of_older_releases_of_transformers_are_the_same(name: str) -> None:
    hf_config, patterns = FAMILY_MODELS[name].hf_config(), []
    for kind in ("indexed_attention", "deepseek_sparse_attention"):
        hf_config.layer_types = [kind] * hf_config.num_hidden_layers
        patterns.append(build_transformer_config(tiny_policy(1), hf_config).moe_layer_freq)
    assert patterns[0] == patterns[1]
