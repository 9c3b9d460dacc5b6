# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The sections `data`, `checkpointing`, `logger` and `cluster`."""

import re
from typing import Annotated, Any, Literal

from pydantic import Field

from nemo_rl_moe.config.schema_base import (
    CustomCode,
    DurationText,
    ExpectedWords,
    NonNegativeInt,
    PathText,
    PositiveFloat,
    PositiveInt,
    Processes,
    Seconds,
    Share,
    StrictModel,
    Text,
    WholeOrLess,
)


class CheckpointingConfig(StrictModel):
    """Checkpoints to resume from, and the final weights."""

    enabled: bool
    """Save checkpoints, and the final weights as a Hugging Face folder."""
    checkpoint_dir: PathText | None
    """Folder of the checkpoints. null: `checkpoints` in the run's folder."""
    resume: Literal["auto", "never"]
    """auto: continue from the newest checkpoint of `checkpoint_dir` or, if that is null, of the newest run in
    `logger.log_dir` that has one. never: start anew, and remove the older checkpoints once there is a new one."""
    metric_name: Text | None
    """Metric that selects the best checkpoints: `val:NAME` or `train:NAME` for the metric `val/NAME` or `train/NAME` of
    the checkpoint's step. auto: `val:accuracy`, or `val:reward` if rewards may be graded, as with your functions and
    partial credit. null, or `val:NAME` without `data.validation`: keep the newest checkpoints."""
    higher_is_better: bool
    """true: higher values of `metric_name` are better. false: lower ones."""
    keep_top_k: PositiveInt | None
    """Number of the best checkpoints to keep, besides the newest. null: all."""
    save_period: NonNegativeInt
    """Save after every this many steps. 0: only at the end and when the run is stopped."""
    checkpoint_must_save_by: DurationText | None
    """Time from the start of the run, DD:HH:MM:SS, after which it saves and ends with exit code 0. null: no limit."""
    save_optimizer: bool
    """Also save the optimizer's state. Without it, a resumed run starts with a new optimizer."""


class DataSourceConfig(StrictModel):
    """Source of one set of samples."""

    path: PathText
    """A `.jsonl` file, or a name or folder that `datasets.load_dataset` takes."""
    split: Text
    """Split of a dataset. A `.jsonl` file ignores it."""


MOST_IMAGE_PIXELS = 178_000_000
"""Largest image, in pixels, that Pillow opens."""


class DataConfig(StrictModel):
    """Reading and rendering of records, of any kind."""

    on_bad_line: Literal["stop", "skip"]
    """Treatment of a line that cannot be used. stop: end the run. skip: skip and count it."""
    load_timeout_s: Seconds
    """The run ends if reading or sampling one set of records takes longer than this, in seconds."""
    chat_template_kwargs: dict[str, Any]
    """Variables for the chat template, such as `enable_thinking: false`. A record's `chat_template_kwargs` override
    them by name. A variable that the template does not read is an error. {}: none."""
    tools: list[dict[str, Any]]
    """Definitions of tools in the standard form, for records without `tools`. The template must show them. []: none."""
    image_key: Text | None
    """Key of a record that holds its images, one or a list, if they are not part of its messages. null: such images are
    not read. Images in the messages are always read."""
    image_root: PathText | None
    """Folder that paths of images are relative to and must stay in. null: the folder of the data file."""
    max_image_pixels: Annotated[int, Field(ge=1, le=MOST_IMAGE_PIXELS)]
    """Most pixels of an image by its file's header. A line with a larger image is not decoded and cannot be used."""


class ResponseDataConfig(DataConfig):
    """Samples with responses, to train on and to validate with."""

    train: DataSourceConfig
    """The samples to train on."""
    validation: DataSourceConfig | None
    """The held-out samples. null: no validation, regardless of `val_*` and a `val:` metric."""
    shuffle: bool
    """Shuffle the training samples anew for each epoch, with the loop's seed."""


class SampleDataConfig(ResponseDataConfig):
    """The conversations to train on, and their keys."""

    messages_key: Text | None
    """Key of a record that holds its messages. Dots reach into objects and lists (`answers.text.0`). null: `messages`
    or `conversations`."""
    prompt_key: Text | None
    """Key of a record that holds the prompt, a text or messages. null: `prompt`, or the usual key (docs/data.md)."""
    completion_key: Text | None
    """Key of a record that holds the response to train on. null: `completion`, or the usual key (docs/data.md)."""
    system_key: Text | None
    """Key of a record that holds the text of its system turn. null: `system` or `system_prompt`."""

    @property
    def keys(self) -> dict[str, str]:
        """Keys that the configuration names, by their names in this package's format."""
        return _named(
            messages=self.messages_key, prompt=self.prompt_key, completion=self.completion_key, system=self.system_key
        )


class PairDataConfig(ResponseDataConfig):
    """The pairs to train on, and their keys."""

    prompt_key: Text | None
    """Key of a record that holds the prompt, a text or messages. Dots reach into objects. null: `prompt`, or the usual
    key, or the messages that both responses begin with (docs/data.md)."""
    chosen_key: Text | None
    """Key of a record that holds the better response. null: `chosen`, or the usual key (docs/data.md)."""
    rejected_key: Text | None
    """Key of a record that holds the worse response. null: `rejected`, or the usual key (docs/data.md)."""
    system_key: Text | None
    """Key of a record that holds the text of its system turn. null: `system` or `system_prompt`."""

    @property
    def keys(self) -> dict[str, str]:
        return _named(
            prompt=self.prompt_key, chosen=self.chosen_key, rejected=self.rejected_key, system=self.system_key
        )


def _named(**keys: str | None) -> dict[str, str]:
    return {own: key for own, key in keys.items() if key is not None}


class ConsoleConfig(StrictModel):
    """Display of a run in the terminal."""

    live: Literal["auto", "always", "never"]
    """Show progress in one line that is updated in place. auto: only in a terminal, otherwise one line for each
    step."""


class WandbConfig(StrictModel):
    """Names of the run in Weights & Biases."""

    project: Text
    """The project."""
    name: Text
    """The run's name."""


class MlflowConfig(StrictModel):
    """Names of the run in MLflow, and its store."""

    experiment_name: Text
    """The experiment."""
    run_name: Text
    """The run's name."""
    tracking_uri: Text | None
    """The store. null: `mlflow.db` next to the log folder."""


class ExpertLoadPlotsConfig(StrictModel):
    """Plots for TensorBoard, Weights & Biases and MLflow: the load of the experts and, in GRPO, how far training agrees
    with the routes of the rollouts."""

    every_steps: NonNegativeInt | None
    """Plot after the first step and after every this many steps. Load needs `policy.megatron_cfg.track_moe_metrics`,
    agreement needs `policy.megatron_cfg.capture_routing`. null or 0: never."""


class AlertsConfig(StrictModel):
    """Limits of healthy routing and steps. Each episode beyond a limit is reported once. null switches a limit off.
    Invalid routes of rollouts are reported without a limit."""

    enabled: bool
    """Warn on the console, and by an alert of Weights & Biases if that is enabled."""
    dead_expert_steps: PositiveInt | None
    """Steps in a row in which an expert gets no token, beyond what chance explains."""
    excess_cv: PositiveFloat | None
    """Imbalance of a layer beyond sampling noise, `sqrt(cv^2 - cv_null^2)`."""
    overload_factor: PositiveFloat | None
    """Work of the busiest expert-parallel rank over the mean of all ranks, `avg_overload_factor`."""
    sustained_steps: PositiveInt
    """Steps in a row above `excess_cv` or `overload_factor` before an alert."""
    idle_steps: PositiveInt | None
    """Steps of GRPO in a row without any advantage, or with every response truncated at the length limit. Also the
    number of first steps of a run in which a reward, in total or by name, had the same value in every response."""
    failed_responses_share: WholeOrLess | None
    """Share of the responses of a step, or of a validation, whose scoring failed."""
    missing_routes_share: Share | None
    """Share of the routed experts of GRPO's rollouts that did not arrive, `routing/rows_missing_share`."""
    missing_routes_steps: PositiveInt
    """Steps in a row above `missing_routes_share` before an alert."""
    sudden_steps: PositiveInt | None
    """Steps in a row of a sudden change of routing, or of invalid routing. docs/alerts.md lists the conditions."""
    unbounded_lag: PositiveInt | None
    """Lag of a token, in optimizer steps, if GRPO's loss does not bound its importance weight."""


class LoggerConfig(StrictModel):
    """Destinations of metrics. A JSONL file in the run's folder is always written."""

    log_dir: PathText
    """Folder in which each run gets a numbered folder."""
    console: ConsoleConfig
    """The terminal."""
    tensorboard_enabled: bool
    """Write TensorBoard files."""
    wandb_enabled: bool
    """Write a Weights & Biases run, offline unless the user is logged in."""
    mlflow_enabled: bool
    """Write an MLflow run."""
    backends: Annotated[list[CustomCode], ExpectedWords("a list of package.module:name")]
    """Your loggers, each a class or function `package.module:name` that is called with the run's folder. []: none."""
    expert_load_plots: ExpertLoadPlotsConfig
    """Plots of the expert load."""
    alerts: AlertsConfig
    """Warnings about unhealthy routing and idle steps."""
    wandb: WandbConfig
    """Read if `wandb_enabled` is true."""
    mlflow: MlflowConfig
    """Read if `mlflow_enabled` is true."""


POLICY_ROLE = "policy"
"""The model that is trained."""
CRITIC_ROLE = "critic"
"""The model of PPO that learns the returns, in `cluster.roles`."""
REWARD_MODEL_ROLE = "reward_model"
"""The model that scores trajectories, in `cluster.roles`. Its score has the same name among named rewards."""
GENERATION_ROLE = "generation"
"""Generation engines on machines that the policy does not use, in `cluster.roles`."""


MOST_MACHINES = 100_000
MOST_GPUS = 1024
Machines = Annotated[int, Field(gt=0, le=MOST_MACHINES)]
Gpus = Annotated[int, Field(ge=0, le=MOST_GPUS)]


class RolePlacementConfig(StrictModel):
    """Workers of one role other than the policy. Missing keys have the policy's values."""

    num_nodes: Machines | None = None
    """Number of machines."""
    gpus_per_node: Gpus | None = None
    """GPUs on each machine. 0: run on CPUs."""
    cpu_workers_per_node: Processes | None = None
    """Worker processes on each machine if `gpus_per_node` is 0."""


class ClusterConfig(StrictModel):
    """The machines. There is one worker process for each GPU, or the given number of CPU workers."""

    num_nodes: Machines
    """Number of machines."""
    gpus_per_node: Gpus
    """GPUs on each machine. 0: train on CPUs."""
    cpu_workers_per_node: Processes
    """Worker processes on each machine if `gpus_per_node` is 0."""
    worker_start_timeout_s: Seconds
    """The run ends if the workers take longer than this to start, in seconds."""
    worker_call_timeout_s: Seconds
    """The run ends if a worker takes longer than this to answer, in seconds, for a full step or round of generation.
    The error names the worker, which may be frozen or wait for a dead device."""
    max_restarts: NonNegativeInt
    """Number of times that a run restarts itself from its last checkpoint after a failure."""
    network_interface: Text | None
    """Interface of each machine, such as `eth1`, between workers of several machines. null: gloo and NCCL choose."""
    roles: dict[str, RolePlacementConfig]
    """Workers of other roles by name, such as a teacher, or `generation` for engines on separate machines. Each has
    `num_nodes`, `gpus_per_node` and `cpu_workers_per_node`, by default the policy's. {}: none."""

    @property
    def workers_per_node(self) -> int:
        return self.gpus_per_node or self.cpu_workers_per_node

    @property
    def world_size(self) -> int:
        """Number of worker processes."""
        return self.num_nodes * self.workers_per_node

    @property
    def all_workers_per_node(self) -> int:
        """Worker processes on each machine, of all roles together if they share the machines."""
        return self.workers_per_node + sum(self.place_of(role).workers_per_node for role in self.roles)

    @property
    def num_gpus(self) -> int:
        """GPUs of all roles together. 0 on CPUs."""
        return self.num_nodes * self.gpus_per_node + sum(self.place_of(role).num_gpus for role in self.roles)

    def place_of(self, role: str) -> "ClusterConfig":
        """Return the section with the values of one role."""
        chosen = self.roles[role]
        sizes = {name: value for name in type(chosen).model_fields if (value := getattr(chosen, name)) is not None}
        return self.model_copy(update={**sizes, "roles": {}})


DURATION_FORM = "DD:HH:MM:SS"
_PATTERN = re.compile(r"(\d{1,3}):(\d{1,2}):(\d{1,2}):(\d{1,2})")
_SECONDS = (86400, 3600, 60, 1)
_LIMITS = (1000, 24, 60, 60)


def parse_duration(text: str) -> int | None:
    """Return the seconds of a text such as `00:03:30:00` (DD:HH:MM:SS), or None for another form."""
    match = _PATTERN.fullmatch(text)
    if match is None:
        return None
    parts = [int(part) for part in match.groups()]
    if any(part >= limit for part, limit in zip(parts, _LIMITS, strict=True)):
        return None
    return sum(part * seconds for part, seconds in zip(parts, _SECONDS, strict=True))


def format_duration(seconds: int) -> str:
    """Return the text that `parse_duration` reads as this number of seconds, below 1000 days."""
    parts = []
    for unit in _SECONDS:
        number, seconds = divmod(seconds, unit)
        parts.append(f"{number:02d}")
    return ":".join(parts)
