# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""`state.json` of a checkpoint, with the training loop's state and the run that wrote it."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from nemo_rl_moe.config.schema import MasterConfig
from nemo_rl_moe.errors import CheckpointError
from nemo_rl_moe.runs.folder.lines import to_plain
from nemo_rl_moe.runs.folder.metrics import json_number

STATE_FILE_NAME = "state.json"
FORMAT_VERSION: Final = 1
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _number(value: Any) -> Any:
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value


Name = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=0)]
Number = Annotated[float, BeforeValidator(_number)]
_STRICT = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())


@dataclass(frozen=True)
class LoopState:
    """State of a training loop between two steps, without the models.

    Attributes:
        batches_taken: Number of batches taken from the data: global batches or, with rollouts, the prompts of one step
            as one batch.
        first_validation: Metrics of the first validation, for the summary. Empty before it.
        skipped_in_a_row: Number of consecutive skipped updates up to this step.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    step: Count = 0
    batches_taken: Count = 0
    first_validation: Mapping[Name, Number] = field(default_factory=dict)
    last_validation: Mapping[Name, Number] = field(default_factory=dict)
    last_training: Mapping[Name, Number] = field(default_factory=dict)
    skipped_in_a_row: Count = 0


class RunDescription(BaseModel):
    """Description of a run in each of its checkpoints.

    Attributes:
        algorithm: Name of the run's algorithm, such as `sft`.
        first_run_id: Id of the run that started at step 0. It identifies a history of training.
        run_folder: Absolute path of the run's folder.
        logger_run_ids: Logger -> id under which the logger resumes the run.
        layout: Parallel dimension -> size, from `layout_of`.
        fingerprints: Name of an input -> fingerprint.
    """

    model_config = _STRICT

    algorithm: Name
    run_id: Name
    first_run_id: Name
    run_folder: Name
    logger_run_ids: dict[Name, Name]
    config: dict[str, Any]
    layout: dict[Name, Count]
    fingerprints: dict[Name, Name]
    versions: dict[str, Any]


class CheckpointState(RunDescription):
    """Description of a checkpoint and of the run that wrote it.

    Attributes:
        format_version: Increased when older releases cannot read the file.
        run_folder_id: Id in the run folder's `run.json`, if it had one.
        checkpoint_dir: Absolute path, without links, that the folder of checkpoints had at the time of writing.
        metric_name: Metric that ranks checkpoints, such as `val:accuracy`.
        metric_value: Value of the metric. None if it was not measured.
        time: Unix seconds of writing.
    """

    format_version: Literal[1]
    loop: LoopState
    run_folder_id: Name | None
    checkpoint_dir: Name
    metric_name: Name | None
    metric_value: Number | None
    with_optimizer: bool
    time: Annotated[float, Field(ge=0, allow_inf_nan=False)]


def layout_of(config: MasterConfig) -> dict[str, int]:
    """Return the sizes of a run's parallel dimensions, by name."""
    megatron = config.policy.megatron_cfg
    return {
        "workers": config.cluster.world_size,
        "data_parallel_size": config.data_parallel_size,
        "tensor_model_parallel_size": megatron.tensor_model_parallel_size,
        "pipeline_model_parallel_size": megatron.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": megatron.virtual_pipeline_model_parallel_size or 1,
        "context_parallel_size": megatron.context_parallel_size,
        "expert_model_parallel_size": megatron.expert_model_parallel_size,
        "expert_tensor_parallel_size": megatron.expert_tensor_parallel_size,
    }


def json_ready(value: Any) -> Any:
    """Return content in JSON's types, with NaN and infinities as strings."""
    if isinstance(value, Mapping):
        return {str(key): json_ready(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(item) for item in value]
    plain = to_plain(value)
    return json_number(plain) if isinstance(plain, float) else plain


def write_state(folder: Path, state: CheckpointState) -> None:
    """Write `state.json` into a checkpoint's folder. Numbers are written without rounding."""
    content = json_ready(dict(state) | {"loop": vars(state.loop)})
    text = json.dumps(content, allow_nan=False, indent=1)
    (folder / STATE_FILE_NAME).write_text(text + "\n", encoding="utf-8")


def read_state(folder: Path) -> CheckpointState:
    """Return the content of `state.json` of a checkpoint's folder.

    Raises:
        CheckpointError: The file is missing or invalid.
    """
    path = folder / STATE_FILE_NAME
    try:
        return CheckpointState.model_validate_json(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except ValidationError as error:
        raise CheckpointError(validation_problems(path, error)) from None


def validation_problems(path: Path, error: ValidationError) -> list[str]:
    """Return lines with the file and its wrong fields."""
    details = error.errors(include_url=False, include_context=False, include_input=False)
    if details[0]["type"] == "json_invalid":  # a torn file
        return [f"{path}: not valid JSON: {details[0]['msg'].removeprefix('Invalid JSON: ')}"]
    return [f"{path}: {'.'.join(map(str, detail['loc'])) or 'all of it'}: {detail['msg']}" for detail in details][:10]
