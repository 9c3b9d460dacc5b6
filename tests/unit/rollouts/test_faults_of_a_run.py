# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""An environment that fails: reported at once, and the end of a run where nothing at all is scored."""

from dataclasses import replace

import pytest

from nemo_rl_moe.config.schema_environment import OnFailure
from nemo_rl_moe.errors import EXIT_RUN_FAILED, RewardWorkersFailedError
from nemo_rl_moe.rewards.interface import Fault, Score, ScoringItem
from nemo_rl_moe.rollouts.faults import FaultWatch
from nemo_rl_moe.rollouts.trajectory import Trajectory
from tests.support.grpo_fakes import SAMPLING, FakeEngine, make_runner, prompts, trajectory


def failed(fault: Fault = Fault.ERROR, message: str = "ValueError: a nine", sample_id: str = "line 1") -> Trajectory:
    return replace(trajectory(sample_id=sample_id, fault=fault), fault_message=message)


SCORED, CUT = trajectory(), trajectory(is_truncated=True)


def watch(
    max_failed: int | None = 1, *, score_truncated: bool = False, on_failure: OnFailure = "leave_out"
) -> tuple[FaultWatch, list[str]]:
    warnings: list[str] = []
    found = FaultWatch(max_failed, score_truncated=score_truncated, on_failure=on_failure, warn=warnings.append)
    return found, warnings


def test_the_first_failure_of_each_kind_is_reported_at_once() -> None:
    watched, warnings = watch()
    watched.observe([SCORED, SCORED])
    assert warnings == []
    watched.observe([SCORED, failed(), failed(message="KeyError: 3"), failed(Fault.TIMEOUT, "took longer than 1 s")])
    watched.observe([SCORED, failed(message="IndexError: 4")])
    assert warnings == [
        "the environment failed to score a response, which is not trained on: ValueError: a nine (sample line 1);"
        " further ones are counted as env/num_errors (env.on_failure: leave_out)",
        "the environment failed to score a response, which is not trained on: took longer than 1 s (sample line 1);"
        " further ones are counted as env/num_timeouts (env.on_failure: leave_out)",
    ]


@pytest.mark.parametrize(
    ("on_failure", "reported"),
    [("lowest", "which gets the lowest reward of its group"), ("zero", "which gets reward 0")],
)
def test_what_becomes_of_it_is_reported(on_failure: OnFailure, reported: str) -> None:
    watched, warnings = watch(on_failure=on_failure)
    watched.observe([SCORED, failed()])
    assert f"failed to score a response, {reported}: ValueError: a nine" in warnings[0]


def test_the_first_answer_that_does_not_fit_is_reported_with_its_numbers() -> None:
    watched, warnings = watch()
    long = [
        replace(SCORED, overlong=f"{size} tokens of the environment do not fit", sample_id="p:3") for size in (9, 8)
    ]
    watched.observe([SCORED, *long])
    watched.observe(long)
    assert warnings == [
        "9 tokens of the environment do not fit: none of them is added, and the trajectory ends as truncated (sample"
        " p:3); further ones are counted as env/num_overlong"
    ]


def test_a_step_without_any_score_ends_the_run() -> None:
    watched, warnings = watch()
    with pytest.raises(RewardWorkersFailedError) as error:
        watched.observe([failed(), failed(sample_id="line 2"), CUT])
    assert str(error.value) == (
        "the environment scored no response of a step or validation: 2 of 3 failed, the first with ValueError: a nine"
        " (sample line 1) (grpo.max_consecutive_failed_steps: 1)"
    )
    assert error.value.exit_code == EXIT_RUN_FAILED
    assert len(warnings) == 1


def test_as_many_steps_in_a_row_as_the_key_says() -> None:
    watched, _ = watch(3)
    for step in ([failed()], [failed()], [failed(), SCORED], [failed()], [CUT, CUT], [failed(), CUT]):
        watched.observe(step)
    with pytest.raises(RewardWorkersFailedError, match="3 times in a row"):
        watched.observe([failed()])


def test_null_never_ends_a_run_and_reports_once_that_nothing_is_learned() -> None:
    watched, warnings = watch(None)
    for _ in range(50):
        watched.observe([failed()])
    assert len(warnings) == 2
    assert warnings[1] == (
        "the environment scored no response of a step or validation: 1 of 1 failed, the first with ValueError: a nine"
        " (sample line 1); a step without a scored response changes no weights (grpo.max_consecutive_failed_steps:"
        " null)"
    )


def test_what_was_cut_shows_only_where_it_is_scored_that_the_environment_works() -> None:
    watch(score_truncated=True)[0].observe([failed(), CUT])
    watch()[0].observe([failed(), replace(CUT, reward=0.5)])
    watch()[0].observe([CUT, CUT])
    with pytest.raises(RewardWorkersFailedError):
        watch()[0].observe([failed(), CUT])


class Raises:
    """Scores nothing."""

    def score(self, items: list[ScoringItem]) -> list[Score]:
        return [Score(0.0, is_correct=False, fault=Fault.ERROR, message="ValueError: no") for _ in items]


def test_the_runner_shows_its_trajectories_to_the_watch() -> None:
    watched, warnings = watch(2)
    worker = make_runner(FakeEngine(), Raises(), watch=watched)
    assert len(worker.evaluate(prompts(2), 2, SAMPLING, (1,))) == 4
    assert len(warnings) == 2
    with pytest.raises(RewardWorkersFailedError, match="4 of 4 failed"):
        worker.evaluate(prompts(2), 2, SAMPLING, (2,))
