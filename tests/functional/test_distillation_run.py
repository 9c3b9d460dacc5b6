# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs of distillation: the policy comes to its teacher, goes on to the bit, and layouts have the same numbers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from tests.functional import grpo_runs, sft_runs
from tests.functional.named_runs import NamedRuns
from tests.functional.test_resume import weights_of
from tests.support.golden_runs import make_moe_teacher

pytestmark = pytest.mark.shared_ray

EXEMPLAR = sft_runs.REPOSITORY_ROOT / "examples/configs/distillation_tiny_moe.yaml"
NUM_STEPS, SAVED_AT, K = 6, 3, 8
TEACHER = "distillation.teachers.teacher"
TP2 = {
    f"{TEACHER}.megatron_cfg.tensor_model_parallel_size": 2,
    f"{TEACHER}.megatron_cfg.sequence_parallel": True,
    "cluster.roles.teacher.cpu_workers_per_node": 2,
}
POLICY_TP2 = {
    "policy.megatron_cfg.tensor_model_parallel_size": 2,
    "policy.megatron_cfg.sequence_parallel": True,
    "cluster.cpu_workers_per_node": 2,
}
# Adam without it makes whole steps of gradients that are rounding, after which other tokens are sampled.
EVEN_STEPS = {"policy.megatron_cfg.optimizer.adam_eps": 1e-2}
PACKED = {"policy.sequence_packing.enabled": True, "policy.sequence_packing.train_mb_tokens": 128}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> NamedRuns:
    """From random weights, with a teacher of the same shape; with one run that was never stopped."""
    folder = tmp_path_factory.mktemp("distillation")
    settings = grpo_runs.settings(
        folder,
        grpo_runs.make_prompts(folder / "data", 12),
        distillation__topk_logits_k=K,
        distillation__teachers__teacher__model_name=make_moe_teacher(folder / "teacher", sft_runs.MODEL),
        distillation__teachers__teacher__logprob_batch_size=4,
        grpo__num_generations_per_prompt=4,
        grpo__max_num_epochs=6,
        policy__generation__max_new_tokens=6,
        # An auxiliary loss is one of each microbatch, which layouts divide in different ways.
        policy__megatron_cfg__moe_aux_loss_coeff=0.0,
        policy__megatron_cfg__optimizer__lr=3e-3,
        policy__megatron_cfg__optimizer__min_lr=3e-3,
        data__validation=None,
        checkpointing__save_period=SAVED_AT,
        checkpointing__metric_name=None,
        checkpointing__keep_top_k=None,
        cluster__cpu_workers_per_node=1,
        **sft_runs.only_jsonl(),
    )
    runs = NamedRuns(folder, ("distillation", "--config", EXEMPLAR), settings, "grpo", NUM_STEPS)
    runs("whole")
    return runs


@pytest.fixture(scope="module")
def expected(runs: NamedRuns) -> list[Mapping[str, float]]:
    """Steps of one worker, whose updates are as even as its gradients."""
    runs("even", 2, EVEN_STEPS)
    return runs.steps("even")


def test_the_policy_comes_to_its_teacher(runs: NamedRuns) -> None:
    steps = runs.steps("whole")
    divergences = [metrics["train/teacher_kl"] for metrics in steps]
    assert len(steps) == NUM_STEPS
    assert divergences[0] > 0.3
    assert divergences[-1] < 0.7 * divergences[0], divergences
    for metrics in steps:
        assert metrics["train/loss"] == pytest.approx(metrics["train/teacher_kl"], rel=1e-5)
        assert metrics["train/distillation/share_with_teacher"] == 1
        assert 0 < metrics["train/teacher_candidate_mass"] <= 1
        # An id and a number of 4 bytes for each candidate of each token.
        assert metrics["train/distillation/bytes_to_teachers"] == metrics["train/distillation/bytes_from_teachers"]
        assert metrics["train/distillation/bytes_to_teachers"] % (16 * K * 4) == 0
        assert metrics["train/token_mult_prob_error"] == pytest.approx(1, abs=1e-5)
        assert "timing/teachers/seconds" in metrics


@pytest.mark.full
def test_it_goes_on_to_the_last_bit(runs: NamedRuns) -> None:
    runs("stopped", SAVED_AT)
    assert f"step_{SAVED_AT}: {SAVED_AT} of {NUM_STEPS} steps are done" in runs("stopped")
    assert runs.learned("stopped") == runs.learned("whole")
    assert weights_of(runs.checkpoints("stopped") / "final") == weights_of(runs.checkpoints("whole") / "final")


@pytest.mark.full
def test_another_teacher_is_refused_on_resume(runs: NamedRuns) -> None:
    another = make_moe_teacher(runs.folder / "another", sft_runs.MODEL, seed=4)
    refused = runs.start("whole", NUM_STEPS + 1, {f"{TEACHER}.model_name": another}, exit_code=2)
    assert f"{TEACHER}.model_name: got {another}" in refused.stderr
    assert "the policy would learn from another teacher" in refused.stderr


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("tensor parallel teacher", TP2),
        ("tensor parallel policy", POLICY_TP2),
        ("packed", PACKED),
        ("microbatches", {"policy.train_micro_batch_size": 2, f"{TEACHER}.logprob_batch_size": 3}),
        ("chunks", {"policy.logprob_chunk_size": 5}),
    ],
)
def test_another_layout_has_the_same_numbers(
    name: str, changes: Mapping[str, Any], runs: NamedRuns, expected: list[Mapping[str, float]]
) -> None:
    runs(name, 2, {**EVEN_STEPS, **changes})
    found = runs.steps(name)
    for key in ("teacher_kl", "grad_norm", "teacher_candidate_mass", "policy_candidate_mass"):
        numbers = ([step[f"train/{key}"] for step in steps] for steps in (found, expected))
        np.testing.assert_allclose(*numbers, rtol=2e-3, err_msg=key)


@pytest.mark.full
@pytest.mark.parametrize(
    "changes",
    [
        {"distillation.topk_logits_k": None},
        {"distillation.topk_ids": "teacher", "distillation.kl_type": "forward"},
        {"distillation.kl_type": "jensen_shannon"},
    ],
)
def test_other_divergences_fall_too(changes: Mapping[str, Any], runs: NamedRuns) -> None:
    name = "-".join(map(str, changes.values()))
    runs(name, NUM_STEPS, changes)
    divergences = [metrics["train/teacher_kl"] for metrics in runs.steps(name)]
    assert divergences[-1] < 0.8 * divergences[0], divergences


def test_a_teacher_with_another_vocabulary_is_refused_in_one_line(runs: NamedRuns) -> None:
    other = runs.folder / "other"
    make_moe_teacher(other, sft_runs.MODEL)
    path = other / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    first, second, *_ = vocabulary
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(content))
    refused = runs.start("refused", 1, {f"{TEACHER}.model_name": other}, exit_code=2)
    (line,) = refused.stderr.splitlines()
    assert line.startswith(f"error: {TEACHER}.model_name: got {other}, which has another vocabulary than ")
    assert line.endswith("; expected a model with the policy's tokenizer")
    assert "starting Ray" not in refused.stdout


@pytest.mark.full
def test_a_policy_that_begins_as_its_teacher_has_nothing_to_learn_and_the_same_routes(runs: NamedRuns) -> None:
    teacher = runs.folder / "teacher"
    changes = {
        "policy.model_name": teacher,
        "policy.init": "pretrained",
        "policy.megatron_cfg.capture_routing": True,
        "policy.megatron_cfg.routing_measurements.every_n_steps": 1,
        "policy.megatron_cfg.routing_measurements.share_of_tokens": 1.0,
        "policy.megatron_cfg.moe_aux_loss_coeff": 1.0,  # moves it away
    }
    runs("same", 2, changes)
    first, second = runs.steps("same")
    assert abs(first["train/teacher_kl"]) < 1e-5
    assert second["train/teacher_kl"] > 10 * abs(first["train/teacher_kl"])
    for unit in ("rows", "tokens"):
        key = f"train/moe/teacher_routes/{unit}_differing_from_teacher"
        assert first[key] == 0
        assert 0 < second[key] <= 1


@pytest.mark.full
def test_routes_of_another_teacher_differ_and_one_of_another_shape_is_not_compared(runs: NamedRuns) -> None:
    captured = {
        "policy.megatron_cfg.capture_routing": True,
        "policy.megatron_cfg.routing_measurements.every_n_steps": 2,
    }
    runs("routes", 2, captured)
    first, second = runs.steps("routes")
    key = "train/moe/teacher_routes/rows_differing_from_teacher"
    assert key not in first
    assert second[key] > 0.5
    larger = make_moe_teacher(runs.folder / "larger", sft_runs.MODEL, num_experts=16)
    runs("another shape", 2, captured | {f"{TEACHER}.model_name": larger})
    assert not [name for name in runs.steps("another shape")[1] if "teacher_routes" in name]


@pytest.mark.full
def test_under_replay_policy_and_candidates_are_those_of_the_rollouts_experts(runs: NamedRuns) -> None:
    replayed = {"policy.megatron_cfg.capture_routing": True, "policy.megatron_cfg.routing_replay": "rollout"}
    runs("replay", 2, replayed)
    for found, expected in zip(runs.steps("replay"), runs.steps("whole")[:2], strict=True):
        assert found["train/teacher_kl"] == pytest.approx(expected["train/teacher_kl"], rel=1e-3)
        assert found["train/policy_candidate_mass"] == pytest.approx(expected["train/policy_candidate_mass"], rel=1e-4)
        assert found["train/token_mult_prob_error"] == pytest.approx(1, abs=1e-5)


def given(runs: NamedRuns, **keys: str) -> dict[str, Any]:
    """Settings of a run on responses of the records, with further keys of each."""
    path = runs.folder / "given.jsonl"
    records = [
        {"prompt": f"{number}+{number}=", "answer": str(2 * number), "response": f"{number}{number}", "metadata": {}}
        for number in range(10, 26)
    ]
    for number, record in enumerate(records):
        record |= {key: value for key, value in keys.items() if number % 2}
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return {
        "distillation.responses": "given",
        "distillation.response_key": "response",
        "grpo.num_prompts_per_step": 16,
        "grpo.num_generations_per_prompt": 1,
        "grpo.adv_estimator.name": "reinforce",
        "grpo.adv_estimator.normalize_rewards": False,
        "policy.megatron_cfg.capture_routing": False,
        "data.train.path": path,
    }


@pytest.mark.full
def test_given_responses_are_learned_from_as_the_teacher_sees_them(runs: NamedRuns) -> None:
    runs("given", NUM_STEPS, given(runs))
    steps = runs.steps("given")
    assert steps[-1]["train/teacher_kl"] < 0.8 * steps[0]["train/teacher_kl"]
    for metrics in steps:
        assert metrics["train/num_valid_tokens"] == 16 * 5, "four digits and the end"
        assert metrics["train/loss"] == pytest.approx(metrics["train/teacher_kl"], rel=1e-5)
        assert not {"train/reward", "train/token_mult_prob_error", "timing/generation/seconds"} & metrics.keys()
    runs("stopped given", 3, given(runs))
    runs("stopped given", NUM_STEPS, given(runs))
    assert runs.learned("stopped given") == runs.learned("given")


@pytest.mark.full
def test_their_likelihood_is_a_component_of_its_own(runs: NamedRuns) -> None:
    """Half of the records name a teacher: their divergence is a mean over their tokens, the likelihood over all."""
    weights = {"distillation.cross_entropy_weight": 2.0, "distillation.teacher_key": "by"}
    runs("likelihood", NUM_STEPS, given(runs, by="teacher") | weights)
    steps = runs.steps("likelihood")
    for metrics in steps:
        parts = metrics["train/teacher_kl"] + 2 * metrics["train/cross_entropy"]
        assert metrics["train/loss"] == pytest.approx(parts, rel=1e-5)
        assert metrics["train/distillation/share_with_teacher"] == 0.5
    assert steps[-1]["train/cross_entropy"] < steps[0]["train/cross_entropy"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"distillation.response_key": "reply"}, "error: 16 records without a response, expected a text under 'reply'"),
        ({"distillation.teacher_key": "by"}, "got 'teachr', expected one of teacher (distillation.teachers); did you"),
        ({"distillation.teacher_key": "name"}, "error: no record has the key 'name' (distillation.teacher_key), so"),
    ],
)
def test_records_without_what_is_asked_of_them_end_before_ray(changes: Any, line: str, runs: NamedRuns) -> None:
    refused = runs.start("refused records", 1, given(runs, by="teachr") | changes, exit_code=2)
    assert line in refused.stderr
    assert "starting 1 worker" not in refused.stdout


@pytest.mark.full
def test_teachers_by_environment_score_their_own_responses(runs: NamedRuns) -> None:
    second = make_moe_teacher(runs.folder / "second", sft_runs.MODEL, seed=5)
    changes = {
        "+env.mixture.sums": "{weight: 1.0}",
        "+env.mixture.words": "{weight: 1.0}",
        "+distillation.teachers.writer": f"{{model_name: {second}, adapter: null, logprob_batch_size: 4,"
        f' megatron_cfg: "${{{TEACHER}.megatron_cfg}}"}}',
        "+cluster.roles.writer": "{cpu_workers_per_node: 1}",
        "distillation.teacher_by_environment": "{sums: teacher, words: writer}",
        "+data.environments.sums": "{}",
        "+data.environments.words": "{}",
    }
    runs("two teachers", 2, changes)
    for metrics in runs.steps("two teachers"):
        assert metrics["train/distillation/share_with_teacher"] == 1
        assert metrics["train/env/sums/share"] == metrics["train/env/words/share"] == 0.5


def write_adapter(folder: Path, base: Path) -> Path:
    """Write an adapter of peft on the attention, with random values that show."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj"], init_lora_weights=False)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    model.save_pretrained(folder)
    return folder


@pytest.mark.full
def test_a_teacher_computes_with_its_adapter(runs: NamedRuns) -> None:
    peft, base = pytest.importorskip("peft"), runs.folder / "teacher"
    adapter, merged = write_adapter(runs.folder / "adapter", base), runs.folder / "merged teacher"
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(adapter))
    make_moe_teacher(merged, sft_runs.MODEL)  # its tokenizer
    model.merge_and_unload().save_pretrained(merged)
    runs("merged", 2, {**EVEN_STEPS, f"{TEACHER}.model_name": merged})
    expected = [metrics["train/teacher_kl"] for metrics in runs.steps("merged")]
    for name, changes in {"adapted": {}, "adapted, tensor parallel": TP2}.items():
        runs(name, 2, {**EVEN_STEPS, **changes, f"{TEACHER}.adapter": adapter})
        assert [metrics["train/teacher_kl"] for metrics in runs.steps(name)] == pytest.approx(expected, rel=1e-4)
    whole = [metrics["train/teacher_kl"] for metrics in runs.steps("whole")]
    assert expected[0] != pytest.approx(whole[0], rel=1e-2)


def test_an_adapter_that_is_not_the_teacher_s_ends_before_workers(runs: NamedRuns) -> None:
    other = make_moe_teacher(runs.folder / "wide", sft_runs.MODEL, hidden_size=64)
    of_another = write_adapter(runs.folder / "adapter of another", other)
    for folder, said in {
        runs.folder / "nowhere": "nowhere not found",
        runs.folder / "teacher": "holds no adapter: there is no adapter_config.json",
        of_another: "factors in adapter_model.safetensors belong to another base than",
    }.items():
        refused = runs.start("refused adapter", 1, {f"{TEACHER}.adapter": folder}, exit_code=2)
        assert refused.stderr.startswith(f"error: {TEACHER}.adapter: {folder}")
        assert said in refused.stderr
        assert "starting 1 worker" not in refused.stdout
