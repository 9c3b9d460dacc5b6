# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""GPUs that trainer and engine share: the code of both in any order, against an engine with vLLM's rules of sleep."""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_moe.distributed.shared_gpu import GpuBytes, OwnGpu, SharedGpu
from nemo_rl_moe.errors import GenerationError
from nemo_rl_moe.generation.vllm import engine as engine_module
from nemo_rl_moe.generation.vllm.engine import VllmEngine
from nemo_rl_moe.generation.vllm.releases import StepCount, count_steps, sleeping_parts
from tests.conftest import REPOSITORY_ROOT

SIZES = GpuBytes(
    process=15, weights=100, training=330, in_a_step=40, measuring=20, buckets=16, engine_weights=305, engine_share=500,
    engine_kept=15,
)  # fmt: skip
BUDGET = 15 * 2 + 100 + 16 + 500
"""Of a GPU that holds a run whose training state moves, and not a byte less."""
MOST_STEPS = 50


@pytest.fixture(scope="module")
def stand_in() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]:
            patch.delitem(sys.modules, name)
        patch.syspath_prepend(str(REPOSITORY_ROOT / "tests/support/vllm_stand_in"))
        yield importlib.import_module("vllm")
        for name in [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]:
            del sys.modules[name]


class Here:
    """An engine's actor in this process, which is called as Ray's are."""

    def __init__(self, vllm: Any):
        arguments = vllm.EngineArgs(model="", seed=0, enable_prefix_caching=False)
        self.engine = vllm.LLMEngine.from_engine_args(arguments)
        self.steps = StepCount()
        count_steps(self.engine, self.steps)

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self, f"do_{name}"))

    def do_wake(self, part: str) -> None:
        self.engine.wake_up(tags=[part])

    def do_sleep(self) -> None:
        self.engine.sleep(level=2)

    def do_receive(self, *_: Any) -> object:
        return object()

    def do_asleep(self) -> list[str]:
        return sleeping_parts(self.engine)


class Actors:
    """`EngineActors` of one engine, in this process."""

    number, num_started, stall_timeout_s = 1, 0, 1.0

    def __init__(self, vllm: Any):
        self._vllm = vllm
        self.present: list[Any] = []
        self.is_dead = False

    def start_missing(self) -> None:
        if not self.present:
            self.present = [SimpleNamespace(handle=Here(self._vllm), asleep=set(), name="engine 0")]
            self.is_dead = False

    def give_up_the_dead(self) -> None:
        if self.is_dead:
            self.present = []

    def ask(self, question: Callable[[Any], Any], actors: Any = None) -> tuple[list[Any], str | None]:
        self.give_up_the_dead()
        asked = self.present if actors is None else [each for each in actors if each in self.present]
        return [(actor, question(actor.handle)) for actor in asked], None

    def end_all(self) -> None:
        self.present = []


class Machine:
    """A run's trainer and engine, with the engine's own code and the trainer's account of its calls."""

    def __init__(self, vllm: Any, *, budget: int | None):
        self.gpu = SharedGpu(moves_training_state=True, sizes=SIZES, budget=budget)
        self.version, self.has_room = 1, False
        self.actors = Actors(vllm)
        patched = {"EngineActors": lambda *_, **__: self.actors, "Serving": lambda *_: SimpleNamespace(drain=int)}
        with pytest.MonkeyPatch.context() as patch:
            for name, value in patched.items():
                patch.setattr(engine_module, name, value)
            self.gpu.load()
            self.gpu.make_room()
            settings: Any = SimpleNamespace(dtype="bfloat16", tensor_parallel_size=1, on_gpus=True, image_settings=None)
            self.engine = VllmEngine(
                settings,
                num_engines=1,
                start_timeout_s=1.0,
                stall_timeout_s=1.0,
                placement=SimpleNamespace(is_shared=True),  # type: ignore[arg-type]
                refit=lambda engine: self.send(),
                warn=lambda text: None,
                gpu=self.gpu,
            )
        self.engine.sleep()

    def send(self) -> None:
        """Send the weights by the engine's own function, but its receivers."""

        def receive(actor: Any) -> None:
            actor.handle.engine.model_executor.worker.model_runner.reload_weights(
                iter([("weights", SimpleNamespace(flatten=lambda: [self.version]))])
            )

        transport: Any = SimpleNamespace(
            open=lambda *_, **__: None, send=lambda: [receive(actor) for actor in self.actors.present]
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine_module, "watched", lambda *_: nullcontext())
            patch.setattr(engine_module, "ActorReceivers", lambda *_, **__: SimpleNamespace(wait=lambda: None))
            self.engine.update_weights(transport, self.version)

    # What a loop may ask for

    def refit(self) -> None:
        self.gpu.make_room()
        self.send()

    def send_again(self) -> None:
        """As the refit check's round trip does."""
        self.send()

    def generate(self) -> None:
        self.engine.wake()
        self.engine._prepare()
        (actor,) = self.actors.present
        engine, steps = actor.handle.engine, actor.handle.steps
        for number in range(3):
            engine.add_request(str(number), {"prompt_token_ids": [1, number]}, SimpleNamespace(max_tokens=3, seed=None))
        before, tokens = steps.value, set[int]()
        for _ in range(MOST_STEPS):
            tokens |= {output.outputs[0].token_ids[0] for output in engine.step()}
        assert not engine.has_unfinished_requests(), "it would never end"
        assert steps.value == before + 3
        assert tokens == {self.version}, "of other weights than the trainer's"

    def sleep(self) -> None:
        self.engine.sleep()

    def measure(self) -> None:
        self.gpu.measure()

    def train(self) -> None:
        self.gpu.train()
        self.version += 1

    def load(self) -> None:
        self.gpu.load()

    def die(self) -> None:
        self.actors.is_dead = True


REQUESTS = ("refit", "send_again", "generate", "sleep", "measure", "train", "load", "die")


@given(st.lists(st.sampled_from(REQUESTS), max_size=30))
def test_whatever_is_asked_for_nobody_waits_and_the_gpu_is_never_too_full(
    stand_in: ModuleType, requests: list[str]
) -> None:
    """Each request is done, or an error names what was missing before anything of it."""
    machine, refused = Machine(stand_in, budget=BUDGET), list[str]()
    for request in requests:
        try:
            getattr(machine, request)()
        except GenerationError as error:
            refused.append(str(error))
    assert all("expected " in text for text in refused), "nobody notices by its bytes alone"
    assert max(entry.total for entry in machine.gpu.ledger) <= BUDGET


ROUNDS = st.lists(st.sampled_from(["rollouts", "rollouts and death", "measured rollouts"]), min_size=1, max_size=2)


@given(st.lists(st.tuples(st.booleans(), ROUNDS, st.booleans(), st.booleans()), min_size=1, max_size=6), st.booleans())
def test_a_run_is_never_refused_anything(
    stand_in: ModuleType, steps: list[tuple[bool, list[str], bool, bool]], is_checked: bool
) -> None:
    """Steps as the loop takes them: validation, rounds of rollouts, log-probabilities, an update, a refit."""
    machine = Machine(stand_in, budget=BUDGET)
    machine.load()  # of a checkpoint, while engines sleep
    machine.refit()
    for validates, rounds, dies_in_training, measures in steps:
        if is_checked:
            for request in (machine.generate, machine.send_again, machine.send_again, machine.generate):
                request()
        for _ in range(validates + len(rounds)):
            machine.generate()
        if "rollouts and death" in rounds:
            machine.die()
            machine.generate()
        machine.sleep()
        if measures:
            machine.measure()
        machine.train()
        if dies_in_training:
            machine.die()
        machine.refit()
    most = max(machine.gpu.ledger, key=lambda entry: entry.total)
    if is_checked:
        assert (most.event, most.total) == ("when weights arrive beside the cache", BUDGET)


def test_an_engine_does_not_wake_beside_a_full_allocator(stand_in: ModuleType) -> None:
    machine = Machine(stand_in, budget=None)
    machine.refit()
    machine.generate()
    machine.sleep()
    machine.train()
    with pytest.raises(GenerationError) as caught:
        machine.generate()
    assert str(caught.value) == (
        "GPUs that trainer and engines share: when the key-value cache wakes: expected memory that the trainer has"
        " freed, found engines (awake: nothing), and the trainer has freed no memory"
    )
    with pytest.raises(GenerationError, match="when weights arrive: expected memory that the trainer has freed"):
        machine.send()
    machine.refit()
    machine.generate()
    with pytest.raises(GenerationError, match="while training: expected engines asleep, found engines"):
        machine.train()


def test_an_engine_that_has_slept_gets_its_weights_again(stand_in: ModuleType) -> None:
    """Two rollouts with sleep between them, and no update."""
    machine = Machine(stand_in, budget=BUDGET)
    machine.refit()
    for _ in range(2):
        machine.generate()
        machine.sleep()
    assert [entry.event for entry in machine.gpu.ledger].count("when weights arrive beside the cache") == 1


def test_gpus_that_are_not_shared_allow_everything() -> None:
    gpu = OwnGpu()
    gpu.train()
    gpu.start_engine()
    gpu.generate()
    gpu.train()
    assert gpu.ledger == []
