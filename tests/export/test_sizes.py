"""Sizes come from optimum's table where it has the architecture, from the usual names elsewhere, and are never guessed."""

from __future__ import annotations

import pytest
import transformers

from specstream.export.sizes import ModelSizes, read_sizes
from specstream.models.errors import UserError


@pytest.mark.parametrize(
    ("config", "source"),
    [
        (transformers.LlamaConfig, "optimum"),
        (transformers.Qwen3Config, "optimum"),
        (transformers.Gemma2Config, "config"),
        (transformers.Gemma3TextConfig, "config"),
    ],
)
def test_sizes(config: type[transformers.PretrainedConfig], source: str) -> None:
    made = config(
        num_hidden_layers=3,
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=99,
        max_position_embeddings=64,
    )
    assert read_sizes(made) == ModelSizes(
        num_layers=3, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=99, context_length=64, source=source
    )


def test_sizes_that_are_left_out() -> None:
    sizes = read_sizes(transformers.MistralConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=None, head_dim=None))
    assert (sizes.num_kv_heads, sizes.head_dim) == (4, 8)


def test_missing_sizes_are_named() -> None:
    class OddConfig(transformers.PretrainedConfig):
        model_type = "odd"

    with pytest.raises(UserError, match="num_layers, hidden_size, num_heads, vocab_size, context_length not found"):
        read_sizes(OddConfig())


def test_heads_that_do_not_divide() -> None:
    with pytest.raises(UserError, match="4 heads cannot share 3 key/value heads"):
        read_sizes(transformers.LlamaConfig(num_attention_heads=4, num_key_value_heads=3))
