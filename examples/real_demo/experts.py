# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Experts that the routers choose for the words of the demo, by the kind of word."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from examples.real_demo.data import WORDS, prompt

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class KindsByExpert:
    """Experts that a model chooses at the tokens of words.

    Attributes:
        words: Words of each kind, with equal numbers.
        of_words: Counts of tokens.
    """

    words: Sequence[Sequence[str]]
    of_words: Float[Tensor, "layers kinds words experts"]

    @property
    def shares(self) -> Float[Tensor, "layers kinds experts"]:
        """Return each kind's distribution over the experts."""
        counts = self.of_words.sum(2)
        return counts / counts.sum(-1, keepdim=True)

    @property
    def information(self) -> Float[Tensor, " layers"]:
        """Return the mutual information of a word's kind and its expert, in bits, with equally likely kinds."""
        shares = self.shares
        mean = shares.mean(1, keepdim=True)
        return (torch.special.xlogy(shares, shares) - torch.special.xlogy(shares, mean)).sum(-1).mean(1) / torch.log(
            torch.tensor(2.0)
        )

    def information_by_chance(self, num_draws: int = 50) -> Float[Tensor, " layers"]:
        """Return the mean information with randomly assigned kinds, which is above 0 for few words."""
        generator = torch.Generator().manual_seed(0)
        words, sizes = self.of_words.flatten(1, 2), self.of_words.shape[1:3]
        orders = [torch.randperm(words.shape[1], generator=generator) for _ in range(num_draws)]
        dealt = [KindsByExpert(self.words, words[:, order].unflatten(1, sizes)).information for order in orders]
        return torch.stack(dealt).mean(0)


def kinds_by_expert(model: Path, spelled: Callable[[str], str] = str) -> KindsByExpert:
    """Count the experts that a model of the demo chooses at the tokens of all words, with transformers.

    Args:
        spelled: Changes each word. `str.lower` removes the capital letters that only countries have.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    num_experts = network.config.num_local_experts

    def counts_of(word: str) -> Float[Tensor, "layers experts"]:
        shown = tokenizer.apply_chat_template(prompt(word), tokenize=False, add_generation_prompt=True)
        begin = shown.rindex(word)
        encoded = tokenizer(shown, return_offsets_mapping=True, return_tensors="pt", add_special_tokens=False)
        spans = encoded.pop("offset_mapping")[0]
        is_of_word = (spans[:, 0] >= begin) & (spans[:, 1] <= begin + len(word))
        with torch.inference_mode():
            layers = network(**encoded, output_router_logits=True).router_logits
        chosen = [logits[is_of_word].topk(network.config.num_experts_per_tok).indices.flatten() for logits in layers]
        return torch.stack([torch.bincount(of_layer, minlength=num_experts) for of_layer in chosen]).float()

    words = [[spelled(word) for word in text.split()] for text in WORDS.values()]
    of_words = torch.stack([torch.stack([counts_of(word) for word in of_kind], 1) for of_kind in words], 1)
    return KindsByExpert(words, of_words)


def sharpest_table(found: KindsByExpert, lower_case: KindsByExpert, num_words: int = 4) -> str:
    """Describe the layer with the most information on kinds: shares of each kind, and some words of each expert.

    Args:
        lower_case: Control with the words in lower case, since only countries have capital letters.
    """
    layer = int(found.information.argmax())

    def bits(information: Float[Tensor, " layers"]) -> str:
        return f"{information[layer]:.2f} (mean of the layers: {information.mean():.2f})"

    experts = range(found.of_words.shape[-1])
    heading = "".join(f"{expert:>7}" for expert in experts)
    lines = [
        f"layer {layer}, bits that the experts tell about the kind of a word: {bits(found.information)}",
        f"  control, all words in lower case: {bits(lower_case.information)}",
        f"  control, kinds dealt at random: {bits(found.information_by_chance())}",
        f"  {'expert':9}{heading}",
    ]
    for kind, shares in zip(WORDS, found.shares[layer].tolist(), strict=True):
        cells = "".join(f"{share:7.2f}" for share in shares)
        lines.append(f"  {kind:9}{cells}")
    names = [word for of_kind in found.words for word in of_kind]
    for expert, counts in enumerate(found.of_words[layer].flatten(0, 1).T.tolist()):
        words = [name for name, count in zip(names, counts, strict=True) if count]
        some = words[:: max(1, len(words) // num_words)][:num_words]
        lines.append(
            f"  expert {expert}: {len(words)} words, such as {', '.join(some)}" if words else f"  expert {expert}: -"
        )
    return "\n".join(lines)


def draw_kinds(found: KindsByExpert, lower_case: KindsByExpert) -> "Figure":
    """Plot each kind's share of each expert minus the mean of all kinds (layers x experts)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 10), layout="constrained")
    panels = figure.subplots(2, len(WORDS), sharex=True, sharey=True)
    for row, of_row, spelling in zip(panels, (found, lower_case), ("as written", "in lower case"), strict=True):
        shares = of_row.shares
        for axes, kind, values in zip(row, WORDS, (shares - shares.mean(1, keepdim=True)).unbind(1), strict=True):
            image = axes.imshow(values.numpy(), cmap="RdBu_r", vmin=-0.5, vmax=0.5, aspect="auto")
            axes.set(title=kind)
        row[0].set_ylabel(f"layer, words {spelling}")
    for axes in panels[-1]:
        axes.set_xlabel("expert")
    figure.suptitle("Experts at words of each kind: share less the mean of all kinds. Only countries have capitals.")
    figure.colorbar(image, ax=list(panels.flat))
    return figure
