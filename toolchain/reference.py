"""transformers' own greedy decoding of the same weights: the independent text that ``verify`` compares with."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from transformers import GenerationConfig

from specstream.models.adapter import check_base, load_adapter, merge_main
from specstream.models.base import identity, load_base, load_config, resolve_base
from specstream.models.errors import UserError


class TransformersReference:
    """Greedy ``generate`` of transformers, with its own attention and cache, in fp32.

    Args:
        model: as on the command line.
        adapter: folder of an adapter whose fine-tune (``main.*``) is merged; its streams play no part.
        fingerprint: that the base weights must have.
        stop_ids: tokens that end a text.

    Raises:
        UserError: what :func:`load_base` refuses, or other weights than those of the bundle.
    """

    def __init__(self, model: str, adapter: Path | None, fingerprint: str, stop_ids: Collection[int]) -> None:
        source = resolve_base(model)
        architectures = load_config(source).architectures
        assert architectures
        self._model, tokenizer = load_base(source)
        base = identity(self._model, architectures[0])
        if base.fingerprint != fingerprint:
            raise UserError(f"{model}: not the weights of this bundle (fingerprint {base.fingerprint[:12]}, expected {fingerprint[:12]})")
        if adapter is not None:
            loaded = load_adapter(adapter)
            check_base(loaded, base, adapter)
            merge_main(self._model, loaded)
        self._stop_ids = sorted(stop_ids)
        self._pad_id = tokenizer.tokenizer.pad_token_id if tokenizer.tokenizer.pad_token_id is not None else self._stop_ids[0]

    def __call__(self, prompt_ids: Sequence[int], max_new_tokens: int) -> list[int]:
        """Token ids after the prompt, the stop token included."""
        config = GenerationConfig(
            do_sample=False, num_beams=1, max_new_tokens=max_new_tokens, eos_token_id=self._stop_ids, pad_token_id=self._pad_id
        )
        ids = torch.tensor([list(prompt_ids)])
        with torch.inference_mode():
            # The model's own generation settings (temperature, penalties) would make it another decoding.
            out = self._model.generate(  # type: ignore[operator]
                input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config, use_model_defaults=False
            )
        return [int(token) for token in out[0, ids.shape[1] :]]
