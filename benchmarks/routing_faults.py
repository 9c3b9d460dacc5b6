# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The scorecard of silent routing failures, each planted into real GRPO runs. Prints one table.

A run is the demo's: a tiny Qwen3-MoE, two ranks, Ray and Megatron-Core, 64 responses per step. A fault begins at a
step. It is found if the run reports it to the user: by a warning, or by the error that ends the run. Healthy steps are
the steps before a fault, and many simulated ones from the captures and loads of healthy runs, with the same checks.
"""

import argparse
import functools
import json
import re
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

from capture_faults import OF_RUNS, FileScore, audited, lowest_agreement, score_of_capture, score_of_files
from healthy_steps import HealthySteps, read_steps
from planted_faults import FAULTS, NUM_EXPERTS, SHARED_RUN, start_planted
from small_model import CONFIGS, REPOSITORY, TOKENIZER, make_parser, not_negative, positive, running_ray

from nemo_rl_moe.cli import main as run_command
from nemo_rl_moe.config.loading import load_grpo_config
from nemo_rl_moe.distributed.cluster import RayCluster
from nemo_rl_moe.distributed.worker_group import WorkerGroup
from nemo_rl_moe.generation.vllm.releases import installed_release
from nemo_rl_moe.models.megatron.training.megatron_model import MegatronModel
from nemo_rl_moe.models.policy import model_workers
from nemo_rl_moe.runs.folder.capture_folder import CAPTURE_FOLDER
from nemo_rl_moe.runs.folder.metrics import METRICS_FILE_NAME, read_metrics

EXAMPLES = """\
examples:
  python benchmarks/routing_faults.py                            all faults, 10,000 healthy steps
  python benchmarks/routing_faults.py --faults zeros swapped     two of them
  python benchmarks/routing_faults.py --onsets 1 --healthy 0     faults from the first step on
  python benchmarks/routing_faults.py --files                    faults in capture folders, by nemo-rl-moe audit"""
FINE_TUNED = REPOSITORY / "results" / "sft_tiny_moe" / "final"
FAULTY_STEPS, RECORDED_STEPS = 3, 12
ERRORS = ("replayed experts cannot be right", "the generation engine", "receiver", "sender", "rank")
"""Beginnings of error messages about captures and refits."""
CAPTURES = f"run_*/logs/*/{CAPTURE_FOLDER}"
FAILED = "run failed"
WITHOUT_VLLM = "not run: vLLM is not installed"
HEALTHY_RUNS: dict[str, tuple[tuple[str, ...], bool]] = {
    "one update a step in float32, with replay": (SHARED_RUN, True),
    "four updates a step in float32": (
        (
            "policy.train_global_batch_size=16",
            "policy.train_micro_batch_size=8",
            "policy.megatron_cfg.optimizer.lr=3e-4",
        ),
        False,
    ),
    "one update a step in bfloat16": (("policy.precision=bfloat16",), False),
}
"""Overrides, and whether capture and live routes have the same weights in float32."""


class RunFailedError(Exception):
    """A run ended for another reason than the fault."""


@dataclass(frozen=True)
class Ran:
    """Report of a run.

    Attributes:
        num_steps: Number of recorded steps.
        alarms: Step and line of each warning about a step, and of the error that ended it.
    """

    num_steps: int
    alarms: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class Score:
    """One row of the table.

    Attributes:
        steps: Steps until the report, with the first faulty one. None if it was not reported.
        reported: The lines of the step that reported it.
        healthy_steps: Steps before the fault.
        false_alarms: Lines about these steps.
    """

    fault: str
    onset: int
    steps: int | None
    reported: str
    healthy_steps: int
    false_alarms: tuple[str, ...]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    if options.files is not None:
        return score_files(options)
    scores: list[Score] = []
    with tempfile.TemporaryDirectory(prefix="routing_faults_") as name, running_ray(num_cpus=4):
        scene = Scene(Path(name), options.model)
        for fault in options.faults:
            for onset in options.onsets:
                if FAULTS[fault].vllm and installed_release() is None:
                    scores.append(Score(fault, onset, None, WITHOUT_VLLM, 0, ()))
                    continue
                scores.append(score_of(scene, fault, onset))
                report_error(f"{fault} from step {onset} on: {scores[-1].reported or 'not found'}")
        healthy = healthy_alarms(scene, options.healthy, options.seed) if options.healthy else []
    report(scores, healthy, options.output)
    return 1 if any(score.reported.startswith(FAILED) for score in scores) else 0


def score_files(options: argparse.Namespace) -> int:
    """Print the table of faults in capture folders, from a given capture or from runs, and return the exit code."""
    scores: list[Score] = []
    healthy: list[HealthyRow] = []
    with tempfile.TemporaryDirectory(prefix="routing_faults_") as name:
        folder = Path(name)
        if options.files != Path():
            scores += _planted_into(options.files, options, folder)
        else:
            with running_ray(num_cpus=4):
                scene = Scene(folder, options.model)
                capture = capture_of(scene, None, 1, max(options.onsets) + FAULTY_STEPS - 1, SHARED_RUN)
                scores += _planted_into(capture, options, folder)
                for fault in (fault for fault in options.faults if fault in OF_RUNS):
                    for onset in options.onsets:
                        written = capture_of(scene, fault, onset, onset + FAULTY_STEPS - 1, FAULTS[fault].settings)
                        scores.append(_score_in_files(fault, onset, score_of_capture(written, onset)))
                healthy = _healthy_captures(scene, options.captures)
    report(scores, healthy, options.output)
    return 0


def report(scores: Sequence["Score"], healthy: Sequence["HealthyRow"], output: Path | None) -> None:
    """Print the table, and write it as JSON if a file is given."""
    print(table(scores, healthy))
    if output is not None:
        content = {"scores": [asdict(score) for score in scores], "healthy": [asdict(row) for row in healthy]}
        output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _planted_into(capture: Path, options: argparse.Namespace, folder: Path) -> list[Score]:
    scores = []
    for fault in (fault for fault in options.faults if fault not in OF_RUNS):
        for onset in options.onsets:
            found = score_of_files(capture, fault, onset, folder / f"{fault}_{onset}")
            scores.append(_score_in_files(fault, onset, found))
    return scores


def _score_in_files(fault: str, onset: int, found: FileScore) -> Score:
    report_error(f"{fault} from step {onset} on: {found.reported or 'not found'}")
    return Score(fault, onset, found.steps, found.reported, onset - 1, found.false_alarms)


def capture_of(scene: "Scene", fault: str | None, onset: int, num_steps: int, settings: Sequence[str]) -> Path:
    """Return the capture of a run with the trainer's engine, with all sequences of every step."""
    measured = "policy.megatron_cfg.routing_measurements"
    overrides = [f"{measured}.every_n_steps=1", f"{measured}.share_of_tokens=1.0", f"{measured}.save_capture=true"]
    # The capture should contain anomalies that would end a run.
    overrides.append("policy.megatron_cfg.routing_replay_on_anomaly=warn")
    before = set(scene.folder.glob(CAPTURES))
    scene.run(fault, onset, num_steps, [*settings, *overrides], own_engine=True)
    (capture,) = set(scene.folder.glob(CAPTURES)) - before
    return capture


def _healthy_captures(scene: "Scene", num_seeds: int) -> list["HealthyRow"]:
    rows = []
    for kind, (overrides, _) in HEALTHY_RUNS.items():
        alarms: list[str] = []
        lowest = []
        for seed in range(num_seeds):
            settings = [*overrides, f"grpo.seed={100 + seed}"]
            capture = capture_of(scene, None, 1, RECORDED_STEPS, settings)
            alarms += audited(capture)
            lowest.append(lowest_agreement(capture))
        num_steps = num_seeds * RECORDED_STEPS
        rows.append(HealthyRow(f"real, {num_seeds} seeds: {kind}", num_steps, tuple(alarms), min(lowest, default=1.0)))
        report_error(f"{kind}: {num_steps} steps of captures, {len(alarms)} alarms")
    return rows


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, EXAMPLES)
    names = list(FAULTS)
    parser.add_argument("--faults", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument(
        "--onsets", nargs="+", type=positive, default=[6, 1], metavar="STEP", help="first faulty steps (default: 6 1)"
    )
    parser.add_argument("--healthy", type=not_negative, default=10_000, metavar="N", help="healthy steps (10000)")
    parser.add_argument("--seed", type=not_negative, default=0, help="of the healthy steps (default: 0)")
    parser.add_argument("--model", type=Path, help=f"fine-tuned model (default: {FINE_TUNED}, else one is made)")
    parser.add_argument(
        "--files",
        nargs="?",
        type=Path,
        const=Path(),
        metavar="CAPTURE",
        help="plant into capture folders made of this healthy one; without a path, of a healthy run's, and of runs with"
        " the faults that change what a model computes",
    )
    parser.add_argument(
        "--captures",
        type=not_negative,
        default=3,
        metavar="N",
        help="with --files: healthy runs of each kind (default: 3)",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="the same as JSON")
    return parser.parse_args(arguments)


def report_error(line: str) -> None:
    """Print progress to standard error."""
    print(line, file=sys.stderr, flush=True)


class Scene:
    """Data and model of all runs.

    Args:
        model: The model's folder. By default the demo's, or, if that is missing, a model that is trained first.
    """

    def __init__(self, folder: Path, model: Path | None):
        self.folder = folder
        script = REPOSITORY / "examples" / "make_demo_data.py"
        command = [sys.executable, str(script), "--output", str(folder / "data"), "--seed", "0"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        self._model = model or (FINE_TUNED if (FINE_TUNED / "config.json").is_file() else self._fine_tuned())

    def run(
        self,
        fault: str | None,
        onset: int,
        num_steps: int,
        overrides: Sequence[str] = (),
        record_to: Path | None = None,
        config: str = "grpo_tiny_moe.yaml",
        own_engine: bool = False,
    ) -> Ran:
        """Make one run of GRPO with a fault, like in a driver process."""
        planted = functools.partial(start_planted, fault=fault, onset=onset, record_to=record_to, own_engine=own_engine)

        def group_of_planted(
            cluster: RayCluster, make_worker: functools.partial[Any], **settings: Any
        ) -> WorkerGroup[MegatronModel]:
            return WorkerGroup(cluster, functools.partial(planted, **make_worker.keywords), **settings)

        with mock.patch.object(model_workers, "WorkerGroup", group_of_planted):
            return self._command("grpo", config, [*self._settings(num_steps), *overrides])

    def _settings(self, num_steps: int) -> list[str]:
        return [
            f"policy.model_name={self._model.absolute()}",
            f"grpo.max_num_steps={num_steps}",
            "grpo.num_prompts_per_step=8",
            "grpo.val_period=0",
            "grpo.val_at_start=false",
            "grpo.val_at_end=false",
            "checkpointing.metric_name=null",
            "policy.train_global_batch_size=64",
            "policy.train_micro_batch_size=32",
            "policy.megatron_cfg.scheduler.lr_warmup_iters=0",
            f"data.train.path={self.folder / 'data' / 'grpo.jsonl'}",
            f"data.validation.path={self.folder / 'data' / 'validation_prompts.jsonl'}",
        ]

    def _fine_tuned(self) -> Path:
        report_error(f"{FINE_TUNED} is missing: fine-tuning a model, as `make demo` does")
        data, output = self.folder / "data", self.folder / "sft"
        overrides = [
            f"data.train.path={data / 'train.jsonl'}",
            f"data.validation.path={data / 'validation.jsonl'}",
            f"policy.model_name={TOKENIZER}",
            "sft.val_period=0",
        ]
        self._command("sft", "sft_tiny_moe.yaml", overrides, f"checkpointing.checkpoint_dir={output}")
        return output / "final"

    def _command(self, name: str, config: str, overrides: Sequence[str], checkpoints: str = "") -> Ran:
        folder = self.folder / f"run_{uuid.uuid4().hex[:8]}"
        folder.mkdir()
        words = [
            *(name, "--config", str(CONFIGS / config)),
            *overrides,
            *(f"logger.{logger}_enabled=false" for logger in ("tensorboard", "wandb", "mlflow")),
            f"logger.log_dir={folder / 'logs'}",
            checkpoints or "checkpointing.checkpoint_dir=null",
        ]
        with _captured() as printed, chdir(folder):
            code = run_command(words)
        paths = list(folder.glob(f"logs/*/{METRICS_FILE_NAME}"))
        num_steps = sum("train/loss" in record.metrics for path in paths for record in read_metrics(path))
        return Ran(num_steps, alarms_in(printed.getvalue(), code, num_steps))


@contextmanager
def _captured() -> Iterator[StringIO]:
    output = StringIO()
    with redirect_stdout(output), redirect_stderr(output):
        yield output


def alarms_in(printed: str, code: int, num_steps: int) -> tuple[tuple[int, str], ...]:
    """Return step and line of each report of a run. Its error belongs to the step that it did not finish.

    Raises:
        RunFailedError: The run ended with an error that no planted fault causes.
    """
    found = [(int(step), text) for step, text in re.findall(r"^warning: step (\d+): (.*)$", printed, re.MULTILINE)]
    if code != 0:
        reported = re.search(rf"^error: ({'|'.join(ERRORS)}).*$", printed, re.MULTILINE)
        if reported is None:
            raise RunFailedError(f"exit code {code}: {printed[-2000:]}")
        found.append((num_steps + 1, reported[0]))
    return tuple(found)


def score_of(scene: Scene, fault: str, onset: int) -> Score:
    """Return the score of a run with a fault from a step on."""
    planted = FAULTS[fault]
    config = "grpo_tiny_moe_vllm.yaml" if planted.vllm else "grpo_tiny_moe.yaml"
    try:
        ran = scene.run(fault, onset, onset + FAULTY_STEPS - 1, planted.settings, config=config)
    except RunFailedError as error:
        return Score(fault, onset, None, f"{FAILED}: {error}", 0, ())
    early = tuple(text for step, text in ran.alarms if step < onset)
    late = [(step, text) for step, text in ran.alarms if step >= onset]
    first = min((step for step, _ in late), default=None)
    reported = "; ".join(text for step, text in late if step == first)
    return Score(
        fault, onset, None if first is None else first - onset + 1, reported, min(onset - 1, ran.num_steps), early
    )


@dataclass(frozen=True)
class HealthyRow:
    """Healthy steps of one kind.

    Attributes:
        alarms: False alarms.
        lowest_agreement: Live agreement of the worst step.
    """

    kind: str
    num_steps: int
    alarms: tuple[str, ...]
    lowest_agreement: float


def healthy_alarms(scene: Scene, num_steps: int, seed: int) -> list[HealthyRow]:
    """Return the results of simulated steps of each kind of healthy run, `num_steps` in total."""
    alerts = load_grpo_config(CONFIGS / "grpo_tiny_moe.yaml", [], check_paths=False).logger.alerts
    rows = []
    for number, (kind, (overrides, is_exact)) in enumerate(HEALTHY_RUNS.items()):
        folder = scene.folder / f"recorded_{number}"
        folder.mkdir()
        ran = scene.run(None, 1, RECORDED_STEPS, overrides, record_to=folder)
        rows.append(HealthyRow(f"real: {kind}", ran.num_steps, tuple(text for _, text in ran.alarms), float("nan")))
        share = num_steps // len(HEALTHY_RUNS) + (number < num_steps % len(HEALTHY_RUNS))
        steps = HealthySteps(read_steps(folder), NUM_EXPERTS, alerts, is_exact=is_exact)
        said = steps.alarms(share, seed + number)
        rows.append(HealthyRow(f"simulated from it: {kind}", share, tuple(said), min(steps.agreements, default=1.0)))
        report_error(f"{kind}: {share:,} simulated steps, {len(said)} alarms")
    return rows


def table(scores: Sequence[Score], healthy: Sequence[HealthyRow]) -> str:
    """Return the scorecard as Markdown."""
    lines = ["| fault | seen | strikes from | reported after | by |", "|---|---|---|---|---|"]
    for score in scores:
        fault = FAULTS[score.fault]
        plural = "" if score.steps == 1 else "s"
        after = f"{score.steps} step{plural}" if score.steps else "-" if score.reported else "not found"
        reported = _short(" ".join(score.reported.split()))
        onset = f"step {score.onset}" if score.onset else "-"
        lines.append(f"| {fault.title} | {fault.seen} | {onset} | {after} | {reported} |")
    before = sum(score.healthy_steps for score in scores)
    alarms = [text for score in scores for text in score.false_alarms]
    lines += ["", "| healthy steps | number | false alarms | lowest live agreement |", "|---|---|---|---|"]
    lines.append(f"| real: before the faults | {before:,} | {len(alarms)} | |")
    for row in healthy:
        lowest = "" if row.lowest_agreement != row.lowest_agreement else f"{row.lowest_agreement:.4f}"
        lines.append(f"| {row.kind} | {row.num_steps:,} | {len(row.alarms)} | {lowest} |")
    lines += [f"false alarm: {text}" for text in [*alarms, *(text for row in healthy for text in row.alarms)]]
    return "\n".join(lines)


def _short(text: str, most: int = 200) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


if __name__ == "__main__":
    sys.exit(main())
