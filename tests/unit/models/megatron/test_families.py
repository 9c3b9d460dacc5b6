# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Every family against transformers: the same logits and experts, and the same tensors after a round trip."""

from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.models.families import FAMILIES
from nemo_rl_moe.models.families.rules import ModelFamily, Rule, RuleTable
from nemo_rl_moe.models.megatron.model.sparse_attention import chooses_tokens
from tests.support.family_models import FAMILY_MODELS, FamilyModel
from tests.support.family_parity import LAYOUTS, ParityJobs
from tests.support.family_reference import (
    ModelOutputs,
    assert_same_experts,
    assert_same_tensors,
    logit_difference,
    outputs_of_trainer,
    reference_outputs,
    tensors_in,
    trainer_of,
    write_reference,
)
from tests.support.gloo_ranks import run_ranks
from tests.support.quick_list import full, slow
from tests.support.tiny_model import layout, parallel_job, shard_of_rank, tiny_batch, tiny_policy

# Largest seen: 1.1e-5.
LOGITS_TOLERANCE = 1e-4

# Of the layouts of several ranks, those that a model is tried in on each change. Together every
# kind of experts is spread (with a shared one, with groups, with biases), and every kind of layer is put into stages.
ON_SEVERAL_RANKS = {
    # Tensor parallelism goes through OLMoE's own norms.
    "olmoe": {"tp2"},
    "qwen2_moe": {"ep2"},
    "qwen3": {"pp2"},
    "gpt_oss": {"pp2_ep2"},
    "deepseek_v2_groups": {"ep2"},
    "deepseek_v3": {"pp2_ep2"},
    # A part of each head rotated, with biases, cut between ranks.
    "glm4_moe": {"tp2"},
    "glm4_moe_lite": {"pp2_ep2"},
    # Norms of all heads behind a rotation of a part of each.
    "minimax_m2": {"tp2"},
    # Weights of an indexer, in some layers of each stage.
    "glm_moe_dsa": {"pp2_ep2"},
    # Choices of tokens, gathered from parts of sequences and shared between layers.
    "deepseek_v32_sparse": {"tp2"},
    "glm_moe_dsa_sparse": {"pp2_ep2"},
    # Gated delta nets, whose output norm has a part of its gradient on each rank.
    "qwen3_next": {"tp2"},
    "qwen3_5_moe_text": {"pp2_ep2"},
    # Mamba-2 layers, whose output norm each rank has a part of; layers of one part in both stages.
    "nemotron_h": {"tp2", "pp2_ep2"},
}
# On one rank: a dense model, plain experts, norms of heads, sinks and biases, latents with groups and a shared expert,
# a part of each head rotated, gated delta nets, Mamba-2.
QUICK = {"llama", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "glm4_moe", "qwen3_5_moe_text", "nemotron_h"}
# Latents, a shared expert, groups and a bias, in stages that share their experts: in the quick list.
COMBINING_MOST = ("deepseek_v3", "pp2_ep2")
# Megatron-Core's own modules: plain attention and experts, sinks and biases, latents.
WITH_STOCK_MODULES = {"mixtral", "gpt_oss", "deepseek_v3"}


@pytest.fixture(scope="module")
def jobs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ParityJobs:
    """Return the jobs of the models and layouts whose tests are selected."""
    parameters = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    wanted = {(chosen["name"], chosen["where"]) for chosen in parameters if chosen.keys() >= {"name", "where"}}
    return ParityJobs(wanted, tmp_path_factory.mktemp("families"))


def marks_of(name: str, where: str) -> list[pytest.MarkDecorator]:
    if where == "one_rank":
        return [] if name in QUICK else [pytest.mark.full]
    if (name, where) == COMBINING_MOST:
        return []
    if where == "one_rank_local":
        return [pytest.mark.full if name in WITH_STOCK_MODULES else pytest.mark.slow]
    return [pytest.mark.full if where in ON_SEVERAL_RANKS.get(name, set()) else pytest.mark.slow]


with_layouts = pytest.mark.parametrize(
    ("name", "where"),
    [
        pytest.param(name, where, marks=marks_of(name, where))
        for where, chosen in LAYOUTS.items()
        for name, model in FAMILY_MODELS.items()
        if chosen.holds(model)
    ],
)
"""Every model in every layout that holds it."""


@with_layouts
def test_logits_experts_and_tensors_are_those_of_transformers(name: str, where: str, jobs: ParityJobs) -> None:
    ours, reference = jobs.run(name, where).outputs, jobs.reference(name).outputs
    difference = logit_difference(ours, reference)
    print(f"{name}, {where}: largest difference of two logits {difference:.1e}")
    assert difference < LOGITS_TOLERANCE
    assert_same_experts(ours, reference)
    assert_same_tensors(jobs.exported(name, where), jobs.folder(name))


@with_layouts
def test_transformers_reads_what_is_exported(name: str, where: str, jobs: ParityJobs) -> None:
    run, export = jobs.run(name, where), jobs.export(name, where)
    assert export.is_same
    difference = logit_difference(run.trained, export.trained)
    print(f"{name}, {where}: largest difference of two logits after a step {difference:.1e}")
    assert difference < LOGITS_TOLERANCE
    assert_same_experts(run.trained, export.trained)
    # The step changes far more than that.
    assert logit_difference(run.trained, run.outputs) > 100 * LOGITS_TOLERANCE


@with_layouts
def test_greedy_responses_are_those_of_transformers(name: str, where: str, jobs: ParityJobs) -> None:
    responses, expected = jobs.run(name, where).responses, jobs.reference(name).responses
    assert [response.token_ids for response in responses] == [response.token_ids for response in expected]
    for response, theirs in zip(responses, expected, strict=True):
        assert response.logprobs == pytest.approx(theirs.logprobs, abs=LOGITS_TOLERANCE)


@with_layouts
def test_training_does_not_depend_on_the_layout_or_on_packing(name: str, where: str, jobs: ParityJobs) -> None:
    expected, run = jobs.run(name, "one_rank").step, jobs.run(name, where)
    for step in filter(None, (run.step, run.packed_step)):
        assert step.loss == pytest.approx(expected.loss, rel=1e-5)
        assert step.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)


def measures_of(folder: str, policy: PolicyConfig) -> tuple[list[float], list[float]]:
    """Losses of two steps; then loss and accuracy of an evaluation, where they are reported."""
    with parallel_job(policy):
        trainer = trainer_of(Path(folder), policy, num_steps=3)
        shard = shard_of_rank(tiny_batch(11, vocabulary_size=61))
        losses = [trainer.train([shard], sft_loss).global_loss for _ in range(2)]
        evaluated = trainer.evaluate(shard, sft_loss)
        return losses, [evaluated[name].reduce() for name in ("loss", "accuracy") if name in evaluated]


@pytest.mark.parametrize("layer_spec", [full("local"), "auto"])
def test_odd_vocabulary_is_padded_without_changing_a_measure(layer_spec: str, tmp_path: Path) -> None:
    run_ranks(write_reference, 1, "mixtral_top3_odd_vocabulary", tmp_path)
    ((losses, evaluated),) = run_ranks(measures_of, 1, str(tmp_path), tiny_policy(1, layer_spec=layer_spec))
    policy = tiny_policy(2, layer_spec=layer_spec, **layout(tp=2))
    for losses_of_rank, evaluated_by_rank in run_ranks(measures_of, 2, str(tmp_path), policy):
        assert losses_of_rank == pytest.approx(losses, rel=1e-6)
        assert evaluated_by_rank in ([], pytest.approx(evaluated, rel=1e-6))


class UpBeforeGate(RuleTable):
    """A family's rules with gate and up exchanged wherever files have one tensor for each."""

    def __init__(self, rules: RuleTable):
        self._others = rules

    def find(self, name: str) -> Rule | None:
        found = self._others.find(name)
        if found is None or "linear_fc1." not in name or len(found.sources) != 2:
            return found
        return replace(found, sources=found.sources[::-1])


def faults_of(family: ModelFamily, model: FamilyModel) -> dict[str, ModelFamily]:
    """Return a family with mistakes that load without an error, as far as it can have them."""
    found = {"none": family, "gate and up are exchanged": replace(family, rules=UpBeforeGate(family.rules))}
    if family.rotary_percent(model.hf_config()) < 1:
        found["whole heads are rotated"] = replace(family, rotary_percent=lambda hf_config: 1.0)
    if chooses_tokens(tiny_policy(), model.hf_config()):
        found["the indexer rotates other entries"] = replace(
            family, indexer_rotates_pairs=not family.indexer_rotates_pairs
        )
    if "moe_router_enable_expert_bias" in family.router_fields:
        softmax = {"moe_router_score_function": "softmax", "moe_router_enable_expert_bias": False}
        found["softmax in place of sigmoid"] = replace(
            family,
            transformer_fields=lambda hf_config: family.transformer_fields(hf_config) | softmax,
            unused_tensors=lambda hf_config: {r".*\.e_score_correction_bias": "the control has no bias"},
        )
    return found


def differences_with_faults(name: str, root: str, policy: PolicyConfig) -> dict[str, float]:
    """Run on one rank: the largest difference of a logit from transformers' for each fault."""
    folder, found, model = Path(root), {}, FAMILY_MODELS[name]
    write_reference(name, folder)
    reference = reference_outputs(folder)
    with parallel_job(policy):
        for fault, family in faults_of(FAMILIES[model.model_type], model).items():
            with mock.patch.dict(FAMILIES, {model.model_type: family}):
                outputs = outputs_of_trainer(trainer_of(folder, policy))
            assert outputs is not None
            found[fault] = logit_difference(outputs, reference)
    return found


@pytest.mark.parametrize(
    ("name", "num_faults"),
    [
        full("glm4_moe", 3),
        # With latents a part of each head has positions by its shape.
        slow("glm_moe_dsa_sparse", 3),
        full("deepseek_v32_sparse", 3),
        *(
            slow(name, 2)
            for name in ("glm4_moe_lite", "kimi_k2", "deepseek_v32", "glm_moe_dsa", "qwen3_next", "qwen3_5_moe_text")
        ),
        slow("minimax_m2", 3),
        slow("qwen3_5_text", 2),
    ],
)
def test_mistakes_that_load_are_seen_in_the_logits(name: str, num_faults: int, tmp_path: Path) -> None:
    (found,) = run_ranks(differences_with_faults, 1, name, str(tmp_path), tiny_policy())
    assert found.pop("none") < LOGITS_TOLERANCE
    assert len(found) == num_faults
    assert all(difference > 100 * LOGITS_TOLERANCE for difference in found.values()), found


def write_both_forms(name: str, root: str) -> None:
    """Write the same weights in the form of files, in that of memory, and what an export makes of the second."""
    write_reference(name, Path(root, "files"))
    write_reference(name, Path(root, "memory"), as_in_memory=True)
    policy = tiny_policy()
    with parallel_job(policy):
        trainer_of(Path(root, "memory"), policy).save_weights(Path(root, "exported"), {})


@pytest.mark.parametrize("name", ["mixtral", full("olmoe"), full("qwen2_moe"), full("nemotron_h")])
def test_files_may_have_the_form_of_transformers_memory(name: str, tmp_path: Path) -> None:
    run_ranks(write_both_forms, 1, name, str(tmp_path))
    assert any(tensor.ndim == 3 for tensor in tensors_in(tmp_path / "memory").values())
    assert_same_tensors(tmp_path / "exported", tmp_path / "files")


def test_experts_may_change_places_only_where_their_scores_are_equal() -> None:
    scores = np.array([[[0.5, 0.3, 0.3 + 1e-6, 0.1]]])
    theirs = ModelOutputs(np.zeros((1, 1, 2)), [np.array([[[0, 2]]])], [scores])
    assert_same_experts(ModelOutputs(theirs.logits, [np.array([[[0, 1]]])], []), theirs)
    with pytest.raises(AssertionError, match=r"layer 0 with experts, row 0, column 0: chosen \[0 3\]"):
        assert_same_experts(ModelOutputs(theirs.logits, [np.array([[[0, 3]]])], []), theirs)
