# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs of GRPO as a user starts them, and everything that they leave behind."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_rl_moe.algorithms.losses.position_sums import QUARTERS
from nemo_rl_moe.config.schema_run import GENERATION_ROLE
from nemo_rl_moe.routing.agreement.row_kinds import Row
from nemo_rl_moe.runs.folder.routing import ANOMALIES_FILE_NAME, read_routing
from tests.functional import grpo_runs, sft_runs
from tests.support.loggers import MetricHistory, read_jsonl, read_tensorboard, read_wandb_offline

pytestmark = pytest.mark.shared_ray

NUM_STEPS = 3
MEASURED = {
    "policy__megatron_cfg__routing_measurements__every_n_steps": 2,
    "policy__megatron_cfg__routing_measurements__share_of_tokens": 0.5,
}
FLOAT32_EPSILON = 2.0**-23
REWARD_KEYS = {"reward", "reward_std", "accuracy", "frac_zero_std_groups"}
LENGTH_KEYS = {"mean_gen_tokens_per_sample", "max_gen_tokens_per_sample", "truncation_rate"}
ADVANTAGE_KEYS = {f"advantages/{kind}" for kind in ("mean", "min", "max")}
FAULT_KEYS = {"env/failed_share", *(f"env/num_{kind}" for kind in ("errors", "timeouts", "died"))}
LOSS_KEYS = {
    *(f"by_position/{quarter}/sampling_logp_difference" for quarter in QUARTERS),
    "approx_entropy",
    "clip_fraction_high",
    "clip_fraction_low",
    "gen_kl_error",
    "policy_kl_error",
    "js_divergence_error",
    "sampling_importance_ratio",
    "sampling_importance_ratio_min",
    "sampling_importance_ratio_max",
    "sampling_logp_difference",
    "sampling_logp_difference_max",
    "grad_norm",
    "loss",
    "lr",
    "num_microbatches",
    "num_tokens",
    "num_valid_tokens",
    "skipped_updates",
    "probs_ratio",
    "probs_ratio_clamped",
    "probs_ratio_max",
    "probs_ratio_min",
    "token_mult_prob_error",
}


@dataclass(frozen=True)
class FinishedRun:
    """A run that ended, and where it wrote.

    Attributes:
        folder: Holds `logs`.
        output: Standard output.
    """

    folder: Path
    output: str

    @property
    def run_folder(self) -> Path:
        """The numbered folder."""
        return sft_runs.only_run_folder(self.folder)

    def history(self) -> MetricHistory:
        """Every metric as `metrics.jsonl` holds it."""
        return read_jsonl(self.run_folder / "metrics.jsonl")

    def values(self, key: str) -> list[float]:
        """One metric over the steps."""
        return [value for _, value in self.history()[key]]

    def samples(self) -> list[dict[str, Any]]:
        """Return the generated responses."""
        return sft_runs.samples_of(self.run_folder)


def finished_run(folder: Path, data: Path, **changes: Any) -> FinishedRun:
    """Runs to a good end."""
    (folder / "work").mkdir(parents=True)
    done = grpo_runs.run_here(grpo_runs.settings(folder, data, **changes), folder / "work")
    assert done.stderr == ""
    assert list((folder / "work").iterdir()) == []
    return FinishedRun(folder, done.stdout)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return grpo_runs.make_prompts(tmp_path_factory.mktemp("data"), 40)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, data: Path) -> FinishedRun:
    # A new store of MLflow takes ten seconds; the run of supervised fine-tuning has one.
    return finished_run(tmp_path_factory.mktemp("grpo"), data, logger__mlflow_enabled=False, **MEASURED)


def test_logs_reward_beside_routing_by_the_field_s_names(run: FinishedRun) -> None:
    keys = {key.removeprefix("train/") for key in run.history() if key.startswith("train/")}
    routing = {key for key in keys if key.startswith(("moe/", "moe_expert_utilization/"))}
    of_groups = {"env/num_groups_left_out", "truncation_rate_unscored"}
    assert keys - routing == REWARD_KEYS | LENGTH_KEYS | ADVANTAGE_KEYS | FAULT_KEYS | LOSS_KEYS | of_groups
    assert {"moe/load_balancing_loss", "moe/cv_mean", "moe/max_overload_factor"} <= routing
    validation = {key.removeprefix("val/") for key in run.history() if key.startswith("val/")}
    assert validation == {"reward", "reward_std", "accuracy", "pass_at_2"} | LENGTH_KEYS | FAULT_KEYS
    timing = {key.split("/")[1] for key in run.history() if key.startswith("timing/")}
    # One update a step: the pass that would only give the ratio 1 is left out.
    assert timing == {"generation", "rewards", "train", "step", "validation", "checkpoint", "routing_measurements"}


def test_routing_is_measured_every_second_step(run: FinishedRun) -> None:
    """The trainer's own engine computes as training does, but for the rounding of float32."""
    history = run.history()
    measured = {key: history[key] for key in history if "/routing_" in key and "routing_confidence" not in key}
    families = {key.removeprefix("train/moe/").split("/")[0] for key in measured if not key.startswith("timing/")}
    assert families == {"routing_split", "routing_noise", "routing_drift"}
    assert {step for values in measured.values() for step, _ in values} == {2}
    value = {key.removeprefix("train/moe/"): values[0][1] for key, values in measured.items()}
    assert 16 * 12 / 2 <= value["routing_split/tokens"] < 16 * 12 * 2 / 3
    for part in ("total", "numerics", "routing", "in_force"):
        assert value[f"routing_split/mean_abs_{part}"] < 1e-6
    assert value["routing_split/mean_abs_numerics"] > 0
    assert value["routing_noise/mean_abs_trainer"] < 1e-6
    assert value["routing_noise/rows_differing_trainer"] < 0.01
    drift = value["routing_drift/rows_differing_of_step"]
    assert 0 < drift <= value["routing_drift/tokens_differing_of_step"] < 1
    (_, num_bytes), *_ = run.history()["train/moe/routing/captured_bytes"]
    (_, num_rows), *_ = run.history()["train/moe/routing/rows_expected"]
    assert num_bytes == num_rows * 2 * 2


def test_the_capture_of_each_step_is_kept_layer_by_layer(run: FinishedRun) -> None:
    kept = read_routing(run.run_folder)
    expected, usable, same = (kept.rows[..., kind].sum(1) for kind in (Row.EXPECTED, Row.USABLE, Row.LIVE_SAME))
    assert kept.steps.tolist() == list(range(1, len(kept.steps) + 1))
    assert expected.tolist() == run.values("train/moe/routing/rows_expected")
    assert (same / usable).tolist() == pytest.approx(run.values("train/moe/routing/live_agreement"))
    assert not (run.run_folder / ANOMALIES_FILE_NAME).exists()


def test_three_loggers_hold_the_same_metrics(run: FinishedRun) -> None:
    history = run.history()
    others = {
        "tensorboard": read_tensorboard(run.run_folder / "tensorboard"),
        "wandb": read_wandb_offline(run.run_folder / "wandb"),
    }
    for name, other in others.items():
        for key in ("train/reward", "train/moe/cv_mean", "train/advantages/max", "val/accuracy", "val/pass_at_2"):
            assert [step for step, _ in other[key]] == [step for step, _ in history[key]], (name, key)
            expected = [value for _, value in history[key]]
            assert [value for _, value in other[key]] == pytest.approx(expected, rel=FLOAT32_EPSILON), (name, key)


def test_generation_and_training_agree_about_every_token(run: FinishedRun) -> None:
    # One token off by 1e-4 among 200 would lift this mean by 5e-7; rounding alone gives about 1e-7.
    assert max(run.values("train/token_mult_prob_error")) < 1 + 1e-6
    for divergence in ("gen_kl_error", "policy_kl_error", "js_divergence_error"):
        assert max(run.values(f"train/{divergence}")) < 1e-10
    assert 0 < max(run.values("train/sampling_logp_difference_max")) < 1e-5, "two passes differ by rounding"
    assert min(run.values("train/sampling_importance_ratio_min")) > 1 - 1e-5
    assert max(run.values("train/sampling_importance_ratio_max")) < 1 + 1e-5
    assert run.values("train/probs_ratio_min") == run.values("train/probs_ratio_max") == [1.0] * NUM_STEPS


def test_samples_are_saved_and_shown(run: FinishedRun) -> None:
    samples = run.samples()
    counts = {(split, step): 0 for split in ("train", "val") for step in range(NUM_STEPS + 1)}
    for sample in samples:
        counts[sample["split"], sample["step"]] += 1
    assert [counts["train", step] for step in range(NUM_STEPS + 1)] == [0, 16, 16, 16]
    assert [counts["val", step] for step in range(NUM_STEPS + 1)] == [12, 0, 12, 12]
    trained = [sample for sample in samples if sample["split"] == "train"]
    assert [sample["weight_version"] for sample in trained] == [step for step in range(NUM_STEPS) for _ in range(16)]
    shown = re.findall(r"^  (?:right|wrong|truncated) +(\S+)  ->  ", run.output, flags=re.MULTILINE)
    assert len(shown) == 15
    assert shown[:5] == shown[5:10] == shown[10:]


@pytest.mark.slow
def test_same_seed_same_run_to_the_last_bit(run: FinishedRun, tmp_path: Path, data: Path) -> None:
    again = finished_run(tmp_path, data, **sft_runs.only_jsonl(), **MEASURED)
    first, second = run.history(), again.history()
    keys = {key for key in first if not key.startswith("timing/")}
    assert len(keys) > 60
    assert {key: first[key] for key in keys} == {key: second[key] for key in keys}
    assert run.samples() == again.samples()


LAYOUTS = {
    "ep2": {"policy__megatron_cfg__expert_model_parallel_size": 2},
    "pp2": {"policy__megatron_cfg__pipeline_model_parallel_size": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ep2", "pp2"])
def test_layout_generates_and_trains_as_two_data_parallel_workers_do(
    run: FinishedRun, tmp_path: Path, data: Path, layout: str
) -> None:
    other = finished_run(tmp_path, data, **LAYOUTS[layout], **sft_runs.only_jsonl())
    assert max(other.values("train/token_mult_prob_error")) < 1 + 1e-6
    # Responses depend on weights, prompt and seed alone. Weights differ in their last digits from the second step on,
    # which flips a token now and then; the first step has no such excuse.
    first = [sample["response"] for sample in run.samples() if sample["step"] <= 1]
    assert [sample["response"] for sample in other.samples() if sample["step"] <= 1] == first
    for key in ("train/reward", "train/loss", "train/grad_norm", "train/moe/cv_mean", "train/approx_entropy"):
        assert other.values(key)[0] == pytest.approx(run.values(key)[0], rel=2e-5, abs=1e-7), key


@pytest.mark.slow
@pytest.mark.parametrize("estimator", [pytest.param("grpo", marks=pytest.mark.slow), "gdpo"])
def test_several_rewards_are_weighed_logged_and_saved_apart(tmp_path: Path, data: Path, estimator: str) -> None:
    weights = {"short": 0.5, "digits": 2.0, "even": 0.0}
    run = finished_run(
        tmp_path,
        data,
        **sft_runs.only_jsonl(),
        grpo__max_num_steps=2,
        grpo__adv_estimator__name=estimator,
        env__reward__kind="callable",
        env__reward__function="tests.functional.grpo_runs:digits_and_length",
        env__score_truncated=True,
        env__on_failure="zero",
        env__reward_weights=weights,
    )
    for split in ("train", "val"):
        named = {name: run.values(f"{split}/rewards/{name}/mean") for name in weights}
        added = [sum(weights[name] * values[step] for name, values in named.items()) for step in range(2)]
        assert run.values(f"{split}/reward") == pytest.approx(added, rel=1e-12)
        assert all(value > 0 for value in run.values(f"{split}/rewards/digits/std"))
    samples = run.samples()
    scored = [sample for sample in samples if sample["fault"] is None]
    assert 0 < len(samples) - len(scored) == sum(run.values("train/env/num_errors") + run.values("val/env/num_errors"))
    for sample in scored:
        assert sample["rewards"].keys() == weights.keys()
        assert sample["reward"] == pytest.approx(sum(weights[name] * sample["rewards"][name] for name in weights))
        assert sample["is_correct"] == (sample["rewards"]["digits"] >= 1), "the first that the function names"
    assert all("rewards" not in sample and sample["reward"] == 0 for sample in samples if sample["fault"])
    trained = [sample for sample in samples if (sample["split"], sample["step"]) == ("train", 1)]
    named_rewards = np.array([[sample.get("rewards", {}).get(name, 0.0) for sample in trained] for name in weights])
    weighed = np.array([*weights.values()])[:, None]

    def by_group(rewards: np.ndarray) -> np.ndarray:
        groups = rewards.reshape(*rewards.shape[:-1], 4, 4)
        centred = groups - groups.mean(-1, keepdims=True)
        return (centred / (groups.std(-1, ddof=1, keepdims=True) + 1e-6)).reshape(rewards.shape)

    expected = by_group((weighed * named_rewards).sum(0))
    if estimator == "gdpo":
        expected = (weighed * by_group(named_rewards)).sum(0)
        expected /= expected.std(ddof=1) + 1e-6
    for kind in ("min", "max"):
        assert run.values(f"train/advantages/{kind}")[0] == pytest.approx(getattr(expected, kind)(), rel=1e-5)


@pytest.mark.full
def test_everything_at_once(tmp_path: Path, data: Path) -> None:
    """Packing, several updates, reference model, dynamic sampling, shaping, stop strings, a failing environment."""
    run = finished_run(
        tmp_path,
        data,
        **sft_runs.only_jsonl(),
        policy__train_global_batch_size=8,
        policy__megatron_cfg__routing_measurements__every_n_steps=1,
        policy__megatron_cfg__routing_measurements__share_of_tokens=0.3,
        policy__megatron_cfg__routing_replay="old_policy",
        policy__sequence_packing={"enabled": True, "train_mb_tokens": 64, "train_mb_patches": None},
        policy__generation__stop_strings=["7"],
        policy__generation__top_k=20,
        policy__generation__top_p=0.95,
        policy__generation__temperature=0.8,
        loss_fn__reference_policy_kl_penalty=0.01,
        loss_fn__reference_policy_kl_gradient="divergence",
        loss_fn__importance_sampling_correction="truncated",
        policy__megatron_cfg__router_gradients={
            "every_n_steps": 2,
            "num_microbatches": 1,
        },
        loss_fn__ratio_clip_max=0.28,
        grpo__use_dynamic_sampling=True,
        grpo__dynamic_sampling_max_groups=8,
        grpo__overlong_filtering=True,
        grpo__reward_shaping={"enabled": True, "overlong_buffer_length": 6, "overlong_buffer_penalty": 0.5},
        grpo__max_num_epochs=3,
        env__reward__kind="callable",
        env__reward__function="tests.functional.grpo_runs:reward_that_fails_at_times",
        env__score_truncated=True,
    )
    assert run.values("train/num_microbatches")[0] >= 2
    phases = {key.split("/")[1] for key in run.history() if key.startswith("timing/")}
    assert {"logprobs", "reference_logprobs"} <= phases
    assert 0.0 < run.values("train/kl_penalty")[0] < run.values("train/kl_penalty")[-1]
    assert max(run.values("train/probs_ratio_max")) > 1.0
    assert max(run.values("train/token_mult_prob_error")) < 1 + 1e-6
    assert sum(run.values("train/env/num_errors")) > 0
    assert all(0 < mass < 1 for mass in run.values("train/sampling_kept_mass"))
    first, *later = run.values("train/moe/routing_drift/rows_differing_from_reference")
    assert first == 0
    assert min(later) > 0
    # The weights have moved by two updates: numerics are what they were before them.
    at_the_end = [run.values(f"train/moe/routing_split_end/mean_abs_{part}") for part in ("staleness", "numerics")]
    assert min(at_the_end[0]) > 1e-4
    assert max(at_the_end[1]) < 1e-6
    assert [step for step, _ in run.history()["train/moe/router_gradient/norm_policy"]] == [2]
    assert run.values("train/moe/routing_advantage/max_abs_z")[0] > 0
    versions = sorted({sample["weight_version"] for sample in run.samples() if sample["split"] == "train"})
    # Two updates a step, but for one whose responses are all left out.
    assert (versions[0], len(versions)) == (0, 3)
    assert versions[-1] in (3, 4)
    ended = [sample for sample in run.samples() if "7" in sample["response"]]
    assert ended
    assert all(sample["response"].endswith("7") and not sample["is_truncated"] for sample in ended)


@pytest.mark.full
def test_the_sampling_mask_is_replayed(tmp_path: Path, data: Path) -> None:
    """With top-p, rollout and training differ by as little as without, in passes before and in each of two updates."""
    settings: dict[str, Any] = {
        **sft_runs.only_jsonl(),
        "policy__train_global_batch_size": 8,
        "policy__sequence_packing": {"enabled": True, "train_mb_tokens": 64, "train_mb_patches": None},
        "loss_fn__reference_policy_kl_penalty": 0.01,
    }
    cut = {"policy__generation__top_p": 0.8, "policy__generation__top_k": 64, "loss_fn__sampling_mask": "replay"}
    whole = finished_run(tmp_path / "whole", data, **settings)
    replayed = finished_run(tmp_path / "replayed", data, **settings, **cut)
    assert all(0 < mass < 0.95 for mass in replayed.values("train/sampling_kept_mass"))
    for run in (whole, replayed):
        assert max(run.values("train/token_mult_prob_error")) < 1 + 1e-6
        assert min(run.values("train/probs_ratio_max")) > 1.0
        # The reference model's log-probabilities are over the same tokens: before the first update nothing differs.
        assert run.values("train/kl_penalty")[0] < run.values("train/kl_penalty")[-1]
    assert replayed.values("train/kl_penalty")[0] < 5 * whole.values("train/kl_penalty")[0]


@pytest.mark.full
def test_an_engine_of_its_own_sends_the_sampling_mask(tmp_path: Path, data: Path) -> None:
    """Kept tokens of another worker's sequences; rounding of its weights is the same."""
    run = finished_run(
        tmp_path,
        data,
        **sft_runs.only_jsonl(),
        policy__generation__backend="megatron_separate",
        policy__generation__top_p=0.8,
        policy__generation__top_k=64,
        loss_fn__sampling_mask="replay",
        **{f"+cluster__roles__{GENERATION_ROLE}": "{cpu_workers_per_node: 1}"},
    )
    assert all(0 < mass < 0.95 for mass in run.values("train/sampling_kept_mass"))
    assert max(run.values("train/token_mult_prob_error")) < 1 + 1e-5


@pytest.mark.slow
def test_the_divergence_in_the_reward(tmp_path: Path, data: Path) -> None:
    """The first step is the reference model's own; from the second on rewards pay for what has moved."""
    run = finished_run(
        tmp_path,
        data,
        **sft_runs.only_jsonl(),
        grpo__adv_estimator={
            "name": "grpo",
            "use_leave_one_out_baseline": False,
            "normalize_rewards": False,
            "normalize_over": "group",
        },
        loss_fn__reference_policy_kl_penalty=100.0,
        loss_fn__reference_policy_kl_type="k1",
        loss_fn__use_kl_in_reward=True,
        policy__megatron_cfg__optimizer__lr=1e-2,
        env__reward__kind="callable",
        env__reward__function="tests.functional.grpo_runs:share_of_digits",
        env__score_truncated=True,
    )
    phases = {key.split("/")[1] for key in run.history() if key.startswith("timing/")}
    assert {"logprobs", "reference_logprobs"} <= phases
    first, second, _ = run.values("train/kl_penalty")
    assert first == 0.0
    assert second > 0.001
    rewards = [sample["reward"] for sample in run.samples() if sample["step"] == 1 and sample["split"] == "train"]
    groups = np.array(rewards).reshape(4, 4)
    assert run.values("train/advantages/max")[0] == pytest.approx((groups - groups.mean(1, keepdims=True)).max())
    assert run.values("train/advantages/max")[1] > 1.0, "more than rewards from 0 to 1 could give"
