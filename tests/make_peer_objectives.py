# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes `tests/unit/parity/peer_objectives.json`: values of functions of verl and TRL, in float64.

python tests/make_peer_objectives.py [--packages FOLDER] [--output FILE]

FOLDER is one that `pip install --no-deps --target FOLDER` has filled with `PACKAGES`. Without it, this is done in a
temporary folder. Modules that verl imports and the called functions do not use have empty stand-ins.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import MagicMock

import numpy as np
import torch
from torch import Tensor

PACKAGES = ("verl==0.9.1", "trl==1.16.0", "accelerate==1.15.0")
ABSENT = ("tensordict", "codetiming", "orjson")
OUTPUT = Path(__file__).resolve().parent / "unit/parity/peer_objectives.json"
SEQUENCES, TARGETS, VOCABULARY = 8, 9, 7


class _Empty(ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()


class _StandIns(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in ABSENT else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module empty."""


def make_inputs() -> dict[str, Tensor]:
    """Make sequences of several lengths, sampled from random distributions. Rewards are of groups of four."""
    generator = torch.Generator().manual_seed(65)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    logits = 1.5 * noise(SEQUENCES, TARGETS, VOCABULARY)
    old = (logits + 0.5 * noise(*logits.shape)).log_softmax(-1)
    tokens = torch.multinomial(old.exp().flatten(0, 1), 1, generator=generator).view(SEQUENCES, TARGETS, 1)
    lengths = torch.tensor([9, 4, 6, 2, 7, 7, 1, 5])
    mask = torch.arange(TARGETS) < lengths[:, None]
    with_gaps = mask & (torch.rand(mask.shape, generator=generator) < 0.75)
    with_gaps[:, 0] = True
    advantages = noise(SEQUENCES)
    advantages[3] = 0.0
    found = {
        "logprobs": logits.log_softmax(-1).gather(-1, tokens)[..., 0],
        "old_logprobs": old.gather(-1, tokens)[..., 0],
        "sum_of_squares": old.exp().square().sum(-1),
        "mask": mask,
        "mask_with_gaps": with_gaps,
        "advantages": advantages,
        "rewards": torch.tensor([1.0, 0.0, 0.5, 1.0, 0.0, 0.0, 1.0, 0.25], dtype=torch.float64),
    }
    return {name: values.double().mul(1e6).round().div(1e6) for name, values in found.items()}


def verl_losses(given: dict[str, Tensor]) -> list[dict[str, Any]]:
    """Call verl's policy losses."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig
    from verl.workers.config.actor import PolicyLossConfig

    def call(name: str, settings: dict[str, Any], on_policy: bool = False, **config: Any) -> dict[str, Any]:
        selection = PolicyLossConfig(**{key: config.pop(key) for key in list(config) if "cov" in key or "coef" in key})
        theirs = ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, policy_loss=selection, **config)
        logprobs = given["logprobs"].clone().requires_grad_()
        advantages = given["advantages"][:, None].expand_as(logprobs)
        old = logprobs.detach() if on_policy else given["old_logprobs"]
        mode = "token-mean" if settings.get("token_level_loss", True) else "seq-mean-token-mean"
        loss, _ = get_policy_loss_fn(name)(old, logprobs, advantages, given["mask_with_gaps"], mode, theirs)
        (gradient,) = torch.autograd.grad(loss, logprobs)
        case = {"kind": "loss", "function": name, "on_policy": on_policy, "settings": settings}
        return case | {"loss": loss.item(), "gradient": gradient.tolist()}

    found = []
    for pos, neg in ((1.0, 1.05), (3.0, 0.5)):
        ours = {"objective": "sapo", "sapo_temperature_pos": pos, "sapo_temperature_neg": neg}
        found.append(call("sapo", ours | {"token_level_loss": False}, tau_pos=pos, tau_neg=neg))
    for low, high in ((0.1, 0.2), (0.4, 0.4)):
        ours = {"ratio_clip_min": low, "ratio_clip_max": high}
        theirs = {"clip_ratio_low": low, "clip_ratio_high": high}
        gmpo = {"objective": "gmpo", "token_level_loss": False}
        found.append(call("geo_mean", gmpo | ours, **theirs))
        for name in ("dppo_tv", "dppo_kl"):
            small = {key: value / 5 for key, value in ours.items()}
            small_there = {key: value / 5 for key, value in theirs.items()}
            for truncation, token_level in ((20.0, True), (1.1, False)):
                settings = small | {"objective": name, "ratio_clip_c": truncation, "token_level_loss": token_level}
                found.append(call(name, settings, **small_there, clip_ratio_c=truncation))
    wide = {"ratio_clip_min": 1.0, "ratio_clip_max": 9.0}, {"clip_ratio_low": 1.0, "clip_ratio_high": 9.0}
    for on_policy in (True, False):
        ours = {"objective": "clip_cov", "cov_ratio": 1.0, "clip_cov_min": 0.1, "clip_cov_max": 1.0} | wide[0]
        theirs = {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 1.0} | wide[1]
        found.append(call("clip_cov", ours, on_policy, **theirs))
    for share, weight in ((0.1, 1.0), (0.3, 0.25)):
        ours = {"objective": "kl_cov", "cov_ratio": share, "kl_cov_coef": weight}
        found.append(call("kl_cov", ours, kl_cov_ratio=share, ppo_kl_coef=weight))
    return found


def verl_baselines(given: dict[str, Tensor]) -> list[dict[str, Any]]:
    """Call verl's optimal token baseline, of responses without and with tokens of the environment in between."""
    from verl.trainer.ppo import core_algos

    functions: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
        "mask": core_algos.compute_optimal_token_baseline_advantage,
        "mask_with_gaps": core_algos.compute_multi_turn_optimal_token_baseline_advantage,
    }
    found = []
    for name, function in functions.items():
        mask = given[name]
        last = mask.cumsum(1).argmax(1)
        rewards = torch.zeros_like(mask).scatter(1, last[:, None], given["rewards"][:, None])
        rewards[:, 0] += 0.5 * given["advantages"]  # of a first turn of one token
        index = np.repeat(np.arange(2), SEQUENCES // 2)
        advantages, _ = function(rewards, mask, index, given["old_logprobs"], given["sum_of_squares"])
        case = {"kind": "baseline", "function": function.__name__, "mask": name, "token_rewards": rewards.tolist()}
        found.append(case | {"advantages": advantages.tolist()})
    return found


def trl_losses(given: dict[str, Tensor]) -> list[dict[str, Any]]:
    """Call TRL's losses of trainers, with an object in place of the trainer."""
    from trl.experimental.gmpo import GMPOTrainer
    from trl.trainer.grpo_trainer import GRPOTrainer

    mask = given["mask_with_gaps"]
    columns = {"completion_mask": mask, "advantages": given["advantages"], "old_per_token_logps": given["old_logprobs"]}
    ids = torch.zeros(mask.shape, dtype=torch.long)
    columns |= {"prompt_ids": ids, "prompt_mask": mask, "completion_ids": ids}

    def call(trainer: Any, settings: dict[str, Any], **theirs: Any) -> dict[str, Any]:
        logprobs = given["logprobs"].clone().requires_grad_()
        accelerator = SimpleNamespace(gather=lambda value: value, reduce=lambda value, reduction: value)
        stand_in = SimpleNamespace(
            _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
            accelerator=accelerator,
            model=SimpleNamespace(training=True),
            args=SimpleNamespace(**theirs),
            importance_sampling_level="token",
            loss_type="sapo",
            beta=0.0,
            use_vllm=False,
            aux_loss_enabled=False,
            off_policy_mask_threshold=None,
            top_entropy_quantile=1.0,
            current_gradient_accumulation_steps=1,
            _entropy_bonus_enabled=False,
            _metrics=defaultdict(lambda: defaultdict(list)),
            **theirs,
        )
        loss = trainer._compute_loss(stand_in, None, columns)
        (gradient,) = torch.autograd.grad(loss, logprobs)
        case = {"kind": "loss", "function": f"{trainer.__name__}._compute_loss", "on_policy": False}
        settings = settings | {"token_level_loss": False}
        return case | {"settings": settings, "loss": loss.item(), "gradient": gradient.tolist()}

    found = []
    for pos, neg in ((1.0, 1.05), (3.0, 0.5)):
        ours = {"objective": "sapo", "sapo_temperature_pos": pos, "sapo_temperature_neg": neg}
        found.append(call(GRPOTrainer, ours, sapo_temperature_pos=pos, sapo_temperature_neg=neg))
    for low, high in ((0.1, 0.2), (0.4, 0.4)):
        ours = {"objective": "gmpo", "ratio_clip_min": low, "ratio_clip_max": high}
        found.append(call(GMPOTrainer, ours, epsilon_low=low, epsilon_high=high))
    return found


def main() -> None:
    """Install the peers if they are not there, and write the file."""
    parser = argparse.ArgumentParser(description="Writes the values of the peers' objectives anew.")
    parser.add_argument("--packages", type=Path)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.packages or Path(temporary)
        if arguments.packages is None:
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
            subprocess.run([*pip, *PACKAGES], check=True)
        sys.path.insert(0, str(folder))
        sys.meta_path.append(_StandIns())
        given = make_inputs()
        peers = {
            "verl": {"release": PACKAGES[0], "cases": verl_losses(given) + verl_baselines(given)},
            "TRL": {"release": PACKAGES[1], "cases": trl_losses(given)},
        }
    inputs = {name: values.tolist() for name, values in given.items()}
    text = json.dumps({"inputs": inputs, "peers": peers})
    # A case in a line, so that a change is seen.
    arguments.output.write_text(text.replace('{"kind"', '\n{"kind"').replace('], "', '],\n "') + "\n")


if __name__ == "__main__":
    main()
