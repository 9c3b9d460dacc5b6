# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The plot in sft.md: what fine-tuning in the demo logged.

pip install matplotlib
python docs/make_demo_plot.py logs/sft_tiny_moe/exp_001
"""

import argparse
from pathlib import Path

from matplotlib.figure import Figure

from nemo_rl_moe.runs.folder.metrics import METRICS_FILE_NAME, MetricHistory, read_history

OUTPUT = Path(__file__).resolve().parent / "images" / "demo.png"
PANELS: dict[str, dict[str, str]] = {
    "loss (nats a token)": {"train/loss": "train/loss", "val/loss": "val/loss"},
    "val/accuracy": {"val/accuracy": "held-out sums"},
    "train/moe/load_balancing_loss": {"train/moe/load_balancing_loss": "mean over layers"},
    "expert load: coefficient of variation": {
        "train/moe/cv_max": "cv_max",
        "train/moe/cv_mean": "cv_mean",
        "train/moe/cv_null_mean": "cv_null_mean: random routing",
    },
}


def draw(history: MetricHistory, output: Path) -> None:
    """Plot four panels over the steps. Metrics that are logged rarely have markers."""
    figure = Figure(figsize=(11, 6), layout="constrained")
    for axis, (title, curves) in zip(figure.subplots(2, 2).flat, PANELS.items(), strict=True):
        for key, label in curves.items():
            steps, values = zip(*history[key], strict=True)
            # Few points are measurements far apart: a full line would claim to know what lies between.
            rare = len(steps) < len(history["train/loss"]) / 4
            axis.plot(steps, values, label=label, marker="o" if rare else None, linestyle=":" if rare else "-")
        if title.endswith("load_balancing_loss"):
            axis.axhline(1.0, color="gray", linestyle="--", label="perfect balance")
        axis.set(title=title, xlabel="step")
        axis.set_ylim(bottom=None if title.endswith("load_balancing_loss") else 0)
        axis.grid(alpha=0.3)
        axis.legend()
    output.parent.mkdir(exist_ok=True)
    figure.savefig(output, dpi=110)


def main() -> None:
    """Reads a run's folder."""
    parser = argparse.ArgumentParser(description="Draws what a run of the demo logged.")
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="default: %(default)s")
    chosen = parser.parse_args()
    draw(read_history(chosen.run / METRICS_FILE_NAME), chosen.output)


if __name__ == "__main__":
    main()
