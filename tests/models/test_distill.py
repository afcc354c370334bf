"""Answers that the model itself gives: padding beside a prompt changes nothing, an answer ends where it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from specstream.models.base import load_base, resolve_base
from specstream.models.data import TokenRow
from specstream.models.distill import distill
from specstream.toolchain.train_pipeline import encoders


@pytest.mark.slow
def test_the_real_model_answers_each_prompt_as_it_would_alone(smollm2_path: Path, data_folder: Path, tmp_path: Path) -> None:
    base, tokenizer = load_base(resolve_base(str(smollm2_path)))
    encode_prompt, _, stop = encoders(tokenizer)
    texts = [json.loads(line)["prompt"] for line in (data_folder / "sql.jsonl").read_text().splitlines()[:3]]
    prompts = [encode_prompt(text) for text in [*texts, "Say yes."]]
    answered = distill(base, [TokenRow((*ids, stop), len(ids)) for ids in prompts], 12, tmp_path / "answers.jsonl")
    for ids, row in zip(prompts, answered, strict=True):
        alone = list(ids)
        with torch.inference_mode():
            while len(alone) < len(ids) + 12 and (alone[-1] != stop or len(alone) == len(ids)):
                alone.append(int(base(torch.tensor([alone])).logits[0, -1].argmax()))
        assert list(row.ids) == alone
        assert row.start == len(ids)
