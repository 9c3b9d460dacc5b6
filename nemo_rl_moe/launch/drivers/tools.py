# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The driver of conversations with tools. The tools run in worker processes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nemo_rl_moe.config.environments.tools import ToolsConfig
from nemo_rl_moe.launch.drivers.setup import DriverSetup, StartDriver, described_tools
from nemo_rl_moe.launch.setup import ModelRun
from nemo_rl_moe.rollouts.environment import Environment
from nemo_rl_moe.rollouts.tool_environment import ToolConversation
from nemo_rl_moe.runs.loggers.console import ConsoleLogger, Notices
from nemo_rl_moe.tools.definitions import Tools
from nemo_rl_moe.tools.worker_pool import ToolWorkers


def prepare_tools(driver: ToolsConfig, setup: DriverSetup) -> StartDriver:
    """Check the tools of an environment, and return the function that starts its driver."""
    tools, tool_format = described_tools(driver), setup.tool_format(driver.format)

    def start(run: ModelRun, warn: Callable[[str], None]) -> Environment:
        workers = run.use(running_tool_workers(driver, tools, run.console))
        return ToolConversation(tools, tool_format, workers.calls, driver, warn)

    return start


@contextmanager
def running_tool_workers(driver: ToolsConfig, tools: Tools, console: ConsoleLogger) -> Iterator[ToolWorkers]:
    """Run the tool workers within this context, and yield them."""
    limits = driver.limits
    with console.phase(f"starting the tool workers ({', '.join(driver.tool_names)})"):
        workers = ToolWorkers(
            driver.tools,
            driver.parameters,
            num_workers=limits.num_workers,
            memory_mb=limits.memory_mb,
            most_characters=limits.max_result_characters,
            servers=driver.mcp_servers,
            methods=[name for name, tool in tools.items() if tool.state is not None],
            warn=Notices(console.message, console.warn).warn,
        )
    with workers:
        yield workers
