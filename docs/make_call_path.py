# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The way of one trajectory, for architecture.md: call stacks from the training loop to the engine and the optimizer.

    python docs/make_call_path.py

Runs one GRPO step of the tiny recipe on this machine, records call stacks in the driver and on rank 0, and prints them
as Markdown, with the number of distinct files of their functions. Functions of other packages are left out.
"""

import inspect
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, cast
from unittest import mock

import nemo_rl_moe
from nemo_rl_moe.algorithms.losses.policy_gradient import PolicyGradientLoss
from nemo_rl_moe.config.loading import load_grpo_config
from nemo_rl_moe.demo_data import main as make_data
from nemo_rl_moe.distributed.run_process import StopSignals
from nemo_rl_moe.distributed.worker_group import WorkerGroup
from nemo_rl_moe.generation.lockstep import LockstepEngine
from nemo_rl_moe.launch import grpo
from nemo_rl_moe.launch.start import RunLaunch
from nemo_rl_moe.launch.training_run import TrainingRun
from nemo_rl_moe.models.megatron.generation.engine import MegatronGenerator
from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer
from nemo_rl_moe.models.policy.lm_policy import MegatronPolicy

# isort: split
from megatron.core.optimizer import ChainedOptimizer

REPOSITORY = Path(__file__).parent.parent
TO_ENGINE = "a request at the engine"
Stack = list[tuple[str, str]]
"""Functions from the outermost to the innermost one, each with its file in the package."""


class StackRecorder:
    """Profile function of a thread that records the stack at the first call of each function that is looked for.

    Args:
        wanted: By the name of a stack, the called function and one that it is called by, directly or not.
    """

    def __init__(self, wanted: Mapping[str, tuple[Callable[..., Any], Callable[..., Any]]]):
        self.stacks: dict[str, Stack] = {}
        self._package = Path(nemo_rl_moe.__file__).parent
        self._wanted: dict[CodeType, dict[str, CodeType]] = {}
        for name, (function, caller) in wanted.items():
            # A decorator such as `torch.no_grad` gives all its functions the same code.
            self._wanted.setdefault(inspect.unwrap(function).__code__, {})[name] = caller.__code__

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Take an event of `sys.setprofile`."""
        for name, caller in self._wanted.get(frame.f_code, {}).items() if event == "call" else ():
            codes = _codes(frame)
            if name not in self.stacks and caller in codes:
                self.stacks[name] = [found for code in codes if (found := self._named(code)) is not None]

    def _named(self, code: CodeType) -> tuple[str, str] | None:
        path = Path(code.co_filename)
        if not path.is_relative_to(self._package):
            return None
        return code.co_qualname.replace(".<locals>", ""), str(path.relative_to(self._package))


def _codes(frame: FrameType | None) -> list[CodeType]:
    """Return the code of a frame and of those that have called it, the outermost first."""
    codes = []
    while frame is not None:
        codes.append(frame.f_code)
        frame = frame.f_back
    return codes[::-1]


def start_on_rank(trainer: MegatronTrainer) -> None:
    """Begin to record in a rank's process."""
    recorder = StackRecorder(
        {
            "rank: generation": (MegatronGenerator.generate, MegatronTrainer.generate),
            "rank: the loss": (PolicyGradientLoss.__call__, MegatronTrainer.train),
            "rank: `optimizer.step`": (ChainedOptimizer.step, MegatronTrainer.train),
        }
    )
    sys.setprofile(recorder)


def stacks_of_rank(trainer: MegatronTrainer) -> dict[str, Stack]:
    """End the recording in a rank's process; return its stacks."""
    recorder = cast("StackRecorder", sys.getprofile())
    sys.setprofile(None)
    return recorder.stacks


def record(folder: Path) -> dict[str, Stack]:
    """Run one step, and return the stacks of the driver and of rank 0.

    Args:
        folder: Takes what the run writes.
    """
    train_grpo = grpo.train_grpo
    recorder = StackRecorder(
        {
            TO_ENGINE: (LockstepEngine.generate, train_grpo),
            "a batch of requests to the ranks": (WorkerGroup.start_each, MegatronPolicy.generate),
            "an update to the ranks": (WorkerGroup.start_each, MegatronPolicy.train),
        }
    )
    of_rank: dict[str, Stack] = {}

    def recorded(config: Any, policy: MegatronPolicy, *arguments: Any) -> Any:
        policy._workers.call_all(start_on_rank)
        sys.setprofile(recorder)
        try:
            return train_grpo(config, policy, *arguments)
        finally:
            sys.setprofile(None)
            of_rank.update(policy._workers.call_all(stacks_of_rank)[0])

    make_data(["--output", str(folder / "data")])
    config = load_grpo_config(REPOSITORY / "examples" / "configs" / "grpo_tiny_moe.yaml", overrides(folder))
    run = TrainingRun(config, RunLaunch("call path"), StopSignals())
    with mock.patch.object(grpo, "train_grpo", recorded), run:
        grpo.run_grpo(config, run)
    loop = ("train_grpo", "algorithms/grpo.py")
    return {name: stack[stack.index(loop) :] for name, stack in recorder.stacks.items()} | of_rank


def overrides(folder: Path) -> list[str]:
    """Return the settings of one small step."""
    return [
        f"policy.model_name={REPOSITORY / 'examples' / 'assets' / 'tiny_qwen3_moe'}",
        "policy.init=random",
        "grpo.max_num_steps=1",
        "grpo.num_prompts_per_step=2",
        "grpo.num_generations_per_prompt=2",
        "grpo.val_period=0",
        "grpo.val_at_start=false",
        "grpo.val_at_end=false",
        "policy.train_global_batch_size=4",
        "policy.train_micro_batch_size=2",
        "policy.megatron_cfg.scheduler.lr_warmup_iters=0",
        f"data.train.path={folder / 'data' / 'grpo.jsonl'}",
        "data.validation=null",
        "checkpointing.enabled=false",
        f"logger.log_dir={folder / 'logs'}",
    ]


def as_table(stacks: Mapping[str, Stack]) -> list[str]:
    """Return stacks as rows of a Markdown table; functions that the stack before has too are left out."""
    rows, before = ["| way | frame | function | file |", "|---|---|---|---|"], Stack()
    for name, stack in stacks.items():
        shared = next((n for n, (one, other) in enumerate(zip(stack, before, strict=False)) if one != other), 0)
        for number, (function, file) in list(enumerate(stack, 1))[shared:]:
            way = name if number == shared + 1 else ""
            rows.append(f"| {way} | {number} | `{function}` | `{file}` |")
        before = stack
    return rows


def main() -> None:
    """Print the way as Markdown."""
    with tempfile.TemporaryDirectory() as folder:
        stacks = record(Path(folder))
    num_frames, num_files = len(stacks[TO_ENGINE]), len({file for stack in stacks.values() for _, file in stack})
    print("`python docs/make_call_path.py` runs one step of the tiny recipe and counts:\n")
    print(f"- {num_frames} frames from `train_grpo` to a request at the engine,")
    print(f"- {num_files} files on the way of one trajectory: to the engine, through generation on rank 0, and through")
    print("  the update to the loss and `optimizer.step` there.\n")
    print("\n".join(as_table(stacks)))


if __name__ == "__main__":
    main()
