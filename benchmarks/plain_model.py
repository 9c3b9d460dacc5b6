# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The small model in plain PyTorch, without Megatron-Core, which generation is compared with."""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3MoeConfig

from nemo_rl_moe.generation.interface import SamplingParameters
from nemo_rl_moe.models.megatron.generation.sampling import sample


class PlainModel:
    """Qwen3-MoE in plain PyTorch, from Hugging Face weights, with a key-value cache.

    Args:
        num_slots: Most tokens of a sequence.
    """

    def __init__(self, weights: Mapping[str, Tensor], config: Qwen3MoeConfig, num_slots: int):
        self.config, self.num_slots = config, num_slots
        self.embedding, self.norm = weights["model.embed_tokens.weight"], weights["model.norm.weight"]
        self.head = weights["lm_head.weight"]
        self.layers = [_plain_layer(weights, f"model.layers.{i}.", config) for i in range(config.num_hidden_layers)]
        dim = config.head_dim
        base = float(config.rope_parameters["rope_theta"])
        frequencies = base ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        angles = torch.outer(torch.arange(num_slots).float(), frequencies).repeat(1, 2)
        self.cosines, self.sines = angles.cos(), angles.sin()

    @torch.inference_mode()
    def generate(self, prompts: Tensor, how: SamplingParameters) -> Tensor:
        """Continue prompts `[rows, columns]` of one length."""
        rows = len(prompts)
        shape = (rows, self.config.num_key_value_heads, self.num_slots, self.config.head_dim)
        cache = [(torch.empty(shape), torch.empty(shape)) for _ in self.layers]
        uniforms = torch.rand(how.max_new_tokens, rows, dtype=torch.float64)
        inputs, made, first = prompts, [], 0
        for step in range(how.max_new_tokens):
            logits = self._forward(inputs, cache, first)
            first += inputs.shape[1]
            made.append(sample(logits, uniforms[step], how))
            inputs = made[-1].token_ids[:, None]
        return torch.stack([tokens.token_ids for tokens in made], 1)

    def _forward(self, token_ids: Tensor, cache: Sequence[tuple[Tensor, Tensor]], first: int) -> Tensor:
        """Return the logits of the last column."""
        rows, columns = token_ids.shape
        config, dim, last = self.config, self.config.head_dim, first + columns
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        hidden = F.embedding(token_ids, self.embedding)
        cosines, sines = self.cosines[first:last], self.sines[first:last]
        for layer, (keys, values) in zip(self.layers, cache, strict=True):
            mixed = F.linear(self._norm(hidden, layer["input_norm"]), layer["qkv"])
            mixed = mixed.view(rows, columns, heads + 2 * groups, dim).transpose(1, 2)
            query, key, value = mixed.split([heads, groups, groups], 1)
            query = _rotate(self._norm(query, layer["query_norm"]), cosines, sines)
            keys[:, :, first:last] = _rotate(self._norm(key, layer["key_norm"]), cosines, sines)
            values[:, :, first:last] = value
            attended = F.scaled_dot_product_attention(
                query, keys[:, :, :last], values[:, :, :last], is_causal=columns > 1, enable_gqa=True
            )
            hidden = hidden + F.linear(attended.transpose(1, 2).reshape(rows, columns, -1), layer["output"])
            hidden = hidden + self._experts(self._norm(hidden, layer["expert_norm"]), layer)
        return F.linear(self._norm(hidden[:, -1], self.norm), self.head)

    def _norm(self, inputs: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(inputs, weight.shape, weight, self.config.rms_norm_eps)

    def _experts(self, inputs: Tensor, layer: Mapping[str, Tensor]) -> Tensor:
        tokens = inputs.reshape(-1, inputs.shape[-1])
        top_k = self.config.num_experts_per_tok
        scores, chosen = F.linear(tokens, layer["router"]).topk(top_k, -1)
        experts, order = chosen.reshape(-1).sort()
        source = order // top_k
        rows = tokens[source]
        ends = torch.bincount(experts, minlength=self.config.num_experts).cumsum(0).to(torch.int32)
        gate, up = F.grouped_mm(rows, layer["gate_up"].transpose(1, 2), offs=ends).chunk(2, -1)
        made = F.grouped_mm(F.silu(gate) * up, layer["down"].transpose(1, 2), offs=ends)
        made = made * scores.softmax(-1).reshape(-1)[order, None]
        return torch.zeros_like(tokens).index_add_(0, source, made).view_as(inputs)


def _rotate(inputs: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    left, right = inputs.chunk(2, -1)
    return inputs * cosines + torch.cat([-right, left], -1) * sines


def _plain_layer(weights: Mapping[str, Tensor], prefix: str, config: Qwen3MoeConfig) -> dict[str, Tensor]:
    attention = {name: weights[f"{prefix}self_attn.{name}.weight"] for name in ("q_proj", "k_proj", "v_proj")}
    experts = [f"{prefix}mlp.experts.{index}." for index in range(config.num_experts)]

    def stacked(*names: str) -> Tensor:
        return torch.stack([torch.cat([weights[f"{expert}{name}.weight"] for name in names]) for expert in experts])

    return {
        "input_norm": weights[f"{prefix}input_layernorm.weight"],
        "qkv": torch.cat(list(attention.values())),
        "query_norm": weights[f"{prefix}self_attn.q_norm.weight"],
        "key_norm": weights[f"{prefix}self_attn.k_norm.weight"],
        "output": weights[f"{prefix}self_attn.o_proj.weight"],
        "expert_norm": weights[f"{prefix}post_attention_layernorm.weight"],
        "router": weights[f"{prefix}mlp.gate.weight"],
        "gate_up": stacked("gate_proj", "up_proj"),
        "down": stacked("down_proj"),
    }
