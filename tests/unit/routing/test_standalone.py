# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The routing package in a process that has torch and numpy, and nothing else of what this project needs."""

import subprocess
import sys

WITHOUT = ("megatron", "omegaconf", "pandas", "pyarrow", "pydantic", "ray", "transformers", "yaml")

SCRIPT = f"""
import importlib
import pkgutil
import sys

for name in {WITHOUT}:
    sys.modules[name] = None  # importing it is an error

import nemo_rl_moe.routing.agreement, nemo_rl_moe.routing.findings, nemo_rl_moe.routing.metrics

importlib.import_module("nemo_rl_moe.routing.replay")
names = [
    f"{{package.__name__}}.{{module.name}}"
    for package in (nemo_rl_moe.routing.agreement, nemo_rl_moe.routing.findings, nemo_rl_moe.routing.metrics)
    for module in pkgutil.iter_modules(package.__path__)
]
for name in names:
    importlib.import_module(name)
packages = {{name.split(".")[1] for name in sys.modules if name.startswith("nemo_rl_moe.")}}
print(len(names), *sorted(packages))

import torch
from torch import nn
from nemo_rl_moe.routing.metrics.load_balance_metrics import (
    collect_expert_loads, compute_brief_metrics, enable_load_balance_tracking,
)

class MyTopKRouter(nn.Module):
    num_experts, top_k = 4, 1

    def forward(self, tokens):
        return tokens, torch.tensor([[0], [0], [1], [2]])

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([MyTopKRouter()])

    def forward(self, tokens):
        return self.layers[0](tokens)

model = Model()
enable_load_balance_tracking(model)
model(torch.ones(4, 2))
metrics = compute_brief_metrics(collect_expert_loads(model))
print(metrics["expert_utilization_max"], metrics["dead_expert_frac_mean"])
"""


def test_all_of_it_is_importable_and_useful_alone() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    imported, used = done.stdout.splitlines()
    num_modules, *packages = imported.split()
    assert int(num_modules) >= 25
    assert packages == ["routing", "shapes", "token_lag", "token_writers"]
    # Two of four tokens go to the first expert; the last one gets none.
    assert used == "2.0 0.25"
