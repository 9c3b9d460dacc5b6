# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What a user reads after a wrong key, type or value."""

import pytest

from nemo_rl_moe.config.loading import load_config
from nemo_rl_moe.config.renamed_keys import new_key
from tests.unit.config.conftest import Problems, about_keys

M = "policy.megatron_cfg"


REFUSED = {
    "sft.max_num_steps=ten": "got 'ten' (str), expected a whole number above 0 or null",
    "sft.max_num_steps=0": "got 0 (int), expected a whole number above 0 or null",
    "sft.max_num_steps=2.0": "got 2.0 (float), expected a whole number above 0 or null",
    "sft.seed='1'": "got '1' (str), expected a whole number from 0 to 4294967295",
    "sft.seed=true": "got true (bool), expected a whole number from 0 to 4294967295",
    "sft.val_at_start=1": "got 1 (int), expected true or false",
    "sft.val_period=null": "got null, expected a whole number from 0 up",
    "policy.max_grad_norm=true": "got true (bool), expected a number above 0 and up to 1000000000 or null",
    "policy.max_grad_norm=.nan": "got nan (float), expected a finite number above 0 and up to 1000000000 or null",
    "policy.tokenizer.name=''": "got '' (str), expected a path (~ is the home folder, ${oc.env:NAME} a variable)",
    "logger.wandb.project=2024": "got 2024 (int), expected text that is not empty",
    "policy.precision=bfloat": "got 'bfloat' (str), expected float32 or bfloat16; did you mean bfloat16?",
    f"{M}.scheduler.lr_decay_style=cosin": "got 'cosin' (str), expected one of constant, linear, cosine,"
    " inverse-square-root; did you mean cosine?",
    f"{M}.optimizer.adam_beta1=1": "got 1 (int), expected a number from 0 up and below 1",
    f"{M}.moe_router_topk=0": "got 0 (int), expected a whole number above 0",
    f"{M}.moe_aux_loss_coeff=[0.1,x]": "got [0.1, 'x'] (list), expected a number from 0 to 1000 or a list of numbers",
    f"{M}.moe_router_load_balancing_type=aux_los": "got 'aux_los' (str), expected one of aux_loss, seq_aux_loss,"
    " global_aux_loss, sinkhorn, quantile_balancing, none or a list of these; did you mean aux_loss?",
    f"{M}.activation_checkpointing=moee": "got 'moee' (str), expected one of none, full, moe; did you mean moe?",
    f"{M}.track_moe_metric=true": f"unknown key; did you mean {M}.track_moe_metrics?",
    "policy.track_moe_metrics=true": f"unknown key; did you mean {M}.track_moe_metrics?",
    "data=3": "got 3 (int), expected a section with the keys on_bad_line, load_timeout_s, chat_template_kwargs, tools,"
    " image_key, image_root, max_image_pixels, train, validation, shuffle, messages_key, prompt_key, completion_key,"
    " system_key",
    "~policy.init": "missing; expected random or pretrained",
}


FORMS = "expected section.key=value, +section.key=value or ~section.key"
OF_CLUSTER = (
    *("gpus_per_node", "cpu_workers_per_node", "worker_start_timeout_s", "worker_call_timeout_s"),
    *("max_restarts", "network_interface", "roles"),
)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        *about_keys(REFUSED),
        ("+wibble.zzz=1", "wibble: unknown key; allowed here: checkpointing, policy, logger, cluster, data, sft"),
        ("~policy.inti", "~policy.inti: no such key; did you mean policy.init?"),
        ("sft", f"override 'sft': {FORMS}"),
        ("sft..seed=1", f"override 'sft..seed=1': {FORMS}"),
    ],
)
def test_one_wrong_input_gives_its_line(problems_of: Problems, override: str, line: str) -> None:
    assert problems_of(override) == [line]


@pytest.mark.parametrize(
    ("override", "beginnings"),
    [
        ("+sft.zzz=1", ["sft.zzz: unknown key; allowed here: max_num_epochs, max_num_steps,"]),
        ("sft.seed.x=1", ["sft.seed.x: unknown key; did you mean"]),
        ("cluster={num_nodes: 1}", [f"cluster.{key}: missing" for key in OF_CLUSTER]),
    ],
)
def test_lines_of_wrong_keys_begin_with_them(problems_of: Problems, override: str, beginnings: list[str]) -> None:
    for problem, beginning in zip(problems_of(override), beginnings, strict=True):
        assert problem.startswith(beginning)


def test_bad_yaml_in_an_override(problems_of: Problems) -> None:
    (problem,) = problems_of("data.train={path: x")
    assert problem.startswith("data.train: '{path: x' is not valid YAML: ")
    assert "\n" not in problem


def test_every_problem_is_reported_at_once(problems_of: Problems) -> None:
    problems = problems_of(
        "sft.max_num_steps=ten",
        f"{M}.track_moe_metric=true",
        "policy.tokenizer.name=${policy.modle_name}",
        "logger.log_dir=${oc.env:NO_SUCH_VARIABLE}",
        "cluster.cpu_workers_per_node=3",
        f"{M}.optimizer.min_lr=1",
        "oops",
    )
    keys = [problem.split(":")[0] for problem in problems]
    assert set(keys) == {
        "sft.max_num_steps",
        f"{M}.track_moe_metric",
        "policy.tokenizer.name",
        "logger.log_dir",
        "policy.train_global_batch_size",
        f"{M}.optimizer.min_lr",
        "override 'oops'",
    }
    assert len(keys) == 7
    assert all("\n" not in problem for problem in problems)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("policy.max_grad_norm=1e-3", 1e-3),
        ("policy.max_grad_norm=1E5", 1e5),
        ("policy.max_grad_norm=2", 2.0),
        ("policy.max_grad_norm=null", None),
    ],
)
def test_numbers_as_people_write_them(override: str, expected: float | None) -> None:
    value = load_config("sft_tiny_moe.yaml", [override], check_paths=False).policy.max_grad_norm
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("text", "meaning"), [("true", "full"), ("false", "none"), ("moe", "moe"), ("none", "none"), ("full", "full")]
)
def test_activation_checkpointing_takes_booleans_too(text: str, meaning: str) -> None:
    config = load_config("sft_tiny_moe.yaml", [f"{M}.activation_checkpointing={text}"], check_paths=False)
    assert config.policy.megatron_cfg.activation_checkpointing == meaning


def test_configuration_is_frozen() -> None:
    config = load_config("sft_tiny_moe.yaml", check_paths=False)
    with pytest.raises(ValueError, match="frozen"):
        config.sft.seed = 3


def test_a_renamed_key_names_the_new_one() -> None:
    assert new_key("logger.expert_load_pictures.every_steps") == "logger.expert_load_plots.every_steps"  # older name
    assert new_key("policy.megatron_cfg.routing_tape") == "policy.megatron_cfg.capture_routing"  # older name
    assert new_key("logger.wandb") is None
