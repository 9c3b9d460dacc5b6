# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from nemo_rl_moe.distributed import node_tools
from nemo_rl_moe.distributed.node_tools import (
    ProcessIdentity,
    chosen_threads,
    end_families,
    families,
    find_families,
    folder_of_this_process,
    is_running,
    ray_folder,
    read_tail,
    remove_folders_of,
    threads_per_worker,
    usable_cores,
)
from nemo_rl_moe.distributed.worker_group import worker_environment
from nemo_rl_moe.distributed.worker_process import WorkerPlace, describe_failure
from nemo_rl_moe.errors import ConfigurationError, DataError


@pytest.mark.parametrize(("cores", "workers", "threads"), [(2, 1, 2), (2, 2, 1), (2, 4, 1), (64, 6, 10)])
def test_threads_per_worker(cores: int, workers: int, threads: int):
    assert threads_per_worker(cores, workers) == threads


@pytest.mark.parametrize(
    ("quota", "cores"), [("max 100000", 8), ("200000 100000", 2), ("50000 100000", 1), ("900000 100000", 8), ("", 8)]
)
def test_usable_cores_heed_the_quota(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quota: str, cores: int):
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(node_tools, "CGROUP_CPU_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(node_tools.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert usable_cores() == cores


def test_read_tail(tmp_path: Path):
    log = tmp_path / "worker.err"
    log.write_bytes(b"".join(b"line %d\n" % number for number in range(20_000)) + b"caf\xe9\n\n")
    assert read_tail(log, 2) == "line 19999\ncaf\ufffd"
    log.write_text(":job_id:01000000\n:actor_name:WorkerProcess\nout of memory\n")
    assert read_tail(log, 30) == "out of memory"
    assert read_tail(tmp_path / "missing", 2) == read_tail(None, 2) == ""


def test_a_process_and_its_children_end():
    grandchild = "import time; time.sleep(600)"
    child = f"import subprocess, sys; print('up', flush=True); subprocess.run([sys.executable, '-c', {grandchild!r}])"
    with subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        root = ProcessIdentity.of(psutil.Process(process.pid))
        deadline = time.monotonic() + 100
        while len(family := families([psutil.Process(process.pid)])) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(family) == 2
        end_families(find_families([root]), grace_s=0.0)
        assert not any(map(is_running, family))
        assert root.find() is None


def test_a_reused_process_id_is_another_process():
    here = ProcessIdentity.of(psutil.Process())
    assert here.find() is not None
    assert ProcessIdentity(here.pid, here.create_time - 1000).find() is None


def place(gpu_ids: tuple[str, ...] = (), ip: str = "10.0.0.1") -> WorkerPlace:
    return WorkerPlace(ProcessIdentity(1, 0.0), "node", ip, num_cores=8, gpu_ids=gpu_ids, stderr_path=None)


def test_environment_on_one_machine_without_gpus(monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    first, second = worker_environment([place(), place()], 2, 1234, is_local=True)
    assert first == {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1234",
        "OMP_NUM_THREADS": "4",
        "MKL_NUM_THREADS": "4",
        "OMP_WAIT_POLICY": "passive",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",
    }
    assert {key for key in first if first[key] != second[key]} == {"RANK", "LOCAL_RANK"}


def test_threads_that_the_user_has_chosen(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    (environment,) = worker_environment([place()], 1, 1234, is_local=True, num_threads=3)
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY")
    assert [environment[name] for name in names] == ["3", "3", "active"]
    for value, expected in (("3", 3), (" 4,2 ", 4), ("", None), (None, None)):
        assert chosen_threads({} if value is None else {"OMP_NUM_THREADS": value}) == expected
    for value in ("0", "-1", "two", "1.5", "9" * 30):
        with pytest.raises(ConfigurationError) as error:
            chosen_threads({"OMP_NUM_THREADS": value})
        assert str(error.value) == f"the environment's OMP_NUM_THREADS: got {value!r}, expected a number from 1 to 1024"


def test_environment_on_two_machines_with_gpus():
    places = [place(("2",)), place(("0",)), place(("1",), "10.0.0.2"), place(("0",), "10.0.0.2")]
    environments = worker_environment(places, 2, 1234, is_local=False)
    assert [each["RANK"] for each in environments] == ["0", "1", "2", "3"]
    assert [each["LOCAL_RANK"] for each in environments] == ["0", "1", "0", "1"]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in environments] == ["2,0", "2,0", "1,0", "1,0"]
    assert {each["MASTER_ADDR"] for each in environments} == {"10.0.0.1"}
    assert not any("SOCKET_IFNAME" in name for name in environments[0])
    chosen = worker_environment(places, 2, 1234, is_local=False, network_interface="eth1")
    assert {each["GLOO_SOCKET_IFNAME"] + each["NCCL_SOCKET_IFNAME"] for each in chosen} == {"eth1eth1"}


def raise_deep(error: BaseException) -> None:
    raise error


def test_folders_of_processes_that_run_no_more_are_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(node_tools, "SHARED_MEMORY", tmp_path / "shm")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    own = folder_of_this_process(tmp_path, "vllm")
    other = tmp_path / "nemo_rl_moe-notes"
    left = own.with_name(own.name.replace(str(os.getpid()), str(ended.pid)))
    for folder in (left, other):
        folder.mkdir()
    remove_folders_of([])
    assert sorted(tmp_path.iterdir()) == sorted([own, other])
    of_ray = ray_folder(ended.pid)
    (of_ray / "ray" / "session").mkdir(parents=True)
    remove_folders_of([ended.pid])
    assert not of_ray.exists()
    assert sorted(tmp_path.iterdir()) == sorted([own, other])
    remove_folders_of([os.getpid()])
    assert list(tmp_path.iterdir()) == [other], "one that was killed, and that the system still names"


def test_a_failure_shows_the_workers_own_frames():
    try:
        raise_deep(KeyError("layer 3"))
    except KeyError as error:
        failure = describe_failure(error)
    assert failure.summary == "raised KeyError"
    assert failure.details.endswith("KeyError: 'layer 3'")
    assert "in raise_deep" in failure.details
    assert "test_a_failure_shows" not in failure.details, "the dispatcher's frame is left out"


def test_an_error_made_for_users_has_no_traceback():
    try:
        raise_deep(DataError("weights.safetensors: no tensor lm_head.weight"))
    except DataError as error:
        failure = describe_failure(error)
    assert failure.details == "weights.safetensors: no tensor lm_head.weight"
