# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Dense Qwen3 against transformers, in other layouts, and what asks for experts where there are none."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nemo_rl_moe.algorithms.losses import sft_loss
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.hf_files import load_hf_config
from nemo_rl_moe.models.megatron.trainer import MegatronTrainer
from nemo_rl_moe.models.megatron.transformer_config import build_transformer_config, effective_moe_configuration
from tests.support.gloo_ranks import run_ranks
from tests.support.tiny_dense_model import tiny_dense_hf_config
from tests.support.tiny_model import layout, parallel_job, shard_of_rank, tiny_batch, tiny_policy
from tests.unit.models.megatron.test_qwen3_moe import NoTokenizer, tensors_in

# Largest seen: 1.4e-6, at logits of up to 2.4.
LOGITS_TOLERANCE = 1e-5

MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True, "vocab_size": 61, "rope_parameters": {"rope_theta": 1000.0}},
    "multi_head": {"num_key_value_heads": 4, "head_dim": 16},
}


def write_reference(model: Mapping[str, Any], folder: str) -> Any:
    """Writes random weights of transformers' own model, norms too; gives its logits."""
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(5)
    reference = Qwen3ForCausalLM(tiny_dense_hf_config(**model, attn_implementation="eager")).eval()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.3 * torch.randn(parameter.shape))
        reference.save_pretrained(folder)
        return reference(tiny_batch(3, 61, shortest=12, longest=12).input_ids).logits.numpy()


def our_logits(folder: str, layer_spec: str) -> Any:
    policy = tiny_policy(1, layer_spec=layer_spec)
    with parallel_job(policy):
        (chunk,) = MegatronTrainer(policy, load_hf_config(folder), Path(folder), num_steps=1).chunks
        ids = tiny_batch(3, 61, shortest=12, longest=12).input_ids
        positions = torch.arange(ids.shape[1]).expand(ids.shape)
        mask = torch.ones(12, 12, dtype=torch.bool).triu_(1)[None, None] if layer_spec == "local" else None
        with torch.no_grad():
            return chunk.eval()(ids, positions, mask).numpy()


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    (logits,) = run_ranks(write_reference, 1, MODELS[name], str(tmp_path))
    for layer_spec in ("local", "auto"):
        (ours,) = run_ranks(our_logits, 1, str(tmp_path), layer_spec)
        np.testing.assert_allclose(ours, logits, atol=LOGITS_TOLERANCE, rtol=0)


def save_then_train(source: str, target: str, policy: PolicyConfig) -> tuple[list[float], list[float]]:
    """Writes the weights that were read; then losses and gradient norms of two steps with all MoE metrics on."""
    with parallel_job(policy):
        trainer = MegatronTrainer(policy, load_hf_config(source), Path(source), num_steps=5, tokenizer=NoTokenizer())
        trainer.save_weights(Path(target))
        place = trainer.coordinates
        shard = shard_of_rank(tiny_batch(11, 61), place.data_parallel_rank, place.data_parallel_size)
        results = [trainer.train([shard], sft_loss) for _ in range(2)]
        assert all(result.moe_metrics == {} and result.expert_load is None for result in results)
        return [result.global_loss for result in results], [result.grad_norm for result in results]


@pytest.mark.parametrize("name", ["plain", "tied"])
def test_layouts_write_the_same_weights_and_train_alike(name: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    run_ranks(write_reference, 1, MODELS[name], str(source))
    expected = tensors_in(source)
    layouts: list[tuple[int, dict[str, int]]] = [(1, {}), (2, {}), (2, {"tp": 2}), (2, {"pp": 2})]
    steps = []
    for world_size, sizes in layouts:
        target = tmp_path / f"target {world_size} {sizes}"
        policy = tiny_policy(world_size, moe_per_layer_logging=True, **layout(**sizes))
        steps += run_ranks(save_then_train, world_size, str(source), str(target), policy)
        written = tensors_in(target)
        assert written.keys() == expected.keys()
        assert all(torch.equal(written[key], tensor) for key, tensor in expected.items())
    losses, norms = (np.array(values) for values in zip(*steps, strict=True))
    assert (losses[:, 1] < losses[:, 0]).all()
    np.testing.assert_allclose(losses, losses[:1].repeat(len(losses), 0), rtol=1e-5)
    np.testing.assert_allclose(norms, norms[:1].repeat(len(norms), 0), rtol=1e-4)


def test_moe_fields_have_no_effect() -> None:
    chosen = {
        "moe_aux_loss_coeff": 0.5,
        "moe_z_loss_coeff": 0.1,
        "moe_expert_capacity_factor": 1.0,
        "moe_grouped_gemm": True,
        "moe_router_enable_expert_bias": True,
        "moe_router_force_load_balancing": True,
        "moe_shared_expert_intermediate_size": 16,
    }
    plain = build_transformer_config(tiny_policy(1), tiny_dense_hf_config())
    config = build_transformer_config(tiny_policy(1, **chosen), tiny_dense_hf_config())
    assert vars(config).keys() == vars(plain).keys()
    assert all(getattr(config, name) == getattr(plain, name) for name in chosen)
    assert config.num_moe_experts is None
    assert effective_moe_configuration(config) == {}


def test_settings_that_need_experts_are_named() -> None:
    policy = tiny_policy(2, **layout(ep=2), moe_router_force_hot_rank=1, activation_checkpointing="moe")
    with pytest.raises(ConfigurationError) as caught:
        build_transformer_config(policy, tiny_dense_hf_config())
    key = "policy.megatron_cfg."
    assert caught.value.problems == [
        f"{key}expert_model_parallel_size: got 2, expected 1: the model has no experts",
        f"{key}moe_router_force_hot_rank: got 1, expected null: the model has no experts",
        f"{key}activation_checkpointing: got 'moe', expected none or full: the model has no experts",
    ]
