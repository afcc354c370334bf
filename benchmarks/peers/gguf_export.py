"""Writes a Hugging Face folder of the Llama architecture as a GGUF file for llama.cpp, in one of its simple types.

    python benchmarks/peers/gguf_export.py FOLDER OUT.gguf --type q4_0

Every matrix gets the type, the embedding too (tied heads are read from it); norms stay fp32. For timing token ids: the tokenizer in
the file is the vocabulary without what is needed to cut text into tokens as the original does. Runs in specstream's own
environment (the export extra).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import click
import numpy as np

from specstream.models.errors import UserError
from specstream.toolchain.cli import run

# Name of a layer's tensor in a Hugging Face checkpoint -> in GGUF.
LAYER_TENSORS: Final = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TYPES: Final = ("q4_0", "q4_1", "q8_0", "f32")


def interleave(matrix: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection for llama.cpp's rotary embedding.

    Hugging Face rotates dimension i with i + d/2, llama.cpp's Llama graph 2i with 2i + 1: row (half, i) of a head becomes row
    (i, half).

    Args:
        matrix: [heads · d, n].
    """
    rows, columns = matrix.shape
    return matrix.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--type", "kind", type=click.Choice(TYPES), default="q4_0", show_default=True)
def export(folder: Path, out: Path, kind: str) -> None:
    """Write the model in FOLDER to the GGUF file OUT."""
    import gguf
    from safetensors.numpy import load_file

    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config["architectures"] != ["LlamaForCausalLM"]:
        raise UserError(f"{folder}: {config['architectures']}; this writes LlamaForCausalLM only")
    if config.get("rope_scaling") or config.get("attention_bias") or config.get("mlp_bias"):
        raise UserError(f"{folder}: scaled rotary positions or biases, which this does not write")
    tensors = {name: array for file in sorted(folder.glob("*.safetensors")) for name, array in load_file(file).items()}
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]

    out.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(str(out), "llama")
    writer.add_name(folder.name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config.get("head_dim") or config["hidden_size"] // heads)
    writer.add_vocab_size(config["vocab_size"])
    _add_tokenizer(writer, gguf, folder, config)
    for name, array in _named(tensors, config["num_hidden_layers"], heads, kv_heads):
        if array.ndim == 1 or kind == "f32":
            writer.add_tensor(name, array)
        else:
            quantization = gguf.GGMLQuantizationType[kind.upper()]
            writer.add_tensor(name, gguf.quants.quantize(array, quantization), raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    click.echo(f"{out}: {out.stat().st_size / 1e6:.0f} MB")


def _named(tensors: dict[str, np.ndarray], layers: int, heads: int, kv_heads: int) -> list[tuple[str, np.ndarray]]:
    """GGUF names and fp32 values, in the order of the file; every tensor of the checkpoint once."""
    names = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}
    for i in range(layers):
        names |= {f"model.layers.{i}.{theirs}.weight": f"blk.{i}.{ours}.weight" for theirs, ours in LAYER_TENSORS.items()}
    unknown = sorted(set(tensors) - set(names))
    if unknown:
        raise UserError(f"{len(unknown)} tensors that a Llama does not have, {unknown[0]} among them")
    missing = sorted(set(names) - set(tensors) - {"lm_head.weight"})
    if missing:
        raise UserError(f"{len(missing)} tensors missing, {missing[0]} among them")
    found = []
    for name, target in names.items():
        if name in tensors:
            array = tensors[name].astype(np.float32)
            if target.endswith(("attn_q.weight", "attn_k.weight")):
                array = interleave(array, heads if "attn_q" in target else kv_heads)
            found.append((target, array))
    return found


def _add_tokenizer(writer: Any, gguf: Any, folder: Path, config: dict[str, Any]) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    if tokenizer["model"]["type"] != "BPE":
        raise UserError(f"{folder}: a tokenizer of type {tokenizer['model']['type']}; this writes BPE only")
    size = config["vocab_size"]
    tokens, kinds = [f"[unused{i}]" for i in range(size)], [int(gguf.TokenType.UNUSED)] * size
    for text, token in tokenizer["model"]["vocab"].items():
        tokens[token], kinds[token] = text, int(gguf.TokenType.NORMAL)
    for added in tokenizer["added_tokens"]:
        kind = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
        tokens[added["id"]], kinds[added["id"]] = added["content"], int(kind)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]])
    eos = config["eos_token_id"]
    writer.add_eos_token_id(eos[0] if isinstance(eos, list) else eos)
    writer.add_add_bos_token(False)


if __name__ == "__main__":
    import sys

    sys.exit(run(sys.argv[1:], export, "gguf_export.py"))
