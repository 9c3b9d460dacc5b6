# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Prompts from the data of an environment of the verifiers library."""

from collections.abc import Iterator, Mapping
from typing import Any

from nemo_rl_moe.config.environments.verifiers import VerifiersConfig
from nemo_rl_moe.config.schema_grpo import PromptSourceConfig
from nemo_rl_moe.data.messages import parse_turns, text_of
from nemo_rl_moe.data.prompt_records import ROW, PromptRecord
from nemo_rl_moe.data.record_values import RecordError, decoded_json
from nemo_rl_moe.data.records import BadLine
from nemo_rl_moe.data.sources import LineSource
from nemo_rl_moe.data.template_inputs import NO_INPUTS, TOOLS, TemplateInputs, parse_template_inputs
from nemo_rl_moe.rewards.verifiers_library import load_verifiers, verifiers_rows

TRAINING_SPLIT = "train"


def verifiers_prompts(driver: VerifiersConfig, source: PromptSourceConfig) -> LineSource[PromptRecord]:
    """Return the prompts of an environment, with the definitions of its tools."""
    trains = source.split == TRAINING_SPLIT
    rows = verifiers_rows(driver, trains=trains, num_items=source.num_items, seed=source.seed)
    name = f"{driver.id}[{'train' if trains else 'eval'}]"
    tools = load_verifiers(driver).tool_defs

    def parsed() -> Iterator[PromptRecord | BadLine]:
        for index, row in enumerate(rows):
            sample_id = f"{name}:{row.get('example_id', index)}"
            try:
                yield _record(row, tools, sample_id)
            except RecordError as error:
                yield BadLine(sample_id, str(error))

    return LineSource(name, len(rows), parsed())


def _record(row: Mapping[str, Any], tools: Any, sample_id: str) -> PromptRecord:
    messages = tuple(parse_turns(row["prompt"], "prompt", "user"))
    return PromptRecord(
        sample_id,
        messages,
        is_text=False,
        record={"question": text_of(messages), "answer": row.get("answer"), "info": row.get("info"), ROW: row},
        inputs=_inputs(row, tools),
    )


def _inputs(row: Mapping[str, Any], tools: Any) -> TemplateInputs:
    """Return the definitions of tools as inputs of the chat template: the row's definitions or else the
    environment's."""
    info = row.get("info")
    info = decoded_json(info, "info") if isinstance(info, str) and info else info
    own = info.get("tool_defs") if isinstance(info, Mapping) else None
    chosen = tools if own is None else own
    return parse_template_inputs({TOOLS: [_definition(tool) for tool in chosen]}) if chosen else NO_INPUTS


def _definition(tool: Any) -> dict[str, Any]:
    given = tool if isinstance(tool, Mapping) else tool.model_dump(exclude_none=True)
    return {"type": "function", "function": {key: given[key] for key in ("name", "description", "parameters")}}
