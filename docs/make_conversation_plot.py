# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The plot of conversations in the report: a model that says what a script says, and tools that are called.

pip install -e '.[test]' and a Chromium
python docs/make_conversation_plot.py
"""

import argparse
import asyncio
import json
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import yaml
from make_report_plots import EXECUTABLES, IMAGES, open_report, shrink
from playwright.sync_api import sync_playwright
from transformers import PreTrainedTokenizerBase

from nemo_rl_moe.config.schema_environment import ToolLimitsConfig
from nemo_rl_moe.data.continuation import Continuation
from nemo_rl_moe.data.prompts import Prompt
from nemo_rl_moe.data.template_inputs import NO_INPUTS, TemplateInputs
from nemo_rl_moe.data.tokenizer import load_tokenizer
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationRequest, SamplingParameters
from nemo_rl_moe.rewards.interface import Fault, Score, ScoringItem
from nemo_rl_moe.rollouts.environment import Session
from nemo_rl_moe.rollouts.tool_environment import ToolConversation
from nemo_rl_moe.rollouts.trajectory import Trajectory
from nemo_rl_moe.runs.folder.metrics import JsonlLogger
from nemo_rl_moe.runs.folder.samples import SampleLog
from nemo_rl_moe.runs.loggers.console import ConsoleLogger
from nemo_rl_moe.runs.report.command import write_report
from nemo_rl_moe.tools.definitions import load_tools
from nemo_rl_moe.tools.detection import format_of
from nemo_rl_moe.tools.results import ToolResult, error_text

MODEL = Path(__file__).resolve().parents[1] / "examples/assets/tiny_qwen3_moe_tools"
TOOLS = load_tools(["calculator"], {})
LIMITS = ToolLimitsConfig(
    num_workers=1, call_timeout_s=10.0, turn_timeout_s=30.0, max_result_characters=1000, memory_mb=100
)


def called(**arguments: object) -> str:
    """Return a call of the calculator, as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': 'calculator', 'arguments': arguments})}\n</tool_call>"


QUESTION = "A farm has 17 rows of 23 trees. 45 trees are cut. How many are left?"
SECOND = "What is 2 to the power of 20, divided by 64?"
SCRIPTS = (
    (
        QUESTION,
        (
            (0.5, "I multiply the rows by the trees of a row.\n" + called(expression="17 * 23")),
            (0.35, "Now the trees that are cut.\n" + called(expresion="391 - 45")),
            (0.3, "The argument had a mistake.\n" + called(expression="391 - 45")),
            (0.2, "346 trees are left."),
        ),
    ),
    (SECOND, ((0.45, called(expression="2 ** 20") + "\n" + called(expression="1048576 / 64")), (0.25, "16384."))),
    (SECOND, ((0.6, called(expression="2 ** 20 / 64 # slow")),)),
)


async def call(name: str, arguments: Mapping[str, object], limit_s: float) -> ToolResult:
    """Call a tool in this process; a slow one gives no result."""
    await asyncio.sleep(0.1)  # waits for a process
    is_slow = "slow" in str(arguments)
    began_s = time.monotonic()
    await asyncio.sleep(0.9 if is_slow else 0.12)
    seconds = time.monotonic() - began_s
    if is_slow:
        return ToolResult(error_text("no result within 0.9 s"), Fault.TIMEOUT, seconds=seconds)
    return ToolResult(str(TOOLS[name].function(**arguments)), seconds=seconds)


async def play(
    tokenizer: PreTrainedTokenizerBase, question: str, responses: Sequence[tuple[float, str]], sample_id: str
) -> Trajectory:
    """Return the trajectory of responses that are given, each after so many seconds."""
    script = iter(responses)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")

    async def generate(request: GenerationRequest) -> GeneratedSequence:
        seconds, text = next(script)
        await asyncio.sleep(seconds + 0.15)
        ids = np.array([*tokenizer.encode(text, add_special_tokens=False), end])
        return GeneratedSequence(ids, np.full(len(ids), -0.25), False, 4, waited_s=0.15)

    async def score(item: ScoringItem) -> Score:
        await asyncio.sleep(0.1)
        return Score(1.0, is_correct=True)

    messages = ({"role": "user", "content": question},)
    inputs = TemplateInputs(tools=tuple(tool.definition for tool in TOOLS.values()))
    ids = tokenizer.apply_chat_template(
        list(messages), tools=list(inputs.tools or ()), add_generation_prompt=True, return_dict=False
    )
    session = Session(
        prompt=Prompt(sample_id, question, tuple(ids), {}, messages=messages, inputs=inputs),
        group_id=sample_id,
        sampling=SamplingParameters(1000, stop_token_ids=(end,)),
        seed=0,
        max_tokens=10_000,
        submit_request=generate,
        submit_item=score,
        decode=tokenizer.decode,
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
        continuation=Continuation(tokenizer),
    )
    conversation = ToolConversation(TOOLS, format_of(tokenizer, None, NO_INPUTS), call, LIMITS, 8, print)
    try:
        return await conversation.rollout(session)
    except RuntimeError:  # the script is at its end
        failed = session.failed(Fault.TIMEOUT, "the trajectory took longer than 600 s (env.rollout_timeout_s)")
        return replace(failed, left_out=f"timeout: {failed.fault_message} (env.on_failure: leave_out)")


def make_run(folder: Path) -> None:
    """Write the folder of a run with these trajectories."""
    tokenizer = load_tokenizer(str(MODEL))
    folder.mkdir(parents=True)
    found = [
        asyncio.run(play(tokenizer, question, responses, f"data/grpo.jsonl:{number}"))
        for number, (question, responses) in enumerate(SCRIPTS, 1)
    ]
    console = ConsoleLogger(total_steps=1, live="never")
    with SampleLog(folder, console, 3, None) as samples:
        samples.write(1, "train", found)
        samples.write(1, "val", found[1:2])
    logger = JsonlLogger(folder, print, print)
    logger.log_step(1, {"train/reward": 1.0})
    logger.close()
    (folder / "config.yaml").write_text(yaml.safe_dump({"grpo": {"max_num_steps": 1}}))


def main() -> None:
    """Makes the run, its report and the plot."""
    parser = argparse.ArgumentParser(description="Photographs conversations in a report.")
    parser.add_argument("--output", type=Path, default=IMAGES, help="folder of the plot; default: %(default)s")
    chosen = parser.parse_args()
    executable = next(filter(None, map(shutil.which, EXECUTABLES)), None)
    with tempfile.TemporaryDirectory() as name:
        make_run(run := Path(name) / "tools" / "exp_001")
        write_report([run], report := Path(name) / "report.html")
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=executable)
            page = browser.new_page(viewport={"width": 1200, "height": 900})
            open_report(page, report)
            card = page.locator("section", has=page.locator("h3", has_text="Conversations"))
            card.last.screenshot(path=chosen.output / "report_conversations.png")
    shrink(chosen.output / "report_conversations.png")


if __name__ == "__main__":
    main()
