# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""MTP layers, computed from the published equations around transformers' own decoder layers.

transformers reads no such layer. As in DeepSeek-V3's and Qwen3-Next's serving code:

    x[i] = eh_proj([enorm(embedding(t[i + 1])), hnorm(h[i])])       with h behind the model's last norm
    p(t[i + 2]) = softmax(output_layer(norm(decoder_layer(x)[i])))
"""

import copy
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from nemo_rl_moe.distributed.batch import TokenBatch
from tests.support.family_reference import read_model, save_model
from tests.support.mtp_layers import FILE

_ENDS = {
    "deepseek": {
        "enorm": "enorm",
        "hnorm": "hnorm",
        "eh_proj": "eh_proj",
        "norm": "shared_head.norm",
    },
    "qwen": {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "norm": "norm"},
}
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")


class ModelWithMtpLayer(nn.Module):
    """A folder's model of transformers with its MTP layer, in float64.

    Args:
        weight: Factor of the MTP layer's loss.
        is_detached: This loss trains the MTP layer alone.
    """

    def __init__(self, folder: Path, weight: float, *, is_detached: bool):
        super().__init__()
        self.model = read_model(folder)
        self.model.config._experts_implementation = "eager"  # grouped products take no float64
        self.config, self.weight, self.is_detached = self.model.config, weight, is_detached
        tensors = load_file(folder / FILE)
        self.is_qwen = "mtp.fc.weight" in tensors
        decoder = self.model.model
        attends = [index for index, layer in enumerate(decoder.layers) if hasattr(layer, "self_attn")]
        self.layer = copy.deepcopy(decoder.layers[attends[-1]])
        self.enorm, self.hnorm, self.norm = (copy.deepcopy(decoder.norm) for _ in range(3))
        size = self.config.hidden_size
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        for ours, theirs in self._ends().items():
            getattr(self, ours).weight.data = tensors[f"{theirs}.weight"].float()
        self._read_layer({name: tensors[self._prefix + name] for name in self._names(tensors)})
        self.double()

    def losses(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """Return the loss that is trained, and the MTP layer's."""
        ids, mask = batch.input_ids, batch.token_mask
        hidden = self.model.model(ids, use_cache=False).last_hidden_state
        main = _sum_of_targets(self.model.lm_head(hidden[:, :-1]), ids[:, 1:], mask[:, 1:])
        embedding, head = self.model.model.embed_tokens.weight, self.model.lm_head.weight
        if self.is_detached:
            hidden, embedding, head = hidden.detach(), embedding.detach(), head.detach()
        found = self._layer_of(hidden[:, :-1], torch.nn.functional.embedding(ids[:, 1:], embedding))
        further = _sum_of_targets(torch.nn.functional.linear(found[:, :-1], head), ids[:, 2:], mask[:, 2:])
        count = mask[:, 1:].sum()
        return (main + self.weight * further) / count, further / count

    def _layer_of(self, hidden: Tensor, embeddings: Tensor) -> Tensor:
        joined = self.eh_proj(torch.cat([self.enorm(embeddings), self.hnorm(hidden)], -1))
        length = joined.shape[1]
        positions = torch.arange(length)[None]
        mask = torch.full((length, length), float("-inf"), dtype=joined.dtype).triu(1)[None, None]
        found = self.layer(
            joined,
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=self.model.model.rotary_emb(joined, positions),
        )
        return self.norm(found[0] if isinstance(found, tuple) else found)  # type: ignore[no-any-return]

    @property
    def _prefix(self) -> str:
        return "mtp.layers.0." if self.is_qwen else f"model.layers.{self.config.num_hidden_layers}."

    def _ends(self) -> dict[str, str]:
        prefix = "mtp." if self.is_qwen else self._prefix
        return {ours: prefix + theirs for ours, theirs in _ENDS["qwen" if self.is_qwen else "deepseek"].items()}

    def _names(self, tensors: Mapping[str, Tensor]) -> list[str]:
        ends = {f"{end}.weight" for end in self._ends().values()} | set(self._copies())
        return [name.removeprefix(self._prefix) for name in tensors if name not in ends]

    def _copies(self) -> dict[str, Tensor]:
        if self.is_qwen:
            return {}
        return {
            f"{self._prefix}embed_tokens.weight": self.model.model.embed_tokens.weight,
            f"{self._prefix}shared_head.head.weight": self.model.lm_head.weight,
        }

    def _read_layer(self, tensors: dict[str, Tensor]) -> None:
        experts = {
            (match[2], int(match[1])): tensors.pop(name) for name in [*tensors] if (match := _EXPERT.match(name))
        }
        if experts:
            count = 1 + max(index for _, index in experts)
            gate, up, down = (
                torch.stack([experts[part, index] for index in range(count)]) for part in ("gate", "up", "down")
            )
            tensors |= {"mlp.experts.gate_up_proj": torch.cat([gate, up], 1), "mlp.experts.down_proj": down}
        self.layer.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})

    def save(self, folder: Path, names: Mapping[str, Any]) -> None:
        """Write all weights in float32, the MTP layer's under the published names."""
        save_model(self.model.float(), folder)
        state = {self._prefix + name: tensor.float() for name, tensor in self.layer.state_dict().items()}
        stacked = f"{self._prefix}mlp.experts."
        if f"{stacked}gate_up_proj" in state and f"{stacked}gate_up_proj" not in names:
            gate_up, down = state.pop(f"{stacked}gate_up_proj"), state.pop(f"{stacked}down_proj")
            for index, (both, last) in enumerate(zip(gate_up, down, strict=True)):
                for part, tensor in zip(("gate", "up", "down"), (*both.chunk(2), last), strict=True):
                    state[f"{stacked}{index}.{part}_proj.weight"] = tensor
        state |= {
            f"{theirs}.weight": getattr(self, ours).weight.detach().float() for ours, theirs in self._ends().items()
        }
        state |= {name: tensor.detach().float() for name, tensor in self._copies().items()}
        assert state.keys() == names.keys()
        save_file({name: tensor.contiguous().clone() for name, tensor in state.items()}, folder / FILE)


def _sum_of_targets(logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    logprobs = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    return -logprobs[mask].sum()
