# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A conversation with tools trains in every family: loss and gradient are those of what the assistant wrote."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.data.loader import collate
from nemo_rl_moe.data.records import parse_record
from tests.support.chat_templates import make_byte_tokenizer, tokenize_example
from tests.support.family_models import FAMILY_MODELS
from tests.support.family_reference import trainer_of
from tests.support.gloo_ranks import run_ranks
from tests.support.quick_list import listed
from tests.support.tiny_model import forget_recorded_losses, parallel_job, shard_of_rank, tiny_policy
from tests.support.tool_templates import FAMILIES, ToolFormat

# Two models where a family has dense ones and ones with experts.
MODELS = {
    "Qwen2.5, Qwen2-MoE": ("qwen2", "qwen2_moe"),
    "Qwen3, Qwen3-MoE": ("qwen3", "qwen3_moe"),
    "Llama 3.1": ("llama",),
    "Mistral, Mixtral": ("mistral", "mixtral"),
    "DeepSeek-V3": ("deepseek_v3",),
    "gpt-oss": ("gpt_oss",),
    "OLMoE": ("olmoe",),
    "OLMo-3": ("olmoe",),
}
# Two formats that differ much; the tests of data see of every one which of its text the assistant writes.
LONGEST = 600
RELATIVE_TOLERANCE = 1e-4
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
RECORD = {
    "messages": [
        {"role": "user", "content": "1+2?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "abcdefghi", "name": "add", "content": "3"},
        {"role": "assistant", "content": "It is 3."},
        {"role": "user", "content": "Thanks."},
        {"role": "assistant", "content": "Welcome."},
    ],
    "tools": [
        {
            "type": "function",
            "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
        }
    ],
}


class Step(NamedTuple):
    """Mean loss over the tokens that count, and the norm of its gradient."""

    loss: float
    grad_norm: float


def tokenizer_of(family: ToolFormat) -> Any:
    return make_byte_tokenizer(family.template, more_special=family.special_tokens, eos_token=family.end_token)


def steps_of_family(name: str, model: str, folder: str) -> tuple[Step, Step]:
    """Runs on one rank: a step of this project, and transformers' with the mask that the format calls for."""
    from transformers import AutoModelForCausalLM

    family, tokenizer = FAMILIES[name], tokenizer_of(FAMILIES[name])
    config = FAMILY_MODELS[model].hf_config()
    config.vocab_size, config.max_position_embeddings = len(tokenizer), LONGEST
    torch.manual_seed(5)
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    reference.save_pretrained(folder)
    policy = tiny_policy(moe_aux_loss_coeff=0.0)
    example = tokenize_example(parse_record(RECORD, "train.jsonl:1"), tokenizer, LONGEST)
    with parallel_job(policy):
        forget_recorded_losses()
        shard = shard_of_rank(collate([example], 0), microbatches=((0,),))
        result = trainer_of(Path(folder), policy).train([shard], sft_loss)
    return Step(result.global_loss, result.grad_norm), expected_step(reference, family, tokenizer)


def expected_step(model: nn.Module, family: ToolFormat, tokenizer: Any) -> Step:
    """Transformers' loss over the pieces that the family's format says the assistant writes."""
    messages = family.as_template_wants(RECORD["messages"])  # type: ignore[arg-type]
    text = tokenizer.apply_chat_template(messages, tools=RECORD["tools"], tokenize=False)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    spans, begin = [], 0
    for piece in family.trained:
        begin = text.index(piece, begin)
        spans.append(range(begin, begin + len(piece)))
        begin += len(piece)
    trained = torch.tensor([any(start in span for span in spans) for start, _ in encoded["offset_mapping"]])
    tokens: Tensor = torch.tensor(encoded["input_ids"])
    logprobs = model.eval()(input_ids=tokens[None]).logits[0, :-1].log_softmax(-1)
    loss = -logprobs.gather(1, tokens[1:, None])[:, 0][trained[1:]].mean()
    loss.backward()
    norms = [parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]
    return Step(loss.item(), torch.stack(norms).norm().item())


@pytest.mark.parametrize(
    ("name", "model"),
    listed(
        ((name, model) for name, models in MODELS.items() for model in models),
        quick=[("Qwen3, Qwen3-MoE", "qwen3_moe")],
        in_full=[("gpt-oss", "gpt_oss")],
    ),
)
def test_a_step_learns_what_the_assistant_wrote_and_nothing_else(name: str, model: str, tmp_path: Path) -> None:
    ((found, expected),) = run_ranks(steps_of_family, 1, name, model, str(tmp_path))
    assert expected.grad_norm > 0.01
    assert found == pytest.approx(expected, rel=RELATIVE_TOLERANCE)


def test_every_format_has_its_models() -> None:
    assert MODELS.keys() == FAMILIES.keys()
