# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs of PPO: the critic learns the returns, both models go on to the bit, and another layout has the same numbers."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.functional import grpo_runs, sft_runs
from tests.functional.named_runs import NamedRuns
from tests.functional.test_lora_run import LORA, tensors
from tests.functional.test_resume import weights_of

pytestmark = pytest.mark.shared_ray

EXEMPLAR = sft_runs.REPOSITORY_ROOT / "examples/configs/ppo_tiny_moe.yaml"
NUM_STEPS, SAVED_AT = 4, 2
CRITIC_ALONE = 1
TP2 = {"value.megatron_cfg.tensor_model_parallel_size": 2, "value.megatron_cfg.sequence_parallel": True}
# Adam without it makes whole steps of gradients that are rounding, after which other tokens are sampled.
EVEN_STEPS = {"policy.megatron_cfg.optimizer.adam_eps": 1e-2}
FROM_THE_FIRST_STEP = {"ppo.policy_training_start_step": 0}
ADAPTERS = {"value.lora": LORA}
BOTH = {**ADAPTERS, "policy.lora": LORA, "policy.megatron_cfg.optimizer.lr": 0.01}
PACKED = {"policy.sequence_packing.enabled": True, "policy.sequence_packing.train_mb_tokens": 128}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> NamedRuns:
    """Two turns a trajectory, the first of them rewarded by its digits; with one run that was never stopped."""
    folder = tmp_path_factory.mktemp("ppo")
    # An auxiliary loss is one of each microbatch, which layouts divide in different ways.
    critic = sft_runs.make_model_folder(folder / "critic", router_aux_loss_coef=0.0)
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(critic)).save_pretrained(critic)
    settings = grpo_runs.settings(
        folder,
        grpo_runs.make_prompts(folder / "data", 12),
        value__model_name=critic,
        value__logprob_batch_size=4,
        value__lr=3e-3,
        value_loss_fn__cliprange=0.5,
        ppo__policy_training_start_step=CRITIC_ALONE,
        ppo__gae_lambda_value=1.0,
        env__driver__kind="function",
        env__driver__function="tests.functional.test_turn_credit_run:rewarded",
        policy__generation__max_new_tokens=6,
        policy__megatron_cfg__moe_aux_loss_coeff=0.0,
        grpo__max_num_epochs=4,
        data__validation=None,
        checkpointing__save_period=SAVED_AT,
        checkpointing__metric_name=None,
        checkpointing__keep_top_k=None,
        cluster__cpu_workers_per_node=1,
        **sft_runs.only_jsonl(),
    )
    runs = NamedRuns(folder, ("ppo", "--config", EXEMPLAR), settings, "grpo", NUM_STEPS)
    runs("whole")
    return runs


@pytest.fixture(scope="module")
def expected(runs: NamedRuns) -> list[Mapping[str, float]]:
    """Steps of one worker, whose updates are as even as its gradients."""
    runs("even", 2, EVEN_STEPS)
    return runs.steps("even")


def test_the_critic_learns_and_the_policy_after_it(runs: NamedRuns) -> None:
    steps = runs.steps("whole")
    assert len(steps) == NUM_STEPS
    for number, metrics in enumerate(steps, start=1):
        assert ("train/loss" in metrics) == (number > CRITIC_ALONE)
        assert metrics["train/critic/grad_norm"] > 0
        assert math.isfinite(metrics["train/critic/explained_variance"])
        assert 0 <= metrics["train/critic/clipped_fraction"] <= 1
        assert metrics["train/critic/returns/max"] <= 1 + 2 * 6 / 8 + 1e-6, "returns without values in them"
    assert steps[-1]["train/critic/value_loss"] < steps[0]["train/critic/value_loss"]
    assert steps[-1]["train/grad_norm"] > 0
    assert steps[-1]["train/token_mult_prob_error"] == pytest.approx(1, abs=1e-5)
    assert {path.name for path in runs.checkpoints("whole").iterdir()} >= {"final", "final_critic", f"step_{NUM_STEPS}"}


@pytest.mark.slow
def test_the_policy_replays_the_sampling_mask_and_the_critic_has_no_part_in_it(runs: NamedRuns) -> None:
    cut = {"policy.generation.top_p": 0.8, "policy.generation.top_k": 64, "loss_fn.sampling_mask": "replay"}
    runs("cut", CRITIC_ALONE + 1, cut)
    steps = runs.steps("cut")
    assert all(0 < metrics["train/sampling_kept_mass"] < 0.95 for metrics in steps)
    assert steps[-1]["train/token_mult_prob_error"] < 1 + 1e-5
    assert all(math.isfinite(metrics["train/critic/value_loss"]) for metrics in steps)


@pytest.mark.full
def test_both_models_go_on_to_the_last_bit(runs: NamedRuns) -> None:
    runs("stopped", SAVED_AT)
    assert f"step_{SAVED_AT}: {SAVED_AT} of {NUM_STEPS} steps are done" in runs("stopped")
    assert runs.learned("stopped") == runs.learned("whole")
    for final in ("final", "final_critic"):
        assert weights_of(runs.checkpoints("stopped") / final) == weights_of(runs.checkpoints("whole") / final)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("tensor parallel", {**TP2, "cluster.roles.critic.cpu_workers_per_node": 2}),
        ("packed", PACKED),
        ("microbatches", {"value.logprob_batch_size": 2, "cluster.roles.critic.cpu_workers_per_node": 2}),
    ],
)
def test_another_layout_of_the_critic_has_the_same_numbers(
    name: str, changes: Mapping[str, Any], runs: NamedRuns, expected: list[Mapping[str, float]]
) -> None:
    runs(name, 2, {**EVEN_STEPS, **changes})
    for found, alone in zip(runs.steps(name), expected, strict=True):
        for key in ("value_loss", "grad_norm", "explained_variance", "values/mean", "returns/max"):
            name_of_metric = f"train/critic/{key}"
            assert found[name_of_metric] == pytest.approx(alone[name_of_metric], rel=1e-4, abs=1e-5), key
    assert runs.steps(name)[1]["train/grad_norm"] == pytest.approx(expected[1]["train/grad_norm"], rel=1e-4)


@pytest.mark.full
@pytest.mark.parametrize(("name", "changes"), [("adapters", ADAPTERS), ("adapters of both", BOTH)])
def test_adapters_of_a_critic_learn_and_go_on_to_the_last_bit(
    name: str, changes: Mapping[str, Any], runs: NamedRuns
) -> None:
    runs(name, NUM_STEPS, changes)
    steps, stopped = runs.steps(name), f"{name}, stopped"
    assert steps[-1]["train/critic/value_loss"] < steps[0]["train/critic/value_loss"]
    assert all(metrics["train/critic/grad_norm"] > 0 for metrics in steps)
    runs(stopped, SAVED_AT, changes)
    assert f"step_{SAVED_AT}: {SAVED_AT} of {NUM_STEPS} steps are done" in runs(stopped, None, changes)
    assert runs.learned(stopped) == runs.learned(name)
    for final in ("final", "final_critic", "final_critic/adapter"):
        assert weights_of(runs.checkpoints(stopped) / final) == weights_of(runs.checkpoints(name) / final)
    assert (runs.checkpoints(name) / "final/adapter").exists() == ("policy.lora" in changes)
    assert_merged(runs.folder / "critic", runs.checkpoints(name) / "final_critic")


def assert_merged(base: Path, final: Path) -> None:
    """The final weights are those of peft on the base, which adapters of all layers have moved."""
    peft = pytest.importorskip("peft")
    merged, ids = AutoModelForCausalLM.from_pretrained(final, dtype=torch.float32), torch.arange(2, 22).view(2, 10)
    adapted = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), str(final / "adapter")
    )
    with torch.no_grad():
        torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, atol=1e-5, rtol=0)
    frozen, found = tensors(base), tensors(final)
    same = {name for name, tensor in frozen.items() if torch.equal(tensor, found[name])}
    assert {name for name in frozen if not name.endswith("_proj.weight")} == same


@pytest.mark.full
def test_a_critic_begins_with_the_adapter_of_a_checkpoint(runs: NamedRuns) -> None:
    runs("adapters", NUM_STEPS, ADAPTERS)
    folder = runs.checkpoints("adapters")
    values, first_values = {}, "train/critic/values/mean"
    for name, path in {"checkpoint": folder / f"step_{NUM_STEPS}/critic", "final": folder / "final_critic"}.items():
        runs(f"from {name}", 1, {**FROM_THE_FIRST_STEP, "value.lora": {**LORA, "path": str(path)}})
        values[name] = runs.steps(f"from {name}")[0][first_values]
    runs("from merged", 1, {**FROM_THE_FIRST_STEP, "value.model_name": folder / "final_critic"})
    assert values["final"] == pytest.approx(runs.steps("from merged")[0][first_values], abs=1e-5)
    assert values["checkpoint"] != pytest.approx(values["final"], abs=1e-3), "the checkpoint has the head too"
    wrong = {"value.lora": {**LORA, "rank": 8, "path": str(folder / "final_critic")}}
    assert runs.start("wrong", None, wrong, 2).stderr.startswith(
        "error: value.lora.rank: got 8, expected 4, as in value.lora.path "
    )


@pytest.mark.full
def test_a_resumed_critic_keeps_its_adapters_and_their_base(runs: NamedRuns) -> None:
    runs("kept", SAVED_AT, ADAPTERS)
    refused = runs.start("kept", None, {"value.lora": {**LORA, "rank": 8}}, 2).stderr
    assert "value.lora.rank: got 8, but " in refused
    assert "the checkpoint's adapters have other settings" in refused
    other = sft_runs.make_model_folder(runs.folder / "other")
    torch.manual_seed(4)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(other)).save_pretrained(other)
    refused = runs.start("kept", None, {**ADAPTERS, "value.model_name": other}, 2).stderr
    assert f"value.model_name: got {other}" in refused
    assert "the checkpoint's adapters belong to another base" in refused
