# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Every shipped configuration loads, means what it says, and survives being written and read."""

import ast
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from nemo_rl_moe.config.algorithm import ALGORITHMS
from nemo_rl_moe.config.engines import BUILT_IN
from nemo_rl_moe.config.files import BASE_NAME, BASE_OF, exemplar_names, exemplars_folder, read_with_defaults
from nemo_rl_moe.config.loading import dump_resolved, load_any_config, load_config, load_dpo_config, load_grpo_config
from nemo_rl_moe.config.megatron_moe_fields import MOE_FIELD_NAMES
from nemo_rl_moe.config.overrides import present_keys
from nemo_rl_moe.config.schema import GRPOMasterConfig, MasterConfig, RMMasterConfig, engines_share_gpus
from nemo_rl_moe.config.validation import field_at, known_keys
from nemo_rl_moe.errors import ConfigurationError
from tests.unit.config.conftest import refused

PACKAGE = Path(__file__).resolve().parents[3] / "nemo_rl_moe"
MODEL, TRAIN, VALIDATION = "policy.model_name", "data.train.path", "data.validation.path"
LEFT_OPEN = {"sft": [MODEL, TRAIN, VALIDATION], "grpo": [MODEL, TRAIN, VALIDATION, "env.reward.kind"]}
"""Keys that a base leaves to those that inherit from it."""
BASE_EXEMPLARS = {
    "sft": "sft.yaml",
    "dpo": "dpo.yaml",
    "rm": "rm.yaml",
    "grpo": "grpo.yaml",
    "ppo": "ppo_math_1B.yaml",
    "distillation": "distillation_math.yaml",
}

both_algorithms = pytest.mark.parametrize("algorithm", ALGORITHMS)


def attributes_read(code: str) -> set[str]:
    """Names that follow a dot and are not called: `text.split()` reads no key `split`."""
    nodes = list(ast.walk(ast.parse(code)))
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    return {node.attr for node in nodes if isinstance(node, ast.Attribute) and id(node) not in called}


def own_keys(schema: type[MasterConfig]) -> list[str]:
    return [key for key in known_keys(schema) if key.rpartition(".")[2] not in MOE_FIELD_NAMES]


def leaves(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Full key to value, of everything that is no section."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


@pytest.mark.parametrize("name", exemplar_names())
def test_exemplar_loads_and_its_dump_loads_to_the_same(name: str, tmp_path: Path) -> None:
    config = load_any_config(name, check_paths=False)
    assert type(config) is ALGORITHMS[name.removeprefix("vlm_").partition("_")[0].removesuffix(".yaml")].config_class
    written = tmp_path / "config.yaml"
    written.write_text(OmegaConf.to_yaml(OmegaConf.create(dump_resolved(config))))
    again = load_any_config(written, check_paths=False)
    assert again == config
    assert dump_resolved(again) == dump_resolved(config)


@both_algorithms
def test_base_exemplar_has_every_key_of_the_schema(algorithm: str) -> None:
    present = present_keys(read_with_defaults(exemplars_folder() / BASE_EXEMPLARS[algorithm]))
    absent = set(own_keys(ALGORITHMS[algorithm].config_class)) - set(present)
    # Sections of which at most one is read: they are null in the base, with a comment that says what is in them.
    optional = ("env.reward.", "env.driver.", "policy.lora.", "value.lora.", "reward_model.")
    assert all(key.startswith(optional) for key in absent), absent


def test_base_file_has_the_keys_that_all_algorithms_share_and_no_other() -> None:
    shared = set.intersection(*(set(own_keys(record.config_class)) for record in ALGORITHMS.values()))
    present = set(present_keys(read_with_defaults(exemplars_folder() / BASE_NAME)))
    of_a_null_section = {key for key in shared if key.startswith("policy.lora.")}
    assert {key for key in present if key.rpartition(".")[2] not in MOE_FIELD_NAMES} == shared - of_a_null_section


def test_base_file_starts_no_run_and_is_not_offered() -> None:
    assert BASE_NAME not in exemplar_names()
    assert refused(load_any_config, BASE_NAME, check_paths=False) == [
        "base.yaml: has no section of an algorithm, expected sft or dpo or rm or grpo or ppo or distillation"
    ]


@both_algorithms
def test_what_the_base_file_says_is_not_said_again(algorithm: str) -> None:
    own = leaves(yaml.safe_load((exemplars_folder() / BASE_EXEMPLARS[algorithm]).read_text()))
    inherited = own.pop("defaults")
    assert inherited == ("grpo_math_1B.yaml" if algorithm in ("ppo", "distillation") else BASE_NAME)
    base = leaves(read_with_defaults(exemplars_folder() / inherited))
    assert [key for key, value in own.items() if key in base and value == base[key]] == []
    # Each of them says what the base file leaves open, but for what only those who inherit can know.
    left = {key for key, value in base.items() if value == "???"} - own.keys()
    assert left <= set(LEFT_OPEN.get(algorithm, []))


def opened(algorithm: str) -> list[str]:
    """Overrides that fill in what the base of an algorithm leaves open."""
    return [f"{key}={'exact' if key == 'env.reward.kind' else 'm'}" for key in LEFT_OPEN.get(algorithm, [])]


@pytest.mark.parametrize("algorithm", BASE_OF)
def test_a_base_to_inherit_from_has_no_recipe(algorithm: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_any_config(BASE_OF[algorithm], check_paths=False)
    assert [line.partition(": missing; ")[0] for line in caught.value.problems] == LEFT_OPEN[algorithm]
    (validation,) = [line for line in caught.value.problems if line.startswith(VALIDATION)]
    assert validation.endswith(", or data.validation: null")
    assert BASE_OF[algorithm] not in exemplar_names()
    config = load_any_config(BASE_OF[algorithm], opened(algorithm), check_paths=False)
    assert config.cluster.world_size == config.policy.megatron_cfg.expert_model_parallel_size == 1
    if isinstance(config, GRPOMasterConfig):
        assert (config.data.prompt_template, config.env.score_truncated) == (None, True)
        assert (config.grpo.max_num_steps, config.data.prompt_key) == (None, "prompt")


# Of a recipe: values that its file does not say are those of the base beneath it.
RECIPES: dict[str, dict[str, object]] = {
    "grpo_math_1B.yaml": {
        "policy.model_name": "Qwen/Qwen3-1.7B",
        "grpo.max_num_steps": 500,
        "env.reward.kind": "math",
        "env.score_truncated": False,
        "data.train.path": "agentica-org/DeepScaleR-Preview-Dataset",
        "data.validation.path": "HuggingFaceH4/MATH-500",
        "data.prompt_key": "problem",
        "data.prompt_template": "{prompt}\n\nPlease reason step by step, and put your final answer within \\boxed{}.",
        "cluster.gpus_per_node": 8,
    },
    "sft_qwen3_30b_a3b.yaml": {
        "policy.model_name": "Qwen/Qwen3-30B-A3B",
        "policy.megatron_cfg.expert_model_parallel_size": 8,
        "data.train.path": "trl-lib/Capybara",
        "data.validation.path": "trl-lib/Capybara",
        "cluster.gpus_per_node": 8,
    },
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_keep_what_decides_them(name: str) -> None:
    found = leaves(dump_resolved(load_any_config(name, check_paths=False)))
    assert {key: found[key] for key in RECIPES[name]} == RECIPES[name]


@both_algorithms
def test_every_key_is_documented_and_none_has_a_default(algorithm: str) -> None:
    schema = ALGORITHMS[algorithm].config_class
    for key in known_keys(schema):
        _, field = field_at(schema, key.split("."))
        assert field is not None
        assert field.description, key
        assert field.is_required() == (key in own_keys(schema)), key


def test_tiny_exemplar_is_the_demo() -> None:
    config = load_config("sft_tiny_moe.yaml", check_paths=False)
    assert config.data_parallel_size == config.cluster.world_size == 2
    assert config.policy.tokenizer.name == config.policy.model_name == "examples/assets/tiny_qwen3_moe"
    assert config.policy.megatron_cfg.optimizer.lr == 3e-3
    assert config.policy.megatron_cfg.moe_transformer_fields["moe_aux_loss_coeff"] == 0.01


def test_tiny_grpo_exemplar_goes_on_where_the_tiny_sft_one_ends() -> None:
    sft = load_config("sft_tiny_moe.yaml", check_paths=False)
    grpo = load_grpo_config("grpo_tiny_moe.yaml", check_paths=False)
    assert grpo.policy.model_name == f"{sft.checkpointing.checkpoint_dir}/final"
    assert sft.checkpointing.enabled
    assert (grpo.policy.init, grpo.policy.precision) == ("pretrained", sft.policy.precision)
    assert grpo.policy.max_total_sequence_length <= sft.policy.max_total_sequence_length
    assert grpo.grpo.num_prompts_per_step * grpo.grpo.num_generations_per_prompt == grpo.policy.train_global_batch_size
    assert grpo.cluster == sft.cluster


def test_tiny_dpo_exemplar_goes_on_there_too() -> None:
    sft = load_config("sft_tiny_moe.yaml", check_paths=False)
    dpo = load_dpo_config("dpo_tiny_moe.yaml", check_paths=False)
    assert dpo.policy.model_name == f"{sft.checkpointing.checkpoint_dir}/final"
    assert (dpo.policy.init, dpo.policy.precision) == ("pretrained", sft.policy.precision)
    assert dpo.policy.max_total_sequence_length == sft.policy.max_total_sequence_length
    assert dpo.cluster == sft.cluster


def test_tiny_rm_exemplar_makes_the_reward_model_of_the_tiny_grpo_exemplar() -> None:
    dpo = load_dpo_config("dpo_tiny_moe.yaml", check_paths=False)
    rm = load_any_config("rm_tiny_moe.yaml", check_paths=False)
    assert isinstance(rm, RMMasterConfig)
    assert (rm.policy.model_name, rm.cluster) == (dpo.policy.model_name, dpo.cluster)
    grpo = load_grpo_config("grpo_tiny_moe_reward_model.yaml", check_paths=False)
    assert grpo.reward_model is not None
    assert grpo.reward_model.model_name == f"{rm.checkpointing.checkpoint_dir}/final"
    assert grpo.policy.model_name == rm.policy.model_name, "so the tokenizers are the same"


def test_large_dpo_exemplar_trains_the_model_of_the_large_sft_one() -> None:
    sft, dpo = load_config("sft_qwen3_30b_a3b.yaml", check_paths=False), load_dpo_config("dpo.yaml", check_paths=False)
    assert dpo.policy.model_name == sft.policy.model_name
    assert dpo.cluster == sft.cluster
    assert dpo.policy.megatron_cfg.moe_transformer_fields == sft.policy.megatron_cfg.moe_transformer_fields
    assert dpo.policy.megatron_cfg.track_moe_metrics
    # What the file says of memory: nothing is kept beside the policy, and a microbatch has as many tokens.
    assert dpo.dpo.reference_logprobs == "precompute"
    assert dpo.policy.sequence_packing == sft.policy.sequence_packing


def test_dapo_exemplar_has_what_the_paper_adds() -> None:
    config = load_grpo_config("grpo_dapo17k.yaml", check_paths=False)
    assert config.loss_fn.ratio_clip_max > config.loss_fn.ratio_clip_min
    assert config.loss_fn.token_level_loss
    assert config.loss_fn.reference_policy_kl_penalty == 0
    assert config.grpo.use_dynamic_sampling
    assert config.grpo.reward_shaping.enabled


def test_large_exemplar_spreads_the_experts_over_the_gpus_of_a_machine() -> None:
    config = load_grpo_config("grpo_qwen3_30b_a3b.yaml", check_paths=False)
    assert config.policy.megatron_cfg.expert_model_parallel_size == config.cluster.gpus_per_node == 8
    assert config.policy.megatron_cfg.track_moe_metrics


def test_large_vllm_exemplar_divides_the_gpus_into_engines() -> None:
    config = load_grpo_config("grpo_qwen3_30b_a3b_vllm.yaml", check_paths=False)
    trainer = load_grpo_config("grpo_qwen3_30b_a3b.yaml", check_paths=False)
    assert (config.policy.model_name, config.loss_fn) == (trainer.policy.model_name, trainer.loss_fn)
    assert (config.policy.generation.backend, config.cluster.num_nodes) == ("vllm", 2)
    assert config.cluster.gpus_per_node % config.policy.generation.vllm.tensor_parallel_size == 0
    assert config.checkpointing.checkpoint_dir is not None, "weights travel through it"


def test_exemplars_of_h100_differ_in_what_they_say() -> None:
    beside = load_grpo_config("grpo_qwen3_30b_a3b_8xh100.yaml", check_paths=False)
    replaying = load_grpo_config("grpo_qwen3_30b_a3b_8xh100_r3.yaml", check_paths=False)
    apart = load_grpo_config("grpo_qwen3_30b_a3b_2x8xh100.yaml", check_paths=False)
    assert [each.policy.generation.weight_transport for each in (beside, replaying, apart)] == [
        "cuda_ipc",
        "cuda_ipc",
        "nccl",
    ]
    assert [each.policy.megatron_cfg.routing_replay for each in (beside, replaying, apart)] == [
        "none",
        "rollout",
        "none",
    ]
    assert [engines_share_gpus(each) for each in (beside, replaying, apart)] == [True, True, False]
    assert apart.cluster.num_gpus == 16
    assert apart.grpo.rollouts.is_asynchronous
    for each in (beside, replaying, apart):
        assert each.policy.generation.max_batch_size is None, "of the trainer's own engine"


def test_unset_moe_fields_stay_out() -> None:
    megatron = load_config("sft_tiny_moe.yaml", ["~policy.megatron_cfg.moe_aux_loss_coeff"], check_paths=False)
    fields = megatron.policy.megatron_cfg.moe_transformer_fields
    assert "moe_aux_loss_coeff" not in fields
    assert "moe_router_topk" not in fields
    assert "moe_per_layer_logging" not in fields
    dumped = dump_resolved(megatron)["policy"]["megatron_cfg"]
    assert "moe_router_topk" not in dumped


def test_a_moe_field_set_to_null_is_passed_on() -> None:
    config = load_config("sft_tiny_moe.yaml", ["policy.megatron_cfg.moe_z_loss_coeff=null"], check_paths=False)
    assert config.policy.megatron_cfg.moe_transformer_fields["moe_z_loss_coeff"] is None


@both_algorithms
def test_dump_holds_plain_values_only(algorithm: str) -> None:
    dumped = dump_resolved(load_any_config(BASE_EXEMPLARS[algorithm], opened(algorithm), check_paths=False))
    assert yaml.safe_load(yaml.safe_dump(dumped)) == dumped
    assert next(iter(dumped)) == algorithm


@pytest.mark.full
@both_algorithms
def test_no_dead_flags(algorithm: str) -> None:
    """Every key is read as an attribute by code outside the configuration package, or by a property of its section."""
    read = {
        name
        for path in PACKAGE.rglob("*.py")
        if "config" not in path.relative_to(PACKAGE).parts or path.stem.startswith("schema")
        for name in attributes_read(path.read_text())
    }
    # An engine takes its own section by its class.
    read |= {name for name, engine in BUILT_IN.items() if engine.config_class is not None}
    dead = [key for key in own_keys(ALGORITHMS[algorithm].config_class) if key.rpartition(".")[2] not in read]
    assert not dead, f"keys that nothing reads: {', '.join(dead)}"
    assert "moe_transformer_fields" in read


@pytest.mark.parametrize(
    "exemplar",
    ["sft_tiny_moe.yaml", "dpo_tiny_moe.yaml", "rm_tiny_moe.yaml", "grpo_tiny_moe.yaml", "sft.yaml", "grpo.yaml"],
)
@pytest.mark.parametrize(
    "override",
    [
        "LOOP.max_num_steps=1",  # the warm-up is longer
        "policy.megatron_cfg.optimizer.lr=1e-9",  # below any min_lr of its own
        "data.validation=null",
        "data.validation.path=${data.train.path}",
    ],
)
def test_a_smoke_run_is_one_override(exemplar: str, override: str) -> None:
    loop = exemplar.partition("_")[0].partition(".")[0]
    needed = opened(loop) if exemplar in BASE_OF.values() else []
    load_any_config(exemplar, [*needed, override.replace("LOOP", loop)], check_paths=False)
