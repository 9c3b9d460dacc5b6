# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The sections that say where a run reads, writes and works: data, checkpointing, logger, cluster."""

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
    """Folder to write to; null: `checkpoints` inside the run's folder."""
    resume: Literal["auto", "never"]
    """auto: go on from the newest checkpoint of `checkpoint_dir`, or if that is null of the newest run in
    `logger.log_dir` that has one; never: start anew, and remove the older checkpoints once there is a new one."""
    metric_name: Text | None
    """Metric that chooses the best checkpoints: `val:NAME` or `train:NAME` for the metric `val/NAME` or `train/NAME` of
    the checkpoint's step; auto: `val:accuracy`, and `val:reward` where rewards may be graded, as those of functions
    of your own and partial credit; null, or `val:NAME` without data.validation: keep the newest."""
    higher_is_better: bool
    """true: more of `metric_name` is better; false: less."""
    keep_top_k: PositiveInt | None
    """Number of the best checkpoints to keep, besides the newest; null: all checkpoints."""
    save_period: NonNegativeInt
    """Save each time this many steps are done; 0: only at the end and when the run is stopped."""
    checkpoint_must_save_by: DurationText | None
    """Time from the start of the run, DD:HH:MM:SS, after which it saves and ends with exit code 0; null: none."""
    save_optimizer: bool
    """Save the optimizer's state too; without it a resumed run starts the optimizer anew."""


class DataSourceConfig(StrictModel):
    """Source of one set of samples."""

    path: PathText
    """A `.jsonl` file, or a name or folder that `datasets.load_dataset` takes."""
    split: Text
    """The split to take of a dataset; a `.jsonl` file has none and ignores it."""


MOST_IMAGE_PIXELS = 178_000_000
"""Pixels of an image that Pillow opens."""


class DataConfig(StrictModel):
    """How records of any kind are read and rendered."""

    on_bad_line: Literal["stop", "skip"]
    """Treatment of a line that cannot be used: end the run, or leave it out and count it."""
    load_timeout_s: Seconds
    """Seconds that reading or sampling one set of records may take before the run gives up."""
    chat_template_kwargs: dict[str, Any]
    """Further names for the chat template, such as `enable_thinking: false`; a record's own `chat_template_kwargs` win
    name by name; {}: none. A name that the template does not read is an error."""
    tools: list[dict[str, Any]]
    """Definitions of tools in the standard form, for records that have no `tools` of their own; []: none. A template
    that does not show them is an error."""
    image_key: Text | None
    """Key of a record's images beside its messages: one, or a list; null: such images are not read. Parts of a content
    with images of their own are read either way."""
    image_root: PathText | None
    """Folder that paths of images start from, and do not lead out of; null: the folder of the data file."""
    max_image_pixels: Annotated[int, Field(ge=1, le=MOST_IMAGE_PIXELS)]
    """Most pixels of an image as its file says, before it is decoded; a line with a larger one cannot be used."""


class ResponseDataConfig(DataConfig):
    """The samples to train on and to validate with, which hold their responses."""

    train: DataSourceConfig
    """The samples to train on."""
    validation: DataSourceConfig | None
    """The samples that are held out; null: no validation, whatever `val_*` and a `val:` metric ask for."""
    shuffle: bool
    """Draw a new order of the training samples for each epoch, from the loop's seed."""


class SampleDataConfig(ResponseDataConfig):
    """The conversations to train on, and the names of their keys."""

    messages_key: Text | None
    """Key of a record that holds its messages; null: `messages` or `conversations`. Dots reach into objects and
    lists (`answers.text.0`)."""
    prompt_key: Text | None
    """Key of a record that holds the prompt, text or messages; null: `prompt`, or the only usual one that it has
    (docs/data.md)."""
    completion_key: Text | None
    """Key of a record that holds the response to train on; null: `completion`, or the only usual one that it has."""
    system_key: Text | None
    """Key of a record that holds the text of its system turn; null: `system` or `system_prompt`."""

    @property
    def keys(self) -> dict[str, str]:
        """Keys that are named, by the key of our own form."""
        return _named(
            messages=self.messages_key, prompt=self.prompt_key, completion=self.completion_key, system=self.system_key
        )


class PairDataConfig(ResponseDataConfig):
    """The pairs to train on, and the names of their keys."""

    prompt_key: Text | None
    """Key of a record that holds the prompt, text or messages; null: `prompt`, or the only usual one that it has, or
    the messages that both responses begin with (docs/data.md). Dots reach into objects."""
    chosen_key: Text | None
    """Key of a record that holds the better response; null: `chosen`, or the only usual one that it has."""
    rejected_key: Text | None
    """Key of a record that holds the worse response; null: `rejected`, or the only usual one that it has."""
    system_key: Text | None
    """Key of a record that holds the text of its system turn; null: `system` or `system_prompt`."""

    @property
    def keys(self) -> dict[str, str]:
        """Keys that are named, by the key of our own form."""
        return _named(
            prompt=self.prompt_key, chosen=self.chosen_key, rejected=self.rejected_key, system=self.system_key
        )


def _named(**keys: str | None) -> dict[str, str]:
    return {own: key for own, key in keys.items() if key is not None}


class ConsoleConfig(StrictModel):
    """Display of a run in the terminal."""

    live: Literal["auto", "always", "never"]
    """One line that renews itself; auto: only where the output is a terminal, otherwise a plain line for each step."""


class WandbConfig(StrictModel):
    """Names of the run in Weights & Biases."""

    project: Text
    """The project."""
    name: Text
    """The run's name."""


class MlflowConfig(StrictModel):
    """Names and place of the run in MLflow."""

    experiment_name: Text
    """The experiment."""
    run_name: Text
    """The run's name."""
    tracking_uri: Text | None
    """The store; null: `mlflow.db` beside the log folder."""


class ExpertLoadPlotsConfig(StrictModel):
    """Images of how the tokens are spread over the experts, and in GRPO of how far training agrees with the routes of
    the rollouts, for TensorBoard, Weights & Biases and MLflow."""

    every_steps: NonNegativeInt | None
    """Plot at the first step and each time this many steps are done; null or 0: never. The former need
    `policy.megatron_cfg.track_moe_metrics`, the latter `policy.megatron_cfg.capture_routing`."""


class AlertsConfig(StrictModel):
    """Limits beyond which routing or steps count as unhealthy; each episode is reported once. Of each limit, null:
    never. Invalid routes of rollouts are reported without a limit."""

    enabled: bool
    """Warn on the console, and by an alert of Weights & Biases where that is enabled."""
    dead_expert_steps: PositiveInt | None
    """Steps in a row that an expert gets no token, beyond what chance would explain."""
    excess_cv: PositiveFloat | None
    """Imbalance of a layer beyond sampling noise, `sqrt(cv^2 - cv_null^2)`."""
    overload_factor: PositiveFloat | None
    """Work of the busiest expert-parallel rank over that of the mean one, `avg_overload_factor`."""
    sustained_steps: PositiveInt
    """Steps in a row above `excess_cv` or `overload_factor` before an alert."""
    idle_steps: PositiveInt | None
    """Steps in a row of GRPO without any advantage, or with every response truncated at the length limit; and steps
    from the first one on in which a reward, the whole one or one by name, has had one value in every response."""
    failed_responses_share: WholeOrLess | None
    """Share of the responses of a step, or of a validation, above which failed scoring is reported."""
    missing_routes_share: Share | None
    """Share of the routed experts of GRPO's rollouts that did not arrive, `routing/rows_missing_share`."""
    missing_routes_steps: PositiveInt
    """Steps in a row that `missing_routes_share` must be exceeded."""
    sudden_steps: PositiveInt | None
    """Steps in a row of a sudden change of routing, or of invalid routing: docs/alerts.md names the conditions."""
    unbounded_lag: PositiveInt | None
    """Optimizer steps between weights and a token that older ones sampled, where GRPO's loss bounds its weight
    nowhere."""


class LoggerConfig(StrictModel):
    """Destinations of metrics. The JSONL file in the run's folder is always written."""

    log_dir: PathText
    """Folder that gets one numbered folder for each run."""
    console: ConsoleConfig
    """The terminal."""
    tensorboard_enabled: bool
    """Write TensorBoard files."""
    wandb_enabled: bool
    """Write a Weights & Biases run; offline unless the user is logged in."""
    mlflow_enabled: bool
    """Write an MLflow run."""
    backends: Annotated[list[CustomCode], ExpectedWords("a list of package.module:name")]
    """More loggers, each a class or function of your own, `package.module:name`, that is called with the run's folder;
    []: none."""
    expert_load_plots: ExpertLoadPlotsConfig
    """plots of the expert load."""
    alerts: AlertsConfig
    """Warnings about unhealthy routing and idle steps."""
    wandb: WandbConfig
    """Read when `wandb_enabled`."""
    mlflow: MlflowConfig
    """Read when `mlflow_enabled`."""


POLICY_ROLE = "policy"
"""Role of the model that a run is about."""
CRITIC_ROLE = "critic"
"""The model that learns the returns of PPO, in `cluster.roles`."""
REWARD_MODEL_ROLE = "reward_model"
"""The model that scores trajectories, in `cluster.roles`; also the name of its score among named rewards."""
GENERATION_ROLE = "generation"
"""Role of generation engines that do not share the policy's machines."""


MOST_MACHINES = 100_000
MOST_GPUS = 1024
Machines = Annotated[int, Field(gt=0, le=MOST_MACHINES)]
Gpus = Annotated[int, Field(ge=0, le=MOST_GPUS)]


class RolePlacementConfig(StrictModel):
    """Workers of one role beside the policy; what is left out is as for the policy."""

    num_nodes: Machines | None = None
    """Machines to use."""
    gpus_per_node: Gpus | None = None
    """GPUs to use on each; 0: run on CPUs."""
    cpu_workers_per_node: Processes | None = None
    """Worker processes on each machine when `gpus_per_node` is 0."""


class ClusterConfig(StrictModel):
    """The machines: one worker process for each GPU, or the given number of CPU workers."""

    num_nodes: Machines
    """Machines to use."""
    gpus_per_node: Gpus
    """GPUs to use on each; 0: train on CPUs."""
    cpu_workers_per_node: Processes
    """Worker processes on each machine when `gpus_per_node` is 0."""
    worker_start_timeout_s: Seconds
    """Seconds that the workers may take to start before the run gives up."""
    worker_call_timeout_s: Seconds
    """Seconds that a worker may take to answer, for a whole step or round of generation, before the run ends with a
    message that names it: a frozen worker, or one that waits for a dead device, never answers."""
    max_restarts: NonNegativeInt
    """Number of times that a run which fails restarts itself from its last checkpoint."""
    network_interface: Text | None
    """Interface of each machine, such as `eth1`, over which the workers of several machines talk; null: the one that
    gloo and NCCL choose."""
    roles: dict[str, RolePlacementConfig]
    """Workers of models beside the policy, such as a teacher, and engines of `generation` with machines of their own,
    by role: `num_nodes`, `gpus_per_node` and `cpu_workers_per_node` of each, by default the policy's; {}: none."""

    @property
    def workers_per_node(self) -> int:
        """Worker processes on each machine."""
        return self.gpus_per_node or self.cpu_workers_per_node

    @property
    def world_size(self) -> int:
        """Worker processes in all."""
        return self.num_nodes * self.workers_per_node

    @property
    def all_workers_per_node(self) -> int:
        """Worker processes on each machine, those of all roles together where they share the machines."""
        return self.workers_per_node + sum(self.place_of(role).workers_per_node for role in self.roles)

    @property
    def num_gpus(self) -> int:
        """GPUs of the whole run, those of all roles together; 0 on CPUs."""
        return self.num_nodes * self.gpus_per_node + sum(self.place_of(role).num_gpus for role in self.roles)

    def place_of(self, role: str) -> "ClusterConfig":
        """Return the section as it is for the workers of one role."""
        chosen = self.roles[role]
        sizes = {name: value for name in type(chosen).model_fields if (value := getattr(chosen, name)) is not None}
        return self.model_copy(update={**sizes, "roles": {}})


DURATION_FORM = "DD:HH:MM:SS"
_PATTERN = re.compile(r"(\d{1,3}):(\d{1,2}):(\d{1,2}):(\d{1,2})")
_SECONDS = (86400, 3600, 60, 1)
_LIMITS = (1000, 24, 60, 60)


def parse_duration(text: str) -> int | None:
    """Return the seconds of a text such as `00:03:30:00` (DD:HH:MM:SS); None for another form."""
    match = _PATTERN.fullmatch(text)
    if match is None:
        return None
    parts = [int(part) for part in match.groups()]
    if any(part >= limit for part, limit in zip(parts, _LIMITS, strict=True)):
        return None
    return sum(part * seconds for part, seconds in zip(parts, _SECONDS, strict=True))


def format_duration(seconds: int) -> str:
    """Return the text that `parse_duration` reads as so many seconds, less than 1000 days."""
    parts = []
    for unit in _SECONDS:
        number, seconds = divmod(seconds, unit)
        parts.append(f"{number:02d}")
    return ":".join(parts)
