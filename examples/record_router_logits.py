# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Router logits and log-probabilities of a run's sequences by Hugging Face transformers, for `audit --training`.

    python examples/record_router_logits.py --model Qwen3-30B-A3B --tokens dump/rollout_data --output router_logits

Frameworks' dumps do not contain the choices of the training routers. This script computes them with a forward pass over
the same tokens. The weights must be the weights of the step, from one of the trainer's checkpoints.
"""

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from nemo_rl_moe.routing.audit.adapters.router_shape import read_router_shape
from nemo_rl_moe.routing.audit.sources import open_source


def record(model_folder: Path, tokens: Path, output: Path, sequences_at_a_time: int) -> None:
    """Write the files, each with a few sequences of a step.

    Args:
        model_folder: Configuration and weights.
        tokens: A framework's files with the token ids.
        sequences_at_a_time: Sequences of a forward pass, padded to the longest.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype="auto").eval().to(device)
    source = open_source(tokens, "auto", read_router_shape(model_folder), None, None)
    output.mkdir(parents=True, exist_ok=True)
    for step, read in (source.sequences or {}).items():
        found = [torch.as_tensor(sequence.columns["token_ids"]).long() for part in read() for sequence in part]
        for first in range(0, len(found), sequences_at_a_time):
            save_file(
                _forward(model, found[first : first + sequences_at_a_time], device),
                output / f"step_{step}-{first}.safetensors",
            )


@torch.no_grad()
def _forward(model: torch.nn.Module, sequences: list[torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True).to(device)
    lengths = torch.tensor([len(sequence) for sequence in sequences], device=device)
    mask = (torch.arange(ids.shape[1], device=device) < lengths[:, None]).long()
    outputs = model(input_ids=ids, attention_mask=mask, output_router_logits=True)
    logprobs = torch.zeros(ids.shape, device=device)
    of_next = outputs.logits[:, :-1].float().log_softmax(-1)
    logprobs[:, 1:] = of_next.gather(-1, ids[:, 1:, None])[..., 0]
    tensors = {"input_ids": ids, "attention_mask": mask, "logprobs": logprobs}
    tensors |= {f"router_logits.{number}": logits.float() for number, logits in enumerate(outputs.router_logits)}
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--sequences-at-a-time", type=int, default=8)
    options = parser.parse_args()
    record(options.model, options.tokens, options.output, options.sequences_at_a_time)


if __name__ == "__main__":
    main()
