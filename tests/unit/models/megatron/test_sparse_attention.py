# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3.2 and GLM-5: indexers whose weights pass through folders and checkpoints, and what is refused."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.families import FAMILIES
from nemo_rl_moe.models.megatron.model.sparse_attention import chooses_tokens
from nemo_rl_moe.models.megatron.model.transformer_config import build_transformer_config
from tests.support.family_models import FAMILY_MODELS
from tests.support.family_reference import assert_same_tensors, save_model, tensors_in, trainer_of
from tests.support.gloo_ranks import run_ranks
from tests.support.tiny_model import layout, parallel_job, sharing_sequences, tiny_policy
from tests.support.training_run import tiny_trainer

MODEL = "glm_moe_dsa"


def write_in_bfloat16(folder: Path) -> None:
    """Write weights in bfloat16, but for one norm in float32, with numbers that bfloat16 has not."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(2)
    family_model = FAMILY_MODELS[MODEL]
    model = AutoModelForCausalLM.from_config(family_model.transformers_config(), dtype=torch.bfloat16)
    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):  # newer transformers make routers in float32
            layer.mlp.gate.to(torch.bfloat16)
            layer.mlp.gate.e_score_correction_bias = layer.mlp.gate.e_score_correction_bias.float()
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


def refused(name: str = "deepseek_v32_sparse", num_ranks: int = 1, **changes: Any) -> str:
    """Return the line of the one setting that is refused."""
    policy = tiny_policy(num_ranks, **changes)
    with pytest.raises(ConfigurationError) as caught:
        build_transformer_config(policy, FAMILY_MODELS[name].hf_config())
    (line,) = caught.value.problems
    return str(line)


def test_what_a_choice_of_tokens_lacks_is_refused_in_one_line() -> None:
    why = "in sequences longer than index_topk (4 tokens), indexers choose the tokens of attention"
    assert refused(shared_prefix=True) == (
        f"policy.shared_prefix: got true, expected false for a model with a choice of tokens: {why}"
    )
    sizes = layout(pp=2, first=1, last=3)
    assert refused("glm_moe_dsa_sparse", 2, **sizes) == (
        "policy.megatron_cfg.pipeline_model_parallel_size: got 2, with which layer 1 (from 0) begins a stage, but has"
        f" no indexer: {why}, and choices do not pass between stages; expected stages that begin with a layer of"
        " indexer_types 'full'"
    )
    policy = sharing_sequences(tiny_policy(2), 2)
    with pytest.raises(ConfigurationError, match=r"context_parallel_size: got 2, expected 1: in sequences longer"):
        build_transformer_config(policy, FAMILY_MODELS["deepseek_v32_sparse"].hf_config())


def test_nothing_is_refused_while_indexers_would_choose_all_tokens() -> None:
    hf_config = FAMILY_MODELS["glm_moe_dsa_sparse"].hf_config()
    policy = tiny_policy(2, max_total_sequence_length=4, shared_prefix=True, **layout(pp=2, first=1, last=3))
    assert not chooses_tokens(policy, hf_config)
    build_transformer_config(policy, hf_config)


@pytest.mark.parametrize(("name", "value"), [("deepseek_v32", True), ("glm_moe_dsa", False)])
def test_a_rotation_that_transformers_does_not_compute_is_refused(name: str, value: bool, tmp_path: Path) -> None:
    hf_config = FAMILY_MODELS[name].hf_config()
    family = FAMILIES[name]
    for allowed in (not value, None):
        assert family.config_fields.problems({}, SimpleNamespace(indexer_rope_interleave=allowed), name) == []
    hf_config.indexer_rope_interleave = value
    (line,) = family.config_fields.problems({}, hf_config, family.name)
    assert line.startswith(f"policy.model_name: config.json: indexer_rope_interleave: got {value}, supported for")


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_the_layers_of_older_releases_of_transformers_are_the_same(name: str) -> None:
    hf_config, patterns = FAMILY_MODELS[name].hf_config(), []
    for kind in ("indexed_attention", "deepseek_sparse_attention"):
        hf_config.layer_types = [kind] * hf_config.num_hidden_layers
        patterns.append(build_transformer_config(tiny_policy(1), hf_config).moe_layer_freq)
    assert patterns[0] == patterns[1]
