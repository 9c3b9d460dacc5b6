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
    """Metric that selects the best checkpoints. `val:NAME` or `train:NAME` is the metric `val/NAME` or `train/NAME` of
    the checkpoint's step. auto: `val:accuracy`, or `val:reward` if a reward may be other than right or wrong, as with
    your functions and partial credit. null, or `val:NAME` without `data.validation`: keep the newest checkpoints."""
    higher_is_better: bool
    """true: higher values of `metric_name` are better. false: lower values are better."""
    keep_top_k: PositiveInt | None
    """Number of best checkpoints to keep, in addition to the newest one. null: keep all."""
    save_period: NonNegativeInt
    """Save after every this many steps. 0: only at the end and when the run is stopped."""
    checkpoint_must_save_by: DurationText | None
    """Time limit "DD:HH:MM:SS" from the start of the run. The run then saves a checkpoint and ends with exit code 0.
    null: no limit."""
    save_optimizer: bool
    """Also save the optimizer's state. Without it, a resumed run starts with a new optimizer."""


class DataSourceConfig(StrictModel):
    """Source of one set of samples."""

    path: PathText
    """A `.jsonl` file, or a name or folder that `datasets.load_dataset` takes."""
    split: Text
    """Split of the dataset. Ignored for a `.jsonl` file."""


MOST_IMAGE_PIXELS = 178_000_000
"""Number of pixels of the largest image that Pillow opens."""


class DataConfig(StrictModel):
    """How records of any kind are read and rendered."""

    on_bad_line: Literal["stop", "skip"]
    """Treatment of a line that cannot be used. stop: end the run. skip: skip and count it."""
    load_timeout_s: Seconds
    """The run ends if reading or sampling one set of records takes longer than this, in seconds."""
    chat_template_kwargs: dict[str, Any]
    """Variables for the chat template, such as `enable_thinking: false`. A record's `chat_template_kwargs` override
    them by name. A variable that the template does not read is an error. {}: none."""
    tools: list[dict[str, Any]]
    """Definitions of tools in the standard form, for records without `tools`. The chat template must render them. []:
    none."""
    image_key: Text | None
    """Key of a record that holds an image or a list of images that are not part of its messages. null: no such images
    are read. Images in the messages are always read."""
    image_root: PathText | None
    """Folder of the images. Paths of images are relative to this folder and must not leave it. null: the folder of the
    data file."""
    max_image_pixels: Annotated[int, Field(ge=1, le=MOST_IMAGE_PIXELS)]
    """Maximum number of pixels of an image, by the header of its file. A larger image is not decoded, and its line
    cannot be used (see `on_bad_line`)."""


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
    """Key of a record that holds the prompt, which is a text or messages. null: `prompt`, or the usual key
    (docs/data.md)."""
    completion_key: Text | None
    """Key of a record that holds the response to train on. null: `completion`, or the usual key (docs/data.md)."""
    system_key: Text | None
    """Key of a record that holds the text of its system turn. null: `system` or `system_prompt`."""

    @property
    def keys(self) -> dict[str, str]:
        """This package's key for a part of a sample, such as `prompt` -> the records' key, if the user has set it."""
        return _named(
            messages=self.messages_key, prompt=self.prompt_key, completion=self.completion_key, system=self.system_key
        )


class PairDataConfig(ResponseDataConfig):
    """The pairs to train on, and their keys."""

    prompt_key: Text | None
    """Key of a record that holds the prompt, which is a text or messages. Dots reach into objects. null: `prompt`, or
    the usual key, or the messages with which both responses begin (docs/data.md)."""
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


class ScoredPairDataConfig(PairDataConfig):
    """The pairs from which a reward model learns, and their keys."""

    margin_key: Text | None
    """Key of a record that holds its margin: the number by which the chosen response's score should at least exceed the
    rejected one's. null: `margin`, which all records or no records have."""


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
    """Plots for TensorBoard, Weights & Biases and MLflow: the load of the experts and, in GRPO, the agreement of
    training's routes with the routes of the rollouts."""

    every_steps: NonNegativeInt | None
    """Plot after the first step and after every this many steps. Plots of load need
    `policy.megatron_cfg.track_moe_metrics`, plots of agreement need `policy.megatron_cfg.capture_routing`. null or 0:
    never."""


class AlertsConfig(StrictModel):
    """Limits of healthy routing and steps. A condition beyond its limit is reported once while it lasts. null switches
    a limit off. Invalid routes of rollouts are always reported."""

    enabled: bool
    """Warn on the console, and by an alert of Weights & Biases if `wandb_enabled` is true."""
    dead_expert_steps: PositiveInt | None
    """Number of steps in a row in which an expert gets no token, if chance does not explain this."""
    excess_cv: PositiveFloat | None
    """Imbalance of a layer's loads beyond the imbalance by chance, `sqrt(cv^2 - cv_null^2)`."""
    overload_factor: PositiveFloat | None
    """Work of the busiest expert-parallel rank over the mean of all ranks (the metric `avg_overload_factor`)."""
    sustained_steps: PositiveInt
    """Number of steps in a row above `excess_cv` or `overload_factor` before an alert."""
    idle_steps: PositiveInt | None
    """Number of steps of GRPO in a row without any advantage, or with every response truncated at the length limit.
    Also the number of steps from the start of a run in which a reward (the total or a named one) has the same value in
    every response."""
    failed_responses_share: WholeOrLess | None
    """Share of the responses of a step or of a validation whose scoring failed."""
    missing_routes_share: Share | None
    """Share of the routed experts of GRPO's rollouts that did not arrive (the metric `routing/rows_missing_share`)."""
    missing_routes_steps: PositiveInt
    """Number of steps in a row above `missing_routes_share` before an alert."""
    sudden_steps: PositiveInt | None
    """Number of steps in a row with a sudden change of routing, or with invalid routing. docs/alerts.md lists the
    conditions."""
    unbounded_lag: PositiveInt | None
    """Lag of a token, in optimizer steps. Counts only tokens whose importance weight GRPO's loss does not bound."""


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
    """Your loggers. Each is a class or function `package.module:name`, which is called with the run's folder. []:
    none."""
    expert_load_plots: ExpertLoadPlotsConfig
    """Plots of the expert load."""
    alerts: AlertsConfig
    """Warnings about unhealthy routing and idle steps."""
    wandb: WandbConfig
    """Names in Weights & Biases, used if `wandb_enabled` is true."""
    mlflow: MlflowConfig
    """Names and store in MLflow, used if `mlflow_enabled` is true."""


POLICY_ROLE = "policy"
"""Role of the model that is trained."""
CRITIC_ROLE = "critic"
"""Role of PPO's critic, the model that learns the returns, in `cluster.roles`."""
REWARD_MODEL_ROLE = "reward_model"
"""Role of the model that scores trajectories, in `cluster.roles`. Also the name of its score among named rewards."""
GENERATION_ROLE = "generation"
"""Role of generation engines on machines that the policy does not use, in `cluster.roles`."""


MOST_MACHINES = 100_000
MOST_GPUS = 1024
Machines = Annotated[int, Field(gt=0, le=MOST_MACHINES)]
Gpus = Annotated[int, Field(ge=0, le=MOST_GPUS)]


class RolePlacementConfig(StrictModel):
    """Workers of one role other than the policy. A missing key has the policy's value."""

    num_nodes: Machines | None = None
    """Number of machines."""
    gpus_per_node: Gpus | None = None
    """Number of GPUs on each machine. 0: run on CPUs."""
    cpu_workers_per_node: Processes | None = None
    """Number of worker processes on each machine if `gpus_per_node` is 0."""


class ClusterConfig(StrictModel):
    """The machines. Each has one worker process per GPU, or `cpu_workers_per_node` worker processes."""

    num_nodes: Machines
    """Number of machines."""
    gpus_per_node: Gpus
    """Number of GPUs on each machine. 0: train on CPUs."""
    cpu_workers_per_node: Processes
    """Number of worker processes on each machine if `gpus_per_node` is 0."""
    worker_start_timeout_s: Seconds
    """The run ends if the workers take longer than this to start, in seconds."""
    worker_call_timeout_s: Seconds
    """The run ends if a worker takes longer than this to answer a call, in seconds. A call may take a full step or
    round of generation. The error names the worker, which may be frozen or wait for a dead device."""
    max_restarts: NonNegativeInt
    """Number of times that a run restarts itself from its last checkpoint after a failure."""
    network_interface: Text | None
    """Network interface over which workers of several machines communicate, such as `eth1`. null: gloo and NCCL
    choose."""
    roles: dict[str, RolePlacementConfig]
    """Role -> its workers, for roles other than the policy: a teacher, for example, or `generation` for engines on
    separate machines. Each has `num_nodes`, `gpus_per_node` and `cpu_workers_per_node`. A missing key has the policy's
    value. {}: no other roles."""

    @property
    def workers_per_node(self) -> int:
        return self.gpus_per_node or self.cpu_workers_per_node

    @property
    def world_size(self) -> int:
        """Number of worker processes."""
        return self.num_nodes * self.workers_per_node

    @property
    def all_workers_per_node(self) -> int:
        """Number of worker processes on each machine, of all roles together if they share the machines."""
        return self.workers_per_node + sum(self.place_of(role).workers_per_node for role in self.roles)

    @property
    def num_gpus(self) -> int:
        """Number of GPUs of all roles together. 0 on CPUs."""
        return self.num_nodes * self.gpus_per_node + sum(self.place_of(role).num_gpus for role in self.roles)

    def place_of(self, role: str) -> "ClusterConfig":
        """Return this section with the number of machines and workers of one role."""
        chosen = self.roles[role]
        sizes = {name: value for name in type(chosen).model_fields if (value := getattr(chosen, name)) is not None}
        return self.model_copy(update={**sizes, "roles": {}})


DURATION_FORM = "DD:HH:MM:SS"
_PATTERN = re.compile(r"(\d{1,3}):(\d{1,2}):(\d{1,2}):(\d{1,2})")
_SECONDS = (86400, 3600, 60, 1)
_LIMITS = (1000, 24, 60, 60)


def parse_duration(text: str) -> int | None:
    """Return the number of seconds of a text such as `00:03:30:00` (DD:HH:MM:SS), or None for another form."""
    match = _PATTERN.fullmatch(text)
    if match is None:
        return None
    parts = [int(part) for part in match.groups()]
    if any(part >= limit for part, limit in zip(parts, _LIMITS, strict=True)):
        return None
    return sum(part * seconds for part, seconds in zip(parts, _SECONDS, strict=True))


def format_duration(seconds: int) -> str:
    """Return the text that `parse_duration` reads as this number of seconds. Durations must be below 1000 days."""
    parts = []
    for unit in _SECONDS:
        number, seconds = divmod(seconds, unit)
        parts.append(f"{number:02d}")
    return ":".join(parts)
