# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Qwen3-MoE against transformers: the same logits, the same chosen experts, the same tensors after a round trip."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_rl_moe.algorithms.losses import sft_loss
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.megatron.families import family_of, qwen3_moe
from nemo_rl_moe.models.megatron.trainer import MegatronTrainer
from tests.support.gloo_ranks import RankError, run_ranks
from tests.support.tiny_model import (
    MICROBATCHES,
    layout,
    parallel_job,
    shard_of_rank,
    tiny_batch,
    tiny_hf_config,
    tiny_policy,
)

# Largest seen: 2e-6, at logits of up to 3.
LOGITS_TOLERANCE = 1e-5

MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dense_layers_and_raw_weights": {"mlp_only_layers": [0, 2], "norm_topk_prob": False},
    "every_second_layer_tied": {"decoder_sparse_step": 2, "tie_word_embeddings": True, "num_experts_per_tok": 3},
    "multi_head": {"num_key_value_heads": 4, "head_dim": 16, "rope_theta": 1000.0},
}


class NoTokenizer:
    """Stands where a tokenizer is written beside the weights."""

    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer_was_here").touch()


def write_reference(model: Mapping[str, Any], folder: str) -> None:
    """Random weights of transformers' own model; norms too, so that a swapped one shows."""
    from transformers import Qwen3MoeForCausalLM

    torch.manual_seed(5)
    reference = Qwen3MoeForCausalLM(tiny_hf_config(**model))
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.3 * torch.randn(parameter.shape))
    reference.save_pretrained(folder)


def reference_outputs(folder: str) -> tuple[Any, list[Any]]:
    """Logits and, for each MoE layer, the chosen experts of each token, of transformers' model."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    ids = tiny_batch(3, shortest=12, longest=12).input_ids
    with torch.no_grad():
        outputs = reference(ids, output_router_logits=True)
    topk = reference.config.num_experts_per_tok
    chosen = [
        logits.reshape(-1, 8).topk(topk).indices.sort().values.numpy()
        for logits in outputs.router_logits
        if logits is not None
    ]
    return outputs.logits.numpy(), chosen


def our_outputs(folder: str, model: Mapping[str, Any], layer_spec: str) -> tuple[Any, list[Any]]:
    """The same of this project's model with the weights of that folder."""
    from megatron.core.transformer.moe.router import TopKRouter

    policy = tiny_policy(1, layer_spec=layer_spec)
    with parallel_job(policy):
        trainer = MegatronTrainer(policy, tiny_hf_config(**model), Path(folder), num_steps=1)
        chosen: list[Any] = []
        (chunk,) = trainer.chunks
        for module in chunk.modules():
            if isinstance(module, TopKRouter):
                module.register_forward_hook(lambda _, args, output: chosen.append(_chosen_experts(output[1])))
        ids = tiny_batch(3, shortest=12, longest=12).input_ids
        rows, columns = ids.shape
        positions = torch.arange(columns).expand(rows, columns)
        mask = torch.ones(columns, columns, dtype=torch.bool).triu_(1)[None, None] if layer_spec == "local" else None
        chunk.eval()
        with torch.no_grad():
            logits = chunk(ids, positions, mask)
        # The model's tokens run sequence first.
        by_sequence = [
            experts.reshape(columns, rows, -1).transpose(1, 0, 2).reshape(rows * columns, -1) for experts in chosen
        ]
        return logits.numpy(), by_sequence


def _chosen_experts(output: torch.Tensor) -> np.ndarray[Any, Any]:
    indices = output.nonzero()[:, 1].reshape(len(output), -1) if output.dtype is torch.bool else output
    return indices.sort().values.numpy()


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_chosen_experts_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder, model = str(tmp_path), MODELS[name]
    run_ranks(write_reference, 1, model, folder)
    ((logits, chosen),) = run_ranks(reference_outputs, 1, folder)
    assert len(chosen) == sum(qwen3_moe.moe_layer_pattern(tiny_hf_config(**model)))
    for layer_spec in ("local", "auto"):
        ((our_logits, our_chosen),) = run_ranks(our_outputs, 1, folder, model, layer_spec)
        np.testing.assert_allclose(our_logits, logits, atol=LOGITS_TOLERANCE, rtol=0)
        assert len(our_chosen) == len(chosen)
        for ours, theirs in zip(our_chosen, chosen, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def load_and_save(source: str, target: str, model: Mapping[str, Any], policy: Any) -> None:
    with parallel_job(policy):
        trainer = MegatronTrainer(policy, tiny_hf_config(**model), Path(source), num_steps=1, tokenizer=NoTokenizer())
        trainer.save_weights(Path(target))


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize(
    ("name", "world_size", "sizes", "layer_spec"),
    [
        ("plain", 1, {}, "local"),
        ("plain", 1, {}, "auto"),
        ("plain", 2, {}, "auto"),
        ("plain", 2, {"tp": 2}, "auto"),
        ("plain", 2, {"tp": 2, "etp": 2}, "local"),
        ("plain", 2, {"ep": 2}, "local"),
        ("plain", 2, {"ep": 2}, "auto"),
        ("plain", 2, {"pp": 2, "vpp": 2}, "auto"),
        ("plain", 4, {"tp": 2, "ep": 2, "pp": 2}, "auto"),
        ("dense_layers_and_raw_weights", 2, {"tp": 2}, "auto"),
        ("every_second_layer_tied", 2, {"pp": 2}, "auto"),
        ("multi_head", 2, {"tp": 2}, "auto"),
    ],
)
def test_round_trip_keeps_every_bit(
    name: str, world_size: int, sizes: dict[str, int], layer_spec: str, tmp_path: Path
) -> None:
    source, target, model = tmp_path / "source", tmp_path / "target", MODELS[name]
    run_ranks(write_reference, 1, model, str(source))
    policy = tiny_policy(world_size, layer_spec=layer_spec, **layout(**sizes))
    run_ranks(load_and_save, world_size, str(source), str(target), model, policy)
    written, expected = tensors_in(target), tensors_in(source)
    assert written.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(written[key], tensor), key
    assert (target / "tokenizer_was_here").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target"]


def load_with_transformers(source: str, target: str) -> bool:
    from transformers import AutoModelForCausalLM

    source_state, target_state = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (source, target)
    )
    return source_state.keys() == target_state.keys() and all(
        torch.equal(target_state[name], tensor) for name, tensor in source_state.items()
    )


def test_transformers_loads_what_several_ranks_wrote(tmp_path: Path) -> None:
    source, target = str(tmp_path / "source"), str(tmp_path / "target")
    run_ranks(write_reference, 1, {}, source)
    policy = tiny_policy(4, layer_spec="auto", **layout(tp=2, pp=2))
    run_ranks(load_and_save, 4, source, target, {}, policy)
    assert len(list(Path(target).glob("model-*-of-*.safetensors"))) > 1
    assert run_ranks(load_with_transformers, 1, source, target) == [True]


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    run_ranks(write_reference, 1, {}, str(tmp_path))
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    del tensors["model.layers.2.self_attn.k_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    expected = f"policy.model_name: {tmp_path} holds no tensor model.layers.2.self_attn.k_proj.weight"
    with pytest.raises(RankError, match=expected):
        run_ranks(our_outputs, 1, str(tmp_path), {}, "auto")


def test_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    run_ranks(write_reference, 1, {"moe_intermediate_size": 24}, str(tmp_path))
    expected = r"mlp.experts.0.linear_fc1.weight has shape \(48, 32\), expected \(32, 32\)"
    with pytest.raises(RankError, match=expected):
        run_ranks(our_outputs, 1, str(tmp_path), {}, "auto")


def test_folder_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"policy.init: got 'pretrained', but .* holds no \*.safetensors file"):
        run_ranks(our_outputs, 1, str(tmp_path), {}, "auto")


def losses_of(folder: str, model: Mapping[str, Any], policy: Any) -> list[float]:
    with parallel_job(policy):
        trainer = MegatronTrainer(policy, tiny_hf_config(**model), Path(folder), num_steps=3)
        batch = tiny_batch(11, vocabulary_size=61)
        shard = shard_of_rank(batch, 0, 1, MICROBATCHES)
        losses = [trainer.train([shard], sft_loss).global_loss for _ in range(2)]
        evaluated = trainer.evaluate(shard, sft_loss)
        return losses + ([evaluated["loss"].reduce(), evaluated["accuracy"].reduce()] if evaluated else [])


@pytest.mark.parametrize("layer_spec", ["local", "auto"])
def test_odd_vocabulary_is_padded_without_changing_the_loss(layer_spec: str, tmp_path: Path) -> None:
    model, folder = {"vocab_size": 61}, str(tmp_path / "source")
    run_ranks(write_reference, 1, model, folder)
    (single,) = run_ranks(losses_of, 1, folder, model, tiny_policy(1, layer_spec=layer_spec))
    policy = tiny_policy(2, layer_spec=layer_spec, **layout(tp=2))
    first, second = run_ranks(losses_of, 2, folder, model, policy)
    assert first == pytest.approx(single, rel=1e-6)
    assert second == pytest.approx(single[:2], rel=1e-6)
    run_ranks(load_and_save, 2, folder, str(tmp_path / "target"), model, policy)
    assert tensors_in(tmp_path / "target")["lm_head.weight"].shape == (61, 32)


def test_query_key_value_are_grouped_by_key_head() -> None:
    hf_config = tiny_hf_config()
    # Each row holds its own head: queries 0 to 3, keys 10 and 11, values 20 and 21.
    parts = {
        "q": torch.arange(4).repeat_interleave(8),
        "k": torch.arange(10, 12).repeat_interleave(8),
        "v": torch.arange(20, 22).repeat_interleave(8),
    }
    read = {f"model.layers.1.self_attn.{key}_proj.weight": rows[:, None].float() for key, rows in parts.items()}
    name = "decoder.layers.1.self_attention.linear_qkv.weight"
    rule = qwen3_moe.FAMILY.rules.find(name)
    assert rule is not None
    joined = rule.layout.join([read[source.name] for source in rule.sources], hf_config)
    assert joined.view(8, 8).float().mean(1).tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    parts = rule.layout.split(joined, 3, hf_config)
    back = {source.name: part for source, part in zip(rule.sources, parts, strict=True)}
    assert all(torch.equal(back[key], rows) for key, rows in read.items())


def test_other_families_are_refused() -> None:
    from transformers import LlamaConfig

    with pytest.raises(ConfigurationError, match=r"model_type 'llama' is not supported; supported: qwen3, qwen3_moe"):
        family_of(LlamaConfig())
