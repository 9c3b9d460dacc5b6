# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""PPO's and distillation's configurations in NeMo-RL's layout: the model beside the policy, and the loop."""

from pathlib import Path
from typing import Any

import pytest

from nemo_rl_moe.cli import main
from nemo_rl_moe.config.loading import load_any_config, problems_of_translation
from nemo_rl_moe.config.nemo_rl import translate
from nemo_rl_moe.config.nemo_rl_keys import counterpart_of
from nemo_rl_moe.config.schema_distillation import DistillationMasterConfig
from nemo_rl_moe.config.schema_ppo import PPOMasterConfig
from tests.unit.config.test_nemo_rl import COMMON, GENERATION, write

_LOOP = """max_rollout_turns: 1, max_num_epochs: 1, max_num_steps: 100, val_period: 10, val_at_start: true, \
val_at_end: false, max_val_samples: 64, val_batch_size: 64, seed: 42"""
PPO = f"""
ppo:
  {{{_LOOP}, num_prompts_per_step: 4, num_generations_per_prompt: 8, ppo_epochs: 4, critic_ppo_epochs: 4, \
policy_training_start_step: 3, warm_start_value_checkpoint: null,
  async_ppo: {{enabled: false, max_trajectory_age_steps: 1}}, reward_scaling: {{enabled: true, target_min: -1.0}},
  reward_shaping: {{enabled: true, overlong_buffer_length: 16, overlong_buffer_penalty: 1, max_response_length: 384}},
  adv_estimator: {{name: gae, gae_lambda: 0.9, gae_gamma: 1, gae_lambda_value: null, gae_lambda_policy: null, \
normalize_advantages: false, length_adaptive_alpha: 0.0}}}}
loss_fn: {{reference_policy_kl_penalty: 0.0, ratio_clip_min: 0.2, ratio_clip_max: 0.28, ratio_clip_c: 10}}
value_loss_fn: {{scale: 0.4, cliprange: 0.3}}
value:
  model_name: some/critic
  train_global_batch_size: ${{policy.train_global_batch_size}}
  train_micro_batch_size: 3
  max_grad_norm: 0.5
  precision: bfloat16
  optimizer: {{name: torch.optim.AdamW, kwargs: {{lr: 1.0e-05}}}}
  dtensor_cfg: {{enabled: false, tensor_parallel_size: 4}}
  megatron_cfg:
    {{enabled: true, tensor_model_parallel_size: 2, pipeline_model_parallel_size: 2, expert_model_parallel_size: 1, \
expert_tensor_parallel_size: 1, context_parallel_size: 1, optimizer: {{lr: 2.0e-6, weight_decay: 0.01}}, \
scheduler: {{lr_warmup_iters: 7}}}}
env: {{math: {{num_workers: 4}}}}
"""
DISTILLATION = f"""
distillation: {{num_prompts_per_step: 8, num_generations_per_prompt: 1, {_LOOP}, topk_logits_k: 32}}
loss_fn: {{kl_type: mixed, mixed_kl_weight: 0.25, zero_outside_topk: false}}
policy: {{train_global_batch_size: 8, train_micro_batch_size: 1}}
teacher:
  model_name: some/teacher
  logprob_batch_size: 2
  max_total_sequence_length: 512
  dtensor_cfg: {{enabled: true, tensor_parallel_size: 4, context_parallel_size: 2}}
  megatron_cfg: {{enabled: false, tensor_model_parallel_size: 8}}
env: {{math: {{num_workers: 4}}}}
"""


def test_ppo(tmp_path: Path) -> None:
    translation = translate(write(tmp_path, COMMON, GENERATION, PPO))
    assert problems_of_translation(translation) == []
    wanted = {
        "grpo.num_generations_per_prompt": 8,
        "grpo.max_num_steps": 100,
        "grpo.reward_shaping.overlong_buffer_length": 16,
        "grpo.adv_estimator.normalize_rewards": False,
        "ppo.gae_lambda": 0.9,
        "ppo.policy_training_start_step": 3,
        "value.model_name": "some/critic",
        "value.logprob_batch_size": 3,
        "value.lr": 2.0e-6,
        "value.lr_warmup_iters": 7,
        "value.megatron_cfg.tensor_model_parallel_size": 2,
        "value.megatron_cfg.pipeline_model_parallel_size": 2,
        "value.megatron_cfg.sequence_parallel": True,
        "value_loss_fn.cliprange": 0.3,
        "cluster.roles.critic": {"num_nodes": 2, "gpus_per_node": 8},
        "policy.generation.max_new_tokens": 384,
    }
    assert {key: translation.values.get(key) for key in wanted} == wanted
    for line in (
        "ppo.ppo_epochs: 4: each response is trained on once",
        "value.max_grad_norm: 0.5: the critic's is the policy's",
        "value_loss_fn.scale: 0.4: changes nothing for Adam but the gradient's clip",
    ):
        assert line in translation.without
    assert "value.train_global_batch_size: 16" in translation.idle, "it repeats the policy's"
    assert not [line for line in translation.without if "not a key that" in line]


def test_a_critic_of_pytorch_s_engine(tmp_path: Path) -> None:
    engine: dict[str, Any] = {"value__megatron_cfg__enabled": False, "value__dtensor_cfg__enabled": True}
    values = translate(write(tmp_path, COMMON, GENERATION, PPO, **engine)).values
    assert values["value.lr"] == 1.0e-05
    assert values["value.lr_warmup_iters"] == 0
    assert values["value.megatron_cfg.tensor_model_parallel_size"] == 4
    assert values["value.megatron_cfg.pipeline_model_parallel_size"] == 1


def test_distillation(tmp_path: Path) -> None:
    translation = translate(write(tmp_path, COMMON, GENERATION, DISTILLATION))
    assert problems_of_translation(translation) == []
    wanted = {
        "grpo.num_prompts_per_step": 8,
        "grpo.adv_estimator.name": "reinforce",
        "distillation.topk_logits_k": 32,
        "distillation.kl_type": "mixed",
        "distillation.mixed_kl_weight": 0.25,
        "cluster.roles.teacher": {"num_nodes": 2, "gpus_per_node": 8},
    }
    assert {key: translation.values.get(key) for key in wanted} == wanted
    layout = {"tensor_model": 4, "pipeline_model": 1, "expert_model": 1, "expert_tensor": 1}
    assert translation.values["distillation.teachers"]["teacher"] == {
        "model_name": "some/teacher",
        "adapter": None,
        "logprob_batch_size": 2,
        "megatron_cfg": {f"{name}_parallel_size": size for name, size in layout.items()} | {"sequence_parallel": True},
    }
    assert "teacher.dtensor_cfg.context_parallel_size: 2: the teacher's is the policy's" in translation.without


@pytest.mark.parametrize(
    ("parts", "schema"),
    [((COMMON, GENERATION, PPO), PPOMasterConfig), ((COMMON, GENERATION, DISTILLATION), DistillationMasterConfig)],
)
def test_the_printed_file_is_a_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], parts: tuple[str, ...], schema: type
) -> None:
    assert main(["config", "--from-nemo-rl", str(write(tmp_path, *parts))]) == 0
    ours = tmp_path / "ours.yaml"
    ours.write_text(capsys.readouterr().out)
    assert type(load_any_config(ours, check_paths=False)) is schema


def test_a_distillation_without_a_teacher_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, COMMON, GENERATION, DISTILLATION.replace("teacher:", "teachers:"))
    (line,) = problems_of_translation(translate(path))
    assert line == "distillation.teachers: no section teacher there: name the models to learn from"


def test_a_section_whose_keys_are_of_one_section_here_has_it_as_its_counterpart() -> None:
    assert counterpart_of("teacher") == (
        "; NeMo-RL's teacher is distillation.teachers here (the name of the one teacher is `teacher`)"
    )
