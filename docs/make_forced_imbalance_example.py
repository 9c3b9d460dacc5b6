# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The example in forced-imbalance.md: a run whose routers are free beside the same run with a forced hot rank.

    pip install matplotlib
    python docs/make_forced_imbalance_example.py logs/drill_free/exp_001 logs/drill_forced/exp_001

Prints the table of both runs' numbers as Markdown and draws the load of every expert. forced-imbalance.md has the
commands that make the two runs.
"""

import argparse
from pathlib import Path

import numpy as np
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from numpy.typing import NDArray

from nemo_rl_moe.runs.folder.expert_load import read_expert_load
from nemo_rl_moe.runs.folder.metrics import METRICS_FILE_NAME, read_metrics

OUTPUT = Path(__file__).resolve().parent / "images" / "forced_imbalance.png"
KEYS = (
    "loss",
    "moe/load_balancing_loss",
    "moe/cv_mean",
    "moe/cv_null_mean",
    "moe/cv_excess_mean",
    "moe/max_violation_mean",
    "moe/max_violation_max",
    "moe/expert_utilization_min",
    "moe/expert_utilization_median",
    "moe/expert_utilization_max",
    "moe/dead_expert_frac_mean",
    "moe/expert_diversity_mean",
    "moe/avg_overload_factor",
    "moe/max_overload_factor",
    "moe/max_cum_overload_factor",
    "moe/what_if/avg_overload_factor_ep_4",
    "moe/what_if/avg_overload_factor_ep_8",
)


def print_table(step: int, free: Path, forced: Path) -> None:
    """Both runs' metrics of one step."""
    columns = [_metrics_of_step(run, step) for run in (free, forced)]
    print("| number | free | hot rank 1 |\n|---|---:|---:|")
    for key in KEYS:
        values = [metrics[f"train/{key}"] for metrics in columns]
        print(f"| `train/{key}` | {values[0]:.3f} | {values[1]:.3f} |")


def draw(step: int, free: Path, forced: Path, output: Path) -> None:
    """Layers x experts of both runs, each expert's load over its fair share."""
    panels = {"routers free": _utilization(free, step), "moe_router_force_hot_rank=1": _utilization(forced, step)}
    highest = max(values.max() for values in panels.values())
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, (title, values) in zip(axes, panels.items(), strict=True):
        norm = TwoSlopeNorm(vcenter=1.0, vmin=0.0, vmax=max(highest, 2.0))
        image = axis.imshow(values, cmap="RdBu_r", norm=norm, aspect="auto")
        for (layer, expert), value in np.ndenumerate(values):
            color = "white" if value < 0.3 or value > 0.8 * highest else "black"
            axis.text(expert, layer, f"{value:.2f}", ha="center", va="center", fontsize=8, color=color)
        middle = values.shape[1] / 2 - 0.5
        axis.axvline(middle, color="black", linewidth=1.5)
        axis.set(title=title, xlabel="expert (left of the line: rank 0, right: rank 1)", xticks=range(values.shape[1]))
        axis.set_yticks(range(values.shape[0]))
    axes[0].set_ylabel("layer")
    figure.colorbar(image, ax=axes, label="load over fair share")
    figure.suptitle(f"Load of every expert at step {step}")
    output.parent.mkdir(exist_ok=True)
    figure.savefig(output, dpi=110)


def _metrics_of_step(run: Path, step: int) -> dict[str, float]:
    return next(record.metrics for record in read_metrics(run / METRICS_FILE_NAME) if record.step == step)


def _utilization(run: Path, step: int) -> NDArray[np.float64]:
    load = read_expert_load(run)
    counts = load.counts[load.steps.tolist().index(step)]
    utilization: NDArray[np.float64] = counts / counts.mean(axis=1, keepdims=True)
    return utilization


def main() -> None:
    """Reads both runs' last step."""
    parser = argparse.ArgumentParser(description="Compares a free run with a forced one.")
    parser.add_argument("free", type=Path, help="folder of the run without forced routing")
    parser.add_argument("forced", type=Path, help="folder of the run with it")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="default: %(default)s")
    chosen = parser.parse_args()
    step = read_metrics(chosen.forced / METRICS_FILE_NAME)[-1].step
    print_table(step, chosen.free, chosen.forced)
    draw(step, chosen.free, chosen.forced, chosen.output)


if __name__ == "__main__":
    main()
