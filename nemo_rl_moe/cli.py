# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The `nemo-rl-moe` command. Each subcommand imports heavy packages only if it needs them.

Commands for existing runs, such as `report` and `audit`, work without the packages that training needs.
"""

import argparse
import errno
import io
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

from nemo_rl_moe import __version__
from nemo_rl_moe.checkpoints import verify as verify_command
from nemo_rl_moe.errors import (
    EXIT_BAD_INPUT,
    EXIT_RUN_FAILED,
    GenerationError,
    RoutingAnomalyError,
    TrainingDivergedError,
    UserCodeError,
    UserError,
    WeightSyncError,
    WorkerDiedError,
    escape_log_messages,
    exit_code_of_signal,
    printable,
    report_error,
    report_problems,
)
from nemo_rl_moe.routing.audit import command as audit_command
from nemo_rl_moe.runs.report import command as report_command
from nemo_rl_moe.runs.report import watch as watch_command

WITHOUT_OVERRIDES = ("convert", "upcycle")
OF_TRAINING = (
    *("sft", "dpo", "rm", "grpo", "ppo", "distillation", "run"),
    *("config", "plan", "data", "evaluate", "generate", "serve", *WITHOUT_OVERRIDES),
)
"""Commands that need the packages of `nemo-rl-moe[train]`."""
_OF_FOLDERS = {
    "report": report_command,
    "watch": watch_command,
    "verify": verify_command,
    "audit": audit_command,
}
_CODES_OF_PATHS = {
    errno.EACCES: EXIT_BAD_INPUT,
    errno.ENAMETOOLONG: EXIT_BAD_INPUT,  # a text was given instead of a path
    errno.ENOSPC: EXIT_RUN_FAILED,
    errno.EDQUOT: EXIT_RUN_FAILED,
}
"""Error number -> exit code, for errors that can occur with any path that is read or written."""
_EXAMPLES = """\
examples:
  nemo-rl-moe sft --config examples/configs/sft_tiny_moe.yaml
  nemo-rl-moe sft --config sft_tiny_moe.yaml sft.max_num_steps=50 logger.wandb_enabled=false
  nemo-rl-moe grpo --config grpo_tiny_moe.yaml grpo.max_num_steps=5
  nemo-rl-moe dpo --config dpo_tiny_moe.yaml dpo.reference_logprobs=precompute
  nemo-rl-moe rm --config rm_tiny_moe.yaml rm.center_rewards_coefficient=0.01
  nemo-rl-moe ppo --config ppo_tiny_moe.yaml ppo.policy_training_start_step=3
  nemo-rl-moe distillation --config distillation_tiny_moe.yaml distillation.kl_type=forward
  nemo-rl-moe run --config my_run.yaml
  nemo-rl-moe config --config my_run.yaml cluster.gpus_per_node=4
  nemo-rl-moe data --config my_run.yaml --show 5
  nemo-rl-moe evaluate --config grpo_tiny_moe.yaml policy.model_name=results/grpo_tiny_moe/step_30
  nemo-rl-moe generate --model results/grpo_tiny_moe/final --prompts prompts.txt
  nemo-rl-moe serve --model results/grpo_tiny_moe/final
  nemo-rl-moe report logs/sft_tiny_moe/exp_001
  nemo-rl-moe watch logs/sft_tiny_moe/exp_001
  nemo-rl-moe verify results/sft_tiny_moe
  nemo-rl-moe audit my_run/capture
  nemo-rl-moe plan --config grpo_math_1B.yaml policy.model_name=examples/assets/model_configs/Qwen3-1.7B
  nemo-rl-moe convert --from megatron --to hf --input results/sft_tiny_moe/step_50 --output exported
  nemo-rl-moe upcycle --model Qwen3-0.6B --experts 8 --top-k 2 --output Qwen3-0.6B-8x2
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: Arguments of the command, if another program calls it. None: the arguments of the process. The
            command then owns the process: at its end, a run ends all processes that it started.

    Returns:
        The exit code. 0: success, or the run was asked to stop and has saved. 1: the run failed. 2: wrong input. 3: NaN
            or infinite numbers. 130 or 143: ended at once by SIGINT or SIGTERM.
    """
    escape_log_messages()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # never raises, whatever the terminal can show
    if arguments is not None:
        return _run(arguments, owns_process=False)
    code = EXIT_RUN_FAILED
    try:
        code = _run(sys.argv[1:], owns_process=True)
    except SystemExit as error:  # raised by a request to stop while there is nothing to save
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        raise
    finally:
        if _training_commands()[0] is not None:
            from nemo_rl_moe.distributed.run_process import limit_ending

            limit_ending(code)
    return code


def _run(words: Sequence[str], *, owns_process: bool) -> int:
    training, missing = _training_commands()
    parser = _build_parser(training)
    options, rest = parser.parse_known_args(words)
    if training is None and options.command in OF_TRAINING:
        report_error(
            f"{options.command}: needs the packages of training, of which {missing} is not installed: "
            "pip install 'nemo-rl-moe[train]'"
        )
        return EXIT_BAD_INPUT
    flags = [word for word in rest if word.startswith("-")]
    if unknown := rest if options.command in WITHOUT_OVERRIDES else flags:
        hint = "; overrides are written without dashes" if any("." in word for word in unknown) else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    if options.command in _OF_FOLDERS:
        return _reported(partial(_OF_FOLDERS[options.command].run, options, rest))
    assert training is not None
    return _reported(partial(training.run, options, rest, owns_process=owns_process))


def _training_commands() -> tuple[ModuleType | None, str]:
    """Return the module of the training commands, or None and the name of a missing package."""
    try:
        from nemo_rl_moe import training_cli
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("nemo_rl_moe"):
            raise
        return None, error.name
    return training_cli, ""


def _reported(run: Callable[[], int | None]) -> int:
    """Run a command, print errors, and return the exit code."""
    try:
        return run() or 0
    except UserError as error:
        report_problems(error)
        _say_how_to_go_on(error)
        return error.exit_code
    except (
        WorkerDiedError,
        WeightSyncError,
        GenerationError,
        RoutingAnomalyError,
        TrainingDivergedError,
        UserCodeError,
    ) as error:
        report_error(error)
        _say_how_to_go_on(error)
        return error.exit_code
    except OSError as error:
        if error.filename is None or error.errno not in _CODES_OF_PATHS:
            raise
        report_error(f"{error.filename}: {error.strerror}")
        _say_how_to_go_on(error)
        return _CODES_OF_PATHS[error.errno]
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return exit_code_of_signal(signal.SIGINT)
    except SystemExit as error:
        if error.code == exit_code_of_signal(signal.SIGTERM):
            print("terminated", file=sys.stderr)
        raise


def _say_how_to_go_on(error: BaseException) -> None:
    for note in getattr(error, "__notes__", ()):
        print(printable(note), file=sys.stderr, flush=True)


class _Parser(argparse.ArgumentParser):
    """Parser of the command. argparse uses the same class for its subcommands."""

    def __init__(self, **settings: Any):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **settings)


def _build_parser(training: ModuleType | None) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="nemo-rl-moe",
        description="Post-training of Mixture-of-Experts models with Megatron-Core on Ray.",
        epilog=_EXAMPLES if training is None else f"{_EXAMPLES}\n{training.OVERRIDES_HELP}",
    )
    parser.add_argument("--version", action="version", version=f"nemo-rl-moe {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    if training is None:
        for name in OF_TRAINING:
            commands.add_parser(name, help="needs nemo-rl-moe[train]", add_help=False)
    else:
        training.add_commands(commands, _EXAMPLES)
    for name, module in _OF_FOLDERS.items():
        module.add_arguments(
            commands.add_parser(
                name,
                help=module.SUMMARY,
                description=f"{module.SUMMARY[0].upper()}{module.SUMMARY[1:]}.",
                epilog=module.EXAMPLES,
            )
        )
    return parser


if __name__ == "__main__":
    sys.exit(main())
