"""Completions that the model itself gives to the prompts of training rows (self-distillation): streams then learn what they will
have to guess. Knows a Hugging Face causal LM and rows of token ids; nothing of streams."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from specstream.models.data import TokenRow

BATCH = 32  # prompts completed together


def distill(
    base: PreTrainedModel,
    rows: Sequence[TokenRow],
    tokens: int,
    file: Path,
    progress: Callable[[int, int], None] | None = None,
) -> list[TokenRow]:
    """The rows' prompts with greedy completions of ``base`` in place of their own.

    Args:
        base: evaluation mode, its fine-tune merged.
        rows: their last token ends an answer.
        tokens: of a completion at most; a longer one is cut, without the token that ends it.
        file: finished batches go there, a JSON line each. Batches found there are not made again, so a killed run goes on.
        progress: called with rows done and rows in all.

    Returns:
        One row for each given, in the same order.
    """
    # Prompts of like lengths together: padding costs what a token costs.
    order = sorted(range(len(rows)), key=lambda i: (rows[i].start, i))
    batches = [order[i : i + BATCH] for i in range(0, len(order), BATCH)]
    done = _read(file)[: len(batches)]
    base.config._attn_implementation = "sdpa"  # a stage before this one may have put ours there
    base.model.config._attn_implementation = "sdpa"
    for number in range(len(done), len(batches)):
        done.append(_complete(base, [rows[i] for i in batches[number]], tokens))
        with file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(done[-1]) + "\n")
        if progress is not None:
            progress(min((number + 1) * BATCH, len(rows)), len(rows))
    completions = {i: ids for batch, found in zip(batches, done, strict=True) for i, ids in zip(batch, found, strict=True)}
    return [TokenRow((*row.ids[: row.start], *completions[i]), row.start) for i, row in enumerate(rows)]


@torch.inference_mode()
def _complete(base: PreTrainedModel, rows: Sequence[TokenRow], tokens: int) -> list[list[int]]:
    """Greedy completions, the token that ends an answer included where one came."""
    width = max(row.start for row in rows)
    stop = rows[0].ids[-1]
    ids = torch.full((len(rows), width), stop, dtype=torch.int64)
    seen = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, width - row.start :] = torch.tensor(row.ids[: row.start])
        seen[i, width - row.start :] = 1
    # In place of the model's own, which may sample or punish repetition.
    base.generation_config = GenerationConfig(do_sample=False, max_new_tokens=tokens, eos_token_id=stop, pad_token_id=stop)
    device = base.device
    generate = base.generate
    out: Tensor = generate(ids.to(device), attention_mask=seen.to(device))  # type: ignore[operator]
    completions = []
    for line in out[:, width:].tolist():
        end = line.index(stop) + 1 if stop in line else len(line)
        completions.append(line[:end])
    return completions


def _read(file: Path) -> list[list[list[int]]]:
    """Batches of an earlier run; a last line that was cut short is taken away."""
    if not file.is_file():
        return []
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    if len(whole) < len(lines):
        file.write_text("".join(whole), encoding="utf-8")
    return [json.loads(line) for line in whole]
