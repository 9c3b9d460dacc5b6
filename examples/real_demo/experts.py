# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Which words go to which experts: the routers' choices at the words of the demo, by the kind of thing they name."""

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from examples.real_demo.data import WORDS, prompt

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class KindsByExpert:
    """Counts of a model's choices at the tokens of the words.

    Attributes:
        counts: Of tokens, `[layers, kinds, experts]`.
        words: Of a layer and an expert, the words with a token there.
    """

    def __init__(self, num_layers: int, num_experts: int):
        self.counts: Float[Tensor, "layers kinds experts"] = torch.zeros(num_layers, len(WORDS), num_experts)
        self.words: dict[tuple[int, int], list[str]] = defaultdict(list)

    @property
    def shares(self) -> Float[Tensor, "layers kinds experts"]:
        """Return each kind's distribution over the experts."""
        return self.counts / self.counts.sum(-1, keepdim=True)

    @property
    def information(self) -> Float[Tensor, " layers"]:
        """Return the mutual information of a word's kind and its expert, in bits, with equally likely kinds."""
        shares = self.shares
        mean = shares.mean(1, keepdim=True)
        return (torch.special.xlogy(shares, shares) - torch.special.xlogy(shares, mean)).sum(-1).mean(1) / torch.log(
            torch.tensor(2.0)
        )


def kinds_by_expert(model: Path) -> KindsByExpert:
    """Count the experts that a model of the demo takes at the tokens of all words, by transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    found = KindsByExpert(network.config.num_hidden_layers, network.config.num_local_experts)
    for kind, text in enumerate(WORDS.values()):
        for word in text.split():
            shown = tokenizer.apply_chat_template(prompt(word), tokenize=False, add_generation_prompt=True)
            begin = shown.rindex(word)
            encoded = tokenizer(shown, return_offsets_mapping=True, return_tensors="pt", add_special_tokens=False)
            spans = encoded.pop("offset_mapping")[0]
            is_of_word = (spans[:, 0] >= begin) & (spans[:, 1] <= begin + len(word))
            with torch.inference_mode():
                layers = network(**encoded, output_router_logits=True).router_logits
            for layer, logits in enumerate(layers):
                chosen = logits[is_of_word].topk(network.config.num_experts_per_tok).indices.flatten()
                found.counts[layer, kind] += torch.bincount(chosen, minlength=found.counts.shape[-1])
                for expert in chosen.unique().tolist():
                    found.words[layer, expert].append(word)
    return found


def sharpest_table(found: KindsByExpert, num_words: int = 4) -> str:
    """Return the layer whose experts tell most about the kinds: each kind's shares, and some words of each expert."""
    layer = int(found.information.argmax())
    bits, mean = found.information[layer], found.information.mean()
    experts = range(found.counts.shape[-1])
    heading = "".join(f"{expert:>7}" for expert in experts)
    lines = [
        f"layer {layer}, whose experts tell {bits:.2f} bits about the kind of a word (mean of the layers: {mean:.2f})",
        f"  {'expert':9}{heading}",
    ]
    for kind, shares in zip(WORDS, found.shares[layer].tolist(), strict=True):
        cells = "".join(f"{share:7.2f}" for share in shares)
        lines.append(f"  {kind:9}{cells}")
    for expert in experts:
        words = found.words[layer, expert]
        some = words[:: max(1, len(words) // num_words)][:num_words]
        lines.append(
            f"  expert {expert}: {len(words)} words, such as {', '.join(some)}" if words else f"  expert {expert}: -"
        )
    return "\n".join(lines)


def draw_kinds(found: KindsByExpert) -> "Figure":
    """Draw, for each kind, its share of each expert over that of all kinds together (layers x experts)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6), layout="constrained")
    shares = found.shares
    excess = shares - shares.mean(1, keepdim=True)
    panels = figure.subplots(1, len(WORDS), sharey=True)
    for axes, kind, values in zip(panels, WORDS, excess.unbind(1), strict=True):
        image = axes.imshow(values.numpy(), cmap="RdBu_r", vmin=-0.5, vmax=0.5, aspect="auto")
        axes.set(title=kind, xlabel="expert")
    panels[0].set_ylabel("layer")
    figure.suptitle("Experts of words by the kind of thing that they name: share less the mean of all kinds")
    figure.colorbar(image, ax=list(panels))
    return figure
