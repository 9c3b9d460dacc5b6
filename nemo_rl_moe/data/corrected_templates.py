# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Corrected chat templates for models whose published template loses parts of some conversations.

If the published template shows the entire conversation, the corrected one gives the same text. Each file lists its
differences.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from nemo_rl_moe.data.chat_template import template_setup
from nemo_rl_moe.data.template_renderer import TemplateRenderer
from nemo_rl_moe.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CorrectedTemplates = Literal["auto", "never"]
_FOLDER = Path(__file__).parent / "corrected"


@dataclass(frozen=True)
class CorrectedTemplate:
    """A corrected template, and the published template that it replaces.

    Attributes:
        file: The corrected template, in `data/corrected/`.
        values: Name -> value, for variables of the file, so that one file serves several published templates.
        mark: Text in the published template that identifies it.
    """

    family: str
    file: str
    values: Mapping[str, bool | str]
    mark: str
    loses: str

    def text(self) -> str:
        """Return the template's text, with its values inserted."""
        names = "".join(f"{{%- set {name} = {json.dumps(value)} -%}}" for name, value in self.values.items())
        return names + (_FOLDER / self.file).read_text(encoding="utf-8").rstrip("\n")


_CALLS = "<\uff5ctool\u2581calls\u2581begin\uff5c>"
_KIMI_CALLS = "<|tool_calls_section_begin|>"
CORRECTED = (
    CorrectedTemplate("DeepSeek-R1", "deepseek.jinja", {"opens_thinking": True}, _CALLS, "thinking and later calls"),
    CorrectedTemplate("DeepSeek-V3", "deepseek.jinja", {"opens_thinking": False}, _CALLS, "later calls"),
    CorrectedTemplate("Mistral", "mistral.jinja", {"blank": " "}, "[AVAILABLE_TOOLS]", "the system turn"),
    CorrectedTemplate("Mistral", "mistral.jinja", {"blank": ""}, "[AVAILABLE_TOOLS]", "the system turn"),
    CorrectedTemplate("Kimi-K2", "kimi_k2.jinja", {"thinks": False}, _KIMI_CALLS, "tool calls (it refuses them)"),
    CorrectedTemplate(
        "Kimi-K2-Thinking", "kimi_k2.jinja", {"thinks": True}, _KIMI_CALLS, "tool calls (it refuses them)"
    ),
    CorrectedTemplate("DeepSeek-V3.1", "deepseek_v31.jinja", {}, _CALLS, "thinking"),
)


def correct_template(tokenizer: "PreTrainedTokenizerBase", setting: CorrectedTemplates) -> str | None:
    """Replace a published template by the corrected template if both give the same texts for `PROBES`. Return a line
    that reports this, or None if there is no corrected template.

    Only this process uses the corrected template. Exports keep the model's template.
    """
    own = tokenizer.chat_template
    if setting == "never" or not isinstance(own, str):
        return None
    for candidate in CORRECTED:
        if candidate.mark not in own:
            continue
        try:
            published = template_setup(tokenizer, with_tools=False)
            ours = TemplateRenderer(replace(published, template=candidate.text()))
            if TemplateRenderer(published).renders_as(ours):
                tokenizer.chat_template = candidate.text()
                return (
                    f"chat template: that of {candidate.family} loses {candidate.loses}; {candidate.file} of this"
                    " package replaces it (policy.tokenizer.corrected_template=never keeps the model's)"
                )
        except DataError:  # the problem is reported when the template is used
            return None
    return None
