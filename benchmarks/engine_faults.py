# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The scorecard of an engine without the weights, and of captures that lack or mistake what they hold. Prints a table.

A tiny Qwen3-MoE of transformers is trained by policy gradients; a copy of it, the engine, samples and records its
routes and log-probabilities, and gets the weights after every step, unless a fault keeps them from it.
Everything is written as a capture and audited by `nemo-rl-moe audit`. Healthy steps are real ones of several kinds, and
many more that draw their sequences from these.
"""

import argparse
import copy
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from capture_faults import OF_FILES, FileScore, audited, score_of_capture, score_of_files, simulated_alarms
from small_model import make_parser, not_negative, positive

from nemo_rl_moe.runs.folder.capture_folder import CaptureFolderWriter
from nemo_rl_moe.runs.folder.captured_sequences import CaptureDescription, CapturedSequence

EXAMPLES = """\
examples:
  python benchmarks/engine_faults.py                  all faults, 10,000 healthy steps
  python benchmarks/engine_faults.py --healthy 0      faults alone"""
NUM_LAYERS, NUM_EXPERTS, TOPK, VOCABULARY = 4, 8, 2, 64
TEMPLATE, PROMPT, RESPONSE, PROMPTS_A_STEP, RESPONSES = 4, 12, 20, 8, 8
LEARNING_RATE, FAULTY_STEPS = 3e-4, 14
Weights = dict[str, torch.Tensor]
Delivery = Callable[[Weights, Weights], Weights]
"""From the trainer's weights, and those before the fault, to the engine's."""
FAULTS: dict[str, tuple[str, Delivery]] = {
    "pinned_engine": ("an engine that gets no weights", lambda now, before: before),
    "doubled_update": (
        "an update that is applied twice",
        lambda now, before: {name: 2 * values - before[name] for name, values in now.items()},
    ),
}
HEALTHY = {"float32": torch.float32, "an engine in bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Score:
    """Result for one fault, see `FileScore`."""

    fault: str
    onset: int
    found: FileScore


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    scores: list[Score] = []
    with tempfile.TemporaryDirectory(prefix="engine_faults_") as name:
        folder = Path(name)
        healthy = {
            kind: run(
                folder / f"healthy_{number}_{seed}", FAULTY_STEPS + max(options.onsets), seed, engine_type=kind_of
            )
            for number, (kind, kind_of) in enumerate(HEALTHY.items())
            for seed in range(options.seeds)
            for kind in (f"{kind}, seed {seed}",)
        }
        first = next(iter(healthy.values()))
        for onset in options.onsets:
            for fault, (title, deliver) in FAULTS.items():
                capture = run(folder / f"{fault}_{onset}", FAULTY_STEPS + onset, 0, onset=onset, deliver=deliver)
                scores.append(Score(title, onset, score_of_capture(capture, onset)))
            for fault, title in OF_FILES.items():
                scores.append(Score(title, onset, score_of_files(first, fault, onset, folder / f"{fault}_{onset}")))
        alarms = {kind: list(audited(capture)) for kind, capture in healthy.items()}
        said = simulated_alarms(list(healthy.values()), options.healthy, options.seed) if options.healthy else []
    print(table(scores, alarms, options.healthy, said))
    if options.output is not None:
        content = {"scores": [asdict(score) for score in scores], "real": alarms, "simulated": said}
        options.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, EXAMPLES)
    parser.add_argument("--onsets", nargs="+", type=positive, default=[6, 1], metavar="STEP", help="first faulty steps")
    parser.add_argument("--healthy", type=not_negative, default=10_000, metavar="N", help="simulated steps (10000)")
    parser.add_argument("--seeds", type=positive, default=2, metavar="N", help="healthy runs of each kind (2)")
    parser.add_argument("--seed", type=not_negative, default=0, help="of the simulated steps (default: 0)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the same as JSON")
    return parser.parse_args(arguments)


def run(
    folder: Path,
    num_steps: int,
    seed: int,
    *,
    engine_type: torch.dtype = torch.float32,
    onset: int = 0,
    deliver: Delivery | None = None,
) -> Path:
    """Train, and return the capture of all steps.

    Args:
        onset: First step whose engine has the weights that `deliver` makes; 0: none.
    """
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = tiny_model()
    engine = copy.deepcopy(model).to(engine_type)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    writer = CaptureFolderWriter(
        folder, CaptureDescription(tuple(range(NUM_LAYERS)), NUM_EXPERTS, TOPK, "benchmarks/engine_faults.py")
    )
    prompts = torch.randint(VOCABULARY, (32, PROMPT), generator=generator)
    prompts[:, :TEMPLATE] = torch.arange(TEMPLATE)
    before: Weights = {}
    for step in range(1, num_steps + 1):
        now = {name: values.clone() for name, values in model.state_dict().items()}
        if not before or step < onset or deliver is None:
            before = now
        engine.load_state_dict(now if deliver is None or step < onset else deliver(now, before))
        chosen = prompts[torch.randperm(len(prompts), generator=generator)[:PROMPTS_A_STEP]].repeat_interleave(
            RESPONSES, 0
        )
        tokens = sampled(engine, chosen, generator)
        with torch.no_grad():
            rollout, rollout_experts = scored(engine, tokens)
        training, training_experts = scored(model, tokens)
        rewards = (tokens[:, PROMPT:] % 2 == 0).float().mean(1)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        optimizer.zero_grad()
        (-(advantages[:, None] * training[:, PROMPT - 1 :]).mean()).backward()
        optimizer.step()
        writer.write(step, sequences(tokens, rollout, rollout_experts, training.detach(), training_experts, step - 1))
    return folder


def tiny_model() -> torch.nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=64,
            moe_intermediate_size=32,
            num_hidden_layers=NUM_LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            num_experts=NUM_EXPERTS,
            num_experts_per_tok=TOPK,
            decoder_sparse_step=1,
            norm_topk_prob=True,
            initializer_range=0.1,
        )
    ).eval()


@torch.no_grad()
def sampled(engine: torch.nn.Module, prompts: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    tokens = prompts
    for _ in range(RESPONSE):
        logits = engine(input_ids=tokens, use_cache=False).logits[:, -1].float()
        tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1, generator=generator)], 1)
    return tokens


def scored(model: torch.nn.Module, tokens: torch.Tensor) -> tuple[torch.Tensor, np.ndarray]:
    """Return log-probabilities `[sequences, tokens - 1]` of all but the first token, and experts of all tokens."""
    found = model(input_ids=tokens, use_cache=False, output_router_logits=True)
    logprobs = found.logits[:, :-1].float().log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    experts = torch.stack([logits.float().topk(TOPK).indices for logits in found.router_logits], 1)
    return logprobs, experts.reshape(*tokens.shape, NUM_LAYERS, TOPK).numpy().astype(np.int16)


def sequences(
    tokens: torch.Tensor,
    rollout: torch.Tensor,
    rollout_experts: np.ndarray,
    training: torch.Tensor,
    training_experts: np.ndarray,
    version: int,
) -> list[CapturedSequence]:
    mask = np.arange(tokens.shape[1]) >= PROMPT
    first = np.zeros(1, dtype=np.float32)
    return [
        CapturedSequence(
            str(number),
            len(ids),
            {
                "token_ids": ids.numpy().astype(np.int32),
                "loss_mask": mask,
                "rollout_experts": rollout_experts[number, :-1],
                "training_experts": training_experts[number],
                "rollout_logprobs": np.concatenate([first, rollout[number].numpy()]),
                "training_logprobs": np.concatenate([first, training[number].numpy()]),
                "weight_versions": np.full(len(ids), version, dtype=np.int32),
            },
        )
        for number, ids in enumerate(tokens)
    ]


def table(scores: Sequence[Score], real: dict[str, list[str]], num_simulated: int, said: Sequence[str]) -> str:
    """Return the scorecard, in Markdown."""
    lines = ["| fault | strikes from | reported after | by |", "|---|---|---|---|"]
    for score in scores:
        after = "not found" if score.found.steps is None else f"{score.found.steps} steps"
        lines.append(f"| {score.fault} | step {score.onset} | {after} | {score.found.reported[:160]} |")
    early = [text for score in scores for text in score.found.false_alarms]
    lines += ["", f"false alarms before the faults: {len(early)}"]
    lines += [f"false alarms in a healthy run, {kind}: {len(found)}" for kind, found in real.items()]
    lines.append(f"false alarms in {num_simulated:,} simulated healthy steps: {len(said)}")
    return "\n".join(
        [
            *lines,
            *(f"false alarm: {text}" for text in [*early, *(text for found in real.values() for text in found), *said]),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
