# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Cost of routing features in RL: steps of the demo's GRPO with and without them. Prints one JSON line.

Real trainers of the demo's model (examples/configs/grpo_tiny_moe.yaml, random weights, one rank), in separate
processes, make the same step at the same time on one core. They take turns of milliseconds, so that other load of the
machine affects all of them. A step generates 128 responses and trains on them. Each contestant has the features of the
previous ones:

    off             no load tracking, no capture
    load            MoE metrics and expert_load.parquet
    capture            the rollouts' experts captured, counted and checked; routing.parquet
    replay          routing_replay: rollout
    all             experts by advantage: the shipped defaults, and replay

`off` runs twice, and a ratio divides by the mean of both. `off_again_to_off`, which should be 1, shows the noise. The
memory layout of a process makes it faster or slower by a percent for its entire life. Therefore all are restarted
`--starts` times, and a ratio is the median over the starts. The measurements of routing are made in separate rounds
without other measurements, since in a run their effect on the caches concerns few steps. They count with the weight
1/`every_n_steps`. Tables are also written in every round, and count once in five seconds of steps, like in a run. All
times are of the contestant's process. The work of other processes is excluded: scoring, logging, and Ray's handling of
the capture, whose size is `captured_bytes`.

Then the same steps run without these features in the package's loop, with Ray, one worker, the environment and the
loggers' files. `of_a_step` is the cost above as a share of the CPU time of such a step in the driver, the worker and
the environment, without Ray's processes: the ratios above times the worker's share.

`--width 2` makes the model twice as wide, with four times the parameters, while the work of the features (on tokens,
layers and chosen experts) is the same. `--total-only` skips the contestants between `off` and `all`, for more starts in
the same time. Each contestant takes 1 GB of memory.
"""

import argparse
import itertools
import json
import math
import multiprocessing
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch
from grpo_throughput import ONE_CHARACTER, RandomPrompts, run
from moe_overhead import median_ratio
from small_model import (
    CONFIGS,
    TOKENIZER,
    StepClock,
    confine,
    make_parser,
    one_epoch,
    one_rank,
    positive,
    running_ray,
    surroundings,
)

from nemo_rl_moe.algorithms.losses.policy_gradient import PolicyGradientLoss
from nemo_rl_moe.algorithms.routing_measurements import RoutingMeasurements
from nemo_rl_moe.algorithms.run_observers import captured_bytes
from nemo_rl_moe.config.loading import load_grpo_config
from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.data.prompts import Prompt
from nemo_rl_moe.distributed.batch import TokenBatch, make_shard, per_sequence, per_token, stored_per_token
from nemo_rl_moe.distributed.worker_process import keep_freed_memory
from nemo_rl_moe.generation.interface import GenerationBatch, SamplingParameters
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.models.hf_files import load_hf_config
from nemo_rl_moe.models.interfaces import RouteComparison, TrainResult
from nemo_rl_moe.models.megatron.model.releases import clear_auxiliary_losses
from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer
from nemo_rl_moe.models.rank_results import RankTrainResult
from nemo_rl_moe.routing.replay import ROUTED_EXPERTS, UNKNOWN
from nemo_rl_moe.runs.folder.step_tables import MAX_DELAY_S
from nemo_rl_moe.runs.loggers.artifacts import ArtifactTables

# As in the demo: 27 tokens per sequence, and responses of up to 31 tokens. Random weights sample each token from 45, of
# which three are end tokens.
PROMPT_LENGTH, END_TOKENS = 12, (4, 5, 6)
LIMIT = 1.03
_OFF = {
    "track_moe_metrics": False,
    "moe_per_layer_logging": False,
    "capture_routing": False,
    "experts_by_advantage": False,
}
_LOAD = {"capture_routing": False, "experts_by_advantage": False}
_CAPTURE = {"experts_by_advantage": False}
_REPLAY = {"routing_replay": "rollout"}
CONTESTANTS: dict[str, dict[str, Any]] = {
    "off": _OFF,
    "off_again": _OFF,
    "load": _LOAD,
    "capture": _CAPTURE,
    "replay": _CAPTURE | _REPLAY,
    "all": _REPLAY,
}
EXPLAINED_EVERY = 3
"""Rounds before each round with the measurements of routing."""
PARTS = ("load", "capture", "replay", "all")
_WIDTHS = (
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
)
_AS_THE_RACE = {
    "policy.generation.stop_token_ids": list(END_TOKENS),
    **ONE_CHARACTER,
    **one_epoch("grpo"),
}
_RAYS_OWN = ("gcs_server", "raylet", "ray/dashboard", "ray/_private", "ray/autoscaler")
EXAMPLES = """\
examples:
  OMP_NUM_THREADS=1 python benchmarks/routing_cost.py
  OMP_NUM_THREADS=1 python benchmarks/routing_cost.py --starts 12 --total-only
  OMP_NUM_THREADS=1 python benchmarks/routing_cost.py --width 2 --total-only

of_a_step is the one to quote; total is steps with everything over steps without in the trainer alone, the measurements'
share added."""


@contextmanager
def timed(seconds: list[float]) -> Iterator[None]:
    """Append the CPU time of the body in this process."""
    before = time.process_time()
    yield
    seconds.append(time.process_time() - before)


class LocalPolicy:
    """A trainer of this process with a policy's interface for `RoutingMeasurements`, and its engine.

    Args:
        batch_size: Sequences of a log-probability pass.
    """

    shares_weights = True

    def __init__(self, trainer: MegatronTrainer, batch_size: int):
        self._trainer, self._batch_size = trainer, batch_size

    def logprobs(self, batch: TokenBatch) -> torch.Tensor:
        """Compute the log-probability of every token, with the batch's captured experts if it has any."""
        return _in_one(batch, self._trainer.logprobs(self._microbatches(batch, self._batch_size)))

    def logprobs_and_routes(self, batch: TokenBatch) -> tuple[torch.Tensor, Any]:
        """Compute log-probabilities, and the experts that the routers choose."""
        found, routes = self._trainer.logprobs_and_routes(self._microbatches(batch, self._batch_size))
        return _in_one(batch, found), stored_per_token(routes, fill=UNKNOWN)

    def compare_routes(self, batch: TokenBatch, *, one_at_a_time: bool = False) -> RouteComparison:
        """Compare the experts that the routers choose with the batch's capture."""
        microbatches = self._microbatches(batch, 1 if one_at_a_time else self._batch_size)
        found, totals = self._trainer.compare_routes(microbatches)
        return RouteComparison(_in_one(batch, found), totals)

    def _microbatches(self, batch: TokenBatch, size: int) -> list[TokenBatch]:
        starts = range(0, len(batch), size)
        return [batch.select(range(len(batch))[first : first + size]).fetched(list) for first in starts]


def _in_one(batch: TokenBatch, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate the log-probabilities of microbatches, padded to the batch's width."""
    width = batch.input_ids.shape[1]
    return torch.cat([torch.nn.functional.pad(part, (0, width - part.shape[1])) for part in parts])


NO_RESULT = TrainResult(0.0, 0.0, 0.0, 0, 0, {}, {})
"""The measurements only use the policy."""


@dataclass
class Found:
    """Measurements of one contestant: for one start, of its rounds, and for several, the mean of each.

    Attributes:
        step: Seconds of the steps.
        tables: Seconds of writing the tables.
        measurements: Seconds of the measurements of routing, if any.
        num_tokens: Tokens of the last step, with prompts.
    """

    step: list[float] = field(default_factory=list)
    tables: list[float] = field(default_factory=list)
    measurements: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    captured_bytes: int = 0
    num_tokens: int = 0

    def add_start(self, other: "Found") -> None:
        """Add the rounds of one start."""
        self.step.append(statistics.mean(other.step))
        self.tables.append(statistics.mean(other.tables))
        self.measurements += other.measurements
        self.losses += other.losses
        self.captured_bytes, self.num_tokens = other.captured_bytes, other.num_tokens


@dataclass
class Contestant:
    """One trainer, its tables, and the time of its steps.

    Attributes:
        folder: Folder of its tables.
    """

    config: GRPOMasterConfig
    folder: Path
    found: Found = field(default_factory=Found)

    def __post_init__(self) -> None:
        policy, megatron = self.config.policy, self.config.policy.megatron_cfg
        self.trainer = MegatronTrainer(policy, load_hf_config(policy.model_name), None, num_steps=200)
        self._loss = PolicyGradientLoss(self.config.loss_fn, prev_is_current=True)
        self.folder.mkdir()
        self._tables = ArtifactTables(self.folder, print, max_delay_s=math.inf)
        local: Any = LocalPolicy(self.trainer, policy.logprob_batch_size)
        self._measurements = RoutingMeasurements(
            # Made in every round here. Their cost per step is computed with the configured period.
            megatron.routing_measurements.model_copy(update={"every_n_steps": 1}),
            self.config.loss_fn,
            local,
            local,
            temperature=1.0,
            max_tokens=policy.max_total_sequence_length,
            seed=0,
            updates_per_step=1,
            replays=megatron.routing_replay == "rollout",
            has_reference=False,
        )

    def run(self, number: int, *, measured: bool, explains: bool) -> None:
        """Time one step, with the separately timed measurements of routing if `explains`."""
        step, tables, measurements, clock = [], [], [], PhaseClock()  # type: ignore[var-annotated]
        with timed(step):
            batch = self._rollouts(number)
        with timed(measurements):
            if explains:
                self._measurements.before_update(number, batch, [], clock)  # no capture is saved
        with timed(step):
            result = self._train(batch)
            for name, artifact in result.artifacts.items():
                self._tables.write(number, name, artifact)
        with timed(tables):
            self._tables.flush()
        with timed(measurements):
            if explains:
                self._measurements.after_update(NO_RESULT, clock)
        # The process has one record of the routers' auxiliary losses, which is only cleared with tracking.
        clear_auxiliary_losses()
        self.found.losses.append(result.global_loss)
        self.found.num_tokens = int(batch.lengths.sum())
        self.found.captured_bytes = captured_bytes(batch) or 0
        if measured:
            self.found.step.append(sum(step))
            self.found.tables.append(sum(tables))
        if explains:
            self.found.measurements.append(sum(measurements))

    def _rollouts(self, number: int) -> TokenBatch:
        """Return responses to random prompts, with random advantages."""
        grpo, generator = self.config.grpo, torch.Generator().manual_seed(number)
        of_group = grpo.num_generations_per_prompt
        size = grpo.num_prompts_per_step * of_group
        prompts = torch.randint(4, 45, (grpo.num_prompts_per_step, PROMPT_LENGTH), generator=generator)
        rows = [tuple(row) for row in prompts.repeat_interleave(of_group, 0).tolist()]
        longest = self.config.policy.generation.max_new_tokens
        sampling = SamplingParameters(max_new_tokens=longest, temperature=1.0, stop_token_ids=END_TOKENS)
        request = GenerationBatch(tuple(rows), tuple(range(number * size, (number + 1) * size)), sampling)
        found = self.trainer.generate(request, self.config.policy.generation.max_batch_size)
        lengths = torch.tensor([PROMPT_LENGTH + len(each.token_ids) for each in found])
        tokens = torch.zeros(size, int(lengths.max()), dtype=torch.long)
        logprobs = torch.zeros(tokens.shape)
        tokens[:, :PROMPT_LENGTH] = torch.tensor(rows)
        for row, each in enumerate(found):
            tokens[row, PROMPT_LENGTH : lengths[row]] = torch.from_numpy(each.token_ids)
            logprobs[row, PROMPT_LENGTH : lengths[row]] = torch.from_numpy(each.logprobs)
        columns = torch.arange(tokens.shape[1])
        batch = TokenBatch(
            input_ids=tokens,
            lengths=lengths,
            token_mask=(columns >= PROMPT_LENGTH) & (columns < lengths[:, None]),
            sample_ids=tuple(f"random:{index // of_group}" for index in range(size)),
        ).with_columns(
            advantages=per_sequence(torch.randn(size, generator=generator)), generation_logprobs=per_token(logprobs)
        )
        capture = stored_per_token([each.routed_experts for each in found], fill=UNKNOWN)
        return batch if capture is None else batch.with_stored(ROUTED_EXPERTS, capture)

    def _train(self, batch: TokenBatch) -> RankTrainResult:
        size = self.config.policy.train_micro_batch_size
        fetched = batch.fetched(list)
        shard = make_shard(fetched, [range(first, first + size) for first in range(0, len(batch), size)], fetched)
        return self.trainer.train([shard], self._loss)

    def close(self) -> None:
        """Close the tables."""
        self._tables.close()


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    # One thread, since a waiting thread would spin, which would count, and since all share one core.
    confine(1)
    with tempfile.TemporaryDirectory(prefix="routing_cost_") as scratch:
        model = write_wider_model(Path(scratch, "model"), options.width)
        names = ("off", "off_again", "all") if options.total_only else tuple(CONTESTANTS)
        found = {name: Found() for name in names}
        for start in range(options.starts):
            print(f"start {start + 1} of {options.starts} ...", file=sys.stderr, flush=True)
            for name, of_start in race(names, model, Path(scratch, f"start_{start}"), options).items():
                found[name].add_start(of_start)
        config = make_config(CONTESTANTS["off"], model)
        every = make_config(CONTESTANTS["all"], model).policy.megatron_cfg.routing_measurements.every_n_steps
        assert every is not None  # the shipped default
        result = summary(found, every)
        result |= {"starts": options.starts, "rounds": options.rounds, "width": options.width}
        step, of_worker = cpu_seconds_of_a_step(config, options.warmup, options.steps)
    shares = {name: part["median"] for name, part in result["parts"].items()} | {"total": result["total"]["median"] - 1}
    result["of_a_step"] = {
        "cpu_seconds": round(step, 4),
        "cpu_seconds_of_worker": round(of_worker, 4),
        "cost": {name: round(share * of_worker / step, 4) for name, share in shares.items()},
        "steps": options.steps,
    }
    print(json.dumps(result))


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, EXAMPLES)
    parser.add_argument("--starts", type=positive, default=6, metavar="N", help="starts of all processes (default: 6)")
    parser.add_argument("--rounds", type=positive, default=12, metavar="N", help="measured steps a start (default: 12)")
    parser.add_argument("--steps", type=positive, default=20, metavar="N", help="of the run in the loop (default: 20)")
    parser.add_argument("--warmup", type=positive, default=3, metavar="N", help="steps before these (default: 3)")
    parser.add_argument("--width", type=positive, default=1, metavar="N", help="times the demo's model (default: 1)")
    parser.add_argument("--total-only", action="store_true", help="only off and all")
    return parser.parse_args(arguments)


def write_wider_model(folder: Path, width: int) -> Path:
    """Write the demo's model `width` times as wide, with the same numbers of layers and experts."""
    shutil.copytree(TOKENIZER, folder)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {name: width * config[name] for name in _WIDTHS}))
    return folder


def make_config(changes: dict[str, Any], model: Path = TOKENIZER) -> GRPOMasterConfig:
    """Return the demo's configuration on one rank, with random weights."""
    overrides = [
        f"policy.model_name={model}",
        "policy.init=random",
        *(f"{key}={value}" for key, value in _AS_THE_RACE.items()),
        "cluster.cpu_workers_per_node=1",
        *(f"policy.megatron_cfg.{name}={json.dumps(value)}" for name, value in changes.items()),
    ]
    return load_grpo_config(CONFIGS / "grpo_tiny_moe.yaml", overrides, check_paths=False)


def race(names: Sequence[str], model: Path, folder: Path, options: argparse.Namespace) -> dict[str, Found]:
    """Start a process for each, and let all make the same step at the same time, round by round."""
    folder.mkdir()
    context = multiprocessing.get_context("spawn")
    ends = {name: context.Pipe() for name in names}
    processes = [
        context.Process(target=run_contestant, args=(name, model, folder / name, ends[name][1]), daemon=True)
        for name in names
    ]
    for process in processes:
        process.start()
    own_ends = {name: own for name, (own, _) in ends.items()}
    for _, other in ends.values():
        other.close()  # so that the end of a process closes its pipe
    answers(own_ends)
    # Measurements are also made in the warm-up, and count if there are no others.
    for number in range(options.warmup + options.rounds + options.rounds // EXPLAINED_EVERY):
        place = (number - options.warmup) % (EXPLAINED_EVERY + 1)
        is_explained = number == options.warmup - 1 or place == EXPLAINED_EVERY
        for name, connection in own_ends.items():
            connection.send((number + 1, number >= options.warmup and not is_explained, is_explained and name == "all"))
        answers(own_ends)
    for connection in own_ends.values():
        connection.send(None)
    found = answers(own_ends)
    for process in processes:
        process.join()
    return found


def answers(connections: Mapping[str, Connection]) -> dict[str, Any]:
    """Return one message from each contestant.

    Raises:
        SystemExit: A contestant has ended, and has printed the reason.
    """
    found = {}
    for name, connection in connections.items():
        try:
            found[name] = connection.recv()
        except EOFError:
            raise SystemExit(f"the contestant {name} has ended") from None
    return found


def run_contestant(name: str, model: Path, folder: Path, connection: Connection) -> None:
    """Run one contestant in its process, with a step for each message."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as a worker does
    config = make_config(CONTESTANTS[name], model)
    with one_rank(config.policy):
        contestant = Contestant(config, folder)
        connection.send(None)
        while (message := connection.recv()) is not None:
            number, measured, explains = message
            contestant.run(number, measured=measured, explains=explains)
            connection.send(None)
        contestant.close()
        connection.send(contestant.found)


class ShortPrompts(RandomPrompts):
    """Random prompts as long as the demo's."""

    def epoch(self, epoch_index: int) -> Iterator[list[Prompt]]:
        """Yield the prompts of each step."""
        for prompts in super().epoch(epoch_index):
            yield [replace(prompt, token_ids=prompt.token_ids[:PROMPT_LENGTH]) for prompt in prompts]


@dataclass
class CpuClock(StepClock):
    """A logger that keeps the CPU time of this process and its descendants at the end of each step.

    Attributes:
        cpu: Seconds since the start of the processes: of all, and of the worker.
    """

    cpu: list[tuple[float, float]] = field(default_factory=list)

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """End a step."""
        super().log_step(step, metrics)
        self.cpu.append(cpu_seconds_of_processes())


def cpu_seconds_of_processes() -> tuple[float, float]:
    """Return the CPU time of this process and its descendants without Ray's processes, and of the worker, which has the
    most."""
    own, seconds = psutil.Process(), []
    for process in (own, *own.children(recursive=True)):
        with suppress(psutil.Error):
            if not any(name in " ".join(process.cmdline()) for name in _RAYS_OWN):
                seconds.append(sum(process.cpu_times()[:2]))
    return sum(seconds), max(seconds[1:], default=0.0)


def cpu_seconds_of_a_step(config: GRPOMasterConfig, warmup: int, steps: int) -> tuple[float, float]:
    """Return the median CPU time of the steps of a run in the package's loop: of all processes, and of the worker."""
    clock = CpuClock()
    prompts = ShortPrompts(1 + warmup + steps, config.grpo.num_prompts_per_step)
    with tempfile.TemporaryDirectory(prefix="routing_cost_") as scratch, ExitStack() as stack:
        stack.enter_context(running_ray(config.cluster.cpu_workers_per_node))
        run(config, prompts, Path(scratch), clock, stack)
    pairs = list(itertools.pairwise(clock.cpu[warmup:]))
    whole, of_worker = (statistics.median(after[kind] - before[kind] for before, after in pairs) for kind in (0, 1))
    return whole, of_worker


def summary(contestants: Mapping[str, Found], measured_every: int) -> dict[str, Any]:
    """Return the ratios and shares over the starts, each with the 95% confidence interval of its median."""
    off, again, everything = (contestants[name] for name in ("off", "off_again", "all"))
    # A run writes its tables every five seconds.
    writes = min(1.0, statistics.median(off.step) / MAX_DELAY_S)
    steps = {
        name: [step + writes * tables for step, tables in zip(each.step, each.tables, strict=True)]
        for name, each in contestants.items()
    }
    base = [statistics.mean(pair) for pair in zip(steps["off"], steps["off_again"], strict=True)]
    explained = [statistics.median(everything.measurements) / measured_every] * len(base)
    whole = [sum(pair) for pair in zip(steps["all"], explained, strict=True)]
    before, parts, added_seconds = base, {}, {}
    for name in (part for part in PARTS if part in contestants):
        added = [above - below for above, below in zip(steps[name], before, strict=True)]
        added_seconds[name] = round(statistics.median(added), 5)
        parts[name], before = median_ratio(added, base), steps[name]
    whole_added = [above - below for above, below in zip(whole, base, strict=True)]
    without, replaying = (
        {tuple(contestants[name].losses) for name in names if name in contestants}
        for names in (("off", "off_again", "load", "capture"), ("replay", "all"))
    )
    return {
        "benchmark": "routing_cost",
        "limit": LIMIT,
        "total": median_ratio(whole, base),
        "total_of_starts": [round(above / below, 4) for above, below in zip(whole, base, strict=True)],
        "parts": parts | {"measurements": median_ratio(explained, base)},
        "added_cpu_seconds": added_seconds
        | {
            "measurements": round(statistics.median(explained), 5),
            "total": round(statistics.median(whole_added), 5),
        },
        "off_again_to_off": median_ratio(again.step, off.step),
        "cpu_seconds_per_step": {name: round(statistics.median(each.step), 4) for name, each in contestants.items()},
        "cpu_seconds_of_tables": round(statistics.median(everything.tables), 5),
        "cpu_seconds_of_measurements": round(statistics.median(everything.measurements), 4),
        "measurements_every_n_steps": measured_every,
        "captured_bytes": everything.captured_bytes,
        "num_tokens": everything.num_tokens,
        "losses_identical": len(without) == len(replaying) == 1,
        **surroundings(),
    }


if __name__ == "__main__":
    main()
