# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""How long `nemo-rl-moe report` takes for a long run of a large model, and its memory and file. Prints one JSON line.

The run's folder is written first, by the writers that runs use: metrics of each layer too, and the load of every
expert, which is uneven at first and evens out, with one expert that dies on the way. The command then runs in a process
of its own, whose start and imports are counted.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from small_model import make_parser, positive

from nemo_rl_moe.config.loading import dump_resolved, load_config
from nemo_rl_moe.routing.metrics.load_balance_metrics import load_balance_metrics
from nemo_rl_moe.routing.metrics.load_statistics import ExpertLoad
from nemo_rl_moe.runs.folder.expert_load import ExpertLoadWriter
from nemo_rl_moe.runs.folder.folder import write_run_files
from nemo_rl_moe.runs.folder.metrics import JsonlLogger

TOPK, TOKENS = 8, 16384
# The kernel's own peak of this process alone: what `getrusage` reports includes the process that has started it.
_REPORT_AND_PRINT = """
import re, sys, time
from pathlib import Path
from nemo_rl_moe.cli import main
code = main(sys.argv[1:])
print(time.process_time(), re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
sys.exit(code)
"""
EXAMPLES = """\
examples:
  python benchmarks/report.py                        1,000 steps of 48 layers x 128 experts
  python benchmarks/report.py --runs 2 --steps 500   two runs compared"""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__, EXAMPLES)
    parser.add_argument("--steps", type=positive, default=1000, help="steps of a run (default: 1000)")
    parser.add_argument("--layers", type=positive, default=48, help="MoE layers (default: 48)")
    parser.add_argument("--experts", type=positive, default=128, help="experts of a layer (default: 128)")
    parser.add_argument("--runs", type=positive, default=1, help="runs in the report (default: 1)")
    parser.add_argument("--output", type=Path, help="keep the report as this file")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / f"run_{number}" for number in range(options.runs)]
        for seed, folder in enumerate(folders):
            write_run(folder, options.steps, options.layers, options.experts, seed)
        result = measure(folders, options.output or Path(name) / "report.html")
    sizes = {"steps": options.steps, "layers": options.layers, "experts": options.experts, "runs": options.runs}
    print(json.dumps({"benchmark": "report"} | sizes | result))


def write_run(folder: Path, num_steps: int, num_layers: int, num_experts: int, seed: int) -> None:
    """A run's folder as a run leaves it."""
    folder.mkdir()
    config = load_config("sft_tiny_moe.yaml", [f"sft.max_num_steps={num_steps}"], check_paths=False)
    in_force = {"moe_router_topk": TOPK, "num_moe_experts": num_experts}
    write_run_files(folder, dump_resolved(config), {"effective_moe_configuration": in_force})
    metrics, loads = JsonlLogger(folder, print, print), ExpertLoadWriter(folder, print)
    generator = np.random.default_rng(seed)
    taste = generator.standard_normal((num_layers, num_experts))
    for step in range(1, num_steps + 1):
        popularity = np.exp(taste * (0.2 + 0.6 * np.exp(-step / 100)))
        popularity[-1, 0] *= step < num_steps // 2
        shares = popularity / popularity.sum(1, keepdims=True)
        counts = torch.from_numpy(generator.multinomial(TOKENS * TOPK, shares).astype(np.int64))
        load = ExpertLoad(tuple(range(num_layers)), counts)
        balance = load_balance_metrics(load, router_topk=TOPK, aux_losses=[1.0] * num_layers, detailed=True)
        loss = 4 * float(np.exp(-step / 300)) + 0.05 * float(generator.standard_normal())
        own = {"train/loss": loss, "train/grad_norm": float(generator.gamma(2.0)), "timing/train/seconds": 1.0}
        metrics.log_step(step, own | {f"train/{_prefixed(key)}": value for key, value in balance.items()})
        loads.write(step, load)
    metrics.close()
    loads.close()


def measure(folders: Sequence[Path], output: Path) -> dict[str, Any]:
    """Run the command as a user does."""
    command = [sys.executable, "-c", _REPORT_AND_PRINT, "report", *map(str, folders), "--output", str(output)]
    began = time.perf_counter()
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    seconds = time.perf_counter() - began
    cpu_seconds, peak_kilobytes = done.stdout.splitlines()[-1].split()
    return {
        "seconds": round(seconds, 2),
        "cpu_seconds": round(float(cpu_seconds), 2),
        "peak_megabytes": round(int(peak_kilobytes) / 1024),
        "file_megabytes": round(output.stat().st_size / 1e6, 2),
    }


def _prefixed(key: str) -> str:
    return key if key.startswith("moe_expert_utilization/") else f"moe/{key}"


if __name__ == "__main__":
    main()
