# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Texts and options of the command `nemo-rl-moe serve`. Options set keys of a configuration. Imports no torch."""

import argparse
import os
import secrets
from collections.abc import Sequence

from nemo_rl_moe.config.engines import BUILT_IN
from nemo_rl_moe.config.loading import load_grpo_config
from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.config.schema_run import GENERATION_ROLE
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.launch.generate_command import ADAPTER, Option, adapter_settings, overrides_of, reported_by_option

SUMMARY = "serve a model by OpenAI's API on this machine, with the experts that answered"
BASE_CONFIG = "grpo_serve.yaml"
KEY_VARIABLE = "NEMO_RL_MOE_API_KEY"
_SEPARATE, _TRAINERS = "megatron_separate", "megatron"
_ENGINES = " or ".join(name for name in BUILT_IN if name != _TRAINERS)
EXAMPLES = f"""\
Serves /v1/chat/completions, /v1/completions (echo and logprobs too) and /v1/models on 127.0.0.1, until Ctrl-C.
Requests have their own temperature, top_p, top_k, seed, stop, n and max_tokens. With "return_routed_experts": true, a
choice has the experts of each token in each MoE layer. The page at / shows them for a prompt.

Requests need the key that is printed at the start, or the one of the variable {KEY_VARIABLE}.

By default, one copy of the model runs on a CPU in float32. Overrides (KEY=VALUE) change keys of {BASE_CONFIG}, as the
options do.

examples:
  nemo-rl-moe serve --model results/grpo_tiny_moe/final
  nemo-rl-moe serve --model results/grpo_tiny_moe/step_30 --port 8001 --max-model-len 256
  nemo-rl-moe serve --model MODEL --backend vllm
  nemo-rl-moe serve --model BASE --adapter results/grpo_tiny_moe_lora/step_30
  curl http://127.0.0.1:8000/v1/chat/completions -H "Authorization: Bearer $KEY" -H "Content-Type: application/json" \\
      -d '{{"model": "MODEL", "messages": [{{"role": "user", "content": "7+8="}}], "return_routed_experts": true}}'
"""

_MOST_NEW_TOKENS = 512

OPTIONS = {
    "--model": Option(
        "policy.model_name", "DIR", "a model's folder, a checkpoint of a run, or a hub's name", is_text=True
    ),
    "--adapter": ADAPTER,
    "--backend": Option("policy.generation.backend", "NAME", f"{_ENGINES} (default: {_SEPARATE})"),
    "--max-model-len": Option(
        "policy.max_total_sequence_length", "N", "maximum number of tokens, prompt included (default: 4096)"
    ),
    "--max-new-tokens": Option(
        "policy.generation.max_new_tokens",
        "N",
        f"maximum length of a chat response if its request sets none (default: {_MOST_NEW_TOKENS})",
    ),
}
_DEFAULT_PORT = 8000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to the parser."""
    for name, option in OPTIONS.items():
        parser.add_argument(name, metavar=option.metavar, help=option.text, required=name == "--model")
    parser.add_argument("--served-model-name", metavar="NAME", help="the model's id in requests (default: --model)")
    parser.add_argument(
        "--port",
        metavar="N",
        type=_port,
        default=_DEFAULT_PORT,
        help=f"port on 127.0.0.1; 0: a free one (default: {_DEFAULT_PORT})",
    )


def load(options: argparse.Namespace, overrides: Sequence[str]) -> GRPOMasterConfig:
    """Load and return the configuration."""
    backend = options.backend if options.backend is not None else _SEPARATE
    if backend == _TRAINERS:
        raise ConfigurationError(
            f"--backend: got {backend}, expected {_ENGINES}: the trainer's own engine answers requests only together"
        )
    defaults = [] if backend == _SEPARATE else [f"~cluster.roles.{GENERATION_ROLE}"]
    if options.max_model_len is not None and options.max_model_len.isdecimal():
        half = max(1, int(options.max_model_len) // 2)
        defaults.append(f"policy.generation.max_new_tokens={min(_MOST_NEW_TOKENS, half)}")
    with reported_by_option(OPTIONS, options):
        of_options = [*defaults, *adapter_settings(options.adapter), *overrides_of(OPTIONS, options)]
        config = load_grpo_config(BASE_CONFIG, [*of_options, *overrides])
    generation = config.policy.generation
    if generation.temperature != 1:
        raise ConfigurationError(
            f"policy.generation.temperature: got {generation.temperature:g}, expected 1: requests set the temperature,"
            " and prompts are scored at 1"
        )
    if generation.stop_strings is None:
        raise ConfigurationError("policy.generation.stop_strings: got null, expected a list: requests may have some")
    return config


def run(options: argparse.Namespace, config: GRPOMasterConfig) -> None:
    """Run the command with the configuration that `load` has returned."""
    from nemo_rl_moe.launch.serve import serve

    name = options.served_model_name if options.served_model_name is not None else config.policy.model_name
    given = os.environ.get(KEY_VARIABLE)
    if given and not (given.isascii() and given.isprintable() and " " not in given):
        raise ConfigurationError(f"{KEY_VARIABLE}: got a blank or another character that no header can have")
    with reported_by_option(OPTIONS, options):
        serve(config, name, options.port, given or secrets.token_urlsafe(24), shows_key=not given)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number from 0 to 65535")
    return int(text)
