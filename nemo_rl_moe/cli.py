# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The `nemo-rl-moe` command. Heavy packages are imported only by the command that needs them."""

import argparse
import sys
from collections.abc import Sequence

from nemo_rl_moe import __version__
from nemo_rl_moe.errors import ConfigurationError, UserError, WorkerDiedError

EXIT_INTERRUPTED = 130

_OVERRIDES_HELP = """\
overrides change the configuration from the command line; values are YAML:
  sft.max_num_steps=50                          set a key
  policy.max_grad_norm=null                     null is a value too
  policy.tokenizer.name='${policy.model_name}'  the value of another key
  +policy.megatron_cfg.moe_z_loss_coeff=1e-3    set a key whether the file has it or not
  ~policy.megatron_cfg.moe_aux_loss_coeff       take a key out
Any moe_* field of Megatron-Core's TransformerConfig can be set under policy.megatron_cfg.
A wrong key or value ends with one line for each problem and exit code 2, before anything starts.
"""
_EXAMPLES = """\
examples:
  nemo-rl-moe sft --config examples/configs/sft_tiny_moe.yaml
  nemo-rl-moe sft --config sft_tiny_moe.yaml sft.max_num_steps=50 logger.wandb_enabled=false
  nemo-rl-moe grpo --config grpo_tiny_moe.yaml grpo.max_num_steps=5
  nemo-rl-moe config --config my_run.yaml cluster.gpus_per_node=4
  nemo-rl-moe plan --config grpo_math_1B.yaml policy.model_name=examples/assets/model_configs/Qwen3-1.7B
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: What follows the program's name; None: this process's own.

    Returns:
        The exit code: 0, 1 for a run that failed in a worker, 2 for wrong input, 130 when interrupted.
    """
    parser = _build_parser()
    options, rest = parser.parse_known_args(arguments)
    flags = [word for word in rest if word.startswith("-")]
    if flags:
        parser.error(f"unrecognized arguments: {' '.join(flags)}")
    overrides = [*options.overrides, *rest]  # argparse leaves over those that stand behind an option
    try:
        if options.config is None:
            raise ConfigurationError(_config_is_missing(options.command))
        _COMMANDS[options.command](options.config, overrides)
    except UserError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return error.exit_code
    except WorkerDiedError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nemo-rl-moe",
        description="Post-training of Mixture-of-Experts models with Megatron-Core on Ray.",
        epilog=f"{_EXAMPLES}\n{_OVERRIDES_HELP}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"nemo-rl-moe {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, summary in (
        ("sft", "supervised fine-tuning"),
        ("grpo", "reinforcement learning with verifiable rewards (GRPO, DAPO, GSPO, CISPO, REINFORCE++)"),
        ("config", "check a configuration and print it resolved, as YAML; the files that it names need not exist"),
        (
            "plan",
            "layout, parameters and memory of a run by arithmetic, without starting it; of the files that the "
            "configuration names, only the model's config.json must exist",
        ),
    ):
        command = commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=f"{_EXAMPLES}\n{_OVERRIDES_HELP}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.add_argument(
            "--config", metavar="FILE", help="a YAML file, or the name of a shipped one such as sft_tiny_moe.yaml"
        )
        command.add_argument("overrides", nargs="*", metavar="override", help="section.key=value; see below")
    return parser


def _config_is_missing(command: str) -> str:
    from nemo_rl_moe.config.files import exemplar_names

    return f"{command}: --config FILE is missing; shipped configurations: {', '.join(exemplar_names())}"


def _run_sft(config_path: str, overrides: Sequence[str]) -> None:
    from nemo_rl_moe.config.loading import load_config

    config = load_config(config_path, overrides)
    from nemo_rl_moe.launch.sft import run_sft

    run_sft(config)


def _run_grpo(config_path: str, overrides: Sequence[str]) -> None:
    from nemo_rl_moe.config.loading import load_grpo_config

    config = load_grpo_config(config_path, overrides)
    from nemo_rl_moe.launch.grpo import run_grpo

    run_grpo(config)


def _print_config(config_path: str, overrides: Sequence[str]) -> None:
    from omegaconf import OmegaConf

    from nemo_rl_moe.config.loading import load_any_config
    from nemo_rl_moe.config.resolved import dump_resolved

    config = load_any_config(config_path, overrides, check_paths=False)
    print(OmegaConf.to_yaml(OmegaConf.create(dump_resolved(config))), end="")


def _print_plan(config_path: str, overrides: Sequence[str]) -> None:
    from nemo_rl_moe.config.loading import load_any_config

    config = load_any_config(config_path, overrides, check_paths=False)
    from nemo_rl_moe.launch.plan import print_plan

    print_plan(config)


_COMMANDS = {"sft": _run_sft, "grpo": _run_grpo, "config": _print_config, "plan": _print_plan}

if __name__ == "__main__":
    sys.exit(main())
