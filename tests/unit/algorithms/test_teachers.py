# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Teachers score their rows of a batch, and the loss of these scores brings a policy to them."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_rl_moe.algorithms.distillation import Teachers
from nemo_rl_moe.algorithms.grpo_batch import make_loss
from nemo_rl_moe.algorithms.losses.distillation import (
    TEACHER_LOGPROBS,
    TEACHER_PART,
    TEACHER_SHARE,
    DistillationLoss,
    shares_of_means,
)
from nemo_rl_moe.config.loading import load_config_as
from nemo_rl_moe.config.schema_distillation import DistillationMasterConfig
from nemo_rl_moe.distributed.batch import Destination, TokenBatch, per_token
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.models.candidates import CANDIDATE_IDS, candidate_column
from nemo_rl_moe.models.interfaces import LossInputs, LossOutputs
from nemo_rl_moe.rollouts.training_batch import training_batch
from nemo_rl_moe.rollouts.trajectory import Trajectory
from tests.support.grpo_fakes import trajectory
from tests.support.grpo_inputs import tokens_of, with_tokens
from tests.support.tiny_model import BigramModel

VOCABULARY, K = 12, 4
MIXTURE = (
    *(f"+env.mixture.{name}={{weight: 1.0}}" for name in ("sums", "words", "games")),
    "+distillation.teachers.writer=${distillation.teachers.teacher}",
    "distillation.teacher_by_environment={sums: teacher, words: writer}",
    "+cluster.roles.writer={cpu_workers_per_node: 1}",
)


def config(*overrides: str) -> DistillationMasterConfig:
    return load_config_as(
        DistillationMasterConfig,
        "distillation_tiny_moe.yaml",
        [f"distillation.topk_logits_k={K}", *overrides],
        check_paths=False,
    )


def model(seed: int) -> BigramModel:
    generator = torch.Generator().manual_seed(seed)
    return BigramModel(2 * torch.randn(VOCABULARY, VOCABULARY, generator=generator))


def responses(count: int, environments: tuple[str, ...] = ("",), seed: int = 0) -> list[Trajectory]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number in range(count):
        length = 2 + number % 5
        ids = torch.randint(2, VOCABULARY, (length,), generator=generator).tolist()
        made = trajectory((10, 3, 7)[: 1 + number % 3], ids, [-1.0] * length)
        found.append(replace(made, environment=environments[number % len(environments)]))
    return found


def batch_of(trajectories: list[Trajectory]) -> TokenBatch:
    return training_batch(trajectories, torch.zeros(len(trajectories), 1), 0, leave_out_truncated=False)


def inputs_of(batch: TokenBatch, policy: BigramModel) -> LossInputs:
    """What ranks make of a batch, with the policy's graph."""
    all_logprobs = policy.next_logprobs(batch)
    candidates = None
    if CANDIDATE_IDS in batch.columns:
        candidates = all_logprobs.gather(-1, batch.columns[CANDIDATE_IDS].values[:, :-1].long())
    return LossInputs(
        logprobs=all_logprobs.gather(-1, batch.input_ids[:, 1:, None])[..., 0],
        token_mask=batch.token_mask[:, 1:],
        global_valid_tokens=batch.num_valid_tokens(),
        global_sequences=len(batch),
        greedy_matches=None,
        columns={name: column.of_targets() for name, column in batch.columns_for(Destination.LOSS).items()},
        candidates=candidates,
    )


def exact_divergence(batch: TokenBatch, policy: BigramModel, teacher: BigramModel, counts: Tensor) -> Tensor:
    """KL(policy || teacher) over the whole vocabulary, the mean over tokens that count."""
    p, q = policy.next_logprobs(batch), teacher.next_logprobs(batch)
    return (p.exp() * (p - q)).sum(-1)[counts[:, 1:]].mean()


def test_each_teacher_scores_its_environments_and_the_others_have_none() -> None:
    settings = config(*MIXTURE)
    policy, teachers = model(0), {"teacher": model(1), "writer": model(2)}
    trajectories = responses(9, ("sums", "words", "games"))
    batch = batch_of(trajectories)
    clock = PhaseClock()
    scored, metrics = Teachers(settings, teachers, VOCABULARY).with_scores(policy, batch, trajectories, clock)
    assert [len(each.asked) for each in teachers.values()] == [1, 1]
    ids, found = scored.columns[CANDIDATE_IDS].values, scored.columns[TEACHER_LOGPROBS].values
    by_row: list[BigramModel | None] = [teachers["teacher"], teachers["writer"], None]
    for row in range(9):
        teacher, length = by_row[row % 3], int(batch.lengths[row])
        if teacher is None:
            assert not found[row].any()
            assert not scored.columns[TEACHER_SHARE].values[row].any()
            continue
        for place in range(1, length):
            logprobs = teacher.logits[batch.input_ids[row, place - 1]].log_softmax(-1)
            own = policy.logits[batch.input_ids[row, place - 1]].topk(K).indices
            assert ids[row, place - 1].tolist() == own.tolist()
            torch.testing.assert_close(found[row, place], logprobs[own])
    trained = [int(batch.token_mask[row].sum()) for row in range(9)]
    assert metrics["distillation/share_with_teacher"] == pytest.approx(1 - sum(trained[2::3]) / sum(trained))
    assert float(scored.columns[TEACHER_SHARE].values.sum()) == pytest.approx(1)
    assert {name.split("/")[1] for name in clock.metrics()} == {"candidates", "teachers"}


def test_a_teacher_scores_all_sequences_of_a_trajectory() -> None:
    two = with_tokens(trajectory(), tokens_of([10], [3, 4]), tokens_of([10, 3, 9], [7, 8, 2]))
    trajectories = [two, trajectory((10,), (5, 6))]
    teacher = model(1)
    settings = config("distillation.topk_logits_k=null")
    batch = batch_of(trajectories)
    scored, _ = Teachers(settings, {"teacher": teacher}, VOCABULARY).with_scores(
        model(0), batch, trajectories, PhaseClock()
    )
    assert len(batch) == 3
    torch.testing.assert_close(scored.columns[TEACHER_LOGPROBS].values, teacher.start_logprobs(batch)())
    # Seven trained tokens: two, three and two.
    trained = (scored.columns[TEACHER_SHARE].values > 0).sum(1)
    assert trained.tolist() == [2, 3, 2]
    assert scored.columns[TEACHER_SHARE].values[1].max() == pytest.approx(1 / 7)


@pytest.mark.parametrize(("component", "trains_all"), [(None, False), ("policy_gradient_weight", True)])
def test_tokens_that_no_component_trains_on_are_not_trained_tokens(component: str | None, trains_all: bool) -> None:
    """An update of responses without a teacher has none, and is left out."""
    settings = config(*MIXTURE, *([] if component is None else [f"distillation.{component}=0.5"]))
    trajectories = responses(9, ("sums", "words", "games"))
    batch = batch_of(trajectories)
    teachers = Teachers(settings, {"teacher": model(1), "writer": model(2)}, VOCABULARY)
    scored, _ = teachers.with_scores(model(0), batch, trajectories, PhaseClock())
    without = torch.tensor([number % 3 == 2 for number in range(9)])
    assert bool(scored.token_mask[without].any()) is trains_all
    assert torch.equal(scored.token_mask[~without], batch.token_mask[~without])


def test_environments_with_the_same_teacher_ask_it_once() -> None:
    """O5: each response gets its own scores, the first token's included (O4)."""
    settings = config(
        "+env.mixture.sums={weight: 1.0}",
        "+env.mixture.words={weight: 1.0}",
        "distillation.teacher_by_environment={sums: teacher, words: teacher}",
    )
    policy, teacher = model(0), model(1)
    trajectories = responses(8, ("sums", "words"))
    batch = batch_of(trajectories)
    teachers = Teachers(settings, {"teacher": teacher}, VOCABULARY)
    scored, metrics = teachers.with_scores(policy, batch, trajectories, PhaseClock())
    assert len(teacher.asked) == 1
    assert metrics["distillation/share_with_teacher"] == 1
    ids, found = scored.columns[CANDIDATE_IDS].values.long(), scored.columns[TEACHER_LOGPROBS].values
    expected = teacher.logits[batch.input_ids[:, :-1]].log_softmax(-1).gather(-1, ids[:, :-1])
    of_response = torch.arange(1, batch.input_ids.shape[1]) < batch.lengths[:, None]
    torch.testing.assert_close(found[:, 1:][of_response], expected[of_response])


@pytest.mark.parametrize(
    "changes", [(), ("distillation.topk_ids=teacher",), ("distillation.topk_logits_k=null",)], ids=str
)
def test_a_teacher_that_gives_no_numbers_is_named(changes: tuple[str, ...]) -> None:
    settings = config(*MIXTURE, *changes)
    teachers = {"teacher": model(1), "writer": BigramModel(torch.full((VOCABULARY, VOCABULARY), torch.nan))}
    trajectories = responses(9, ("sums", "words", "games"))
    with pytest.raises(ConfigurationError, match=r"^distillation\.teachers\.writer: .* the step's 3 responses"):
        Teachers(settings, teachers, VOCABULARY).with_scores(
            model(0), batch_of(trajectories), trajectories, PhaseClock()
        )


def test_a_response_that_a_teacher_cannot_score_costs_an_update_alone() -> None:
    broken = model(1)
    broken.logits[3] = torch.nan  # what follows token 3
    trajectories = responses(9)
    scored, _ = Teachers(config(), {"teacher": broken}, VOCABULARY).with_scores(
        model(0), batch_of(trajectories), trajectories, PhaseClock()
    )
    lacks = scored.columns[TEACHER_LOGPROBS].values.isnan().flatten(1).any(-1)
    assert lacks.any()
    assert not lacks.all()


@pytest.mark.parametrize(
    "changes", [(), ("distillation.topk_ids=teacher",), ("distillation.topk_logits_k=null",)], ids=str
)
def test_a_step_without_any_response_that_has_a_teacher_teaches_nothing(changes: tuple[str, ...]) -> None:
    settings = config(*MIXTURE, *changes)
    teachers = Teachers(settings, {"teacher": model(1), "writer": model(2)}, VOCABULARY)
    trajectories = responses(3, ("games",))
    scored, metrics = teachers.with_scores(model(0), batch_of(trajectories), trajectories, PhaseClock())
    policy = model(0)
    policy.logits.requires_grad_()
    outputs = teachers.loss(make_loss(settings, is_on_policy=True))(inputs_of(scored, policy))
    outputs.loss.backward()
    assert outputs.loss == 0
    assert policy.logits.grad is not None
    assert not policy.logits.grad.any()
    assert metrics["distillation/share_with_teacher"] == metrics["distillation/bytes_from_teachers"] == 0


@pytest.mark.parametrize("topk_ids", ["policy", "teacher"])
def test_bytes_are_those_of_ids_and_numbers_of_the_rows_that_are_asked_about(topk_ids: str) -> None:
    settings = config(*MIXTURE, f"distillation.topk_ids={topk_ids}")
    teachers = {"teacher": model(1), "writer": model(2)}
    trajectories = responses(9, ("sums", "words", "games"))
    batch = batch_of(trajectories)
    _, metrics = Teachers(settings, teachers, VOCABULARY).with_scores(model(0), batch, trajectories, PhaseClock())
    widths = {name: int(batch.lengths[start::3].max()) for start, name in enumerate(("teacher", "writer"))}
    numbers = sum(3 * width * K * 4 for width in widths.values())
    ids_out = 2 * 3 * batch.input_ids.shape[1] * K * 4
    expected = (ids_out, numbers) if topk_ids == "policy" else (0, 2 * numbers)
    found = (metrics["distillation/bytes_to_teachers"], metrics["distillation/bytes_from_teachers"])
    assert found == expected


def test_without_candidates_one_number_a_token_comes_back() -> None:
    settings = config("distillation.topk_logits_k=null")
    trajectories = responses(6)
    batch = batch_of(trajectories)
    teacher = model(1)
    scored, metrics = Teachers(settings, {"teacher": teacher}, VOCABULARY).with_scores(
        model(0), batch, trajectories, PhaseClock()
    )
    assert CANDIDATE_IDS not in scored.columns
    torch.testing.assert_close(scored.columns[TEACHER_LOGPROBS].values, teacher.start_logprobs(batch)())
    assert metrics["distillation/bytes_from_teachers"] == batch.input_ids.numel() * 4


def loss_with(**changes: Any) -> DistillationLoss:
    plain = DistillationLoss("reverse", 0.5, True, 1.0, 0.0, 0.0, None)
    return replace(plain, **changes)


def test_a_component_is_not_diluted_by_tokens_of_others() -> None:
    """Rows without a teacher change neither the divergence nor its gradient; a mean over all tokens would halve it."""
    trajectories = responses(6)
    teachers = Teachers(config(), {"teacher": model(1)}, VOCABULARY)
    scored, _ = teachers.with_scores(model(0), batch_of(trajectories), trajectories, PhaseClock())
    counts = scored.columns[TEACHER_SHARE].values > 0
    more = responses(6) + responses(6, seed=1)
    mixed, _ = teachers.with_scores(model(0), batch_of(more), more, PhaseClock())
    counts_of_mixed = mixed.columns[TEACHER_SHARE].values > 0
    counts_of_mixed[6:] = False
    mixed = mixed.with_columns(**shares_of_means(counts_of_mixed, [0]))
    found = []
    for batch in (scored, mixed):
        policy = model(0)
        policy.logits.requires_grad_()
        outputs = loss_with()(inputs_of(batch, policy))
        outputs.loss.backward()
        found.append((outputs, policy.logits.grad))
    assert counts.any()
    torch.testing.assert_close(found[0][0].loss, found[1][0].loss)
    torch.testing.assert_close(found[0][1], found[1][1])


def test_shares_of_microbatches_and_global_batches_add_up_to_means() -> None:
    counts = torch.tensor([[True, True, True], [True, False, False], [False, True, False], [True, True, True]])
    columns = shares_of_means(counts, [0, 2])
    assert columns[TEACHER_PART].values.tolist() == [pytest.approx(part) for part in (0.4, 0.4, 0.6, 0.6)]
    assert columns[TEACHER_SHARE].values.tolist() == [
        [0, 0.5, 0.5],
        [0, 0, 0],
        [0, pytest.approx(1 / 3), 0],
        [0, pytest.approx(1 / 3), pytest.approx(1 / 3)],
    ]


def test_old_tokens_are_weighed_within_the_bounds_of_the_correction() -> None:
    """The policy finds each token e^3 times as likely as the weights that sampled it, and counts it twice at most."""
    trajectories, policy = responses(6), model(0)
    batch = batch_of(trajectories)
    own = policy.start_logprobs(batch)()
    batch = batch.with_columns(generation_logprobs=per_token(own - 3.0))
    found = {}
    for name in ("none", "truncated", "icepop"):
        settings = config(
            "distillation.topk_logits_k=null",
            f"loss_fn.importance_sampling_correction={name}",
            "loss_fn.importance_sampling_ratio_max=2.0",
        )
        teachers = Teachers(settings, {"teacher": model(1)}, VOCABULARY)
        scored, _ = teachers.with_scores(policy, batch, trajectories, PhaseClock())  # type: ignore[arg-type]
        loss = teachers.loss(make_loss(settings, is_on_policy=False))
        found[name] = float(loss(inputs_of(scored, policy)).metrics["teacher_kl"][0])
    assert found["truncated"] == pytest.approx(2 / math.exp(3.0) * found["none"], rel=1e-5)
    assert found["icepop"] == 0
    assert found["none"] != 0


@pytest.mark.parametrize(("staleness", "correction"), [(1, "none"), (1, "truncated"), (0, "none")])
def test_an_estimate_from_old_tokens_without_a_bound_is_refused(staleness: int, correction: str) -> None:
    overrides = [
        "distillation.topk_logits_k=null",
        "policy.generation.backend=vllm",
        "grpo.rollouts.mode=asynchronous",
        f"grpo.rollouts.max_staleness={staleness}",
        f"loss_fn.importance_sampling_correction={correction}",
    ]
    message = "distillation.topk_logits_k: got null with grpo.rollouts.max_staleness 1 and"
    if staleness and correction == "none":
        with pytest.raises(ConfigurationError, match=message):
            config(*overrides)
    else:
        config(*overrides)


def test_means_of_a_step_do_not_depend_on_its_global_batches() -> None:
    """One of a response and one of five: a mean of the two means would count the first one's tokens five times."""
    trajectories = responses(6)
    teachers = Teachers(config(), {"teacher": model(1)}, VOCABULARY)
    scored, _ = teachers.with_scores(model(0), batch_of(trajectories), trajectories, PhaseClock())
    counts = scored.columns[TEACHER_SHARE].values > 0
    divided = scored.with_columns(**shares_of_means(counts, [0, 1]))
    whole, parts = (loss_with()(inputs_of(each, model(0))).metrics for each in (scored, divided))
    for name in ("teacher_kl", "policy_candidate_mass", "teacher_candidate_mass"):
        torch.testing.assert_close(parts[name][0], whole[name][0])


def test_rewards_are_trained_on_where_their_component_has_a_weight() -> None:
    trajectories = responses(6)
    batch = training_batch(trajectories, torch.linspace(-1, 1, 6)[:, None], 0, leave_out_truncated=False)
    gradients = {}
    for weight in (0.0, 0.5):
        settings = config(f"distillation.policy_gradient_weight={weight}")
        teachers = Teachers(settings, {"teacher": model(1)}, VOCABULARY)
        scored, _ = teachers.with_scores(model(0), batch, trajectories, PhaseClock())
        policy = model(0)
        policy.logits.requires_grad_()
        of_rewards = make_loss(settings, is_on_policy=True)
        outputs = teachers.loss(of_rewards)(inputs_of(scored, policy))
        outputs.loss.backward()
        gradients[weight] = policy.logits.grad
        assert {
            "teacher_kl",
            "policy_candidate_mass",
            "num_valid_tokens",
            "token_mult_prob_error",
        } <= outputs.metrics.keys()
    alone = model(0)
    alone.logits.requires_grad_()
    of_rewards(inputs_of(batch, alone)).loss.backward()
    assert alone.logits.grad is not None
    assert alone.logits.grad.abs().max() > 1e-3
    torch.testing.assert_close(gradients[0.5], gradients[0.0] + 0.5 * alone.logits.grad)


def test_what_is_masked_may_hold_anything() -> None:
    trajectories = responses(6)
    teachers = {"teacher": model(1)}
    for k in ("null", str(K)):
        settings = config(f"distillation.topk_logits_k={k}")
        scored, _ = Teachers(settings, teachers, VOCABULARY).with_scores(
            model(0), batch_of(trajectories), trajectories, PhaseClock()
        )
        found: list[LossOutputs] = []
        for spoils in (False, True):
            numbers = scored.columns[TEACHER_LOGPROBS].values.clone()
            if spoils:
                numbers[~scored.token_mask] = torch.nan
            policy = model(0)
            policy.logits.requires_grad_()
            batch = scored.with_columns(**{TEACHER_LOGPROBS: per_token(numbers)})
            found.append(loss_with(has_candidates=k != "null")(inputs_of(batch, policy)))
            found[-1].loss.backward()
            assert policy.logits.grad is not None
            assert policy.logits.grad.isfinite().all()
        assert torch.equal(found[0].loss, found[1].loss)


@pytest.mark.parametrize(
    "settings",
    [
        ("distillation.topk_logits_k=null",),
        ("distillation.kl_type=reverse",),
        ("distillation.kl_type=forward", "distillation.topk_ids=teacher"),
        ("distillation.kl_type=mixed",),
        ("distillation.kl_type=jensen_shannon", "distillation.topk_ids=teacher"),
        (f"distillation.topk_logits_k={VOCABULARY}",),
    ],
)
def test_a_policy_that_samples_comes_to_its_teacher(settings: tuple[str, ...]) -> None:
    """Sample, score, update: the loop of a run with a table for a model."""
    generator = torch.Generator().manual_seed(3)
    teacher, policy = model(1), model(0)
    policy.logits.requires_grad_()
    teachers = Teachers(config(*settings), {"teacher": teacher}, VOCABULARY)
    optimizer = torch.optim.Adam([policy.logits], lr=0.1)
    divergences = []
    for _ in range(150):
        trajectories = sampled(policy, 16, generator)
        with torch.no_grad():
            scored, _ = teachers.with_scores(policy, batch_of(trajectories), trajectories, PhaseClock())
        divergences.append(exact_divergence(scored, policy, teacher, scored.token_mask).item())
        loss = teachers.loss(make_loss(teachers.config, is_on_policy=True))
        outputs = loss(inputs_of(scored, policy))
        optimizer.zero_grad()
        outputs.loss.backward()
        optimizer.step()
        policy.asked.clear()
    assert divergences[0] > 1
    assert sum(divergences[-10:]) / 10 < 0.15 * divergences[0]


def sampled(policy: BigramModel, count: int, generator: torch.Generator) -> list[Trajectory]:
    """Responses of eight tokens each from the policy itself, with their log-probabilities."""
    all_logprobs = policy.logits.detach().log_softmax(-1)
    ids, logprobs = [torch.arange(count) % VOCABULARY], []
    for _ in range(8):
        distributions = all_logprobs[ids[-1]]
        drawn = distributions.exp().multinomial(1, generator=generator)
        logprobs.append(distributions.gather(-1, drawn)[:, 0])
        ids.append(drawn[:, 0])
    rows = zip(torch.stack(ids, 1).tolist(), torch.stack(logprobs, 1).tolist(), strict=True)
    return [trajectory(tokens[:1], tokens[1:], values) for tokens, values in rows]


def test_candidates_stand_where_they_are_predicted() -> None:
    """O4."""
    ids = torch.arange(2 * 3 * 2).view(2, 3, 2)
    column = candidate_column(ids)
    assert column.goes_to is Destination.MODEL
    assert column.values[:, :-1].equal(ids[:, 1:])
