# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A model and its workers for as long as a command runs: what training, evaluation and generation have in common."""

from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Self, TypeVar

from nemo_rl_moe.config.schema import MasterConfig
from nemo_rl_moe.distributed.cluster import RayCluster
from nemo_rl_moe.launch.setup import PreparedModel, prepare_model, running_cluster, running_policy
from nemo_rl_moe.loggers.console import ConsoleLogger
from nemo_rl_moe.models.policy.lm_policy import MegatronPolicy

Opened = TypeVar("Opened")


class ModelRun:
    """A command that runs a model and does not train it: `prepare_model`, then `start_policy`.

    What these and `use` open is closed in reverse order when the run, a context manager, is left.

    Args:
        config: A checked configuration.
        console: Messages to the user.

    Attributes:
        config: As given.
        console: As given.
    """

    def __init__(self, config: MasterConfig, console: ConsoleLogger):
        self.config = config
        self.console = console
        self._opened = ExitStack()
        self._model: PreparedModel | None = None
        self._cluster: RayCluster | None = None
        self._policy: MegatronPolicy | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._opened.__exit__(kind, error, traceback)

    def use(self, context: AbstractContextManager[Opened]) -> Opened:
        """Opens something for the rest of the run."""
        return self._opened.enter_context(context)

    def prepare_model(self) -> PreparedModel:
        """Fetches and checks the model, and loads the tokenizer.

        Raises:
            ConfigurationError: One of them cannot be had or used.
        """
        self._model = prepare_model(self.config.policy, self.console)
        return self._model

    def stop_reason(self) -> str | None:
        """Return the request to stop that waits for a good moment; None where there is none, or it would not wait."""
        return None

    @property
    def cluster(self) -> RayCluster:
        """Ray, which `start_policy` starts."""
        assert self._cluster is not None
        return self._cluster

    def start_policy(self) -> MegatronPolicy:
        """Starts Ray and the workers, for forward passes alone.

        Raises:
            ConfigurationError: The machines are not there, or the model's weights cannot be used.
        """
        return self._start_workers(seed=0, num_steps=None, keep_reference=False)

    def start_places(self, role: str) -> RayCluster:
        """Reserves the places of a role that has no model workers, until the run ends.

        Raises:
            ConfigurationError: There is no room for them.
        """
        place = RayCluster(self.config.cluster.place_of(role), beside=self.cluster)
        self._opened.callback(place.shutdown)
        return place

    @property
    def _started(self) -> MegatronPolicy:
        assert self._policy is not None  # start_policy comes first
        return self._policy

    def _start_workers(self, *, seed: int, num_steps: int | None, keep_reference: bool) -> MegatronPolicy:
        assert self._model is not None  # prepare_model comes first
        self._cluster = self.use(running_cluster(self.config, self.console))
        self._policy = self.use(
            running_policy(
                self.config,
                self.cluster,
                self.console,
                self._model,
                seed=seed,
                num_steps=num_steps,
                keep_reference=keep_reference,
            )
        )
        return self._policy
