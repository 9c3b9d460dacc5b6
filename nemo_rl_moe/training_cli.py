# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The commands that need the packages of training: for algorithms, configurations, data and models.

Each command imports heavy packages only if it needs them.
"""

import argparse
import sys
from collections.abc import Sequence
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from nemo_rl_moe.config.algorithm import ALGORITHMS, BUILT_IN
from nemo_rl_moe.config.files import WHERE_THE_SHIPPED_ARE_LISTED, exemplar_summaries
from nemo_rl_moe.distributed.run_process import StopSignals
from nemo_rl_moe.errors import ConfigurationError, printable
from nemo_rl_moe.launch import (
    convert_command,
    evaluate_command,
    generate_command,
    serve_command,
    start,
    upcycle_command,
)

if TYPE_CHECKING:
    from nemo_rl_moe.config.schema import MasterConfig

OVERRIDES_HELP = """\
overrides change the configuration from the command line; values are YAML:
  sft.max_num_steps=50                          set a key
  policy.max_grad_norm=null                     null is a value too
  policy.tokenizer.name='${policy.model_name}'  the value of another key
  +policy.megatron_cfg.moe_z_loss_coeff=1e-3    set a key whether the file has it or not
  ~policy.megatron_cfg.moe_aux_loss_coeff       remove a key
Any moe_* field of Megatron-Core's TransformerConfig can be set under policy.megatron_cfg.
A wrong key or value ends with one line for each problem and exit code 2, before anything starts.
"""
_RUN_HELP = """\
The configuration selects a built-in algorithm by its section:

{built_in}

or your algorithm, in a module that is installed or in the working folder, by the key `algorithm`:
  algorithm: my_module:ALGORITHM
See docs/adding-an-algorithm.md.

examples:
  nemo-rl-moe run --config grpo_tiny_moe.yaml grpo.max_num_steps=5     the same as nemo-rl-moe grpo
  nemo-rl-moe run --config opd.yaml                                    a file with `algorithm: my_module:ALGORITHM`
""".format(built_in="\n".join(f"  {name:14}{ALGORITHMS[name].summary}" for name in BUILT_IN))
_DATA_HELP = """\
Reads the training data with the tokenizer, the chat template and the lengths of the configuration, as a run does, and
starts nothing. Shows, in the order of the data,

  sft   conversations, with trained tokens, context, and tokens truncated at policy.max_total_sequence_length
  dpo   the chosen and the rejected response of each pair, with the prompt
  rm    the same as dpo, each response up to the token whose score is taken
  grpo  the prompts as the model gets them

and the numbers of samples and tokens, the longest sample, skipped lines, and parts of conversations that the chat
template drops, such as thinking of earlier turns. In a terminal the three kinds of tokens have colours. Elsewhere, or
with NO_COLOR, [[ ]] marks trained tokens and {{ }} truncated ones.

examples:
  nemo-rl-moe data --config sft_tiny_moe.yaml
  nemo-rl-moe data --config my_run.yaml --show 20 policy.max_total_sequence_length=2048
  nemo-rl-moe data --config my_run.yaml +data.chat_template_kwargs.enable_thinking=false
  nemo-rl-moe data --config my_run.yaml data.on_bad_line=skip policy.tokenizer.chat_template=mine.jinja | less
"""
_CONFIG_HELP = """\
Missing files, folders, models, modules and functions, and layouts that a local model cannot have, are reported on
standard error, with exit code 2, as before the start of a run. Models and data on the hub are not checked.

--from-nemo-rl FILE translates a configuration of NeMo-RL into a file that inherits from a shipped one. Comments in it
list keys with another meaning here, and keys without a counterpart, which standard error lists too. The files of
`defaults:` must be next to FILE. The result is checked like a run: problems that would keep it from starting are
reported on standard error, with exit code 2. Intended differences: docs/migrating.md.

examples:
  nemo-rl-moe config --config my_run.yaml cluster.gpus_per_node=4
  nemo-rl-moe config --from-nemo-rl RL/examples/configs/grpo_math_1B.yaml > my_run.yaml
  nemo-rl-moe config --config my_run.yaml
"""
_PLAN_HELP = """\
--target GPUSxCARD or NODESxGPUSxCARD plans for other machines than this one: it sets cluster.num_nodes and
cluster.gpus_per_node, assumes Transformer Engine, and shows whether the run fits the card's memory. If it does not, the
plan names up to three changes with which it does.

examples:
  nemo-rl-moe plan --config grpo_math_1B.yaml policy.model_name=examples/assets/model_configs/Qwen3-1.7B
  nemo-rl-moe plan --config grpo_qwen3_30b_a3b_80gb.yaml --target 8xH100
  nemo-rl-moe plan --config grpo_qwen3_30b_a3b_80gb.yaml --target 4x8xA100-80GB policy.train_global_batch_size=512
"""

_CONFIG = "config"
_DATA = "data"
_PLAN = "plan"
_OF_WEIGHTS = {"convert": convert_command, "upcycle": upcycle_command}
_WITHOUT_TRAINING = {"evaluate": evaluate_command, "generate": generate_command, "serve": serve_command}
_RUN = "run"
_HELP_OF = {_RUN: _RUN_HELP, _CONFIG: _CONFIG_HELP, _DATA: _DATA_HELP, _PLAN: _PLAN_HELP}


def add_commands(commands: "argparse._SubParsersAction[Any]", examples: str) -> None:
    shipped = _shipped_help()
    for name, summary in (
        *((name, ALGORITHMS[name].summary) for name in BUILT_IN),
        (_RUN, "run the algorithm of the configuration: one of the above, or yours"),
        (_CONFIG, "print the resolved configuration as YAML, and check it and the files that it names; nothing runs"),
        (
            _PLAN,
            "compute layout, parameters and memory of a run without starting it; of the files that the configuration "
            "names, only the model's config.json must exist",
        ),
        (_DATA, "show the training data as a run sees it: tokens as text, and which of them are trained on"),
    ):
        command = commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=f"{_HELP_OF.get(name, examples)}\n{shipped}\n{OVERRIDES_HELP}",
        )
        command.add_argument(
            "--config", metavar="FILE", help="a YAML file, or the name of a shipped one such as sft_tiny_moe.yaml"
        )
        command.add_argument("overrides", nargs="*", metavar="override", help="section.key=value; see below")
        if name == _CONFIG:
            command.add_argument(
                "--from-nemo-rl", metavar="FILE", help="translate a configuration of NeMo-RL; see below"
            )
        if name == _DATA:
            command.add_argument(
                "--show",
                type=_number,
                default=3,
                metavar="N",
                help="number of samples to show, from the first (default: 3)",
            )
        elif name == _PLAN:
            command.add_argument(
                "--target", metavar="MACHINES", help="plan for other machines than this one; see below"
            )
        elif name != _CONFIG:
            # Used by the supervisor for the process that it starts. This process reads the configuration from standard
            # input.
            command.add_argument("--run-id", help=argparse.SUPPRESS)
            command.add_argument("--restart-number", type=int, default=0, help=argparse.SUPPRESS)
            command.add_argument("--started", type=float, help=argparse.SUPPRESS)
    for name, module in _WITHOUT_TRAINING.items():
        command = commands.add_parser(
            name,
            help=module.SUMMARY,
            description=f"{module.SUMMARY[0].upper()}{module.SUMMARY[1:]}.",
            epilog=f"{module.EXAMPLES}\n{OVERRIDES_HELP}",
        )
        module.add_arguments(command)
        command.add_argument("overrides", nargs="*", metavar="override", help="section.key=value; see below")
    for name, module in _OF_WEIGHTS.items():
        module.add_arguments(
            commands.add_parser(name, help=module.SUMMARY, description=module.DESCRIPTION, epilog=module.EXAMPLES)
        )


def run(options: argparse.Namespace, rest: Sequence[str], *, owns_process: bool) -> int:
    """Run one of the commands, and return the exit code.

    Args:
        owns_process: Whether this process does nothing else. If so, a run ends all processes that it started, and is
            restarted up to `cluster.max_restarts` times.
    """
    if options.command in _OF_WEIGHTS:
        _OF_WEIGHTS[options.command].run(options)
        return 0
    overrides = [*options.overrides, *rest]
    if options.command in _WITHOUT_TRAINING:
        command = _WITHOUT_TRAINING[options.command]
        config = command.load(options, overrides)
        if owns_process:
            start.take_process(overrides)
        with StopSignals():
            command.run(options, config)
        return 0
    return _run_with_config(options, overrides, owns_process=owns_process)


def _run_with_config(options: argparse.Namespace, overrides: Sequence[str], *, owns_process: bool) -> int:
    if options.command == _CONFIG and options.from_nemo_rl is not None:
        if options.config is not None or overrides:
            raise ConfigurationError(
                "config: --from-nemo-rl FILE takes no --config and no overrides; override keys of the file that it"
                " prints"
            )
        return _print_translation(options.from_nemo_rl)
    if options.command not in (_CONFIG, _DATA, _PLAN) and options.run_id is not None:
        return start.train_supervised(start.RunLaunch(options.run_id, options.restart_number, options.started))
    if options.config is None:
        raise ConfigurationError(_config_is_missing(options.command, overrides))
    if options.command == _DATA:
        _show_data(options.config, overrides, options.show)
    elif options.command == _PLAN:
        _print_plan(options.config, overrides, options.target)
    elif options.command == _CONFIG:
        _print_config(options.config, overrides)
    else:
        return start.train(_load(options.command, options.config, overrides), overrides, owns_process=owns_process)
    return 0


def _shipped_help() -> str:
    summaries = exemplar_summaries()
    width = max(map(len, summaries)) + 2
    lines = [f"  {name:{width}}{shorten(summary, 118 - width)}" for name, summary in summaries.items()]
    return "\n".join(["shipped configurations, which --config finds by their names from any folder:", *lines, ""])


def _config_is_missing(command: str, overrides: Sequence[str]) -> str:
    files = [word for word in overrides if word.endswith((".yaml", ".yml"))]
    if files:
        return f"{command}: --config is missing; did you mean --config {files[0]}?"
    return f"{command}: --config FILE is missing{WHERE_THE_SHIPPED_ARE_LISTED}"


def _load(command: str, config_path: str, overrides: Sequence[str]) -> "MasterConfig":
    from nemo_rl_moe.config.loading import load_any_config, load_config_as

    if command == _RUN:
        return load_any_config(config_path, overrides)
    return load_config_as(ALGORITHMS[command].config_class, config_path, overrides)


def _print_config(config_path: str, overrides: Sequence[str]) -> None:
    import yaml
    from omegaconf import OmegaConf
    from omegaconf._utils import get_omega_conf_dumper

    from nemo_rl_moe.config.loading import dump_resolved, load_any_config
    from nemo_rl_moe.config.notices import rates_for_adapters
    from nemo_rl_moe.launch.config_check import missing_parts

    config = load_any_config(config_path, overrides, check_paths=False)
    resolved = dump_resolved(config)
    text = OmegaConf.to_yaml(OmegaConf.create(resolved))
    if not text.replace("\n", "").isprintable():
        # Like `to_yaml`, but characters that could move a terminal's cursor are escaped.
        text = yaml.dump(resolved, Dumper=get_omega_conf_dumper(), default_flow_style=False, sort_keys=False)
    print(text, end="", flush=True)
    for line in rates_for_adapters(config):
        print(f"warning: {printable(line)}", file=sys.stderr)
    if problems := missing_parts(config):
        raise ConfigurationError(problems)


def _print_translation(path: str) -> int:
    """Print the translation of a NeMo-RL configuration, and return the exit code."""
    from pathlib import Path

    from nemo_rl_moe.config.loading import problems_of_translation
    from nemo_rl_moe.config.nemo_rl import translate

    translation = translate(Path(path))
    print(translation.text(Path(path).name), end="", flush=True)
    for line in translation.without:
        print(f"not carried over: {printable(line)}", file=sys.stderr)
    if problems := problems_of_translation(translation):
        raise ConfigurationError([f"{path}: translated, but needs a correction: {problem}" for problem in problems])
    return 0


def _print_plan(config_path: str, overrides: Sequence[str], machines: str | None) -> None:
    from nemo_rl_moe.config.loading import load_any_config
    from nemo_rl_moe.distributed.accelerators import parse_target

    target = None if machines is None else parse_target(machines)
    placed = [] if target is None else target.overrides

    def load(changes: Sequence[str]) -> "MasterConfig":
        return load_any_config(config_path, [*overrides, *placed, *changes], check_paths=False)

    config = load([])
    from nemo_rl_moe.launch.plan import print_plan

    print_plan(config, target, load)


def _show_data(config_path: str, overrides: Sequence[str], number: int) -> None:
    from nemo_rl_moe.config.loading import load_any_config

    config = load_any_config(config_path, overrides)
    from nemo_rl_moe.launch.data_view import show_data

    show_data(config, number)


def _number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number above 0")
    return int(text)
