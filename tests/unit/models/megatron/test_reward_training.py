# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Training of a reward model is the same in every layout, goes on from its checkpoints, and ends in a folder that
transformers and peft score alike."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nemo_rl_moe.algorithms.losses.reward import RewardLoss
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.data.margins import MARGINS
from nemo_rl_moe.distributed.batch import TokenBatch, make_shard, per_sequence
from nemo_rl_moe.distributed.microbatches import plan_evaluation, plan_microbatches
from nemo_rl_moe.models.classifiers import as_classifier
from nemo_rl_moe.models.interfaces import Head
from nemo_rl_moe.models.megatron.training.measurements import sequence_scores
from nemo_rl_moe.models.megatron.training.megatron_model import MegatronModel
from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer
from nemo_rl_moe.models.megatron.weights.parameter_layout import parameter_pieces
from nemo_rl_moe.models.model_files import CONFIG_FILE, config_file
from nemo_rl_moe.models.peft_files import ADAPTER_FOLDER
from nemo_rl_moe.models.policy.model_workers import choose_batching
from tests.support.gloo_ranks import run_ranks, run_ranks_with_engine
from tests.support.lora_models import lora
from tests.support.quick_list import full, slow
from tests.support.tiny_model import layout, parallel_job, sharing_sequences, tiny_batch, tiny_hf_config, tiny_policy
from tests.support.training_run import tiny_trainer
from tests.unit.models.megatron.tiny_trainers import OVERLAP, PACKED, ZERO_1

NUM_PAIRS, NUM_STEPS = 4, 3
SCORES = (Head.SCORE,)
LOSS = RewardLoss(center_rewards_coefficient=0.1)
IN_128 = PACKED | {"sequence_packing__train_mb_tokens": 128}
LORA = lora()


def pairs() -> TokenBatch:
    """Pairs of different lengths, with margins."""
    margins = torch.tensor([0.5, 0.0, 1.5, -0.5], dtype=torch.float64).repeat_interleave(2)
    return replace(tiny_batch(41).with_columns(**{MARGINS: per_sequence(margins)}), group_size=2)


def policy_of(ranks: int, **changes: Any) -> PolicyConfig:
    # A balancing loss is one of a microbatch, and so depends on the cut.
    fixed = {"train_global_batch_size": NUM_PAIRS, "max_total_sequence_length": 32, "moe_aux_loss_coeff": 0.0}
    return tiny_policy(ranks, **{"train_micro_batch_size": 2, **fixed, **changes})


@dataclass(frozen=True)
class Fitted:
    """What one rank saw."""

    losses: list[float]
    grad_norms: list[float]
    metrics: list[dict[str, float]]  # this rank's shares
    before: dict[int, float]  # scores before the first step, by sequence; of ranks that report
    after: dict[int, float]
    evaluated: dict[str, float]  # this rank's shares
    head: np.ndarray | None  # None of other stages


def scores_of(model: MegatronModel, batch: TokenBatch) -> dict[int, float]:
    place = model.coordinates
    plan = plan_evaluation(
        batch.lengths.tolist(),
        num_data_parallel_ranks=place.data_parallel_size,
        batching=choose_batching(model.policy, 2),
        group_size=2,
    )
    mine = plan.by_rank[place.data_parallel_rank]
    found = model.measure([batch.select(rows) for rows in mine], sequence_scores)
    return {
        row: float(score)
        for rows, of_rows in zip(mine, found, strict=False)
        for row, (score,) in zip(rows, of_rows, strict=True)
    }


def head_of(model: MegatronModel) -> np.ndarray | None:
    pieces = {piece.name: piece.local for piece in parameter_pieces(model.chunks, model.config)}
    return pieces["value_head.weight"].detach().numpy().copy() if "value_head.weight" in pieces else None


def step(trainer: MegatronTrainer) -> Any:
    batch, place = pairs(), trainer.coordinates
    plan = plan_microbatches(
        batch.lengths.tolist(),
        num_data_parallel_ranks=place.data_parallel_size,
        global_batch_size=NUM_PAIRS,
        batching=choose_batching(trainer.policy, trainer.policy.train_micro_batch_size),
        group_size=2,
    )
    return trainer.train([make_shard(batch, plan.global_batches[0][place.data_parallel_rank], batch)], LOSS)


def fit(policy: PolicyConfig, save_to: str | None = None) -> Fitted:
    """Run on every rank."""
    with tiny_trainer(policy, heads=SCORES) as trainer:
        batch = pairs()
        before = scores_of(trainer, batch)
        evaluated = trainer.evaluate(make_shard(batch, [range(8)], batch), LOSS)
        results = [step(trainer) for _ in range(NUM_STEPS)]
        if save_to is not None:
            trainer.start_checkpoint(Path(save_to), with_optimizer=True)
            assert trainer.finish_checkpoint() is None
            results.append(step(trainer))
        return Fitted(
            [result.global_loss for result in results],
            [result.grad_norm for result in results],
            [{name: each.reduce() for name, each in result.microbatch_metrics.items()} for result in results],
            before,
            scores_of(trainer, batch),
            {name: series.reduce() for name, series in evaluated.items()},
            head_of(trainer),
        )


@pytest.fixture(scope="module")
def plain() -> Fitted:
    """Two pairs a microbatch on one rank."""
    (found,) = run_ranks(fit, 1, policy_of(1))
    return found


def test_the_loss_is_that_of_the_scores_and_training_parts_them(plain: Fitted) -> None:
    scores = torch.tensor([plain.before[row] for row in range(8)], dtype=torch.float64)
    chosen, rejected = scores[0::2], scores[1::2]
    margins = pairs().columns[MARGINS].values[0::2]
    preference = torch.nn.functional.softplus(margins - (chosen - rejected)).mean()
    center = (chosen + rejected).square().mean()
    first = plain.metrics[0]
    assert plain.losses[0] == pytest.approx(float(preference + 0.1 * center), rel=1e-5)
    assert first["preference_loss"] == pytest.approx(float(preference), rel=1e-5)
    assert first["center_loss"] == pytest.approx(float(center), rel=1e-4)
    assert first["rewards_chosen_mean"] == pytest.approx(float(chosen.mean()), rel=1e-4)
    assert first["accuracy"] == float((chosen > rejected).double().mean())
    assert first["num_valid_pairs"] == NUM_PAIRS
    assert plain.evaluated["loss"] == pytest.approx(plain.losses[0], rel=1e-5)
    assert float(scores.std()) > 0.01
    assert plain.losses[-1] < plain.losses[0]
    assert plain.metrics[-1]["reward_margin"] > first["reward_margin"] + 0.1


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (1, IN_128),
        full(1, {"train_micro_batch_size": 1}),
        full(1, {"dynamic_batching__enabled": True, "dynamic_batching__train_mb_tokens": 128}),
        full(2, {"train_micro_batch_size": 1}),
        (2, layout(tp=2) | IN_128),
        full(2, layout(tp=2)),
        full(2, layout(pp=2)),
        slow(2, layout(pp=2) | IN_128),
        full(2, layout(ep=2) | ZERO_1 | OVERLAP),
        slow(2, IN_128),
    ],
)
def test_layouts_agree(ranks: int, changes: dict[str, Any], plain: Fitted) -> None:
    _agree(run_ranks(fit, ranks, policy_of(ranks, **changes)), plain)


@pytest.mark.full
def test_ranks_that_share_sequences_agree() -> None:
    policy = policy_of(2, **IN_128)
    (wanted,) = run_ranks_with_engine(fit, 1, policy_of(1, **IN_128))
    _agree(run_ranks_with_engine(fit, 2, sharing_sequences(policy, 2)), wanted)


def _agree(found: list[Fitted], wanted: Fitted) -> None:
    for rank in found:
        assert rank.losses == pytest.approx(wanted.losses, rel=1e-5)
        assert rank.grad_norms == pytest.approx(wanted.grad_norms, rel=1e-4)
        if rank.head is not None:
            np.testing.assert_allclose(rank.head, wanted.head, atol=2e-5)
    for name in ("before", "after"):
        scores = {row: score for rank in found for row, score in getattr(rank, name).items()}
        assert scores == pytest.approx(getattr(wanted, name), rel=1e-4, abs=5e-5)
    for number, metrics in enumerate(wanted.metrics):
        reporting = [rank.metrics[number] for rank in found if rank.metrics[number]]
        # Ranks that share sequences or a layer report the same.
        copies = round(sum(each["num_valid_pairs"] for each in reporting) / NUM_PAIRS)
        sums = {name: sum(each[name] for each in reporting) / copies for name in metrics}
        assert sums == pytest.approx(metrics, rel=1e-4, abs=5e-5)


def go_on(policy: PolicyConfig, folder: str) -> float:
    with tiny_trainer(policy, heads=SCORES) as trainer:
        trainer.load_checkpoint(Path(folder), with_optimizer=True)
        loss: float = step(trainer).global_loss
        return loss


@pytest.mark.parametrize("changes", [{}, LORA], ids=["all weights", "adapters"])
def test_it_goes_on_from_a_checkpoint_in_its_own_layout_and_another(changes: dict[str, Any], tmp_path: Path) -> None:
    (saved,) = run_ranks(fit, 1, policy_of(1, **changes), str(tmp_path))
    assert run_ranks(go_on, 1, policy_of(1, **changes), str(tmp_path)) == [saved.losses[-1]]
    others = run_ranks(go_on, 2, policy_of(2, **changes, **layout(tp=2)), str(tmp_path))
    assert others == pytest.approx([saved.losses[-1]] * 2, rel=1e-5)


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "changes"), [(2, layout(tp=2)), (2, layout(pp=2) | IN_128)])
def test_layouts_of_adapters_agree(ranks: int, changes: dict[str, Any]) -> None:
    (wanted,) = run_ranks(fit, 1, policy_of(1, **LORA))
    _agree(run_ranks(fit, ranks, policy_of(ranks, **LORA, **changes)), wanted)


def train_and_export(policy: PolicyConfig, folder: str) -> tuple[list[str], dict[int, float], dict[str, bool]]:
    """Run on every rank: train, write the final weights, and return the parameters that are left out, the scores, and
    which parts have moved."""
    with tiny_trainer(policy, heads=SCORES) as trainer:
        first = {piece.name: piece.local.clone() for piece in parameter_pieces(trainer.chunks, trainer.config)}
        for _ in range(NUM_STEPS):
            step(trainer)
        content = json.loads(tiny_hf_config().to_json_string(use_diff=False)) | {"dtype": "float32"}
        left_out = trainer.save_weights(Path(folder), {CONFIG_FILE: config_file(as_classifier(content, "m", 0))})
        last = {piece.name: piece.local for piece in parameter_pieces(trainer.chunks, trainer.config)}
        moved = {name: not torch.equal(first[name], last[name]) for name in first}
        return left_out, scores_of(trainer, pairs()), moved


def scores_in_transformers(model: Any) -> dict[int, float]:
    """One padded batch, as TRL scores it."""
    batch = pairs()
    mask = torch.arange(batch.input_ids.shape[1]) < batch.lengths[:, None]
    with torch.no_grad():
        logits = model.eval()(batch.input_ids, attention_mask=mask.long()).logits
    return dict(enumerate(logits[:, 0].tolist()))


@pytest.mark.parametrize(
    ("ranks", "changes"), [(1, {}), full(2, layout(tp=2)), (2, layout(pp=2) | LORA), full(2, layout(ep=2))]
)
def test_the_exported_folder_is_a_sequence_classifier(ranks: int, changes: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, Qwen3MoeForSequenceClassification

    found = run_ranks(train_and_export, ranks, policy_of(ranks, **changes), str(tmp_path / "final"))
    assert all(left_out == [] for left_out, _, _ in found)
    scores = {row: score for _, of_rank, _ in found for row, score in of_rank.items()}
    model, report = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "final", dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert isinstance(model, Qwen3MoeForSequenceClassification)
    assert (model.num_labels, model.config.pad_token_id) == (1, 0)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert scores_in_transformers(model) == pytest.approx(scores, rel=1e-5, abs=1e-5)
    moved = {name: has_moved for _, _, of_rank in found for name, has_moved in of_rank.items()}
    assert moved["value_head.weight"]
    assert not moved["output_layer.weight"]
    assert moved["decoder.final_layernorm.weight"] == (LORA.keys().isdisjoint(changes))


def test_the_first_gradient_is_that_of_transformers(plain: Fitted, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    run_ranks(export_untrained, 1, policy_of(1), str(tmp_path))
    model = AutoModelForSequenceClassification.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    batch = pairs()
    mask = torch.arange(batch.input_ids.shape[1]) < batch.lengths[:, None]
    scores = model(batch.input_ids, attention_mask=mask.long()).logits[:, 0].view(-1, 2)
    chosen, rejected = scores.T
    margins = batch.columns[MARGINS].values[0::2].float()
    preference = -torch.nn.functional.logsigmoid(chosen - rejected - margins).mean()
    loss = preference + LOSS.center_rewards_coefficient * (chosen + rejected).square().mean()
    loss.backward()
    norms = [parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]
    assert loss.item() == pytest.approx(plain.losses[0], rel=1e-5)
    assert float(torch.stack(norms).norm()) == pytest.approx(plain.grad_norms[0], rel=1e-4)


def test_adapters_of_a_reward_model_are_those_of_peft(tmp_path: Path) -> None:
    """The adapter's folder has the head too, and scores alike on the model from which training has begun."""
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    base, final = tmp_path / "base", tmp_path / "final"
    run_ranks(export_untrained, 1, policy_of(1), str(base))
    ((_, scores, _),) = run_ranks(train_and_export, 1, policy_of(1, **LORA), str(final))
    content = json.loads((final / ADAPTER_FOLDER / "adapter_config.json").read_text())
    assert (content["task_type"], content["modules_to_save"]) == ("SEQ_CLS", ["score"])
    started = AutoModelForSequenceClassification.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    before = scores_in_transformers(started)
    model = PeftModel.from_pretrained(started, str(final / ADAPTER_FOLDER))
    after = scores_in_transformers(model)
    assert after == pytest.approx(scores, rel=1e-4, abs=5e-5)
    assert after != pytest.approx(before, abs=1e-2)
    read = lora(path=str(final / ADAPTER_FOLDER))
    for ranks, changes in ((1, {}), (2, layout(pp=2))):
        found = run_ranks(scores_with_adapter, ranks, policy_of(ranks, **read, **changes), str(base))
        assert {row: score for of_rank in found for row, score in of_rank.items()} == pytest.approx(scores, abs=1e-5)


def scores_with_adapter(policy: PolicyConfig, folder: str) -> dict[int, float]:
    """Run on every rank: the scores of the base with the adapter of `policy.lora.path`, whose folder has the head."""
    with parallel_job(policy):
        return scores_of(MegatronModel(policy, tiny_hf_config(), Path(folder), heads=SCORES), pairs())


def export_untrained(policy: PolicyConfig, folder: str) -> None:
    with tiny_trainer(policy, heads=SCORES) as trainer:
        content = json.loads(tiny_hf_config().to_json_string(use_diff=False)) | {"dtype": "float32"}
        trainer.save_weights(Path(folder), {CONFIG_FILE: config_file(as_classifier(content, "m", 0))})
