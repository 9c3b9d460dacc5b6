# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Configurations in NeMo-RL's layout: what is carried over, by which rule; what is reported; that the result is
valid."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_rl_moe.cli import main
from nemo_rl_moe.config.algorithm import ALGORITHMS
from nemo_rl_moe.config.loading import load_any_config, problems_of_translation
from nemo_rl_moe.config.nemo_rl import translate
from nemo_rl_moe.config.nemo_rl_keys import ROWS, row_of
from nemo_rl_moe.config.nemo_rl_translation import Translation
from nemo_rl_moe.config.validation import known_keys
from nemo_rl_moe.errors import ConfigurationError

COMMON = """
checkpointing: {enabled: true, checkpoint_dir: results/x, metric_name: "val:accuracy", higher_is_better: true, \
keep_top_k: 2, save_period: 10}
policy:
  model_name: some/model
  tokenizer: {name: "${policy.model_name}", chat_template_kwargs: null}
  train_global_batch_size: 16
  train_micro_batch_size: 2
  max_total_sequence_length: 512
  precision: bfloat16
  logprob_chunk_size: 512
  max_grad_norm: 1.0
  sequence_packing:
    {enabled: true, train_mb_tokens: "${mul:${policy.max_total_sequence_length}, 4}", algorithm: some_packing}
  dtensor_cfg: {enabled: false, tensor_parallel_size: 8, lora_cfg: {enabled: false, dim: 8}}
  megatron_cfg:
    enabled: true
    activation_checkpointing: true
    tensor_model_parallel_size: 2
    expert_model_parallel_size: 4
    moe_router_load_balancing_type: "none"
    moe_router_dtype: fp64
    apply_rope_fusion: true
    optimizer: {optimizer: adam, lr: 3.0e-7, min_lr: 3.0e-8, weight_decay: 0.01, adam_beta2: 0.999, \
use_distributed_optimizer: true}
    scheduler: {lr_decay_style: constant, lr_decay_iters: 1000, lr_warmup_iters: 13, lr_warmup_init: 3.0e-8}
data: {shuffle: true, train: {dataset_name: DeepScaler}, validation: null, max_input_seq_length: 128}
logger: {log_dir: logs, wandb_enabled: false, wandb: {project: p, name: n}}
cluster: {num_nodes: 2, gpus_per_node: 8}
"""
GRPO = """
grpo:
  num_prompts_per_step: 4
  num_generations_per_prompt: 8
  max_num_epochs: 1
  max_num_steps: 100
  val_period: 10
  val_at_start: false
  val_at_end: false
  seed: 42
  val_num_generations_per_prompt: 2
  adv_estimator: {name: grpo, normalize_rewards: true, use_leave_one_out_baseline: false}
loss_fn: {reference_policy_kl_penalty: 0.01, ratio_clip_min: 0.2, ratio_clip_max: 0.28, kl_input_clamp_value: 20.0}
env: {math: {num_workers: 4}}
"""
GENERATION = """
policy:
  logprob_batch_size: 2
  generation: {backend: vllm, max_new_tokens: 512, temperature: 1.0, vllm_cfg: {tensor_parallel_size: 4}}
"""
SFT = {"max_num_epochs": 1, "val_period": 5, "val_batches": 8, "val_global_batch_size": 32, "seed": 1}


def write(folder: Path, *parts: str, name: str = "theirs.yaml", **changes: Any) -> Path:
    """A file of these parts, and values of `section__key`."""
    tree: dict[str, Any] = {}
    for part in parts:
        _merge(tree, yaml.safe_load(part))
    for key, value in changes.items():
        *sections, last = key.split("__")
        section = tree
        for place in sections:
            section = section.setdefault(place, {})
        section[last] = value
    path = folder / name
    path.write_text(yaml.safe_dump(tree))
    return path


def _merge(below: dict[str, Any], over: dict[str, Any]) -> None:
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(below.get(key), dict):
            _merge(below[key], value)
        else:
            below[key] = value


def grpo(folder: Path, **changes: Any) -> Translation:
    return translate(write(folder, COMMON, GRPO, GENERATION, **changes))


def test_a_file_of_grpo_is_carried_over_and_its_result_is_valid(tmp_path: Path) -> None:
    translation = grpo(tmp_path)
    values = translation.values
    assert problems_of_translation(translation) == []
    wanted = {
        "policy.tokenizer.name": "some/model",
        "policy.logprob_chunk_size": 512,
        "policy.sequence_packing.train_mb_tokens": 2048,
        "policy.megatron_cfg.tensor_model_parallel_size": 2,
        "policy.megatron_cfg.sequence_parallel": True,
        "policy.megatron_cfg.expert_model_parallel_size": 4,
        "policy.megatron_cfg.activation_checkpointing": "full",
        "policy.megatron_cfg.optimizer.lr": 3.0e-7,
        "policy.megatron_cfg.scheduler.lr_warmup_iters": 13,
        "policy.megatron_cfg.distributed_data_parallel_config.use_distributed_optimizer": True,
        # 512 of both, of which 128 are the prompt's.
        "policy.generation.max_new_tokens": 384,
        "policy.generation.vllm.tensor_parallel_size": 4,
        "grpo.val_num_generations": 2,
        "loss_fn.ratio_clip_max": 0.28,
        "loss_fn.reference_policy_kl_gradient": "divergence",
        "data.train.path": "agentica-org/DeepScaleR-Preview-Dataset",
        "data.prompt_key": "problem",
        "data.validation": None,
        "env.reward.num_workers": 4,
        "cluster.num_nodes": 2,
    }
    assert {key: values.get(key) for key in wanted} == wanted
    assert "policy.sequence_packing.algorithm: some_packing: one way of packing" in translation.without
    assert "policy.dtensor_cfg.*: switched off, or not read" in translation.idle
    assert "loss_fn.kl_input_clamp_value: 20.0" in translation.idle
    assert any(line.startswith("policy.generation.max_new_tokens: 512: 384") for line in translation.changed)


def test_the_printed_file_is_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--from-nemo-rl", str(write(tmp_path, COMMON, GRPO, GENERATION))]) == 0
    ours = tmp_path / "ours.yaml"
    ours.write_text(capsys.readouterr().out)
    config = load_any_config(ours, check_paths=False)
    assert config.policy.megatron_cfg.optimizer.min_lr == 3.0e-8
    assert "# Without a counterpart:" in ours.read_text()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"correction": "none"}),
        (
            {"truncated_importance_sampling_type": "tis", "truncated_importance_sampling_ratio": 2},
            {"correction": "truncated", "ratio_max": 2, "ratio_min": None},
        ),
        (
            {"truncated_importance_sampling_type": "icepop", "truncated_importance_sampling_ratio": 5.0}
            | {"truncated_importance_sampling_ratio_min": 0.5},
            {"correction": "icepop", "ratio_max": 5.0, "ratio_min": 0.5},
        ),
        (
            {"truncated_importance_sampling_type": "seq-mask-tis", "truncated_importance_sampling_ratio": 1.002}
            | {"truncated_importance_sampling_ratio_min": 0.999},
            {"correction": "sequence_mask", "ratio_max": 1.002, "ratio_min": 0.999},
        ),
        # Without a type the weights have no bound there.
        (
            {"sequence_level_importance_ratios": True, "token_level_loss": False, "corrected": True},
            {"correction": "truncated", "ratio_max": 1e9, "level": "sequence"},
        ),
    ],
)
def test_importance_sampling(tmp_path: Path, settings: dict[str, Any], expected: dict[str, Any]) -> None:
    chosen = {f"loss_fn__{name}": value for name, value in settings.items() if name != "corrected"}
    translation = grpo(tmp_path, loss_fn__use_importance_sampling_correction=bool(settings), **chosen)
    assert problems_of_translation(translation) == []
    found = {name: translation.values.get(f"loss_fn.importance_sampling_{name}") for name in expected}
    assert found == expected


@pytest.mark.parametrize(
    ("settings", "name", "normalize", "leave_one_out"),
    [
        ({"name": "grpo", "normalize_rewards": False, "use_leave_one_out_baseline": True}, "grpo", False, True),
        (
            {"name": "reinforce_plus_plus", "minus_baseline": True, "use_leave_one_out_baseline": True},
            "reinforce_plus_plus_baseline",
            True,
            False,
        ),
        ({"name": "reinforce_plus_plus", "minus_baseline": False}, "reinforce_plus_plus", True, False),
        ({"name": "raw_reward", "normalize_advantages": False}, "reinforce", False, False),
    ],
)
def test_estimators(tmp_path: Path, settings: dict[str, Any], name: str, normalize: bool, leave_one_out: bool) -> None:
    translation = grpo(tmp_path, grpo__adv_estimator=settings)
    section = "grpo.adv_estimator."
    keys = ("name", "normalize_rewards", "use_leave_one_out_baseline")
    assert [translation.values[section + key] for key in keys] == [name, normalize, leave_one_out]
    assert problems_of_translation(translation) == []


def test_the_reward_s_divergence_is_k1_s_and_objectives_are_named(tmp_path: Path) -> None:
    values = grpo(tmp_path, loss_fn__use_kl_in_reward=True, loss_fn__reference_policy_kl_type="k3").values
    assert values["loss_fn.reference_policy_kl_type"] == "k1"
    assert values["loss_fn.reference_policy_kl_gradient"] == "estimate"
    assert grpo(tmp_path, loss_fn__use_cispo=True).values["loss_fn.objective"] == "cispo"
    assert grpo(tmp_path, loss_fn__disable_ppo_ratio=True).values["loss_fn.objective"] == "reinforce"


def test_a_line_without_factors_is_pytorch_s_warm_up(tmp_path: Path) -> None:
    """`LinearLR` begins at a third of the rate and ends at the whole of it."""
    path = write(
        tmp_path,
        COMMON,
        sft=SFT,
        policy__megatron_cfg__enabled=False,
        policy__dtensor_cfg={"enabled": True, "tensor_parallel_size": 1},
        policy__optimizer={"name": "torch.optim.AdamW", "kwargs": {"lr": 5.0e-6}},
        policy__scheduler={"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"total_iters": 50}},
    )
    values = translate(path).values
    assert values["policy.megatron_cfg.scheduler.lr_warmup_iters"] == 50
    assert values["policy.megatron_cfg.scheduler.lr_decay_style"] == "constant"


def test_pytorch_s_engine_gives_layout_optimizer_and_schedule(tmp_path: Path) -> None:
    linear = {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.1, "total_iters": 20}}
    cosine = {"name": "torch.optim.lr_scheduler.CosineAnnealingLR", "kwargs": {"T_max": 80, "eta_min": 1.0e-7}}
    adam = {"lr": 5.0e-6, "betas": [0.9, 0.98], "eps": 1.0e-5, "weight_decay": 0.1}
    path = write(
        tmp_path,
        COMMON,
        sft=SFT,
        checkpointing__metric_name="val:val_loss",
        policy__megatron_cfg__enabled=False,
        policy__dtensor_cfg={"enabled": True, "tensor_parallel_size": 4, "context_parallel_size": 2},
        policy__optimizer={"name": "torch.optim.AdamW", "kwargs": adam},
        policy__scheduler=[linear, cosine, {"milestones": [20]}],
        policy__tokenizer__chat_template="{% for message in messages %}x{% endfor %}",
        data__train={"dataset_name": "tulu3_sft_mixture"},
    )
    translation = translate(path)
    values = {key.removeprefix("policy.megatron_cfg."): value for key, value in translation.values.items()}
    wanted = {
        "tensor_model_parallel_size": 4,
        "context_parallel_size": 2,
        "expert_model_parallel_size": 1,
        "optimizer.lr": 5.0e-6,
        "optimizer.adam_beta2": 0.98,
        "optimizer.min_lr": 1.0e-7,
        "scheduler.lr_decay_style": "cosine",
        "scheduler.lr_warmup_iters": 20,
        "scheduler.lr_decay_iters": 100,
        "checkpointing.metric_name": "val:loss",
        # 8 batches of 32 are 16 of 16.
        "sft.val_batches": 16,
    }
    assert {key: values.get(key) for key in wanted} == wanted
    assert [line.partition(": ")[0] for line in problems_of_translation(translation)] == [
        "policy.tokenizer.chat_template"
    ]


def test_what_only_grpo_has_here_is_reported_in_sft_and_nothing_else(tmp_path: Path) -> None:
    """`policy.offload_optimizer_for_logprob` is in every file of theirs, false in most."""
    never = SFT | {"val_period": -1}
    samples = {"data__train": {"dataset_name": "tulu3_sft_mixture"}}
    off = translate(write(tmp_path, COMMON, sft=never, policy__offload_optimizer_for_logprob=False, **samples))
    assert problems_of_translation(off) == []
    assert off.values["sft.val_period"] == 0
    assert "policy.offload_optimizer_for_logprob: false" in off.idle
    on = translate(write(tmp_path, COMMON, sft=never, policy__offload_optimizer_for_logprob=True))
    assert any(line.startswith("policy.offload_optimizer_for_logprob: true: ") for line in on.without)
    assert grpo(tmp_path, policy__offload_optimizer_for_logprob=True).values["policy.offload_optimizer_for_logprob"]


OFFLOAD = {"use_precision_aware_optimizer": True, "optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}
OFFLOAD_OF_NOTHING = {
    "optimizer_cpu_offload": True,
    "optimizer_offload_fraction": 0.0,
    "overlap_cpu_optimizer_d2h_h2d": True,
    "exp_avg_dtype": "torch.float32",
}
NO_OFFLOAD = dict.fromkeys(OFFLOAD_OF_NOTHING) | {"optimizer_cpu_offload": False, "exp_avg_dtype": "float32"}


@pytest.mark.parametrize(("chosen", "expected"), [(OFFLOAD, OFFLOAD), (OFFLOAD_OF_NOTHING, NO_OFFLOAD)])
def test_the_optimizer_s_memory_is_carried_over(
    tmp_path: Path, chosen: dict[str, Any], expected: dict[str, Any]
) -> None:
    translation = grpo(tmp_path, **{f"policy__megatron_cfg__optimizer__{key}": value for key, value in chosen.items()})
    assert {key: translation.values.get(f"policy.megatron_cfg.optimizer.{key}") for key in chosen} == expected
    assert any("offloads nothing" in line for line in translation.changed) is (chosen is OFFLOAD_OF_NOTHING)
    assert problems_of_translation(translation) == []


def test_the_optimizer_leaves_gpus_that_engines_share(tmp_path: Path) -> None:
    key = "policy.offload_optimizer_for_generation"
    shared, apart, trainer = (
        grpo(tmp_path, **changes)
        for changes in (
            {},
            {"policy__generation__colocated": {"enabled": False, "resources": {"gpus_per_node": 1}}},
            {"policy__generation__backend": "megatron"},
        )
    )
    assert shared.values[key] is True
    assert any(line.startswith(f"{key}: true, as NeMo-RL always ") for line in shared.changed)
    assert problems_of_translation(shared) == []
    assert not any(key in translation.values for translation in (apart, trainer))


@pytest.mark.parametrize("engine", ["megatron_cfg", "dtensor_cfg"])
def test_environment_variables_are_those_of_the_engine_that_is_on(tmp_path: Path, engine: str) -> None:
    changes: dict[str, Any] = {
        f"policy__{name}": {"enabled": name == engine, "env_vars": {"OF": name, "NUMBER": 1}}
        for name in ("megatron_cfg", "dtensor_cfg")
    }
    translation = grpo(tmp_path, **changes)
    assert translation.values["policy.megatron_cfg.env_vars"] == {"OF": engine, "NUMBER": "1"}
    assert not [line for line in translation.without if "env_vars" in line]


def test_arguments_of_the_chat_template_are_carried_over(tmp_path: Path) -> None:
    translation = grpo(tmp_path, policy__tokenizer__chat_template_kwargs={"enable_thinking": False})
    assert translation.values["data.chat_template_kwargs"] == {"enable_thinking": False}
    assert problems_of_translation(translation) == []
    assert not [line for line in translation.without if "chat_template_kwargs" in line]


@pytest.mark.parametrize(
    ("changes", "weights"),
    [
        ({}, "{NAME: 1.0}"),
        ({"env__math_multi_reward": {"num_workers": 8}}, "{correctness: 1.0, integer: 1.0, format: 1.0}"),
        ({"grpo__adv_estimator__reward_weights": [1, 0.5]}, "{reward_1: 1, reward_2: 0.5}"),
    ],
)
def test_gdpo_is_reported_with_the_weights_to_write(tmp_path: Path, changes: dict[str, Any], weights: str) -> None:
    translation = grpo(tmp_path, grpo__adv_estimator__name="gdpo", **changes)
    (line,) = (line for line in translation.without if line.startswith("grpo.adv_estimator.name: gdpo: "))
    assert f"env.reward_weights: {weights}; the translation has grpo" in line
    assert problems_of_translation(translation) == []


def test_engines_with_gpus_of_their_own_are_counted_beside_the_policy_s(tmp_path: Path) -> None:
    colocated = {"enabled": False, "resources": {"num_nodes": 1, "gpus_per_node": 8}}
    translation = grpo(tmp_path, policy__generation__colocated=colocated)
    assert translation.values["cluster.num_nodes"] == 1
    assert translation.values["cluster.roles.generation"] == {"num_nodes": 1, "gpus_per_node": 8}
    assert problems_of_translation(translation) == []


def test_a_child_inherits_from_files_of_theirs_alone(tmp_path: Path) -> None:
    write(tmp_path, COMMON, GRPO, GENERATION, name="base.yaml")
    (tmp_path / "below").mkdir()
    child = write(tmp_path / "below", "defaults: ../base.yaml", policy__model_name="another/model")
    assert translate(child).values["policy.model_name"] == "another/model"
    # A name that is one of ours too must not be looked for among ours.
    orphan = write(tmp_path / "below", "defaults: grpo_math_1B.yaml", policy__dtensor_cfg={"enabled": True})
    with pytest.raises(ConfigurationError, match=r"grpo_math_1B.yaml: no such file in .*below$"):
        translate(orphan)


def test_a_section_that_overrides_takes_the_place_of_the_whole_other(tmp_path: Path) -> None:
    write(tmp_path, COMMON, GRPO, GENERATION, name="base.yaml")
    other = {"_override_": True, "shuffle": False, "train": {"data_path": "mine.jsonl"}}
    translation = translate(write(tmp_path, "defaults: base.yaml", data=other))
    assert translation.values["data.train.path"] == "mine.jsonl"
    # `data.max_input_seq_length: 128` of the other section left 384 to the response.
    assert translation.values["policy.generation.max_new_tokens"] == 256
    assert not [line for line in translation.without if "_override_" in line]


@pytest.mark.parametrize(
    ("text", "problem"),
    {
        "sft: [": "not valid YAML",
        "just a text": "expected sections such as",
        "defaults: sft.yaml": "no such file in",
        "sft: {seed: 1}\npolicy: {model_name: x}": "not a configuration of NeMo-RL",
        "policy: {megatron_cfg: {enabled: true}}": "expected one section of sft, dpo, rm, grpo, ppo, distillation: none"
        " of them",
        "sft: {seed: 1}\npolicy: {megatron_cfg: {enabled: true}, model_name: '${no.such.key}'}": "no.such.key",
        "sft: {seed: 1}\npolicy: {dtensor_cfg: {enabled: true}, optimizer: {kwargs: {betas: 3}}}": "a value has another"
        " form than in NeMo-RL",
        "sft: {}\npolicy: {megatron_cfg: {enabled: true, optimizer: {_override_: true}}}": "policy.megatron_cfg."
        "optimizer._override_: only supported directly in a top-level section",
    }.items(),
)
def test_what_is_not_theirs_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, problem: str
) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text(text)
    assert main(["config", "--from-nemo-rl", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert problem in line


def test_what_is_still_wrong_is_reported_behind_the_translation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, COMMON, GRPO, GENERATION, cluster__gpus_per_node=3)
    assert main(["config", "--from-nemo-rl", str(path)]) == 2
    captured = capsys.readouterr()
    assert "defaults: grpo.yaml" in captured.out
    assert "translated, but needs a correction: cluster: 6 workers" in captured.err


def test_it_stands_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write(tmp_path, COMMON, GRPO, GENERATION))
    assert main(["config", "--from-nemo-rl", path, "grpo.seed=1"]) == 2
    assert "takes no --config" in capsys.readouterr().err


def test_every_leaf_is_accounted_for(tmp_path: Path) -> None:
    """A key that the table has not heard of is reported too."""
    translation = grpo(tmp_path, policy__some_new_key=3, grpo__another={"enabled": True, "x": 1})
    for key in ("policy.some_new_key: 3", "grpo.another.x: 1"):
        assert f"{key}: not a key that this translator knows" in translation.without


def test_the_table_names_keys_that_are_there_and_each_of_theirs_once() -> None:
    known = {key for algorithm in ALGORITHMS for key in known_keys(ALGORITHMS[algorithm].config_class)}
    assert [
        row.ours for row in ROWS if row.ours is not None and row.ours not in known | {"cluster.roles.generation"}
    ] == []
    names = [row.theirs for row in ROWS]
    assert len(names) == len(set(names))
    assert all(row.note for row in ROWS if row.ours is None)


def test_the_nearest_row_counts() -> None:
    row = row_of("policy.megatron_cfg.optimizer.sgd_momentum")
    assert row is not None
    assert row.theirs == "policy.megatron_cfg.optimizer.*"
    assert row_of("policy.no_such_key") is None
