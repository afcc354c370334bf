"""A varied set of prompts to train chat streams on (`specstream train --mode lossless --self-distill`).

Most are user turns that the model itself makes up: it is given its chat template up to where a user speaks, and sampled. The rest are
task prompts (questions over a schema, facts about a restaurant) as they are or under another instruction. Prompts that
share eight words in a row with a file given by --exclude are left out, so that nothing a benchmark asks is trained on.

    python benchmarks/chat_prompts.py smollm2-135m chat.jsonl --task sql.train.jsonl --exclude benchmarks/data/mt_bench.jsonl
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import click

from specstream.models.errors import UserError

BATCH = 192
SHARED_WORDS = 8
LONGEST = 120  # tokens of a made-up turn; one that does not end by then is dropped

# Other things to ask of a task prompt's input, so that the same facts call for different texts.
INSTRUCTIONS = (
    "Explain the following to a beginner.",
    "Write a short story about this.",
    "List the most important points in the text below.",
    "Rewrite this as an email to a colleague.",
    "What questions could one ask about the following? Give five.",
    "Turn this into a table.",
    "Write a Python function that has to do with this.",
    "What is missing here? Think step by step.",
)


def word_runs(text: str, length: int = SHARED_WORDS) -> set[tuple[str, ...]]:
    """All runs of ``length`` words, case and punctuation aside; the whole text where it has fewer."""
    words = "".join(c.lower() if c.isalnum() else " " for c in text).split()
    return {tuple(words[i : i + length]) for i in range(max(1, len(words) - length + 1))}


def made_up_turns(model: str, count: int, seed: int) -> list[str]:
    """User turns sampled from the model at temperature 1 from its 64 likeliest tokens (sorting all of them would take longer than the
    model itself); none twice."""
    import torch
    from transformers import GenerationConfig

    from specstream.models.base import load_base, resolve_base

    base, tokenizer = load_base(resolve_base(model), dtype=torch.bfloat16)
    if tokenizer.chat_template is None:
        raise UserError(f"{model}: has no chat template, so it cannot speak as a user")
    marked: Any = tokenizer.tokenizer.apply_chat_template(
        [{"role": "user", "content": "@@@"}], chat_template=tokenizer.chat_template, tokenize=False
    )
    start = tokenizer.tokenizer(marked[: marked.index("@@@")], add_special_tokens=False, return_tensors="pt").input_ids
    base.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=64,
        max_new_tokens=LONGEST,
        eos_token_id=tokenizer.stop_ids,
        pad_token_id=tokenizer.stop_ids[0],
    )
    torch.manual_seed(seed)
    turns: dict[str, None] = {}
    while len(turns) < count:
        given = start.repeat(BATCH, 1)
        out: Any = base.generate(given, attention_mask=torch.ones_like(given))  # type: ignore[operator]
        for line in out[:, start.shape[1] :].tolist():
            ends = [i for i, token in enumerate(line) if token in tokenizer.stop_ids]
            text = tokenizer.tokenizer.decode(line[: ends[0]], skip_special_tokens=True).strip() if ends else ""
            if len(text.split()) >= 3:
                turns[text] = None
        click.echo(f"{min(len(turns), count)} of {count} turns made up", err=True)
    return list(turns)[:count]


def task_prompts(files: tuple[Path, ...], count: int, order: random.Random) -> list[str]:
    """Prompts of task files, half of them under another instruction."""
    found = [json.loads(line)["prompt"] for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    if len(found) < count:
        raise UserError(f"{', '.join(map(str, files))}: {len(found)} prompts, {count} wanted")
    made = []
    for prompt in order.sample(found, count):
        _, _, rest = prompt.partition("\n")
        made.append(f"{order.choice(INSTRUCTIONS)}\n{rest}" if rest and order.random() < 0.5 else prompt)
    return made


@click.command()
@click.argument("model")
@click.argument("out", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--count", type=click.IntRange(min=1), default=1800, show_default=True, help="Prompts in all.")
@click.option("--task", "tasks", type=click.Path(path_type=Path, exists=True), multiple=True, help="File whose prompts make up a quarter.")
@click.option("--exclude", type=click.Path(path_type=Path, exists=True), multiple=True, help="File whose prompts must not occur.")
@click.option("--seed", type=int, default=0, show_default=True)
def main(model: str, out: Path, count: int, tasks: tuple[Path, ...], exclude: tuple[Path, ...], seed: int) -> None:
    """Write OUT, JSON lines with a prompt each, for MODEL."""
    order = random.Random(seed)
    kept_out = set()
    for file in exclude:
        for line in file.read_text(encoding="utf-8").splitlines():
            kept_out |= word_runs(json.loads(line)["prompt"])
    from_tasks = task_prompts(tasks, count // 4, order) if tasks else []
    prompts = from_tasks + made_up_turns(model, count - len(from_tasks), seed)
    allowed = [prompt for prompt in prompts if not word_runs(prompt) & kept_out]
    order.shuffle(allowed)
    out.write_text("".join(json.dumps({"prompt": prompt}, ensure_ascii=False) + "\n" for prompt in allowed), encoding="utf-8")
    click.echo(f"{out}: {len(allowed)} prompts, {len(from_tasks)} of them from tasks; {len(prompts) - len(allowed)} left out")


if __name__ == "__main__":
    main()
