"""Sizes of an architecture, read from its configuration through optimum's normalized configs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from specstream.models.errors import UserError


@dataclass(frozen=True)
class ModelSizes:
    """What a graph and its runtime need to know of a decoder.

    Attributes:
        source: who named the configuration's fields: ``optimum``, or ``config`` where optimum does not know the architecture
            and Hugging Face's usual names are read.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    source: str


def read_sizes(config: PretrainedConfig) -> ModelSizes:
    """Sizes of a text decoder.

    Raises:
        UserError: the configuration lacks some of them, or has numbers that cannot be.
    """
    from optimum.utils import NormalizedConfigManager

    known = config.model_type in NormalizedConfigManager._conf
    # optimum's names where it has the architecture; its table lacks Gemma 2 and 3, which use the usual ones.
    named: Any = NormalizedConfigManager.get_normalized_config_class(config.model_type)(config) if known else config
    found = {
        "num_layers": _read(named, "num_layers" if known else "num_hidden_layers"),
        "hidden_size": _read(named, "hidden_size"),
        "num_heads": _read(named, "num_attention_heads"),
        "vocab_size": _read(named, "vocab_size"),
        "context_length": _read(config, "max_position_embeddings"),
    }
    missing = [name for name, value in found.items() if value is None]
    if missing:
        raise UserError(f"configuration of {config.model_type!r}: {', '.join(missing)} not found (positive integers were expected)")
    sizes = {name: value for name, value in found.items() if value is not None}
    # These two have a meaning when left out: as many key/value heads as heads, and heads that share the hidden size.
    kv_heads = _read(config, "num_key_value_heads") or sizes["num_heads"]
    head_dim = _read(config, "head_dim") or sizes["hidden_size"] // sizes["num_heads"]
    if sizes["num_heads"] % kv_heads:
        raise UserError(f"configuration of {config.model_type!r}: {sizes['num_heads']} heads cannot share {kv_heads} key/value heads")
    return ModelSizes(**sizes, num_kv_heads=kv_heads, head_dim=head_dim, source="optimum" if known else "config")


def _read(named: Any, name: str) -> int | None:
    value = getattr(named, name, None)
    return value if isinstance(value, int) and value > 0 else None
