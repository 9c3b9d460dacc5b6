# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The script for Slurm, with stand-ins for Slurm's commands: two Ray nodes on this machine."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import REPOSITORY_ROOT
from tests.functional import sft_runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

SCRIPT = REPOSITORY_ROOT / "examples" / "slurm" / "train.sbatch"
# Of a whole machine Ray would take all cores for each of its nodes, and a share of the memory.
SRUN = """\
#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
[[ $1 != ray ]] || set -- "$@" --num-cpus=1 --num-gpus=0 --object-store-memory=80000000
exec "$@"
"""
SCONTROL = """\
#!/usr/bin/env bash
[[ "$*" == "show hostnames two-machines" ]] && printf 'one\\ntwo\\n'
"""
STAND_INS = {
    "srun": SRUN,
    "scontrol": SCONTROL,
    "nemo-rl-moe": f'#!/usr/bin/env bash\nexec {sys.executable} -m nemo_rl_moe.cli "$@"\n',
    "python": f'#!/usr/bin/env bash\nexec {sys.executable} "$@"\n',
    "ray": f'#!/usr/bin/env bash\nexec {sys.executable} -m ray.scripts.scripts "$@"\n',
}


def wait_for(text: str, log: Path, job: "subprocess.Popen[bytes]") -> None:
    end = time.monotonic() + 900
    while text not in log.read_text():
        assert job.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.5)


def test_a_job_on_two_machines_saves_when_its_time_is_up(tmp_path: Path) -> None:
    programs = tmp_path / "environment" / "bin"
    programs.mkdir(parents=True)
    for name, text in STAND_INS.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    port = str(20000 + os.getpid() % 10000)
    environment = sft_runs.environment() | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "VENV": str(programs.parent),
        "SLURM_JOB_NODELIST": "two-machines",
        "SLURM_JOB_ID": "1",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "RAY_PORT": port,
    }
    data = sft_runs.make_additions(tmp_path / "data", 512, 16)
    changes: dict[str, Any] = {
        "sft__max_num_steps": 100,
        "sft__max_num_epochs": 100,
        "sft__val_period": 0,
        "sft__val_at_start": False,
        "sft__val_at_end": False,
        "policy__train_global_batch_size": 8,
        "policy__train_micro_batch_size": 4,
        "checkpointing__metric_name": None,
        "checkpointing__save_period": 0,
        "cluster__cpu_workers_per_node": 1,
        **sft_runs.only_jsonl(),
    }
    overrides = sft_runs.settings(tmp_path, data, **changes)
    log = tmp_path / "log"
    with log.open("wb") as output:
        job = subprocess.Popen(
            [SCRIPT, "sft", *sft_runs.sft_command(overrides)[2:]],
            env=environment,
            cwd=tmp_path,
            stdout=output,
            stderr=output,
        )
    try:
        wait_for("step 2/100", log, job)
        assert "Ray has 2 of 2 machines" in log.read_text()
        job.send_signal(signal.SIGTERM)
        assert job.wait(timeout=300) == 0, log.read_text()
    finally:
        job.kill()
    assert "the run ended with exit code 0" in log.read_text()
    assert "(SIGTERM); saved to" in log.read_text()
    commands = map(sft_runs.words_of, psutil.process_iter())
    assert not [words for words in commands if any(f":{port}" in word for word in words)]
