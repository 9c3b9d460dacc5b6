# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Texts and options of the command `nemo-rl-moe generate`. Options set keys of a configuration. Imports no torch."""

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from nemo_rl_moe.config.engines import BUILT_IN
from nemo_rl_moe.config.loading import load_grpo_config
from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.errors import ConfigurationError, DataError

SUMMARY = "generate responses of a model to prompts, and write them as JSON lines"
BASE_CONFIG = "grpo_generate.yaml"
EXAMPLES = f"""\
Prompts are a .jsonl file as GRPO trains on, with a text or a list of messages under `prompt` (another key:
data.prompt_key=NAME), a .txt file of one prompt a line, or a data set's name. The chat template of the model's
tokenizer is applied as in training. Each response is a line of JSON on standard output, or in --output FILE, which
is written completely or not at all; progress goes to standard error:

  {{"sample_id": "prompts.txt:1", "sample": 0, "prompt": "7+8=", "response": "15", "finish_reason": "stop", ...}}

finish_reason is "length" for a response that was truncated at --max-new-tokens. With --logprobs, a line
also has token_ids and logprobs: by the softmax of all logits divided by the temperature, in nats.

By default, one worker runs on a CPU in float32. Overrides (KEY=VALUE) change keys of {BASE_CONFIG}, as the options do.

examples:
  nemo-rl-moe generate --model results/sft_tiny_moe/final --prompts prompts.txt
  nemo-rl-moe generate --model results/grpo_tiny_moe/step_30 --prompts data/addition/validation_prompts.jsonl \\
      --samples 4 --temperature 0.7 --seed 1 --output responses.jsonl
  nemo-rl-moe generate --model MODEL --prompts prompts.jsonl --temperature 0 --logprobs --backend vllm
  nemo-rl-moe generate --model BASE --adapter results/grpo_tiny_moe_lora/step_30 --prompts prompts.txt
  nemo-rl-moe generate --model MODEL --prompts prompts.jsonl cluster.gpus_per_node=8 policy.precision=bfloat16 \\
      policy.megatron_cfg.expert_model_parallel_size=8 data.prompt_key=question
"""


@dataclass(frozen=True)
class Option:
    """An option that sets a key of the configuration. With `is_text`, its value is a text and not YAML."""

    key: str
    metavar: str
    text: str
    is_text: bool = False

    def override(self, value: str) -> str:
        return f"{self.key}={json.dumps(value) if self.is_text else value}"


ADAPTER = Option(
    "policy.lora.path",
    "DIR",
    "an adapter of the model: peft's folder, a run's final or checkpoint (default: none)",
    is_text=True,
)
OPTIONS = {
    "--model": Option(
        "policy.model_name", "DIR", "a model's folder, a checkpoint of a run, or a hub's name", is_text=True
    ),
    "--adapter": ADAPTER,
    "--prompts": Option("data.train.path", "FILE", "the prompts: .jsonl, .txt, or a data set", is_text=True),
    "--backend": Option(
        "policy.generation.backend", "NAME", f"{', '.join(BUILT_IN)}, or an engine of your own (default: megatron)"
    ),
    "--max-new-tokens": Option(
        "policy.generation.max_new_tokens", "N", "maximum length of a response in tokens, with its end (default: 256)"
    ),
    "--temperature": Option("grpo.val_temperature", "T", "divisor of the logits; 0: greedy (default: 1.0)"),
    "--top-k": Option("policy.generation.top_k", "N", "sample from the N most likely tokens (default: all)"),
    "--top-p": Option(
        "policy.generation.top_p", "P", "sample from the fewest tokens whose probabilities add up to P (default: 1.0)"
    ),
    "--samples": Option("grpo.val_num_generations", "N", "number of responses to each prompt (default: 1)"),
    "--seed": Option("grpo.seed", "N", "the same seed gives the same responses (default: 42)"),
}
_REQUIRED = ("--model", "--prompts")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to the parser."""
    for name, option in OPTIONS.items():
        parser.add_argument(name, metavar=option.metavar, help=option.text, required=name in _REQUIRED)
    parser.add_argument("--logprobs", action="store_true", help="write the tokens and their log-probabilities too")
    parser.add_argument("--output", metavar="FILE", help="a new file (default: standard output)")


def load(options: argparse.Namespace, overrides: Sequence[str]) -> GRPOMasterConfig:
    """Load and return the configuration, and check that the output can be written."""
    with reported_by_option(OPTIONS, options):
        # Overrides come last, as on the command line of a run.
        of_options = [*adapter_settings(options.adapter), *overrides_of(OPTIONS, options)]
        config = load_grpo_config(BASE_CONFIG, [*of_options, *overrides])
    if options.output is not None:
        _check_output(Path(options.output))
    return config


def adapter_settings(folder: str | None) -> list[str]:
    """Return the section `policy.lora` of an adapter as an override, which the option then completes by the folder."""
    if folder is None:
        return []
    from nemo_rl_moe.models.peft_files import lora_of_folder  # takes a second

    return [f"policy.lora={json.dumps(lora_of_folder(Path(folder)).model_dump())}"]


def overrides_of(known: Mapping[str, Option], options: argparse.Namespace) -> list[str]:
    """Return the given options as overrides of a configuration."""
    return [known[name].override(value) for name, value in _given(known, options).items()]


def run(options: argparse.Namespace, config: GRPOMasterConfig) -> None:
    """Run the command with the configuration that `load` has returned."""
    from nemo_rl_moe.launch.generate import generate

    with reported_by_option(OPTIONS, options):
        generate(config, Path(options.output) if options.output is not None else None, with_logprobs=options.logprobs)


@contextmanager
def reported_by_option(known: Mapping[str, Option], options: argparse.Namespace) -> Iterator[None]:
    """In this context, errors name an option in place of the key that the option sets, if the user gave the option."""
    try:
        yield
    except (ConfigurationError, DataError) as error:
        error.problems = _renamed(error.problems, known, options)
        raise  # the same object, because it may have been printed already


def _renamed(problems: list[str], known: Mapping[str, Option], options: argparse.Namespace) -> list[str]:
    for name in _given(known, options):
        # Replaces only the full key, not a longer key that begins or ends with it.
        key = re.compile(rf"(?<![\w.]){re.escape(known[name].key)}(?![\w.]*\w)")
        problems = [key.sub(name, problem) for problem in problems]
    return problems


def _given(known: Mapping[str, Option], options: argparse.Namespace) -> dict[str, str]:
    values = {name: getattr(options, name.removeprefix("--").replace("-", "_")) for name in known}
    return {name: value for name, value in values.items() if value is not None}


def _check_output(path: Path) -> None:
    if path.exists() or path.is_symlink():
        raise ConfigurationError(f"--output: {path} exists already; name a new file")
    if not path.absolute().parent.is_dir():
        raise ConfigurationError(f"--output: got {path}, and there is no folder {path.parent}")
