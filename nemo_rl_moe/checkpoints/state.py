# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Where a training loop stands between two steps."""

import json
import math
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NoReturn

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from nemo_rl_moe.config.schema import MasterConfig
from nemo_rl_moe.errors import CheckpointError
from nemo_rl_moe.run_folder.lines import to_plain
from nemo_rl_moe.run_folder.metrics import json_number


@dataclass(frozen=True)
class LoopState:
    """What a loop needs, beside the policy's own state, to go on as if it had never stopped.

    Attributes:
        step: Steps done.
        batches_taken: Global batches, or rounds of prompts, that have been taken from the data.
        first_validation: Metrics of the first validation, for the summary; empty before it.
        last_validation: Those of the last one.
        last_training: Metrics of the last step.
        skipped_in_a_row: Updates up to here that were skipped, none between them done.
    """

    step: int = 0
    batches_taken: int = 0
    first_validation: Mapping[str, float] = field(default_factory=dict)
    last_validation: Mapping[str, float] = field(default_factory=dict)
    last_training: Mapping[str, float] = field(default_factory=dict)
    skipped_in_a_row: int = 0


STATE_FILE_NAME = "state.json"
FORMAT_VERSION: Final = 1
LARGEST_STATE_BYTES = 16 << 20
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_LONGEST_NAME = 1000


def _number(value: Any) -> Any:
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value


Name = Annotated[str, Field(min_length=1, max_length=_LONGEST_NAME)]
Count = Annotated[int, Field(ge=0, lt=1 << 62)]
Number = Annotated[float, BeforeValidator(_number)]
Metrics = dict[Name, Number]
_STRICT = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())


class LoopStateRecord(BaseModel):
    """The fields of `LoopState`."""

    model_config = _STRICT

    step: Count
    batches_taken: Count
    first_validation: Metrics
    last_validation: Metrics
    last_training: Metrics
    skipped_in_a_row: Count


class CheckpointState(BaseModel):
    """What a checkpoint says of itself and of the run that wrote it.

    Attributes:
        format_version: Changes when an older reader could not read it.
        algorithm: The configuration's own section, such as `sft`.
        loop: Where the loop stood.
        run_id: The run that wrote it.
        first_run_id: The run that started at step 0; the same for all checkpoints of one history of training.
        run_folder: Full path of the run's folder.
        run_folder_id: The id in that folder's `run.json`; None where it had none.
        checkpoint_dir: Full path of the folder that the checkpoint was made in, without links.
        logger_run_ids: Logger's name to the id under which its run goes on.
        metric_name: What checkpoints were chosen by, such as `val:accuracy`.
        metric_value: The metric at this step; None where it was not measured.
        with_optimizer: Whether the optimizer's state is in it.
        config: The resolved configuration.
        layout: Names and sizes of the parallel dimensions.
        fingerprints: Input's name to a text that changes when the input does.
        versions: Of Python and of the packages.
        time: Unix seconds when it was written.
    """

    model_config = _STRICT

    format_version: Literal[1]
    algorithm: Name
    loop: LoopStateRecord
    run_id: Name
    first_run_id: Name
    run_folder: Name
    run_folder_id: Name | None
    checkpoint_dir: Name
    logger_run_ids: dict[Name, Name]
    metric_name: Name | None
    metric_value: Number | None
    with_optimizer: bool
    config: dict[str, Any]
    layout: dict[Name, Count]
    fingerprints: dict[Name, Name]
    versions: dict[str, Any]
    time: Annotated[float, Field(ge=0, allow_inf_nan=False)]

    @property
    def loop_state(self) -> LoopState:
        """Where the loop goes on."""
        return LoopState(**{name: getattr(self.loop, name) for name in LoopStateRecord.model_fields})


def loop_state_record(state: LoopState) -> LoopStateRecord:
    """The state as it is written; numbers of other kinds become floats."""
    values = {name: getattr(state, name) for name in LoopStateRecord.model_fields}
    for name, value in values.items():
        if isinstance(value, Mapping):
            values[name] = {key: float(number) for key, number in value.items()}
    return LoopStateRecord.model_validate(values)


def layout_of(config: MasterConfig) -> dict[str, int]:
    """How many workers there are and how they share the model."""
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
    """The same content in the few types of JSON, NaN and infinities as text."""
    if isinstance(value, Mapping):
        return {str(key): json_ready(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(item) for item in value]
    plain = to_plain(value)
    return json_number(plain) if isinstance(plain, float) else plain


def write_state(folder: Path, state: CheckpointState) -> None:
    """Writes `state.json` into a checkpoint's folder. Numbers come back to the last bit.

    Raises:
        OSError: The disk is full, or the folder cannot be written to.
    """
    text = json.dumps(json_ready(state.model_dump()), allow_nan=False, indent=1)
    (folder / STATE_FILE_NAME).write_text(text + "\n", encoding="utf-8")


def read_state(folder: Path) -> CheckpointState:
    """Reads `state.json` of a checkpoint's folder.

    Raises:
        CheckpointError: It is not there, not a plain file, too large, not JSON, or a field is missing or wrong.
    """
    path = folder / STATE_FILE_NAME
    content = read_json(path)
    version = content.get("format_version") if isinstance(content, dict) else None
    if isinstance(version, int) and not isinstance(version, bool) and version != FORMAT_VERSION:
        raise CheckpointError(f"{path}: format_version: got {version}, expected {FORMAT_VERSION}")
    try:
        return CheckpointState.model_validate(content)
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False, include_input=False)
        lines = [
            f"{path}: {'.'.join(map(str, detail['loc']))[:200] or 'all of it'}: {detail['msg']}" for detail in details
        ]
        raise CheckpointError(lines[:10]) from None


def read_json(path: Path) -> Any:
    """Reads a file of a checkpoint.

    Raises:
        CheckpointError: It is not there, not a plain file, too large, or not JSON.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise CheckpointError(f"{path}: not a plain file")
        with path.open("rb") as file:
            content = file.read(LARGEST_STATE_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    if len(content) > LARGEST_STATE_BYTES:
        raise CheckpointError(f"{path}: larger than {LARGEST_STATE_BYTES >> 20} MiB")
    try:
        return json.loads(content.decode("utf-8"), parse_constant=_refuse)
    except RecursionError:
        raise CheckpointError(f"{path}: not valid JSON: nested too deeply") from None
    except ValueError as error:  # also bytes that are not UTF-8, and numbers of thousands of digits
        raise CheckpointError(f"{path}: not valid JSON: {error}") from None


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON number")
