# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The trainer with shared prefixes against separate sequences, in turns, on one thread. Prints one JSON line a case.

A case is the number of tokens of the prompt, the mean number of tokens of a response, and the number of responses to
each prompt. Lengths of responses are uniform from half to one and a half times the mean, or have the distribution of a
run's capture. Both ways train the same batches with the same weights, so their losses must agree.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from small_model import (
    CONFIGS,
    CONSTANT_RATE,
    TOKENIZER,
    VOCABULARY,
    confine,
    make_parser,
    one_epoch,
    one_rank,
    overrides_of,
    positive,
    surroundings,
    write_model,
)
from torch import Tensor

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.config.loading import load_config
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.distributed.batch import TokenBatch, make_shard, shared_with_previous
from nemo_rl_moe.distributed.microbatches import PackedBatching, plan_evaluation
from nemo_rl_moe.models.hf_files import load_hf_config
from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer
from nemo_rl_moe.runs.folder.capture_folder import read_description, read_step, steps_of

CASES = ("64,128,8", "128,128,8", "512,128,8", "1024,128,8", "512,64,16", "256,512,8")
PROMPTS = 2
EXAMPLES = """\
examples:
  python benchmarks/shared_prefix.py
  python benchmarks/shared_prefix.py --cases 512,128,8 --turns 9
  python benchmarks/shared_prefix.py --capture logs/my_run/exp_001/capture

training and logprobs are the CPU seconds of separate sequences divided by those of shared prefixes, as the median over
turns with the smallest and the largest ratio. tokens is the same ratio of tokens."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__, EXAMPLES)
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="P,R,G", help="prompt, response, group")
    parser.add_argument("--turns", type=positive, default=5, metavar="N", help="turns of each way (default: 5)")
    parser.add_argument("--capture", type=Path, metavar="DIR", help="a capture with the lengths of its responses")
    parser.add_argument(
        "--microbatch-tokens", type=positive, default=1 << 14, metavar="N", help="most tokens of one (default: 16384)"
    )
    options = parser.parse_args(arguments)
    shares = torch.rand(4096, generator=torch.Generator().manual_seed(0)) + 0.5
    if options.capture is not None:
        shares = response_lengths(options.capture)
        shares = shares / shares.mean()
    confine(1)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="shared_prefix_") as scratch:
        write_model(Path(scratch))
        policy = make_policy(Path(scratch))
        with one_rank(policy):
            trainer = MegatronTrainer(policy, load_hf_config(scratch), None, num_steps=10_000)
            for case in options.cases:
                prompt, response, group = map(int, case.split(","))
                print(json.dumps(measured(trainer, prompt, response * shares, group, options)), flush=True)


def response_lengths(capture: Path) -> Float[Tensor, " responses"]:
    """Return the number of trained tokens of each sequence of a capture."""
    description, found = read_description(capture), []
    for step, files in steps_of(capture).items():
        for rows in read_step(description, step, files):
            sequences = np.repeat(np.arange(len(rows.lengths)), rows.lengths)
            found.append(np.bincount(sequences, rows.columns["loss_mask"], minlength=len(rows.lengths)))
    return torch.from_numpy(np.concatenate(found)).float()


def make_policy(model: Path) -> PolicyConfig:
    values: dict[str, Any] = {
        **one_epoch("sft"),
        "policy.model_name": model,
        "policy.init": "random",
        "policy.tokenizer.name": TOKENIZER,
        "policy.max_total_sequence_length": 4096,
        **CONSTANT_RATE,
        "cluster.cpu_workers_per_node": 1,
    }
    return load_config(CONFIGS / "sft_tiny_moe.yaml", overrides_of(values), check_paths=False).policy


def make_batch(prompt: int, responses: Float[Tensor, " responses"], group: int, seed: int) -> TokenBatch:
    """Return a batch whose responses have lengths that are drawn from `responses`."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(responses), (PROMPTS * group,), generator=generator)
    lengths = prompt + responses[drawn].round().long().clamp(min=1)
    input_ids = torch.randint(1, VOCABULARY, (PROMPTS * group, int(lengths.max())), generator=generator)
    input_ids[:, :prompt] = input_ids[::group, :prompt].repeat_interleave(group, 0)
    position = torch.arange(input_ids.shape[1])
    is_token = position < lengths[:, None]
    names = tuple(map(str, range(len(lengths))))
    return TokenBatch(input_ids * is_token, lengths, is_token & (position >= prompt), names)


def measured(
    trainer: MegatronTrainer,
    prompt: int,
    responses: Float[Tensor, " responses"],
    group: int,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Return the ratios of one case."""
    seconds: dict[str, list[list[float]]] = {"training": [], "logprobs": []}
    differences, tokens = [], (0, 1)
    for turn in range(options.turns + 1):
        batch = make_batch(prompt, responses, group, seed=turn)
        shared = shared_with_previous(batch)
        total = int(batch.lengths.sum())
        tokens = total, total - sum(shared)
        shards = []
        for shares in (False, True):
            batching = PackedBatching(options.microbatch_tokens)
            plan = plan_evaluation(
                batch.lengths.tolist(), num_data_parallel_ranks=1, batching=batching, shared=shared if shares else ()
            )
            shards.append(make_shard(replace(batch, shares_prefixes=shares), plan.by_rank[0], batch))
        for name, found in seconds.items():
            results: dict[bool, tuple[float, Any]] = {}
            for shares in (False, True) if turn % 2 else (True, False):
                start = time.process_time()
                if name == "training":
                    result: Any = trainer.train([shards[shares]], sft_loss).global_loss
                else:
                    result = trainer.logprobs(shards[shares].microbatches)
                results[shares] = time.process_time() - start, result
            if turn:  # the first turn warms up
                found.append([results[False][0], results[True][0]])
            if name == "logprobs":
                rows = [
                    dict(zip(shards[s].places, (r for m in results[s][1] for r in m), strict=True))
                    for s in (False, True)
                ]
                differences += [
                    float((rows[0][i][: batch.lengths[i]] - rows[1][i][: batch.lengths[i]]).abs().max())
                    for i in range(len(batch))
                ]
    ratios = {name: sorted(separate / shared for separate, shared in found) for name, found in seconds.items()}
    return {
        "case": f"{prompt},{responses.mean():.0f},{group}",
        "tokens": round(tokens[0] / tokens[1], 2),
        **{name: [round(r, 2) for r in (statistics.median(each), each[0], each[-1])] for name, each in ratios.items()},
        "largest_logprob_difference": max(differences),
        **surroundings(),
    }


if __name__ == "__main__":
    main()
