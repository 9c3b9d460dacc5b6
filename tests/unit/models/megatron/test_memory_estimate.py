# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The arithmetic against really built models: every rank's parameters, gradient buffers and optimizer state."""

import re
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.config.loading import load_any_config, load_grpo_config
from nemo_rl_moe.config.schema import GRPOMasterConfig, MasterConfig
from nemo_rl_moe.models.hf_files import load_hf_config, plain_config
from nemo_rl_moe.models.megatron.model.memory_estimate import (
    Parameters,
    active_parameters,
    generation_batch_size,
    rank_parameters,
    whole_model_parameters,
    worker_memory,
)
from nemo_rl_moe.models.megatron.model.transformer_config import build_transformer_config
from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer
from tests.support.family_models import FAMILY_MODELS, FamilyModel
from tests.support.gloo_ranks import run_ranks
from tests.support.lora_models import lora
from tests.support.quick_list import listed
from tests.support.tiny_model import (
    layout,
    parallel_job,
    tiny_batch,
    tiny_dense_hf_config,
    tiny_hf_config,
    tiny_policy,
)
from tests.unit.models.megatron.tiny_trainers import ZERO_1, shard_for

MODEL_CONFIGS = "examples/assets/model_configs"
TINY_VISION_MODEL = "examples/assets/tiny_qwen3_vl_moe"
QWEN3_30B_A3B, QWEN3_1_7B = f"{MODEL_CONFIGS}/Qwen3-30B-A3B", f"{MODEL_CONFIGS}/Qwen3-1.7B"
NEMOTRON_3_NANO = f"{MODEL_CONFIGS}/NVIDIA-Nemotron-3-Nano-30B-A3B"

# A tiny MoE layer by hand: 3 x 32 x 16 an expert, 32 x 8 the router.
EXPERT, ROUTER = 1536, 256
# (4 + 2 + 2) heads of 8 in, 4 of them out; two norms of the layer, two of the heads.
ATTENTION = 32 * 64 + 32 * 32 + 2 * 32 + 2 * 8


@dataclass(frozen=True)
class Held:
    """What one rank really holds; bytes but for the parameters."""

    stage: int
    parameters: Parameters
    gradients: int
    optimizer_state: int
    float32_gradients: int
    float32_gradients_after: int


def run_of(world_size: int, grad_reduce_in_fp32: bool = False, **changes: Any) -> MasterConfig:
    """The tiny exemplar with `tiny_policy`'s changes."""
    config = load_any_config("sft_tiny_moe.yaml", check_paths=False)
    reduce = {"distributed_data_parallel_config__grad_reduce_in_fp32": grad_reduce_in_fp32}
    policy = tiny_policy(world_size, **reduce, **changes)
    cluster = config.cluster.model_copy(update={"cpu_workers_per_node": world_size})
    return config.model_copy(update={"policy": policy, "cluster": cluster})


def model_of(model: dict[str, Any]) -> Any:
    if "family" in model:
        return FAMILY_MODELS[model["family"]].hf_config()
    values = {name: value for name, value in model.items() if name != "dense"}
    return tiny_dense_hf_config(**values) if model.get("dense") else tiny_hf_config(**values)


def held_by_rank(config: MasterConfig, model: dict[str, Any]) -> Held:
    """Builds the trainer of this rank, takes one step and counts."""
    with parallel_job(config.policy):
        trainer = MegatronTrainer(config.policy, model_of(model), None, num_steps=5)
        in_optimizer: list[int] = []
        step = trainer.optimizer.step

        def counting_step() -> Any:
            outcome = step()
            in_optimizer.append(float32_gradient_bytes(trainer))
            return outcome

        trainer.optimizer.step = counting_step
        trainer.train([shard_for(trainer, tiny_batch(1, 61))], sft_loss)
        return Held(
            trainer.coordinates.pipeline_rank,
            parameters_of(trainer),
            sum(p.main_grad.nbytes for c in trainer.chunks for p in c.parameters() if p.requires_grad),
            optimizer_state_bytes(trainer),
            in_optimizer[0],
            float32_gradient_bytes(trainer),
        )


def parameters_of(trainer: MegatronTrainer) -> Parameters:
    counts = {"dense": 0, "experts": 0, "frozen": 0}
    for chunk in trainer.chunks:
        for parameter in chunk.parameters():
            trained = "dense" if getattr(parameter, "allreduce", True) else "experts"
            counts[trained if parameter.requires_grad else "frozen"] += parameter.numel()
        counts["frozen"] += sum(buffer.numel() for name, buffer in chunk.named_buffers() if ".indexer." in name)
    return Parameters(**counts)


def optimizer_parts(trainer: MegatronTrainer) -> list[Any]:
    return getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer])


def optimizer_state_bytes(trainer: MegatronTrainer) -> int:
    """Moments, and the parameters that the optimizer updates where they are not the model's own."""
    total = 0
    for part in optimizer_parts(trainer):
        for parameter, state in part.optimizer.state.items():
            total += state["exp_avg"].nbytes + state["exp_avg_sq"].nbytes
            total += parameter.nbytes if trainer.config.bf16 else 0
    return total


def float32_gradient_bytes(trainer: MegatronTrainer) -> int:
    """Gradients that the optimizer has made for itself: not a view of the model's own buffers."""
    buffers = {
        buffer.grad_data.untyped_storage().data_ptr()
        for chunk in trainer.ddp_chunks
        for buffer in chunk.buffers + chunk.expert_parallel_buffers
    }
    groups = [group for part in optimizer_parts(trainer) for group in part.optimizer.param_groups]
    grads = [parameter.grad for group in groups for parameter in group["params"] if parameter.grad is not None]
    return sum(grad.nbytes for grad in grads if grad.untyped_storage().data_ptr() not in buffers)


BF16 = {"precision": "bfloat16"}
WHOLE = {"distributed_data_parallel_config__use_distributed_optimizer": False}
WITH_ROUTER = ("all-linear", "router")
ONE_INPUT = ("in_proj_ba", "out_proj", "q_proj")
DENSE, TIED = {"dense": True}, {"tie_word_embeddings": True}
LATENT, LATENT_KEYS = {"family": "deepseek_v3"}, {"family": "deepseek_v2"}
BIASES_AND_SINKS = {"family": "gpt_oss"}
NORMS_OF_ALL_HEADS = {"family": "olmoe"}
CASES: dict[str, tuple[int, dict[str, int], dict[str, Any], dict[str, Any]]] = {
    "one rank": (1, {}, {}, WHOLE),
    "two copies, bfloat16, sharded": (2, {}, {}, BF16 | ZERO_1),
    "two copies, bfloat16, whole": (2, {}, {}, BF16 | WHOLE),
    "bfloat16, float32 gradients": (2, {}, {}, BF16 | ZERO_1 | {"grad_reduce_in_fp32": True}),
    "float32, sharded": (2, {}, {}, ZERO_1),
    "tensor parallel, whole experts, odd vocabulary": (2, {"tp": 2}, {"vocab_size": 61}, BF16 | ZERO_1),
    "tensor parallel, cut experts": (2, {"tp": 2, "etp": 2}, {}, BF16 | ZERO_1),
    "expert parallel": (2, {"ep": 2}, {"mlp_only_layers": [1]}, BF16 | ZERO_1),
    "experts over two of four": (4, {"ep": 2}, {}, BF16 | ZERO_1),
    "pipeline, tied": (2, {"pp": 2}, {"mlp_only_layers": [0]} | TIED, BF16 | ZERO_1),
    "interleaved pipeline": (2, {"pp": 2, "vpp": 2}, {"mlp_only_layers": [0, 2]}, WHOLE),
    "all at once": (4, {"tp": 2, "ep": 2, "pp": 2}, {}, BF16 | ZERO_1),
    "frozen routers": (1, {}, {}, BF16 | WHOLE | {"freeze_moe_router": True}),
    "adapters": (1, {}, {}, BF16 | WHOLE | lora("per_expert")),
    "adapters, all at once": (4, {"tp": 2, "ep": 2, "pp": 2}, {}, BF16 | ZERO_1 | lora("per_expert")),
    "adapters, latents, shared by experts": (2, {"tp": 2}, LATENT, BF16 | ZERO_1 | lora("shared", WITH_ROUTER)),
    "adapters, biases": (2, {"ep": 2}, BIASES_AND_SINKS, WHOLE | lora("per_expert")),
    "adapters, cut experts": (2, {"tp": 2, "etp": 2}, {}, BF16 | ZERO_1 | lora("per_expert", ("down_proj", "v_proj"))),
    "adapters, gated delta nets": (2, {"tp": 2}, {"family": "qwen3_5_moe_text"}, WHOLE | lora("per_expert")),
    "adapters, delta nets by key head": (2, {"pp": 2}, {"family": "qwen3_next"}, WHOLE | lora("none", ONE_INPUT)),
    "shared experts": (
        2,
        {"tp": 2},
        {},
        WHOLE | {"moe_shared_expert_intermediate_size": 24, "moe_shared_expert_gate": True},
    ),
    "latents, tensor parallel": (2, {"tp": 2}, LATENT, BF16 | ZERO_1),
    "latents of keys alone, pipeline": (2, {"pp": 2}, LATENT_KEYS, WHOLE),
    "Mamba-2, tensor parallel, pipeline": (4, {"tp": 2, "pp": 2}, {"family": "nemotron_h"}, ZERO_1),
    "biases and sinks": (2, {"tp": 2, "ep": 2}, BIASES_AND_SINKS, WHOLE),
    "norms of all heads, tensor parallel": (2, {"tp": 2}, NORMS_OF_ALL_HEADS, BF16 | ZERO_1),
    "dense": (2, {}, DENSE, BF16 | ZERO_1),
    "dense, tied": (1, {}, DENSE | TIED, BF16 | WHOLE),
    "dense, tied, pipeline": (2, {"pp": 2}, DENSE | TIED, WHOLE),
    "dense, tensor parallel, odd vocabulary": (2, {"tp": 2}, DENSE | {"vocab_size": 61}, BF16 | ZERO_1),
}


# Each is a quick case's with one thing less.
SLOW_CASES = {
    "two copies, bfloat16, sharded",
    "expert parallel",
    "two copies, bfloat16, whole",
    "bfloat16, float32 gradients",
    "float32, sharded",
    "experts over two of four",
    "tensor parallel, cut experts",
    "latents of keys alone, pipeline",
    "dense",
    "dense, tied",
    "dense, tied, pipeline",
}
QUICK_CASES = ("one rank", "pipeline, tied", "biases and sinks")


@pytest.mark.parametrize("name", listed(CASES, QUICK_CASES, in_full=CASES.keys() - SLOW_CASES))
def test_every_rank_holds_what_the_arithmetic_says(name: str) -> None:
    world_size, sizes, model, changes = CASES[name]
    config = run_of(world_size, **layout(**sizes), **changes)
    hf_config = model_of(model)
    transformer = build_transformer_config(config.policy, hf_config)
    frozen = config.policy.megatron_cfg.freeze_moe_router
    ranks = run_ranks(held_by_rank, world_size, config, model)
    estimates = [worker_memory(config, transformer, hf_config, held.stage) for held in ranks]
    for held, estimate in zip(ranks, estimates, strict=True):
        lora_of_run = config.policy.lora
        expected = rank_parameters(transformer, hf_config, held.stage, routers_frozen=frozen, lora=lora_of_run)
        assert held.parameters == expected
        assert held.gradients == estimate.gradients
        assert estimate.weights == expected.total * (2 if transformer.bf16 else 4)
        assert held.float32_gradients_after == 0
    # Sharding deals parameters out unevenly, and a share is rounded up: by at most one parameter of either kind.
    slack = 2 * 12 * world_size
    held_state = sum(held.optimizer_state for held in ranks)
    assert held_state <= sum(estimate.optimizer.state for estimate in estimates) <= held_state + slack
    gradients = sum(held.float32_gradients for held in ranks)
    assert gradients <= sum(estimate.optimizer.float32_gradients for estimate in estimates) <= gradients + slack


def test_adapters_freeze_the_vision_tower() -> None:
    policy, hf_config = tiny_policy(1, **lora("none")), plain_config(load_hf_config(TINY_VISION_MODEL))
    config = build_transformer_config(policy, hf_config)
    whole = rank_parameters(config, hf_config, 0)
    assert rank_parameters(config, hf_config, 0, lora=policy.lora).frozen == whole.total
    assert policy.frozen_parts.vision_tower


def test_whole_model_by_hand() -> None:
    config = build_transformer_config(tiny_policy(1), hf_config := tiny_hf_config(mlp_only_layers=[2]))
    total = 2 * 64 * 32 + 32 + 4 * ATTENTION + 3 * (8 * EXPERT + ROUTER) + 3 * 32 * 48
    assert whole_model_parameters(config, hf_config) == total
    assert active_parameters(config, hf_config) == total - 3 * 6 * EXPERT


@pytest.mark.parametrize(
    "model",
    [
        {},
        TIED,
        {"mlp_only_layers": [3], "vocab_size": 61},
        DENSE,
        DENSE | TIED,
        *({"family": name} for name in FAMILY_MODELS),
    ],
    ids=str,
)
def test_whole_model_is_that_of_transformers(model: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    hf_config = model_of(model)
    # Twice the ranks: the layout must not show.
    policy = tiny_policy(2, **layout(tp=2))
    expected = AutoModelForCausalLM.from_config(hf_config).num_parameters()
    assert whole_model_parameters(build_transformer_config(policy, hf_config), hf_config) == expected


@pytest.mark.parametrize(
    ("folder", "total", "active"),
    [
        # The hub gives 61,064,245,248 bytes of bfloat16 weights for it, and 3.3 billion active parameters.
        (QWEN3_30B_A3B, 30_532_122_624, 3_353_032_704),
        # "1.7B" of which 1.4 without the embedding; the hub's 2.03 count the tied embedding twice.
        (QWEN3_1_7B, 1_720_574_976, 1_720_574_976),
        # Its report (arXiv:2512.20848) has 31.6 billion, and 3.6 billion active ones with embeddings.
        (NEMOTRON_3_NANO, 31_577_937_344, 3_580_073_408),
    ],
)
def test_public_models_have_their_known_sizes(folder: str, total: int, active: int) -> None:
    hf_config = load_hf_config(folder)
    config = build_transformer_config(tiny_policy(1), hf_config)
    assert whole_model_parameters(config, hf_config) == total
    assert active_parameters(config, hf_config) == active


def grpo_run(*overrides: str) -> GRPOMasterConfig:
    return load_grpo_config("grpo_math_1B.yaml", [f"policy.model_name={QWEN3_1_7B}", *overrides], check_paths=False)


def memory_of(config: MasterConfig, stage: int = 0) -> Any:
    hf_config = load_hf_config(config.policy.model_name)
    return worker_memory(config, build_transformer_config(config.policy, hf_config), hf_config, stage)


def test_key_value_cache_by_hand() -> None:
    # 2 (key, value) x 28 layers x 8 heads x 128 x 2 bytes a token; 64 sequences of 4096 tokens.
    assert memory_of(grpo_run()).key_value_cache == 2 * 28 * 8 * 128 * 2 * 64 * 4096
    names = ("tensor_model_parallel_size=2", "sequence_parallel=true", "pipeline_model_parallel_size=2")
    cut = [f"policy.megatron_cfg.{name}" for name in names]
    assert memory_of(grpo_run(*cut), 1).key_value_cache == 2 * 14 * 4 * 128 * 2 * 64 * 4096


def test_cache_of_latent_attention_by_hand() -> None:
    config, hf_config = grpo_run(), model_of(LATENT)
    memory = worker_memory(config, build_transformer_config(config.policy, hf_config), hf_config, 0)
    # 4 layers x 4 heads with 8 + 4 numbers of a key and 6 of a value, 2 bytes each.
    assert memory.key_value_cache == 4 * 4 * (8 + 4 + 6) * 2 * 64 * 4096


@pytest.mark.parametrize(("checkpointing", "num_masks"), [("full", 1), ("none", 4)])
def test_a_choice_of_tokens_keeps_masks_and_keys_of_indexers(checkpointing: str, num_masks: int) -> None:
    config = grpo_run(f"policy.megatron_cfg.activation_checkpointing={checkpointing}")
    chooses, sees_all = (
        worker_memory(config, build_transformer_config(config.policy, hf_config), hf_config, 0)
        for hf_config in (
            FamilyModel("glm_moe_dsa", {**FAMILY_MODELS["glm_moe_dsa_sparse"].fields, "index_topk": topk}).hf_config()
            for topk in (4, 4096)
        )
    )
    # Two of four layers have an indexer, with keys of 8 numbers of 2 bytes.
    assert chooses.key_value_cache - sees_all.key_value_cache == 2 * 8 * 2 * 64 * 4096
    assert chooses.activations_at_least - sees_all.activations_at_least == num_masks * 4096 * 4096 * 2


def test_replayed_positions_of_indexers_are_counted() -> None:
    hf_config = FAMILY_MODELS["glm_moe_dsa_sparse"].hf_config()
    chooses, replays = (
        worker_memory(config, build_transformer_config(config.policy, hf_config), hf_config, 0)
        for config in (grpo_run(f"policy.megatron_cfg.indexer_replay={value}") for value in ("none", "rollout"))
    )
    # Two of four layers have an indexer, which chooses 4 positions of 4 bytes.
    of_a_token = 2 * 4 * 4
    assert replays.key_value_cache - chooses.key_value_cache == of_a_token * 64 * 4096
    # As they come and as they are used.
    assert replays.activations_at_least - chooses.activations_at_least == 2 * of_a_token * 4096


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], 64),
        # 64 prompts x 8 responses over 8 ranks are 64, 256 prompts of a validation are 32.
        (["policy.generation.max_batch_size=null"], 64),
        (["policy.generation.max_batch_size=null", "grpo.val_num_generations=4"], 128),
        (["policy.generation.max_batch_size=100"], 64),
        (["policy.generation.max_batch_size=7"], 7),
    ],
)
def test_sequences_at_a_time(overrides: list[str], expected: int) -> None:
    assert generation_batch_size(grpo_run(*overrides)) == expected


def test_reference_is_kept_only_for_its_penalty() -> None:
    assert memory_of(grpo_run()).reference_weights == 0
    memory = memory_of(grpo_run("loss_fn.reference_policy_kl_penalty=0.01"))
    assert memory.reference_weights == memory.weights == 2 * 1_720_574_976


def test_fine_tuning_neither_generates_nor_keeps_a_reference() -> None:
    memory = memory_of(run_of(1).model_copy(update={"policy": tiny_policy(1, model_name=QWEN3_1_7B)}))
    assert (memory.key_value_cache, memory.reference_weights) == (0, 0)


def test_lower_bound_of_activations_by_hand() -> None:
    # Inputs of 28 layers in bfloat16, of 4096 tokens. The last norm; logits of a chunk, and the weight's gradient.
    inputs, norm, vocabulary = 4096 * 28 * 2048 * 2, 3 * 4096 * 2048 * 2, 151936
    head = norm + vocabulary * (1024 * (2 + 4) + 2048 * 4)
    assert memory_of(grpo_run()).activations_at_least == inputs + head
    whole = memory_of(grpo_run("policy.logprob_chunk_size=null"))
    assert whole.activations_at_least == inputs + norm + 4096 * vocabulary * 4
    # 16 heads and 8 groups of 128: queries and outputs, keys and values, inputs of norms; three hidden states; 6144 of
    # the matrices behind. Then float32 numbers of four norms and softmax.
    kept = 2 * (16 * 2 * 128 + 8 * 2 * 128 + 24 * 128 + 3 * 2048 + 3 * 6144) + 4 * (2 + 24 + 16)
    plain = memory_of(grpo_run("policy.megatron_cfg.activation_checkpointing=none"))
    assert plain.activations_at_least == inputs + head + 28 * 4096 * kept
    first = memory_of(grpo_run("policy.megatron_cfg.pipeline_model_parallel_size=2"), 0)
    assert first.activations_at_least == 4096 * (14 * 2048 * 2 + kept)  # one layer is computed again


def test_fullest_moment_is_the_largest_of_the_three() -> None:
    memory = memory_of(grpo_run())
    assert memory.peak_at_least == memory.always + memory.key_value_cache
    memory = memory_of(grpo_run("policy.generation.max_batch_size=1"))
    assert memory.peak_at_least == memory.always + memory.activations_at_least


MEMORY_IS_REPORTED = ("sft_qwen3_30b_a3b.yaml", "grpo_qwen3_30b_a3b.yaml", "grpo_dapo17k.yaml")


def gigabytes_reported(name: str) -> list[int]:
    """The figures in an exemplar's first comment, without the sizes of the GPUs that it is right for."""
    lines = Path("examples/configs", name).read_text(encoding="utf-8").splitlines()
    comment = " ".join(line.removeprefix("# ") for line in takewhile(lambda line: line.startswith("#"), lines))
    return [int(figure) for figure in re.findall(r"(?<!GPUs with )\b(\d+)(?= GB| and \d+ GB)", comment)]


@pytest.mark.parametrize("name", MEMORY_IS_REPORTED)
def test_exemplars_report_their_memory(name: str) -> None:
    """The report has what is always held and the fullest moment, on one machine and on two."""
    found = []
    for num_nodes in (1, 2):
        overrides = [f"policy.model_name={QWEN3_30B_A3B}", f"cluster.num_nodes={num_nodes}"]
        memory = memory_of(load_any_config(name, overrides, check_paths=False))
        found += [round(memory.always / 1e9), round(memory.peak_at_least / 1e9)]
    assert found == gigabytes_reported(name)
    assert found[1] < 96
    assert found[3] < 80


def test_small_exemplar_fits_80_gigabytes() -> None:
    assert memory_of(grpo_run()).peak_at_least < 60e9


def test_what_recomputed_experts_leave() -> None:
    """48 layers with 32 heads and 4 groups of 128; without recomputation, 8 experts of 768 for each token."""

    def activations(recomputed: str) -> int:
        overrides = [f"policy.model_name={QWEN3_30B_A3B}", f"policy.megatron_cfg.activation_checkpointing={recomputed}"]
        config = load_any_config("grpo_qwen3_30b_a3b.yaml", overrides, check_paths=False)
        return memory_of(config).activations_at_least

    attention = 2 * (36 * 2 * 128 + 36 * 128 + 3 * 2048) + 4 * (2 + 36 + 32)
    routing = 128 * (4 + 1) + 257 * 4
    experts = 8 * (2048 + 3 * 768)
    assert activations("moe") - activations("full") == 48 * 4096 * attention
    assert activations("none") - activations("moe") == 48 * 4096 * (routing + experts * 2)
