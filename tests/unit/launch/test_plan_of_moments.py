# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Memory at each moment of a run as `plan` says, against a device that follows the calls of real runs."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from nemo_rl_moe.config.loading import load_grpo_config
from nemo_rl_moe.distributed.accelerators import parse_target
from nemo_rl_moe.launch.plan_gpus import engine_size, fit_line, fit_of, moments_of_the_fullest
from nemo_rl_moe.models.hf_files import load_hf_config
from nemo_rl_moe.models.megatron.model.engine_memory import EngineMemory, engine_memory, refit_bytes
from nemo_rl_moe.models.megatron.model.memory_estimate import WorkerMemory, worker_memory
from nemo_rl_moe.models.megatron.model.memory_moments import KEPT_BYTES, PROCESS_BYTES, fullest
from nemo_rl_moe.models.megatron.model.planned_machine import planned_with_gpus
from nemo_rl_moe.models.megatron.model.transformer_config import build_transformer_config
from tests.conftest import REPOSITORY_ROOT
from tests.support.recorded_run import recorded_run

pytestmark = pytest.mark.megatron


@dataclass
class Device:
    """A GPU that a rank of the trainer and one of an engine share; what the trainer frees, its allocator keeps.

    Attributes:
        worker: Memory of the trainer's rank.
        engine: Memory of the engine's rank.
        share: Bytes that the engine wants while it is awake.
        refit: Bytes that arriving weights take besides.
        size: Bytes of the GPU.
        totals: Most bytes at each call so far.
    """

    worker: WorkerMemory
    engine: EngineMemory
    share: int
    refit: int
    size: int
    totals: dict[str, int] = field(default_factory=dict)

    def begin(self) -> None:
        """Frees all of it."""
        self._live = self._reserved = self._of_engine = self._processes = 0

    def take(self, call: str) -> None:
        """Apply what a call allocates or frees."""
        worker = self.worker
        if call in ("start workers", "engine starts"):
            self._processes += PROCESS_BYTES
        if call in ("start workers", "load_checkpoint", "onload_optimizer"):
            self._live = worker.always
        elif call == "offload_optimizer":
            self._live = worker.weights
        elif call == "train":
            self._live, self._reserved = worker.always, max(self._reserved, worker.while_training_at_least)
        elif call == "empty_cache":
            self._reserved = self._live
        elif call == "engine starts":
            free = self.size - self._reserved - self._processes
            assert free >= self.share, "vLLM refuses to start"
        self._reserved = max(self._reserved, self._live)
        of_engine = {
            "engine starts": self.share,
            "engine sleeps": KEPT_BYTES,
            "weights arrive": self.engine.weights + KEPT_BYTES + self.refit,
            "engine wakes": self.share,
        }
        self._of_engine = of_engine.get(call, self._of_engine)
        total = self._reserved + self._of_engine + self._processes
        self.totals[call] = max(total, self.totals.get(call, 0))


MOMENTS = {
    "load_checkpoint": "when a checkpoint is loaded",
    "engine starts": "when engines start",
    "weights arrive": "when weights arrive",
    "engine wakes": "while responses are generated",
    "train": "while training",
}
BESIDE = ("policy.generation.backend=vllm", "policy.generation.vllm.tensor_parallel_size=4")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, list[list[str]]]:
    """Calls of a run and of one that goes on from its checkpoint, by whether the optimizer's state leaves."""
    found = {}
    for offloads in (False, True):
        folder = tmp_path_factory.mktemp("runs")
        changes = {"policy__offload_optimizer_for_generation": offloads}
        found[offloads] = [recorded_run(folder, grpo__max_num_steps=steps, **changes) for steps in (1, 2)]
    return found


@pytest.mark.parametrize(
    ("recipe", "overrides", "target"),
    [
        ("grpo_qwen3_30b_a3b_vllm.yaml", (), "2x8xH100"),
        ("grpo_qwen3_30b_a3b_80gb.yaml", (*BESIDE, "policy.generation.vllm.gpu_memory_utilization=0.8"), "8xH100"),
        ("grpo_qwen3_30b_a3b.yaml", (*BESIDE, "policy.generation.vllm.gpu_memory_utilization=0.3"), "8xH200"),
    ],
)
def test_plan_reports_what_the_order_of_a_run_comes_to(
    runs: dict[bool, list[list[str]]], recipe: str, overrides: tuple[str, ...], target: str
) -> None:
    machines = parse_target(target)
    model = REPOSITORY_ROOT / "examples/assets/model_configs/Qwen3-30B-A3B"
    chosen = [f"policy.model_name={model}", *machines.overrides, *overrides]
    config, hf_config = load_grpo_config(recipe, chosen, check_paths=False), load_hf_config(str(model))
    with planned_with_gpus():
        transformer = build_transformer_config(config.policy, hf_config)
    size = machines.card.memory_gb * 10**9
    planned: Any = (config, transformer, hf_config)
    engine = engine_size(config)
    assert engine is not None
    device = Device(
        worker_memory(*planned, 0),
        engine_memory(engine, transformer, hf_config),
        int(engine.gpu_memory_utilization * size),
        refit_bytes(config, transformer, engine_memory(engine, transformer, hf_config)),
        size,
    )
    for calls in runs[config.policy.offload_optimizer_for_generation]:
        device.begin()
        for call in calls:
            device.take(call)
    found = moments_of_the_fullest(*planned, size)
    # Runs here have no refit check, which sends weights while the cache is awake.
    again = "when weights arrive beside the cache"
    totals = {moment.event: moment.total for moment in found if moment.event != again}
    assert totals == {name: device.totals[call] for call, name in MOMENTS.items()}
    most = max(moment.total for moment in found)
    assert most == device.totals["engine wakes"] + device.refit
    assert fullest(found).total == most
    line = fit_line(fit_of(*planned, machines), machines)
    assert line.startswith(f"{target}: fits, with {1 - most / size:.0%} of the ")
    assert f" to spare: {most / 1e9:.2f} GB " in line
