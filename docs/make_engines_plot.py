# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Learning curves of runs, some seeds of each engine: those in vllm.md, and those of the quickstart in README.md.

Those in vllm.md are of the demo's reinforcement learning with rollouts by each engine.

After `make demo` and `make vllm`, for each seed:

    nemo-rl-moe grpo --config grpo_tiny_moe.yaml grpo.seed=42 logger.log_dir=logs/megatron_42
    nemo-rl-moe grpo --config grpo_tiny_moe_vllm.yaml grpo.seed=42 logger.log_dir=logs/vllm_42

and then, for the plot and the table of the page, which it prints:

    python docs/make_engines_plot.py logs/megatron_42/exp_001 logs/vllm_42/exp_001

In README.md, after `python prompts.py` of the quickstart, for each seed:

    nemo-rl-moe grpo --config opposites.yaml grpo.seed=0 logger.log_dir=logs/0 checkpointing.checkpoint_dir=null
    python docs/make_engines_plot.py logs/?/exp_001 --output docs/images/opposites.png
"""

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure
from omegaconf import OmegaConf

from nemo_rl_moe.runs.folder.metrics import METRICS_FILE_NAME, MetricHistory, read_history

OUTPUT = Path(__file__).resolve().parent / "images" / "vllm.png"
REWARD, ACCURACY = "train/reward", "val/accuracy"
PANELS = {REWARD: "reward of the step's responses", ACCURACY: "accuracy on held-out prompts, sampled"}
COLOURS = {"megatron": "tab:blue", "vllm": "tab:orange"}
LINES = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        engine: Its `policy.generation.backend`.
        seed: Its `grpo.seed`.
        history: Its metrics.
    """

    engine: str
    seed: int
    history: MetricHistory


def read_run(folder: Path) -> Run:
    """The run of a folder."""
    config = OmegaConf.load(folder / "config.yaml")
    engine, seed = (OmegaConf.select(config, key) for key in ("policy.generation.backend", "grpo.seed"))
    return Run(str(engine), int(seed), read_history(folder / METRICS_FILE_NAME))


def by_engine(runs: Sequence[Run]) -> Mapping[str, list[Run]]:
    """The runs of each engine, by seed."""
    ordered = sorted(runs, key=lambda run: (run.engine, run.seed))
    return {
        engine: [run for run in ordered if run.engine == engine] for engine in dict.fromkeys(r.engine for r in ordered)
    }


def table(runs: Sequence[Run]) -> str:
    """Held-out accuracy of every run when it was measured, and the mean of each engine's last ones, in Markdown."""
    steps = sorted({step for run in runs for step, _ in run.history[ACCURACY]})
    rows = [["engine", "seed", *("start" if step == 0 else f"step {step}" for step in steps)]]
    rows.append(["---"] * len(rows[0]))
    for engine, of_engine in by_engine(runs).items():
        for run in of_engine:
            found = dict(run.history[ACCURACY])
            rows.append([engine, str(run.seed), *(f"{found[step]:.3f}" if step in found else "" for step in steps)])
    lines = [f"| {' | '.join(row)} |" for row in rows]
    means = [
        f"{engine} {statistics.fmean(run.history[ACCURACY][-1][1] for run in of_engine):.3f}"
        for engine, of_engine in by_engine(runs).items()
    ]
    return "\n".join([*lines, "", f"Means at the end: {', '.join(means)}."])


def draw(runs: Sequence[Run], output: Path) -> None:
    """A panel for each metric: a colour for each engine, a line style for each of its seeds."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    engines = by_engine(runs)
    for axis, (key, title) in zip(figure.subplots(1, 2), PANELS.items(), strict=True):
        for engine, of_engine in engines.items():
            for number, run in enumerate(of_engine):
                axis.plot(
                    *zip(*run.history[key], strict=True),
                    label=f"{engine}, seed {run.seed}" if len(engines) > 1 else f"seed {run.seed}",
                    color=COLOURS.get(engine),
                    linestyle=LINES[number % len(LINES)],
                    marker="o" if key == ACCURACY else None,
                )
        axis.set(title=title, xlabel="step", ylim=(0, 1))
        axis.grid(alpha=0.3)
        axis.legend(loc="lower right")
    output.parent.mkdir(exist_ok=True)
    figure.savefig(output, dpi=100)


def main() -> None:
    """Reads the runs' folders."""
    parser = argparse.ArgumentParser(description="Draws how runs learn, of each engine, and prints the table.")
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a run's folder")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="default: %(default)s")
    chosen = parser.parse_args()
    runs = [read_run(folder) for folder in chosen.runs]
    draw(runs, chosen.output)
    print(table(runs))


if __name__ == "__main__":
    main()
