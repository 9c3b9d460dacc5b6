# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Serving of a model on the loopback interface until the command is stopped."""

import asyncio
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from nemo_rl_moe.algorithms.capture_writer import moe_layers
from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.data.continuation import Continuation
from nemo_rl_moe.data.template_inputs import run_wide_inputs
from nemo_rl_moe.distributed.object_store import fetch_objects
from nemo_rl_moe.endpoint.http import HOST, listen
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.generation.interface import GenerationEngine, GenerationRequest, SamplingParameters
from nemo_rl_moe.launch.grpo import announce_named_stops, sampling_parameters, start_engine
from nemo_rl_moe.launch.inference import give_weights
from nemo_rl_moe.launch.setup import ModelRun, PreparedModel
from nemo_rl_moe.models.hf_files import load_config_json
from nemo_rl_moe.models.policy.separate_engine import SeparateEngine
from nemo_rl_moe.models.position_limit import position_limit
from nemo_rl_moe.runs.loggers.console import ConsoleLogger
from nemo_rl_moe.serving.app import served_application
from nemo_rl_moe.serving.requests import ServedRules
from nemo_rl_moe.serving.served_routes import ServedRoutes
from nemo_rl_moe.serving.service import ServedModel, Service
from nemo_rl_moe.tools.detection import format_of
from nemo_rl_moe.tools.formats.interface import ToolFormat

if TYPE_CHECKING:
    from nemo_rl_moe.models.policy.lm_policy import MegatronPolicy


def serve(config: GRPOMasterConfig, name: str, port: int, key: str, *, shows_key: bool) -> None:
    """Serve a model until the command is stopped.

    Args:
        config: A checked configuration.
        name: The model's id in requests.
        port: Port on the loopback interface. 0: a free one.
        key: Key that requests need.
        shows_key: Whether to print the key.

    Raises:
        ConfigurationError: The port is in use, or the model cannot be served.
        GenerationError: The engine failed.
    """
    console = ConsoleLogger(total_steps=0, live=config.logger.console.live, stream=sys.stderr)
    config = _with_positions_of_the_model(config)
    with ModelRun(config, console) as run, _bound(port) as bound:
        service = _started(config, run, name)
        asyncio.run(_listening(service, bound, key, console, shows_key=shows_key))


def _with_positions_of_the_model(config: GRPOMasterConfig) -> GRPOMasterConfig:
    """Return the configuration with the lengths of sequences and responses lowered to the model's limit."""
    policy, limit = config.policy, position_limit(load_config_json(config.policy.model_name))
    if limit is None or limit >= policy.max_total_sequence_length:
        return config
    most_new = min(policy.generation.max_new_tokens, max(1, limit // 2))
    generation = policy.generation.model_copy(update={"max_new_tokens": most_new})
    lowered = policy.model_copy(update={"max_total_sequence_length": limit, "generation": generation})
    return config.model_copy(update={"policy": lowered})


@contextmanager
def _bound(port: int) -> Iterator[socket.socket]:
    """Bind a socket on the loopback interface, so that a port in use is reported before anything starts."""
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((HOST, port))
            bound.listen()  # so that another server cannot bind it meanwhile
        except OSError as error:
            message = f"--port: got {port}, on which the server cannot listen: {error.strerror}"
            raise ConfigurationError(message) from None
        yield bound


async def _listening(
    service: Service, bound: socket.socket, key: str, console: ConsoleLogger, *, shows_key: bool
) -> None:
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    runner, port = await listen(served_application(service, key, failed), bound)
    try:
        url = f"http://{HOST}:{port}"
        console.message(f"serving at {url}/v1; Ctrl-C stops it")
        if shows_key:
            console.message(f"key: {key}")
        console.message(f"the experts that answer: {url}/{f'#key={key}' if shows_key else ''}")
        await failed
    finally:
        await runner.cleanup()


def _started(config: GRPOMasterConfig, run: ModelRun, name: str) -> Service:
    """Start the engine, and return the service that uses it."""
    generation = config.policy.generation
    generation.engine.check_installation(config)
    model = run.prepare_model()
    generation.engine.check_model(config, model.hf_config)
    if model.image_rule is not None:
        run.console.message("images: requests can have text alone")
    sampling = sampling_parameters(generation, model.speech, model.hf_config.vocab_size)
    announce_named_stops(generation, model.tokenizer, run.console)
    tool_format, no_tools = _tool_format(config, model)
    policy = run.start_policy()
    engine = start_engine(config, run, policy, model)
    give_weights(config, run, policy, engine, model)
    if isinstance(engine, SeparateEngine):
        policy.shutdown()  # this engine has a copy of the weights, and replaces no lost worker
    with run.console.phase("answering a first request"):
        routes = asyncio.run(_routes(engine, policy, sampling))
    data = config.data
    served = ServedModel(
        name=name,
        tokenizer=model.tokenizer,
        continuation=Continuation(
            model.tokenizer,
            run_wide_inputs([], data.chat_template_kwargs),
            most_tokens=config.policy.max_total_sequence_length,
        ),
        max_tokens=config.policy.max_total_sequence_length,
        vocabulary_size=model.hf_config.vocab_size,
        tool_format=tool_format,
        thinking=model.speech.thinking,
        routes=routes,
    )
    no_routes = None if routes else "the engine captures none (policy.megatron_cfg.capture_routing)"
    return Service(engine, served, ServedRules(name, sampling, no_tools, no_routes))


def _tool_format(config: GRPOMasterConfig, model: PreparedModel) -> tuple[ToolFormat | None, str | None]:
    """Return the format of tool calls, or the reason why there is none."""
    try:
        return format_of(model.tokenizer, None, run_wide_inputs([], config.data.chat_template_kwargs)), None
    except ConfigurationError as error:
        return None, str(error).partition(": ")[2]


async def _routes(
    engine: GenerationEngine, policy: "MegatronPolicy", sampling: SamplingParameters
) -> ServedRoutes | None:
    """Answer a request of one token, and return the reader of its routed experts. None if it has none."""
    found = await engine.generate(GenerationRequest((0,), 0, replace(sampling, max_new_tokens=1)))
    if found.routed_experts is None:
        return None
    num_layers, topk = found.routed_experts.row_shape
    moe = policy.moe_configuration
    return ServedRoutes(moe_layers(moe, num_layers), int(moe["num_moe_experts"]), topk, fetch_objects)
