# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Serving of a model on the loopback interface until the command is stopped."""

import asyncio
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from nemo_rl_moe.algorithms.capture_writer import moe_layers
from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.config.schema_run import GENERATION_ROLE
from nemo_rl_moe.data.continuation import Continuation
from nemo_rl_moe.data.template_inputs import run_wide_inputs
from nemo_rl_moe.distributed.object_store import fetch_objects
from nemo_rl_moe.endpoint.http import HOST, listen
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.generation.interface import GenerationEngine, GenerationRequest, SamplingParameters
from nemo_rl_moe.launch.generate import with_positions_of_the_model
from nemo_rl_moe.launch.grpo import announce_named_stops, sampling_parameters, start_engine
from nemo_rl_moe.launch.inference import give_weights
from nemo_rl_moe.launch.setup import ModelRun, PreparedModel
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
    with ModelRun(with_positions_of_the_model(config), console) as run:
        service = _started(run, name)
        asyncio.run(_listening(service, port, key, console, shows_key=shows_key))


async def _listening(service: Service, port: int, key: str, console: ConsoleLogger, *, shows_key: bool) -> None:
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    try:
        runner, port = await listen(served_application(service, key, failed), port)
    except OSError as error:
        raise ConfigurationError(f"--port: got {port}, on which the server cannot listen: {error.strerror}") from None
    try:
        url = f"http://{HOST}:{port}"
        console.message(f"serving at {url}/v1; Ctrl-C stops it")
        if shows_key:
            console.message(f"key: {key}")
        console.message(f"the experts that answer: {url}/{f'#key={key}' if shows_key else ''}")
        await failed
    finally:
        await runner.cleanup()


def _started(run: ModelRun, name: str) -> Service:
    """Start the engine, and return the service that uses it."""
    config = run.config
    assert isinstance(config, GRPOMasterConfig)
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
    if GENERATION_ROLE in config.cluster.roles or config.cluster.gpus_per_node == 0:
        policy.shutdown()  # the engine has a copy of the weights
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
