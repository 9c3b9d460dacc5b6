# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A critic beside the policy: it fits returns, is saved with the policy, goes on to the bit, and is exported.

The algorithm stands for what PPO needs of a run: a role that trains, with a value head.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.algorithms.losses.value import ValueLoss
from nemo_rl_moe.algorithms.sft import SupervisedTraining, train_on_batches
from nemo_rl_moe.algorithms.step_recorder import num_training_steps
from nemo_rl_moe.checkpoints.fingerprints import TRAINING_DATA, samples_fingerprint
from nemo_rl_moe.config.algorithm import ALGORITHMS, Algorithm
from nemo_rl_moe.config.schema import SFTMasterConfig
from nemo_rl_moe.config.schema_policy import RoleModelConfig
from nemo_rl_moe.data.loader import GlobalBatchLoader, token_ids_and_images
from nemo_rl_moe.data.sft import load_sft_dataset
from nemo_rl_moe.data.tokenizer import pad_token_id
from nemo_rl_moe.distributed.batch import TokenBatch, per_token
from nemo_rl_moe.launch.setup import read_samples
from nemo_rl_moe.launch.training_run import TrainingRun
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.models.interfaces import Head
from nemo_rl_moe.models.policy.lm_policy import TrainableModel
from tests.functional import sft_runs, shared_ray
from tests.functional.named_runs import NamedRuns
from tests.functional.test_resume import weights_of

CRITIC_FILE = "critic.jsonl"
"""In the run's folder: what the critic's updates have come to, a line each."""


class CriticMasterConfig(SFTMasterConfig):
    """Everything that a run of SFT needs, and the critic."""

    critic: RoleModelConfig
    """The model that learns the returns; `cluster.roles.critic` places its workers."""


def with_returns(batch: TokenBatch) -> TokenBatch:
    """Return the batch with a return for each token: a tenth for every trained token that is still to come."""
    remaining = batch.token_mask.flip(1).cumsum(1).flip(1)
    return batch.with_columns(returns=per_token(remaining.float() / 10))


def train_critic(critic: TrainableModel, batch: TokenBatch, file: Path) -> TokenBatch:
    """Return one update of the critic, noted in a file; the batch has its returns and values afterwards."""
    batch = with_returns(batch)
    values = critic.values(batch)
    batch = batch.with_columns(previous_values=per_token(values))
    result = critic.train(batch, ValueLoss(clip_range=0.5))
    line = {
        "loss": result.global_loss,
        "grad_norm": result.grad_norm,
        "version": result.weight_version,
        "value": float(values[:, 1:][batch.token_mask[:, 1:]].mean(dtype=torch.float64)),
        "value_in_loss": result.microbatch_metrics["value_mean"].reduce(),
    }
    with file.open("a") as lines:
        lines.write(f"{json.dumps(line)}\n")
    return batch


def run_critic(config: CriticMasterConfig, run: TrainingRun) -> None:
    """Runs it from start to end."""
    model, critic_model = run.prepare_model(), run.prepare_role("critic")
    training = read_samples(
        load_sft_dataset, config, config.data.train, model.tokenizer, run.console, None, model.speech
    )
    padding = pad_token_id(model.tokenizer)
    loader = GlobalBatchLoader(training, config.policy.train_global_batch_size, padding, config.sft.seed, True)
    fingerprint = samples_fingerprint(config.data.train.path, token_ids_and_images(training))
    run.begin(num_training_steps(config.sft, len(loader)), {TRAINING_DATA: fingerprint})
    policy = run.start_policy()
    critic = run.start_trainable_role("critic", critic_model, heads=[Head.VALUE])
    run.restore()
    recorder = run.open()

    def prepare(batch: TokenBatch, clock: PhaseClock) -> TokenBatch:
        with clock.phase("critic"):
            return train_critic(critic, batch, run.folder / CRITIC_FILE)

    run.end(train_on_batches(SupervisedTraining(config.sft, policy, loader, sft_loss, None, prepare), recorder))


ALGORITHM = Algorithm(
    name="critic",
    summary="supervised fine-tuning of a policy, and of a critic beside it",
    config_class=CriticMasterConfig,
    run=run_critic,
    resume_keys=ALGORITHMS["sft"].resume_keys,
    loop="sft",
    roles=lambda config: {"critic": config.critic},
)


pytestmark = pytest.mark.shared_ray

NUM_STEPS, SAVED_AT = 6, 3
PARALLEL = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "sequence_parallel": False,
}
TP2 = {"critic.megatron_cfg.tensor_model_parallel_size": 2, "critic.megatron_cfg.sequence_parallel": True}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> NamedRuns:
    """With one run that was never stopped."""
    folder = tmp_path_factory.mktemp("critic")
    model = sft_runs.make_model_folder(folder / "model")
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).save_pretrained(model)
    content: dict[str, Any] = {
        "defaults": str(sft_runs.EXEMPLAR),
        "algorithm": "tests.functional.test_critic_run:ALGORITHM",
        "critic": {"model_name": str(model), "logprob_batch_size": 4, "megatron_cfg": PARALLEL},
        "cluster": {"cpu_workers_per_node": 1, "roles": {"critic": {"cpu_workers_per_node": 1}}},
    }
    config = folder / "critic.yaml"
    config.write_text(yaml.safe_dump(content))
    settings = sft_runs.settings(
        folder,
        sft_runs.make_additions(folder / "data", NUM_STEPS * 8, 1),
        policy__init="random",
        policy__train_global_batch_size=8,
        policy__train_micro_batch_size=4,
        policy__megatron_cfg__optimizer__lr=3e-3,
        policy__megatron_cfg__scheduler__lr_warmup_iters=0,
        policy__megatron_cfg__scheduler__lr_decay_iters=NUM_STEPS,
        sft__val_at_start=False,
        sft__val_at_end=False,
        sft__val_period=0,
        checkpointing__save_period=SAVED_AT,
        checkpointing__metric_name=None,
        checkpointing__keep_top_k=None,
        data__validation=None,
        **sft_runs.only_jsonl(),
    )
    runs = NamedRuns(folder, ("run", "--config", config), settings, "sft", NUM_STEPS)
    runs("whole")
    return runs


def lines_of(runs: NamedRuns, name: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in (runs.run_folder(name) / CRITIC_FILE).read_text().splitlines()]


def test_it_fits_the_returns(runs: NamedRuns) -> None:
    lines = lines_of(runs, "whole")
    assert [line["version"] for line in lines] == list(range(1, NUM_STEPS + 1))
    assert lines[-1]["loss"] < 0.5 * lines[0]["loss"], lines
    for line in lines:
        assert line["value"] == pytest.approx(line["value_in_loss"], abs=1e-6), "as measured before the update"


@pytest.mark.full
def test_it_goes_on_to_the_last_bit(runs: NamedRuns) -> None:
    runs("stopped", SAVED_AT)
    assert f"step_{SAVED_AT}: {SAVED_AT} of {NUM_STEPS} steps are done" in runs("stopped")
    assert lines_of(runs, "stopped") == lines_of(runs, "whole")
    for final in ("final", "final_critic"):
        assert weights_of(runs.checkpoints("stopped") / final) == weights_of(runs.checkpoints("whole") / final)


@pytest.mark.full
def test_another_layout_has_the_same_numbers(runs: NamedRuns) -> None:
    runs("tensor parallel", changes={**TP2, "cluster.roles.critic.cpu_workers_per_node": 2})
    for name in ("loss", "grad_norm", "value"):
        found, expected = ([line[name] for line in lines_of(runs, run)] for run in ("tensor parallel", "whole"))
        np.testing.assert_allclose(found[0], expected[0], rtol=2e-6, err_msg=name)
        # Adam makes steps of rounding where gradients are small: the norm has differed by 3.8e-5 at the last step.
        np.testing.assert_allclose(found, expected, rtol=2e-4, err_msg=name)


def test_its_part_of_a_checkpoint_is_verified(runs: NamedRuns) -> None:
    checkpoint = runs.checkpoints("whole") / f"step_{NUM_STEPS}"
    done = shared_ray.called_here(["verify", str(checkpoint)])
    assert f"{checkpoint}/critic/policy: " in done.stdout
    damaged = next((checkpoint / "critic" / "policy").glob("*.distcp"))
    content = damaged.read_bytes()
    try:
        damaged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        done = shared_ray.called_here(["verify", str(checkpoint)], exit_code=1)
    finally:
        damaged.write_bytes(content)
    assert str(damaged) in done.stderr


def test_it_is_exported_without_its_head_which_is_reported(runs: NamedRuns, tmp_path: Path) -> None:
    words = ["convert", "--from", "megatron", "--to", "hf"]
    source = runs.checkpoints("whole") / f"step_{NUM_STEPS}" / "critic"
    done = shared_ray.called_here([*words, "--input", str(source), "--output", str(tmp_path / "hf")])
    assert "value_head.weight left out: the model has no value head" in done.stdout
    assert weights_of(tmp_path / "hf") == weights_of(runs.checkpoints("whole") / "final_critic")
