"""Tiny random models of every supported architecture, with streams or without."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from specstream.models.config import BaseIdentity, StreamConfig
from specstream.models.stream_model import StreamModel

VOCAB, HIDDEN, LAYERS, HEAD_DIM, KV_HEADS, WINDOW, DRAFT_VOCAB = 97, 32, 2, 8, 2, 8, 30

# Architecture -> what its configuration says beside the common sizes. Every kind of attention that occurs is in one of them.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": True},
    "Qwen2": {"tie_word_embeddings": False},  # biases
    "Qwen3": {"tie_word_embeddings": True},  # norms on queries and keys
    "Gemma3": {"sliding_window": WINDOW, "layer_types": ["full_attention", "sliding_attention"]},
    "Mistral": {"sliding_window": WINDOW},
    "Phi3": {"pad_token_id": 0},  # packed projections
    "SmolLM3": {"pad_token_id": 0, "no_rope_layers": [1, 0]},  # a layer without rotary
    "Olmo2": {},  # norms behind the sublayers
    "Granite": {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2},
    "Gemma2": {"sliding_window": WINDOW, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0},
}


def tiny_base(architecture: str) -> transformers.PreTrainedModel:
    """A random ``*ForCausalLM`` with weights large enough that attention is not flat."""
    torch.manual_seed(1)
    config_name = f"{architecture}TextConfig" if architecture == "Gemma3" else f"{architecture}Config"
    config = getattr(transformers, config_name)(
        **{
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "intermediate_size": 48,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "max_position_embeddings": 512,
            "initializer_range": 0.25,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **ARCHITECTURES[architecture],
        }
    )
    base: transformers.PreTrainedModel = getattr(transformers, f"{architecture}ForCausalLM")(config)
    for name, parameter in base.named_parameters():
        if "norm" in name:  # all ones would hide a norm that is applied to the wrong place
            torch.nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.2)
    return base.eval().requires_grad_(False)


def tiny_model(architecture: str, streams: bool = True, delayed: bool = False) -> StreamModel:
    """The architecture with three streams beside rows of its top layer, all their parameters random; Qwen3's draw from few tokens."""
    base = tiny_base(architecture)
    if not streams:
        return StreamModel(base, None).eval()
    identity = BaseIdentity(f"{architecture}ForCausalLM", "0" * 64, HIDDEN, LAYERS, VOCAB)
    sizes: dict[str, Any] = {"num_streams": 3, "stream_layers": 1, "top_k": 4, "stream_rank": 2, "entry_rank": 2, "prune_rank": 2}
    if delayed:
        sizes |= {"placement": "delayed", "correction_rank": 3, "pair_rank": 2, "prune_rank": 0}
    if architecture == "Qwen3":
        sizes["draft_vocab_size"] = DRAFT_VOCAB
    model = StreamModel(base, StreamConfig(base=identity, mode="lossless", **sizes))
    for parameter in model.stream_parameters().values():
        torch.nn.init.normal_(parameter, std=0.3)
    if model.config is not None and model.config.draft_vocab_size:
        model.draft_vocab.copy_(torch.randperm(VOCAB)[: model.config.draft_vocab_size].sort().values)
    model.freeze()
    return model.eval().requires_grad_(False)
