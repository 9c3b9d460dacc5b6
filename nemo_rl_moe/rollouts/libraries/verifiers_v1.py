# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Tasksets of `verifiers.v1`: loading by name, prompts from their tasks, and episodes in processes of agents."""

import asyncio
import importlib.metadata
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from copy import deepcopy
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from typing import Any

from pydantic import ValidationError

from nemo_rl_moe.config.environments.verifiers_v1 import VerifiersV1Config
from nemo_rl_moe.config.files import merge
from nemo_rl_moe.config.schema_grpo import PromptSourceConfig
from nemo_rl_moe.config.suggestions import did_you_mean, nearest
from nemo_rl_moe.config.user_code import described, error_in_user_code
from nemo_rl_moe.data.messages import parse_turns, text_of
from nemo_rl_moe.data.prompt_records import ROW, PromptRecord
from nemo_rl_moe.data.record_values import RecordError
from nemo_rl_moe.data.records import BadLine
from nemo_rl_moe.data.sources import LineSource
from nemo_rl_moe.data.verifiers_prompts import TRAINING_SPLIT
from nemo_rl_moe.errors import ConfigurationError, one_line
from nemo_rl_moe.rewards.verifiers_library import module_of, search_working_folder, unknown
from nemo_rl_moe.rollouts.agents.task import AgentResult, AgentTask
from nemo_rl_moe.rollouts.agents.worker import API_KEY
from nemo_rl_moe.rollouts.libraries.verifiers_environment import METRIC_PREFIX

_KEY = "env.driver"
_INSTALL = "pip install 'nemo-rl-moe[verifiers-v1]'"
_OF_THE_LIBRARY, _OWN_HARNESS = "bash", "null"
"""Default harness of the library, and of this project. The latter runs no code."""
_TASKSETS = "verifiers.v1.tasksets"
"""Module of the library's tasksets."""
_PROGRAM_FILE = ".chat_program.py"


def load_environment(driver: VerifiersV1Config) -> Any:
    """Return the library's environment: the taskset, and the agent that plays it."""
    config = _environment_config(driver)
    from verifiers.v1 import load_environment as load
    from verifiers.v1 import load_harness
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.compile import validate_pairing

    [agent] = agent_config_fields(config).values()
    [harness] = config.agent_harnesses().values()
    try:
        environment = load(config)
        task = type(environment.taskset).task_type()
        tools = [*task.toolsets(config.taskset.task), *environment.taskset.toolsets(config.taskset)]
    except Exception as error:  # of the taskset's code
        raise ConfigurationError(f"{_KEY}.taskset: {driver.id} cannot be made: {error_in_user_code(error)}") from error
    try:
        validate_pairing(load_harness(harness), task, agent.runtime, tools=tools)
    except ValueError as error:
        raise ConfigurationError(f"{_KEY}.agent: {error}") from error
    return environment


def check_taskset(driver: VerifiersV1Config) -> None:
    """Check that a taskset can be played, and check the settings of the validation taskset."""
    if isinstance(driver.validation, Mapping):
        _environment_config(driver, "taskset", "validation")
    load_environment(driver)


def taskset_prompts(driver: VerifiersV1Config, source: PromptSourceConfig) -> LineSource[PromptRecord]:
    """Return the prompts of a taskset's tasks."""
    trains = source.split == TRAINING_SPLIT
    name = f"{driver.id}[{'train' if trains else 'eval'}]"
    config = _environment_config(driver, "taskset" if trains or isinstance(driver.validation, int) else "validation")
    from verifiers.v1 import load_taskset

    try:
        tasks = _chosen(load_taskset(config.taskset), driver, source, trains=trains)
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(f"{_KEY}.id: {driver.id} gives no tasks: {error_in_user_code(error)}") from error

    def parsed() -> Iterator[PromptRecord | BadLine]:
        for task in tasks:
            sample_id = f"{name}:{task.data.idx}"
            try:
                yield _record(task.data, sample_id)
            except RecordError as error:
                yield BadLine(sample_id, str(error))

    return LineSource(name, len(tasks), parsed())


def _chosen(taskset: Any, driver: VerifiersV1Config, source: PromptSourceConfig, *, trains: bool) -> list[Any]:
    held_out = driver.validation if isinstance(driver.validation, int) else 0
    if not taskset.bounded:
        key = f"data.{'train' if trains else 'validation'}.num_items"
        if source.num_items is None:
            raise ConfigurationError(
                f"{key}: got null, expected a number of tasks, as the taskset {driver.id} is infinite"
            )
        if held_out:
            raise ConfigurationError(
                f"{_KEY}.validation: got {held_out}, but the taskset {driver.id} is infinite, so it has no last"
                " tasks to hold out"
            )
        return list(islice(taskset, source.num_items))
    tasks = list(taskset)
    if held_out >= len(tasks):
        raise ConfigurationError(
            f"{_KEY}.validation: got {held_out}, expected less than {len(tasks)}, the number of tasks of {driver.id}"
        )
    if held_out:
        tasks = tasks[:-held_out] if trains else tasks[-held_out:]
    if source.num_items is not None:
        tasks = random.Random(source.seed).sample(tasks, min(source.num_items, len(tasks)))
    return tasks


def _record(data: Any, sample_id: str) -> PromptRecord:
    if data.prompt is None:
        raise RecordError(
            "prompt is null, so the environment's simulated user would begin the conversation; expected a prompt"
        )
    item = data.model_dump(mode="json")
    given = [{"role": "user", "content": data.prompt}] if isinstance(data.prompt, str) else item["prompt"]
    system = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
    sent = [{key: value for key, value in each.items() if value is not None} for each in (*system, *given)]
    messages = tuple(parse_turns(sent, "prompt", "user"))
    row = {"example_id": item.pop("idx"), **item}
    return PromptRecord(
        sample_id,
        messages,
        is_text=False,
        record={"question": text_of(messages), "answer": item.get("answer"), ROW: row},
    )


@dataclass(frozen=True)
class TasksetProgram:
    """Episodes of a taskset in processes of agents.

    Attributes:
        score_truncated: Whether episodes whose last response was truncated keep their rewards. If not, the rewards are
            0.
    """

    driver: VerifiersV1Config
    score_truncated: bool
    agents_per_worker = 1

    @property
    def memory_mb(self) -> int:
        return self.driver.limits.memory_mb

    def load(self) -> Callable[[AgentTask], object]:  # pragma: no cover  (runs in other processes)
        """Return the function that plays a task. All tasks share the taskset's tool servers."""
        return _Player(load_environment(self.driver), score_truncated=self.score_truncated).play


class _Player:  # pragma: no cover
    """One environment with its servers, in an event loop that runs during episodes."""

    def __init__(self, environment: Any, *, score_truncated: bool):
        _run_chat_programs_here()
        self._score_truncated = score_truncated
        self._environment, self._servers, self._runner = environment, AsyncExitStack(), asyncio.Runner()
        self._runner.run(self._servers.enter_async_context(environment.serving()))

    def play(self, task: AgentTask) -> AgentResult:
        """Play one episode, and return its reward and metrics.

        Raises:
            RuntimeError: The episode has failed.
        """
        from verifiers.v1 import EvalClientConfig, ModelContext

        item = dict(task.record[ROW])
        kind = type(self._environment.taskset).task_type()
        data = kind.data_type().model_validate({"idx": item.pop("example_id"), **item})
        episode = self._runner.run(
            self._environment.run_episode(
                kind(data, self._environment.config.taskset.task),
                ModelContext(task.model, EvalClientConfig(base_url=task.base_url, api_key_var=API_KEY)),
            )
        )
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            message = "; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode has failed"
            raise RuntimeError(" ".join(message.split()))
        reward, metrics = 0.0, dict[str, float]()
        for trace in episode.traces:
            named = {name: each.score for name, each in trace.rewards.items() if each is not None} | trace.metrics
            metrics |= {f"{METRIC_PREFIX}{name}": float(value) for name, value in named.items() if value is not None}
            last = trace.calls[-1] if trace.calls else None
            # A response was truncated, or the next request was too long.
            is_cut = last is not None and (last.finish_reason == "length" or last.error is not None)
            reward += trace.reward if self._score_truncated or not is_cut else 0.0
        return AgentResult(reward, metrics=metrics)


def _run_chat_programs_here() -> None:  # pragma: no cover
    """Run the chat program of the harnesses `null` and `bash` with this Python, which has the program's packages.

    The library would make a Python environment for this program with uv, which needs a package index.
    """
    from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE
    from verifiers.v1.runtimes import SubprocessRuntime

    by_uv = SubprocessRuntime.prepare_uv_script

    async def prepared(runtime: Any, script: str | bytes, *arguments: Any, **options: Any) -> list[str]:
        if script != CHAT_PROGRAM_SOURCE:
            return list(await by_uv(runtime, script, *arguments, **options))
        await runtime.write(_PROGRAM_FILE, CHAT_PROGRAM_SOURCE.encode())
        return [sys.executable, "-P", _PROGRAM_FILE]  # modules of the working folder hide no package

    SubprocessRuntime.prepare_uv_script = prepared


def _environment_config(driver: VerifiersV1Config, *sections: str) -> Any:
    """Check sections of taskset settings (default: `taskset`), and return the environment's configuration.

    The configuration has the settings of the last of the `sections`.
    """
    _require_library()
    _require_taskset(driver.id)
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.utils.loaders import default_harness_id, env_config_type, taskset_config_type

    kind = env_config_type(driver.id)
    roles = {name: field.default for name, field in kind.model_fields.items() if isinstance(field.default, AgentConfig)}
    if len(roles) != 1:
        raise ConfigurationError(
            f"{_KEY}.id: got {driver.id!r}, whose environment has the agents {', '.join(roles)}, expected one agent"
        )
    [(role, default)] = roles.items()
    agent = {**driver.agent, "max_turns": driver.max_turns}
    named = agent.get("harness") or default.harness
    if named is None and default_harness_id(driver.id) == _OF_THE_LIBRARY:
        agent["harness"] = {"id": _OWN_HARNESS}
    problems, taskset = list[str](), dict[str, Any]()
    for section in sections or ("taskset",):
        differing = driver.validation if section == "validation" and isinstance(driver.validation, Mapping) else {}
        taskset = {**merge(driver.taskset, differing), "id": driver.id}
        own = differing if section == "validation" else taskset
        problems += _problems(section, taskset_config_type(driver.id), taskset, own)
    if problems := [*problems, *_problems("agent", AgentConfig, agent, agent)]:
        raise ConfigurationError(problems)
    return kind.model_validate(deepcopy({"taskset": taskset, role: agent}))


def _problems(section: str, kind: Any, settings: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each setting that the library refuses.

    Settings that the section takes over from another section are omitted: only those in `own` are reported.
    """
    try:
        kind.model_validate(deepcopy(settings))
    except ValidationError as error:
        for each in error.errors(include_url=False):
            first, *below = map(str, each["loc"] or (section,))
            is_unknown = each["type"] == "extra_forbidden" and not below
            hint = did_you_mean(nearest(first, kind.model_fields)) if is_unknown else ""
            if first in own:
                place = ".".join([_KEY, section, first, *below])
                yield f"{place}: got {described(each['input'])}: {each['msg']}{hint}"
    except Exception as error:  # such as an unknown harness
        yield f"{_KEY}.{section}: {one_line(error)}"


def _require_taskset(name: str) -> None:
    """Import a taskset by its name."""
    from verifiers.v1.utils.loaders import taskset_class

    search_working_folder()
    older = "; for environments of verifiers below 0.4 set env.driver.kind: verifiers"
    module = module_of(name).partition("@")[0].lower()
    try:
        of_library = f"{_TASKSETS}.{module}"
        found = import_module(of_library if find_spec(of_library) else module)
    except Exception as error:  # also of the taskset's code
        if isinstance(error, ModuleNotFoundError) and error.name == module:
            raise ConfigurationError(unknown(name, "Taskset")) from error
        hint = older if isinstance(error, AttributeError | ImportError) and "'verifiers'" in str(error) else ""
        raise ConfigurationError(f"{_KEY}.id: {name} cannot be imported: {error_in_user_code(error)}{hint}") from error
    try:
        taskset_class(name)
    except (AttributeError, TypeError, ValueError) as error:
        hint = older if hasattr(found, "load_environment") else ""
        raise ConfigurationError(f"{_KEY}.id: got {name!r}: {error}{hint}") from error


def _require_library() -> None:
    try:
        release = importlib.metadata.version("verifiers")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigurationError(f"{_KEY}.kind: verifiers is not installed; {_INSTALL}") from None
    numbers = [int(part) for part in release.split(".")[:2] if part.isdecimal()]
    if numbers != [0, 4]:
        raise ConfigurationError(
            f"{_KEY}.kind: verifiers {release} is installed, expected a release from 0.4 up to below 0.5; {_INSTALL};"
            " for older releases set env.driver.kind: verifiers"
        )
