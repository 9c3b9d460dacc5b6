# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Engines that sleep while the trainer has their GPUs, in GRPO's own loop: a stand-in keeps vLLM's rules of sleep."""

import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from nemo_rl_moe.algorithms.grpo import Rollouts, train_grpo, update_engine
from nemo_rl_moe.algorithms.grpo_batch import failure_rule
from nemo_rl_moe.algorithms.grpo_metrics import Validator
from nemo_rl_moe.checkpoints.state import LoopState
from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.data.prompts import PromptLoader
from nemo_rl_moe.distributed.cluster import RayCluster
from nemo_rl_moe.errors import GenerationError, WeightSyncError
from nemo_rl_moe.generation.refit import refit
from nemo_rl_moe.generation.vllm.config import PrefixCaching
from nemo_rl_moe.generation.vllm.engine import Placement, VllmEngine
from nemo_rl_moe.generation.vllm.images import ImagePrompts
from nemo_rl_moe.generation.vllm.worker import VllmSettings
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.rollouts.trajectory import Trajectory, sequences_of
from nemo_rl_moe.weight_sync.transport import WeightTransport
from tests.conftest import REPOSITORY_ROOT
from tests.support.grpo_fakes import (
    PAD_TOKEN,
    SAMPLING,
    FakePolicy,
    FakeRewardFunction,
    ListLogger,
    make_runner,
    make_source,
    prompts,
    small_config,
)
from tests.support.grpo_inputs import cluster_config
from tests.support.loggers import DiaryOfCheckpoints, make_recorder
from tests.support.vllm_engines import FREE, SentWeights, generated, requests

STAND_IN = REPOSITORY_ROOT / "tests/support/vllm_stand_in"
FIRST_WEIGHTS = 20
"""Value of the weights of version 0, and of the tokens that they draw; that of each later version is one more."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RayCluster, Path]]:
    """A Ray whose processes import the stand-in, and the file of what engines do."""
    log = tmp_path_factory.mktemp("engines") / "events.txt"
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        path = [str(STAND_IN), str(REPOSITORY_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        patch.setenv("PYTHONPATH", os.pathsep.join(path))
        patch.setenv("VLLM_STAND_IN_LOG", str(log))
        cluster = RayCluster(cluster_config(1, 0, 2))
        yield cluster, log
        cluster.shutdown()


class SendingPolicy(FakePolicy):
    """A policy whose weights are one number, of its version."""

    def weight_transport(  # type: ignore[override]
        self, *, altered: bool = False, whole: bool = False, then: Callable[[], object] = lambda: None
    ) -> WeightTransport:
        number = torch.full((4,), float(FIRST_WEIGHTS + self.weight_version))
        return SentWeights({"weights": number}, self.weight_version).weight_transport(then=then)


@dataclass
class Engines:
    """One engine on a GPU of the trainer's, and what it has done.

    Attributes:
        cluster: A started Ray.
        log: File of events.
        policy: Has the weights.
        stall_timeout_s: Of the engine.
        prefix_caching: Of the engine.
    """

    cluster: RayCluster
    log: Path
    policy: SendingPolicy = field(default_factory=SendingPolicy)
    stall_timeout_s: float = 60.0
    prefix_caching: PrefixCaching = "none"

    def __post_init__(self) -> None:
        self.log.write_text("")
        self.warnings: list[str] = []
        machine: Any = SimpleNamespace(
            placement_group=self.cluster.placement_group, config=SimpleNamespace(gpus_per_node=1, num_nodes=1)
        )
        self.engine = VllmEngine(
            VllmSettings(
                model_files={},
                decodes_text=False,
                dtype="bfloat16",
                max_tokens=64,
                max_sequences=None,
                seed=0,
                on_gpus=True,
                tensor_parallel_size=1,
                expert_parallel=False,
                gpu_memory_utilization=0.5,
                cpu_cache_gib=1,
                num_threads=1,
                prefix_caching=self.prefix_caching,
            ),
            num_engines=1,
            start_timeout_s=120.0,
            stall_timeout_s=self.stall_timeout_s,
            placement=Placement(machine, 1),
            refit=lambda engine: refit(engine, self.policy),
            warn=self.warnings.append,
        )

    def events(self) -> list[str]:
        """Return what the engine has done so far; how many requests come at a time depends on the machine's load."""
        events: list[str] = []
        for line in self.log.read_text().splitlines():
            new, last = ANSWERED.fullmatch(line), ANSWERED.fullmatch(events[-1]) if events else None
            if new and last and new[2] == last[2]:
                events[-1] = answered(int(last[1]) + int(new[1]), int(new[2]))
            else:
                events.append(line)
        return events

    def __enter__(self) -> "Engines":
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.shutdown()


def train(engines: Engines, config: GRPOMasterConfig, start: LoopState) -> dict[tuple[int, str], set[int]]:
    """GRPO's own loop, source, validation and rollouts; the weights that sampled the tokens of each step and split."""
    sampled: dict[tuple[int, str], set[int]] = {}

    def note(step: int, split: str, trajectories: list[Trajectory]) -> None:
        sampled[step, split] = {
            int(token) for each in sequences_of(trajectories) for token in each.token_ids[each.loss_mask]
        }

    engine: Any = engines.engine
    runner = make_runner(engine, FakeRewardFunction())
    loader = PromptLoader(prompts(7), config.grpo.num_prompts_per_step, config.grpo.seed, shuffle=True)
    engine.sleep()  # as a run begins
    train_grpo(
        config,
        engines.policy,
        Rollouts(
            engine,
            make_source(config, runner, loader, start),
            Validator(config.grpo, runner, prompts(2, "val"), SAMPLING, failure_rule(config)),
            PAD_TOKEN,
        ),
        make_recorder(ListLogger(), [], note, DiaryOfCheckpoints(), start=start),
    )
    return sampled


ANSWERED = re.compile(r"answer (\d+) with (\d+)")


def answered(count: int, weights: int) -> str:
    return f"answer {count} with {weights}"


def step_events(weights: int, answers: int) -> list[str]:
    """Return the events of a refit, of answers to requests, and of sleep."""
    return ["wake weights", f"load {weights}", "wake kv_cache", answered(answers, weights), "sleep 2"]


DYNAMIC = ("grpo.use_dynamic_sampling=true", "grpo.dynamic_sampling_max_groups=4", "grpo.max_num_epochs=2")


@pytest.mark.parametrize(
    ("overrides", "start", "steps"),
    [
        # Rollouts are six requests; a validation before them four, with the same weights.
        (["grpo.val_at_start=true"], 0, [10, 6]),
        pytest.param(["grpo.val_period=1"], 0, [6, 10], marks=pytest.mark.slow),
        pytest.param([*DYNAMIC], 0, [12, 12], marks=pytest.mark.slow),
        pytest.param([*DYNAMIC, "grpo.val_at_start=true", "grpo.val_period=1"], 0, [16, 16], marks=pytest.mark.full),
        pytest.param(["grpo.val_at_start=true"], 1, [6], marks=pytest.mark.full),
    ],
    ids=["validation at the start", "periodic validation", "dynamic sampling", "all of them", "resume"],
)
def test_engines_have_weights_whenever_the_loop_generates(
    place: tuple[RayCluster, Path], overrides: list[str], start: int, steps: list[int]
) -> None:
    config = small_config("grpo.max_num_steps=2", *overrides)
    with Engines(*place) as engines:
        sampled = train(engines, config, LoopState(step=start, batches_taken=start))
        events = engines.events()
    assert engines.warnings == []
    expected = [event for n, answers in enumerate(steps) for event in step_events(FIRST_WEIGHTS + n, answers)]
    after_the_last = ["wake weights", f"load {FIRST_WEIGHTS + len(steps)}"]
    if "grpo.val_period=1" in overrides:
        after_the_last += ["wake kv_cache", answered(4, FIRST_WEIGHTS + len(steps))]
    assert events == ["start", "sleep 2", *expected, *after_the_last], (
        "asleep once a step, one transfer of weights each"
    )
    assert {step: weights for (step, split), weights in sampled.items() if split == "train"} == {
        start + n + 1: {FIRST_WEIGHTS + n} for n in range(len(steps))
    }


@pytest.mark.full
def test_weights_that_sleep_has_discarded_are_sent_before_engines_generate(place: tuple[RayCluster, Path]) -> None:
    """A loop of one's own that lets engines sleep between two rollouts, and sends nothing."""
    with Engines(*place) as engines:
        engine: Any = engines.engine
        update_engine(engine, engines.policy, PhaseClock())
        for _ in range(2):
            engine.wake()
            assert {int(found.token_ids[0]) for found in generated(engine, requests(3))} == {FIRST_WEIGHTS}
            engine.sleep()
            engine.sleep()
        # New weights arrive while it sleeps, and it sleeps again before it has generated.
        refit(engine, engines.policy)
        engine.sleep()
        assert engines.events()[-3:] == ["load 20", "wake kv_cache", "sleep 2"]
        assert not [event for event in engines.events() if event.startswith(("sleep:", "wake:"))]


@pytest.mark.full
def test_an_engine_that_sleeps_is_not_asked(place: tuple[RayCluster, Path]) -> None:
    with Engines(*place) as engines:
        engine: Any = engines.engine
        refit(engine, engines.policy)
        engine.sleep()
        asleep = r"^vLLM engine 0 cannot generate: still asleep: {}; call wake\(\) before requests, and send new"
        # Weights come by themselves, the cache does not.
        with pytest.raises(GenerationError, match=asleep.format("kv_cache, scheduler")):
            generated(engine, requests(1))
        engine.sleep()
        with pytest.raises(GenerationError, match=asleep.format("weights, scheduler")):
            engine.score([[1, 2]], 1.0)
        engine.wake()
        refit(engine, engines.policy)
        assert len(generated(engine, requests(1))) == 1
        assert engines.warnings == []


@pytest.mark.full
def test_an_engine_that_dies_while_it_has_nothing_to_do_is_replaced(place: tuple[RayCluster, Path]) -> None:
    with Engines(*place) as engines:
        engine: Any = engines.engine
        refit(engine, engines.policy)
        os.kill(engine.process_ids()[0], signal.SIGKILL)
        assert len(generated(engine, requests(2))) == 2
        os.kill(engine.process_ids()[0], signal.SIGKILL)
        with pytest.raises(GenerationError, match="1 of 1 engines were lost before they scored"):
            engine.score([[1, 2]], 1.0)
        assert len(engines.warnings) == 2


@pytest.mark.full
def test_steps_without_tokens_are_no_progress(place: tuple[RayCluster, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that falls asleep of itself is given up after the stall limit, and another one answers."""
    with Engines(*place, stall_timeout_s=5.0) as engines:
        engine: Any = engines.engine
        refit(engine, engines.policy)
        assert len(generated(engine, requests(2))) == 2
        assert engine.num_steps() == FREE.max_new_tokens
        ray.get(engine._actors.present[0].handle.sleep.remote())
        monkeypatch.setattr(engine, "_require_awake", lambda: None)
        assert len(generated(engine, requests(2))) == 2
        assert engines.warnings == ["vLLM engine 0 made no step for 5 s; engines are started anew"]


def test_engines_on_gpus_are_made_for_throughput(place: tuple[RayCluster, Path]) -> None:
    """Batches of the class LLM, a kernel that refits reach, and one generator of the engine's own for all requests."""
    with Engines(*place) as engines:
        engine: Any = engines.engine
        refit(engine, engines.policy)
        generated(engine, requests(3))
        actors = engine._actors

        def made_with() -> tuple[str, str, list[int | None], int]:
            ((_, answer),), _ = actors.ask(lambda handle: handle.__ray_call__.remote(_made_with))
            return answer

        first = made_with()
        actors.give_up(actors.present[0], "is replaced")
        actors.start_missing()
        second = made_with()
    assert first == ("LLM_CLASS", "triton", [None] * 3, 0)
    assert second[3] != first[3], "a new engine does not draw the numbers of the one before"


def _made_with(worker: Any) -> tuple[str, str, list[int | None], int]:
    made = worker._engine
    return made.usage_context.name, made.arguments["moe_backend"], made.seeds, made.arguments["seed"]


@pytest.mark.parametrize(
    ("prefix_caching", "weights", "num_cached"),
    [
        pytest.param("none", (20, 20, 21, 21), None, marks=pytest.mark.full),
        ("reset", (20, 20, 21, 21), (0, 5, 0, 5)),
        pytest.param("keep", (20,) * 4, (0, 5, 5, 5), marks=pytest.mark.full),
    ],
)
def test_a_prefix_cache_is_reset_at_each_update_or_kept(
    place: tuple[RayCluster, Path],
    prefix_caching: PrefixCaching,
    weights: tuple[int, ...],
    num_cached: tuple[int, ...] | None,
) -> None:
    """Tokens show the weights of the keys and values that they were sampled from."""
    found = []
    with Engines(*place, prefix_caching=prefix_caching) as engines:
        engine: Any = engines.engine
        for version in (0, 1):
            refit(engine, SentWeights({"weights": torch.full((4,), float(FIRST_WEIGHTS + version))}, version))
            found += [generated(engine, requests(1))[0] for _ in range(2)]
        events = engines.events()
    assert [int(each.token_ids[0]) for each in found] == list(weights)
    assert [each.num_cached_tokens for each in found] == (list(num_cached) if num_cached else [None] * 4)
    assert events.count("reset the prefix cache") == (2 if prefix_caching == "reset" else 0)
    assert [each.weight_version for each in found] == [0, 0, 1, 1]


def test_an_update_fails_where_requests_still_use_the_prefix_cache(place: tuple[RayCluster, Path]) -> None:
    with Engines(*place, prefix_caching="reset") as engines:
        engine: Any = engines.engine
        refit(engine, engines.policy)
        (actor,) = engine._actors.present
        ray.get(actor.handle.add.remote({7: requests(1)[0]}))
        ray.get(actor.handle.__ray_call__.remote(lambda worker: worker._take_added({}, ImagePrompts(None))))
        with pytest.raises(WeightSyncError, match="its prefix cache cannot be reset: requests still use it"):
            refit(engine, engines.policy)
