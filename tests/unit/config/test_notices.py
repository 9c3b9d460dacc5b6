# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""One override each, and the run starts: what that comes to is reported in one line."""

from typing import Any

import pytest

from nemo_rl_moe.config.algorithm import algorithm_of
from nemo_rl_moe.config.files import exemplar_names, exemplars_folder, read_with_defaults
from nemo_rl_moe.config.loading import load_any_config
from nemo_rl_moe.config.notices import RATE_OF_A_CRITIC, RATES_OF_WEIGHTS, notices

OF_ALGORITHM = {
    "sft": "sft_tiny_moe.yaml",
    "dpo": "dpo_tiny_moe.yaml",
    "rm": "rm_tiny_moe.yaml",
    "grpo": "grpo_tiny_moe.yaml",
}
DECAYS = ("constant", "linear", "cosine", "inverse-square-root")
STYLE = "policy.megatron_cfg.scheduler.lr_decay_style"


def lines(algorithm: str, *overrides: str, num_steps: int = 1000) -> list[str]:
    as_long = f"{algorithm}.max_num_steps={num_steps}"
    config: Any = load_any_config(OF_ALGORITHM[algorithm], [as_long, *overrides], check_paths=False)
    return notices(config, num_steps)


# What `generate` begins with trains nothing, and validates nothing.
@pytest.mark.parametrize(
    "name", [name for name in exemplar_names() if name not in ("grpo_generate.yaml", "grpo_serve.yaml")]
)
def test_shipped_configurations_have_none(name: str) -> None:
    config: Any = load_any_config(name, check_paths=False)
    assert notices(config, algorithm_of(config).loop_of(config).max_num_steps or 10_000) == []


@pytest.mark.parametrize("decay", DECAYS)
def test_a_short_run_is_reported_that_it_only_warms_up(decay: str) -> None:
    assert lines("sft", "sft.max_num_steps=3", f"{STYLE}={decay}", num_steps=3) == [
        "the learning rate is still warming up when the run ends: 3 of the 20 steps of"
        " policy.megatron_cfg.scheduler.lr_warmup_iters, so the learning rate ends at 15% of lr"
    ]
    assert lines("sft", "sft.max_num_steps=20", f"{STYLE}={decay}", num_steps=20) == []


@pytest.mark.parametrize(
    ("algorithm", "num_steps", "line"),
    [
        ("grpo", 2, "1 ends the run after 2 steps, before grpo.max_num_steps: 10; more epochs make it longer"),
        ("sft", 1, "1 ends the run after 1 step, before sft.max_num_steps: 10; more epochs make it longer"),
        ("grpo", 10, None),
    ],
)
def test_epochs_that_end_a_run_before_its_steps_are_said(algorithm: str, num_steps: int, line: str | None) -> None:
    found = lines(algorithm, f"{algorithm}.max_num_steps=10", num_steps=num_steps)
    expected = [f"{algorithm}.max_num_epochs: {line}"] if line else []
    assert [text for text in found if "max_num_epochs" in text] == expected


def test_epochs_alone_are_no_surprise() -> None:
    assert not [text for text in lines("grpo", "grpo.max_num_steps=null", num_steps=2) if "max_num_epochs" in text]


@pytest.mark.parametrize(
    ("algorithm", "num_samples", "num_steps", "left_out"),
    [
        # 16 prompts a step: 40 fill two steps.
        ("grpo", 40, 2, ("8 of 40 prompts", "16 of them (grpo.num_prompts_per_step)", 8)),
        ("grpo", 40, 1, None),  # the run ends within the epoch
        ("grpo", 48, 3, None),
        ("grpo", 1608, 200, None),  # 8 of 1608 are less than one in a hundred
        ("sft", 200, 1, ("72 of 200 samples", "128 of them (policy.train_global_batch_size)", 72)),
        ("dpo", 100, 3, ("4 of 100 pairs", "32 of them (policy.train_global_batch_size)", 4)),
        ("rm", 100, 3, ("4 of 100 pairs", "32 of them (policy.train_global_batch_size)", 4)),
    ],
)
def test_samples_that_fill_no_step_are_counted(
    algorithm: str, num_samples: int, num_steps: int, left_out: tuple[str, str, int] | None
) -> None:
    size = {"dpo": ["policy.train_global_batch_size=32", "policy.train_micro_batch_size=16"]}.get(algorithm, [])
    config: Any = load_any_config(OF_ALGORITHM[algorithm], size, check_paths=False)
    found = [text for text in notices(config, num_steps, num_samples) if "left out" in text]
    form = "{} of each epoch are left out: a step takes {}, and the last {} fill no step"
    assert found == ([form.format(*left_out)] if left_out else [])


WARMUP = "policy.megatron_cfg.scheduler.lr_warmup_iters"


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        (["value.lr_warmup_iters=40"], "30 of the 40 steps of value.lr_warmup_iters"),
        (["ppo.policy_training_start_step=24", f"{WARMUP}=8"], f"6 of the 8 steps of {WARMUP}"),
    ],
    ids=["a critic, by its own key", "a policy that trains after its critic, in the steps that are left"],
)
def test_what_only_warms_up_is_reported(overrides: list[str], steps: str) -> None:
    config: Any = load_any_config("ppo_tiny_moe.yaml", overrides, check_paths=False)
    assert [line for line in notices(config, 30) if "warming" in line] == [
        f"the learning rate is still warming up when the run ends: {steps}, so the learning rate ends at 75% of lr"
    ]


def test_the_schedule_of_the_policy_counts_the_updates_that_it_takes() -> None:
    """Of 30 steps of two updates the critic has 24 alone; the policy's schedule ends with its twelfth update."""
    overrides = [
        "ppo.policy_training_start_step=24",
        "policy.train_global_batch_size=64",
        "policy.train_micro_batch_size=32",
    ]
    config: Any = load_any_config("ppo_tiny_moe.yaml", overrides, check_paths=False)
    ppo = algorithm_of(config)
    assert (ppo.updates_per_step(config), ppo.num_updates(config, 30), ppo.num_policy_updates(config, 30)) == (
        2,
        60,
        12,
    )
    assert ppo.num_policy_updates(config, 20) == 0
    grpo: Any = load_any_config("grpo_tiny_moe.yaml", check_paths=False)
    assert algorithm_of(grpo).num_policy_updates(grpo, 30) == algorithm_of(grpo).num_updates(grpo, 30)


def test_data_that_end_before_the_policy_trains_are_reported() -> None:
    config: Any = load_any_config("ppo_tiny_moe.yaml", ["ppo.policy_training_start_step=14"], check_paths=False)
    assert [line for line in notices(config, 7) if "never" in line] == [
        "the policy never trains: ppo.policy_training_start_step is 14, and the run has 7 steps (grpo.max_num_steps,"
        " grpo.max_num_epochs of the data)"
    ]
    assert notices(config, 30) == []


def test_a_step_of_several_updates_warms_up_by_as_many() -> None:
    two = ("policy.train_global_batch_size=64", "policy.train_micro_batch_size=32")
    assert lines("grpo", *two, num_steps=3) == []  # 6 updates, warm-up of 5
    (line,) = lines("grpo", *two, num_steps=2)
    assert "4 of the 5 steps" in line


@pytest.mark.parametrize("algorithm", OF_ALGORITHM)
def test_validation_is_switched_off_by_one_override(algorithm: str) -> None:
    assert lines(algorithm, "data.validation=null") == [
        f"data.validation is null: there is no validation; without effect: {algorithm}.val_period,"
        f" {algorithm}.val_at_start, {algorithm}.val_at_end, checkpointing.metric_name val:accuracy; the newest"
        " checkpoints are kept"
    ]
    assert lines(algorithm, "data.validation=null", "checkpointing.enabled=false") == [
        f"data.validation is null: there is no validation; without effect: {algorithm}.val_period,"
        f" {algorithm}.val_at_start, {algorithm}.val_at_end"
    ]


def test_nothing_is_reported_validation_that_nothing_asks_for() -> None:
    off = ("sft.val_period=0", "sft.val_at_start=false", "sft.val_at_end=false", "checkpointing.metric_name=train:loss")
    assert lines("sft", "data.validation=null", *off) == []


@pytest.mark.parametrize(
    ("overrides", "num_steps", "is_reported"),
    [
        (("checkpointing.save_period=20",), 200, True),
        (("checkpointing.save_period=100",), 200, False),
        (("checkpointing.save_period=75",), 74, False),  # none is saved before the end
        (("checkpointing.save_period=75",), 75, False),  # the end is validated
        (("checkpointing.save_period=75", "sft.val_at_end=false"), 75, True),
        (("sft.val_period=0",), 200, True),
        (("sft.val_period=0", "checkpointing.save_period=0"), 200, False),
        (("checkpointing.save_period=20", "checkpointing.metric_name=train:loss"), 200, False),
        (("checkpointing.save_period=20", "checkpointing.keep_top_k=null"), 200, False),
        (("checkpointing.save_period=20", "checkpointing.enabled=false"), 200, False),
    ],
)
def test_checkpoints_without_the_metric_are_reported_at_the_start(
    overrides: tuple[str, ...], num_steps: int, is_reported: bool
) -> None:
    found = lines("sft", *overrides, num_steps=num_steps)
    assert len(found) == is_reported
    assert all(line.startswith("checkpointing.save_period: ") and "val:accuracy" in line for line in found)


def test_ipo_on_sums_is_reported() -> None:
    (line,) = lines("dpo", "dpo.preference_loss_type=ipo")
    assert line.startswith("dpo.preference_average_log_probs: false compares sums of log-probabilities")
    assert lines("dpo", "dpo.preference_loss_type=ipo", "dpo.preference_average_log_probs=true") == []


@pytest.mark.parametrize("algorithm", OF_ALGORITHM)
def test_a_learning_rate_is_one_override(algorithm: str) -> None:
    config = load_any_config(OF_ALGORITHM[algorithm], ["policy.megatron_cfg.optimizer.lr=2.0e-8"], check_paths=False)
    assert config.policy.megatron_cfg.optimizer.end_lr == 2.0e-9


def test_gradients_of_many_microbatches_in_bfloat16_are_reported() -> None:
    ddp = "policy.megatron_cfg.distributed_data_parallel_config.grad_reduce_in_fp32"
    many = ("policy.precision=bfloat16", "policy.train_global_batch_size=34", "policy.train_micro_batch_size=1")
    ranks = ("cluster.cpu_workers_per_node=2",)
    (line,) = lines("sft", *many, *ranks, f"{ddp}=false")
    assert line == (
        "gradients of 17 microbatches a rank add up in bfloat16, which rounds each sum to 8 bits;"
        f" {ddp}=true adds them in float32, at 2 more bytes a parameter"
    )
    assert lines("sft", *many, *ranks, f"{ddp}=true") == []
    assert lines("sft", *many, *ranks, f"{ddp}=false", "policy.precision=float32") == []
    assert lines("sft", *many, *ranks, f"{ddp}=false", "policy.train_global_batch_size=32") == []
    packed = ("policy.sequence_packing.enabled=true", "policy.max_total_sequence_length=96", f"{ddp}=false")
    packed = (*packed, "policy.sequence_packing.train_mb_tokens=96", *many[::2], *ranks)
    (line,) = lines("sft", *packed, "policy.train_global_batch_size=130")
    assert line.startswith("gradients of up to 65 microbatches a rank add up in bfloat16")
    assert lines("sft", *packed, "policy.train_global_batch_size=128") == []


@pytest.mark.parametrize(
    ("overrides", "reported"),
    [
        (("policy.generation.top_p=0.9",), "policy.generation.top_p: 0.9: "),
        (("policy.generation.top_k=20",), "policy.generation.top_k: 20: "),
        (
            ("policy.generation.top_p=0.9", "policy.generation.top_k=20"),
            "policy.generation.top_p: 0.9 and policy.generation.top_k: 20: ",
        ),
    ],
)
def test_sampling_from_a_part_of_the_vocabulary_is_reported(overrides: tuple[str, ...], reported: str) -> None:
    (line,) = lines("grpo", *overrides)
    assert line.startswith(f"{reported}responses are sampled from the kept tokens")
    assert "by the factor 1 / train/sampling_kept_mass, and no ratio, mismatch metric or importance weight" in line
    assert lines("grpo", "policy.generation.top_k=20", "loss_fn.sampling_mask=replay") == []
    assert lines("grpo") == lines("sft") == []


def test_a_metric_that_is_nearly_a_known_one_is_reported() -> None:
    (line,) = lines("sft", "checkpointing.metric_name=val:acuracy")
    assert line == (
        "checkpointing.metric_name: val:acuracy, which only code of your own can measure; without it checkpoints are"
        " not ranked; did you mean val:accuracy?"
    )
    assert lines("sft", "checkpointing.metric_name=val:bleu") == []


def test_a_transport_to_the_trainer_itself_is_reported() -> None:
    assert lines("grpo", "policy.generation.weight_transport=gloo") == [
        "policy.generation.weight_transport: gloo has no effect: with backend megatron the trainer generates with its"
        " own weights"
    ]


@pytest.mark.parametrize("name", ["sequence_packing", "dynamic_batching"])
def test_a_microbatch_size_is_reported_if_tokens_fill_microbatches(name: str) -> None:
    other = {"sequence_packing": "dynamic_batching", "dynamic_batching": "sequence_packing"}[name]
    on = [f"policy.{name}.enabled=true", f"policy.{other}.enabled=false"]
    assert lines("sft", *on, "policy.train_micro_batch_size=4") == [
        f"policy.train_micro_batch_size: 4 has no effect: with policy.{name}.enabled true, a microbatch has as many"
        f" samples as fit into policy.{name}.train_mb_tokens"
    ]
    assert lines("sft", *on, "policy.train_micro_batch_size=1") == []


ADAPTERS = (
    "rank: 4, alpha: 8, use_rslora: false, targets: [all-linear], dropout: 0, experts: none, init: kaiming, path: null"
)
RATE = "policy.megatron_cfg.optimizer.lr"


def test_usual_rates_are_those_of_the_shipped_configurations() -> None:
    for kind, rate in RATES_OF_WEIGHTS.items():
        name = kind.__name__.removesuffix("MasterConfig").lower()
        shipped: Any = read_with_defaults(exemplars_folder() / f"{name}.yaml")
        assert shipped["policy"]["megatron_cfg"]["optimizer"]["lr"] == rate
    assert read_with_defaults(exemplars_folder() / "ppo_math_1B.yaml")["value"]["lr"] == RATE_OF_A_CRITIC


@pytest.mark.parametrize(
    ("algorithm", "rate", "proposed"),
    [
        ("sft", "1e-5", "0.0001"),
        ("sft", "2e-5", None),
        ("dpo", "5e-7", "5e-06"),
        ("dpo", "6e-7", None),
        ("rm", "2e-6", "2e-05"),
        ("grpo", "1e-6", "1e-05"),
        ("grpo", "2e-7", "2e-06"),
        ("grpo", "1e-5", None),
    ],
)
def test_adapters_with_a_rate_of_all_weights_get_a_proposal(algorithm: str, rate: str, proposed: str | None) -> None:
    about_rates = [line for line in lines(algorithm, f"policy.lora={{{ADAPTERS}}}", f"{RATE}={rate}") if RATE in line]
    assert not [line for line in lines(algorithm, f"{RATE}={rate}") if RATE in line]
    expected = (
        f"{RATE}: {float(rate):g} is usual for all weights; adapters (policy.lora) learned best at about 10 times the"
        f" rate of all weights in Schulman et al. 2025, LoRA Without Regret, which would be {proposed}"
    )
    assert about_rates == ([] if proposed is None else [expected])


def test_a_critic_with_adapters_gets_a_proposal_by_its_own_key() -> None:
    config: Any = load_any_config(
        "ppo_tiny_moe.yaml", [f"value.lora={{{ADAPTERS}}}", "value.lr=1e-5"], check_paths=False
    )
    (line,) = [line for line in notices(config, 30) if "usual" in line]
    assert line.startswith("value.lr: 1e-05 is usual for all weights; adapters (value.lora) learned best at about 10")
    assert line.endswith(", which would be 0.0001")
