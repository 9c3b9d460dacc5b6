# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Workers that fail in every way a worker can, on a real Ray with real process groups.

Every test checks that the worker's own words reach the user, soon, and that no process stays behind.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

import psutil
import pytest
import ray

from nemo_rl_moe.distributed.cluster import RayCluster
from nemo_rl_moe.distributed.worker_group import WorkerGroup
from nemo_rl_moe.errors import ConfigurationError, DamagedCheckpointError, WorkerDiedError
from tests.support.grpo_inputs import cluster_config
from tests.support.quick_list import slow

NUM_WORKERS = 2
START_TIMEOUT_S = 600.0
CALL_TIMEOUT_S = 1000.0  # longer than a test may take: what ends a call here is no timeout
SHORT_CALL_TIMEOUT_S = 10.0
DETECTION_LIMIT_S = 200.0
RAY_AGENTS = ("ray::DashboardA", "ray::RuntimeEnv")


class BrokenModelError(Exception):
    """Cannot be rebuilt from its text alone, so it cannot travel as it is."""

    def __init__(self, layer: int, reason: str):
        super().__init__(f"layer {layer}: {reason}")


class Ranks:  # pragma: no cover  (runs in other processes)
    """A few steps of torch.distributed, each broken in its own way.

    Args:
        rank: Global rank.
        world_size: Number of ranks.
        notes: A folder where each rank writes its process id, before anything can go wrong.
        start: How starting goes wrong on rank 1.
    """

    def __init__(self, rank: int, world_size: int, *, notes: str, start: str = "well"):
        note = Path(notes, f"{os.getpid()}.unfinished")
        note.write_text("")
        note.rename(note.with_suffix(".pid"))
        self.rank = rank
        if rank == 1 and start == "raise":
            raise BrokenModelError(3, "the experts do not divide")
        if rank == 1 and start == "hang":
            wait_forever_for_a_lock()
        import torch
        from torch import distributed

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        distributed.init_process_group("gloo", rank=rank, world_size=world_size)

    def all_reduce(self, value: float) -> float:
        import torch
        from torch import distributed

        tensor = torch.tensor(value)
        distributed.all_reduce(tensor)
        return tensor.item()

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    def num_threads(self) -> int:
        import torch

        return torch.get_num_threads()

    def identity_of(self, first: Any, second: Any) -> tuple[int, list[int]]:
        return os.getpid(), [sum(first), sum(second)]

    def node(self) -> str:
        return ray.get_runtime_context().get_node_id()

    def raise_while_the_peer_waits(self) -> None:
        if self.rank == 1:
            raise BrokenModelError(7, "the loss is not a number")
        self.all_reduce(1.0)

    def raise_for_good(self) -> None:
        if self.rank == 1:
            sys.exit("no space left on the device")
        self.all_reduce(1.0)

    def die_while_the_peer_waits(self, signal_number: int) -> None:
        if self.rank == 1:
            print("about to run out of memory", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal_number)
        self.all_reduce(1.0)

    def freeze_while_the_peer_waits(self) -> None:
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        self.all_reduce(1.0)

    def raise_while_the_peer_is_frozen(self) -> None:
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.5)
        raise TimeoutError("waited for too long")

    def hang_while_the_peer_waits(self) -> None:
        if self.rank == 1:
            wait_forever_for_a_lock()
        self.all_reduce(1.0)

    def start_a_child_and_raise(self) -> None:
        if self.rank == 0:
            self.all_reduce(1.0)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(os.environ["CHILD_NOTES"], f"{child.pid}.pid").write_text("")
        raise ValueError("the child is left alone")

    def set_variable(self, name: str, value: str) -> None:
        os.environ[name] = value

    def refuse_checkpoint(self) -> None:
        raise DamagedCheckpointError([f"rank {self.rank}: damaged", "and more"]) from BrokenModelError(1, "unreadable")

    def unpicklable(self) -> Any:
        return threading.Lock()


def wait_forever_for_a_lock() -> None:
    time.sleep(600)


def join_two_nodes_and_fail(notes: str) -> None:
    """A driver of its own, which joins two Ray nodes (both on this machine) that go on after it."""
    from ray.cluster_utils import Cluster

    nodes = Cluster()
    for _ in range(2):
        nodes.add_node(num_cpus=1, include_dashboard=False)
    os.environ["RAY_ADDRESS"] = nodes.address
    cluster = RayCluster(cluster_config(2, 0, 1))
    group = WorkerGroup(cluster, partial(Ranks, notes=notes), START_TIMEOUT_S, CALL_TIMEOUT_S)
    where = group.call_all(Ranks.node)
    try:
        group.call_all(Ranks.die_while_the_peer_waits, signal.SIGKILL)
    except WorkerDiedError as error:
        text = str(error)
    cluster.shutdown()
    connected = ray.is_initialized()
    ray.init(address=nodes.address, logging_level=logging.ERROR)
    report = {"where": where, "text": text, "connected": connected, "alive": [node["Alive"] for node in ray.nodes()]}
    Path(notes, "report.json").write_text(json.dumps(report))
    ray.shutdown()
    nodes.shutdown()


def drive_until_killed(notes: str) -> None:
    """A driver of its own, which hangs in a step: rank 1 never joins the collective."""
    cluster = RayCluster(cluster_config(1, 0, NUM_WORKERS))
    group = WorkerGroup(cluster, partial(HangingRanks, notes=notes), START_TIMEOUT_S, CALL_TIMEOUT_S)
    # Ray's two agents are no workers; they end by themselves, but only when they have given up reaching the dead Ray.
    children = psutil.Process().children(recursive=True)
    ray_processes = [process.pid for process in children if not process.name().startswith(RAY_AGENTS)]
    Path(notes, "ray.unfinished").write_text(json.dumps(ray_processes))
    Path(notes, "ray.unfinished").rename(Path(notes, "ray.json"))
    group.call_all(HangingRanks.hang_or_sleep)


class HangingRanks(Ranks):  # pragma: no cover  (runs in other processes)
    """Ranks that wait for each other for ever."""

    def hang_or_sleep(self) -> None:
        if self.rank == 0:
            self.all_reduce(1.0)
        time.sleep(600)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """One Ray for the whole file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("OMP_NUM_THREADS", "3")
        cluster = RayCluster(cluster_config(1, 0, NUM_WORKERS))
        yield cluster
        cluster.shutdown()
        cluster.shutdown()
    assert not ray.is_initialized()


@pytest.fixture
def group(cluster: RayCluster, tmp_path: Path) -> Iterator[WorkerGroup[Ranks]]:
    """Two ranks that have joined a process group."""
    group = WorkerGroup(
        cluster,
        partial(Ranks, notes=str(tmp_path)),
        START_TIMEOUT_S,
        CALL_TIMEOUT_S,
        environment={"NCCL_DEBUG": "WARN"},
    )
    yield group
    group.shutdown()
    assert_all_gone(tmp_path)


def noted_pids(notes: Path) -> list[int]:
    return [int(path.stem) for path in notes.glob("*.pid")]


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def assert_all_gone(notes: Path, expected: int = NUM_WORKERS) -> None:
    pids = noted_pids(notes)
    assert len(pids) == expected
    assert [pid for pid in pids if is_running(pid)] == []


def fail_in_a_step(group: WorkerGroup[Ranks], method: Callable[..., Any], *args: Any) -> str:
    """Calls a method that must fail, and returns the error's text."""
    with pytest.raises(WorkerDiedError) as error:
        group.call_all(method, *args)
    text = str(error.value)
    assert text.endswith("All 2 workers have been stopped.")
    with pytest.raises(WorkerDiedError) as again:  # as a call from another thread, which knows of no failure
        group.call_all(Ranks.all_reduce, 1.0)
    assert str(again.value) == text
    return text


def test_calls_environment_and_shared_arguments(group: WorkerGroup[Ranks]):
    assert group.call_all(Ranks.all_reduce, 1.5) == [3.0, 3.0]
    assert group.start_each(Ranks.all_reduce, [(1.0,), (2.0,)])() == {0: 3.0, 1: 3.0}
    begun = [group.start_each(Ranks.all_reduce, [(number,)] * NUM_WORKERS) for number in (2.0, 5.0)]
    assert [[*wait().values()] for wait in begun] == [[4.0, 4.0], [10.0, 10.0]], "one after the other, on every rank"
    assert list(group.start_each(Ranks.environment, [None, ()])()) == [1], "the other is not called"
    shared = list(range(1000))
    results = group.start_each(Ranks.identity_of, [(shared, [1]), (shared, [2])])()
    assert list(results.values()) == [
        (pid, [499500, number]) for pid, number in zip(group.process_ids, (1, 2), strict=True)
    ]
    with pytest.raises(ValueError, match="arguments for 1 ranks, expected 2"):
        group.start_each(Ranks.all_reduce, [(1.0,)])

    environments = group.call_all(Ranks.environment)
    assert [each["RANK"] for each in environments] == [each["LOCAL_RANK"] for each in environments] == ["0", "1"]
    assert {each["MASTER_ADDR"] for each in environments} == {"127.0.0.1"}
    assert {each["CUDA_VISIBLE_DEVICES"] for each in environments} == {""}
    assert {each["NCCL_DEBUG"] for each in environments} == {"WARN"}
    assert {each["OMP_NUM_THREADS"] for each in environments} == {"3"}, "what the user has set"
    assert group.call_all(Ranks.num_threads) == [3, 3]


@pytest.mark.full
def test_raise_at_start(cluster: RayCluster, tmp_path: Path):
    with pytest.raises(WorkerDiedError) as error:
        make_worker = partial(Ranks, notes=str(tmp_path), start="raise")
        WorkerGroup(cluster, make_worker, START_TIMEOUT_S, CALL_TIMEOUT_S, model="teacher")
    assert "worker rank 1 of the teacher (pid " in str(error.value)
    assert "raised BrokenModelError while starting:" in str(error.value)
    assert "BrokenModelError: layer 3: the experts do not divide" in str(error.value)
    assert "worker_process.py" not in str(error.value)
    assert_all_gone(tmp_path)


def refuse_model(rank: int, world_size: int, *, refusing: Collection[int]) -> Any:
    return ConfigurationError(["no weights", "no tokenizer"]) if rank in refusing else object()


@pytest.mark.parametrize(("refusing", "where"), [((0, 1), ""), slow((1,), " (on rank 1)")])
def test_errors_that_ranks_return_at_the_start(cluster: RayCluster, refusing: tuple[int, ...], where: str):
    with pytest.raises(ConfigurationError) as error:
        WorkerGroup(cluster, partial(refuse_model, refusing=refusing), START_TIMEOUT_S, CALL_TIMEOUT_S)
    assert error.value.problems == [f"no weights{where}", f"no tokenizer{where}"]


@pytest.mark.slow
def test_never_starts(cluster: RayCluster, tmp_path: Path):
    with pytest.raises(WorkerDiedError) as error:
        WorkerGroup(
            cluster,
            partial(Ranks, notes=str(tmp_path), start="hang"),
            start_timeout_s=10.0,
            call_timeout_s=CALL_TIMEOUT_S,
        )
    assert "workers did not start within 10 s (cluster.worker_start_timeout_s): rank 0 (pid " in str(error.value)
    assert "rank 1 (pid " in str(error.value)
    assert "wait_forever_for_a_lock" in str(error.value), "the stack of a hanging worker is shown"
    assert_all_gone(tmp_path)


@pytest.mark.slow
def test_raise_in_a_step(group: WorkerGroup[Ranks]):
    text = fail_in_a_step(group, Ranks.raise_while_the_peer_waits)
    assert "raised BrokenModelError in `raise_while_the_peer_waits`:" in text
    assert "BrokenModelError: layer 7: the loss is not a number" in text
    assert 'raise BrokenModelError(7, "the loss is not a number")' in text


@pytest.mark.slow
def test_exit_in_a_step(group: WorkerGroup[Ranks]):
    assert "SystemExit: no space left on the device" in fail_in_a_step(group, Ranks.raise_for_good)


def test_killed_in_a_step(group: WorkerGroup[Ranks]):
    pid = group.process_ids[1]
    text = fail_in_a_step(group, Ranks.die_while_the_peer_waits, signal.SIGKILL)
    assert text.startswith(
        f"worker rank 1 (pid {pid}) died in `die_while_the_peer_waits`:\nWorker exit type: SYSTEM_ERROR"
    )
    assert "about to run out of memory" in text
    assert "rank 0 (pid" not in text, "the peer whose connection broke is not the one to blame"


@pytest.mark.slow
def test_crash_in_a_step(group: WorkerGroup[Ranks]):
    text = fail_in_a_step(group, Ranks.die_while_the_peer_waits, signal.SIGSEGV)
    assert "rank 1" in text
    assert "Fatal Python error: Segmentation fault" in text


@pytest.fixture
def impatient_group(cluster: RayCluster, tmp_path: Path) -> Iterator[WorkerGroup[Ranks]]:
    """Two ranks whose calls may take a few seconds."""
    group = WorkerGroup(cluster, partial(Ranks, notes=str(tmp_path)), START_TIMEOUT_S, SHORT_CALL_TIMEOUT_S)
    yield group
    group.shutdown()
    assert_all_gone(tmp_path)


@pytest.mark.full
def test_frozen_in_a_step(impatient_group: WorkerGroup[Ranks]):
    first, second = impatient_group.process_ids
    text = fail_in_a_step(impatient_group, Ranks.freeze_while_the_peer_waits)
    assert text.startswith(
        f"worker rank 1 (pid {second}): its process has been stopped (SIGSTOP); it did not answer"
        " `freeze_while_the_peer_waits` within 10 s (cluster.worker_call_timeout_s)\n"
        f"Still waiting then: rank 0 (pid {first}).\n"
    )


@pytest.mark.slow
def test_frozen_while_its_peer_gives_up(group: WorkerGroup[Ranks]):
    pid = group.process_ids[1]
    text = fail_in_a_step(group, Ranks.raise_while_the_peer_is_frozen)
    assert "rank 0" in text.splitlines()[0]
    assert "TimeoutError: waited for too long" in text
    assert f"Did not answer: rank 1 (pid {pid}): its process has been stopped (SIGSTOP)." in text


@pytest.mark.slow
def test_hanging_in_a_step(impatient_group: WorkerGroup[Ranks]):
    first, second = impatient_group.process_ids
    text = fail_in_a_step(impatient_group, Ranks.hang_while_the_peer_waits)
    assert text.startswith(
        "2 of 2 workers did not answer `hang_while_the_peer_waits` within 10 s (cluster.worker_call_timeout_s):"
        f" rank 0 (pid {first}), rank 1 (pid {second})\n"
    )
    assert "wait_forever_for_a_lock" in text, "the stack of a hanging worker is shown"


@pytest.mark.slow
def test_a_workers_child_is_stopped_too(group: WorkerGroup[Ranks], tmp_path_factory: pytest.TempPathFactory):
    notes = tmp_path_factory.mktemp("children")
    group.call_all(Ranks.set_variable, "CHILD_NOTES", str(notes))
    assert "ValueError: the child is left alone" in fail_in_a_step(group, Ranks.start_a_child_and_raise)
    assert_all_gone(notes, expected=1)


@pytest.mark.full
def test_an_error_that_ranks_survive_comes_back_as_it_is(group: WorkerGroup[Ranks]):
    with pytest.raises(DamagedCheckpointError) as error:
        group.call_all(Ranks.refuse_checkpoint)
    assert error.value.problems == ["rank 0: damaged", "and more"]
    assert group.call_all(Ranks.all_reduce, 1.5) == [3.0, 3.0]


@pytest.mark.full
def test_a_result_that_cannot_travel(group: WorkerGroup[Ranks]):
    text = fail_in_a_step(group, Ranks.unpicklable)
    assert "in `unpicklable`:" in text
    assert "_thread.lock" in text


def test_a_second_run_finds_the_machine_busy(cluster: RayCluster):
    with pytest.raises(ConfigurationError) as error:
        RayCluster(cluster_config(1, 0, NUM_WORKERS), placement_timeout_s=0.5)
    assert "large enough, but busy: waited 0.5 s for 1 x 2 CPUs; free now: 0" in str(error.value)
    assert ray.is_initialized(), "a Ray that somebody else has started goes on"
    with pytest.raises(ConfigurationError, match="asked for 8 GPUs on one node, the Ray cluster has"):
        RayCluster(cluster_config(1, 8, 1))


def start_driver(function: str, notes: Path, log: IO[str]) -> subprocess.Popen[bytes]:
    """Runs one of this module's drivers in a process of its own."""
    code = f"import test_worker_faults as faults; faults.{function}({str(notes)!r})"
    search_path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": search_path}
    environment.pop("RAY_ADDRESS", None)
    return subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=log, stderr=log)


@pytest.mark.slow
def test_two_nodes_of_a_running_cluster(tmp_path: Path):
    with (tmp_path / "driver.log").open("w") as log, start_driver("join_two_nodes_and_fail", tmp_path, log) as driver:
        assert driver.wait(START_TIMEOUT_S) == 0, (tmp_path / "driver.log").read_text()
    report = json.loads((tmp_path / "report.json").read_text())
    assert len(set(report["where"])) == 2, "one worker on each node"
    assert report["text"].startswith("worker rank 1 (pid ")
    assert "about to run out of memory" in report["text"], "the log is fetched from the other node"
    assert not report["connected"]
    assert report["alive"] == [True, True], "a cluster that somebody else has started goes on"
    assert_all_gone(tmp_path)


@pytest.mark.full
def test_no_worker_outlives_its_driver(tmp_path: Path):
    with (tmp_path / "driver.log").open("w") as log, start_driver("drive_until_killed", tmp_path, log) as driver:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not (tmp_path / "ray.json").exists():
            assert driver.poll() is None, (tmp_path / "driver.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.5)
        driver.send_signal(signal.SIGKILL)
    pids = set(json.loads((tmp_path / "ray.json").read_text())) | set(noted_pids(tmp_path))
    assert len(noted_pids(tmp_path)) == NUM_WORKERS
    deadline = time.monotonic() + DETECTION_LIMIT_S
    while (alive := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert alive == []
    assert (tmp_path / "driver.log").read_text() == "", "nothing on the console but what a run itself says"
