"""Reads prompts from JSON lines, for every command that takes some. Text only; nothing of tokenizers or models."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from specstream.models.errors import UserError


@dataclass(frozen=True)
class PromptRows:
    """User texts, and the right answer of each where the file has one; an empty one is none."""

    prompts: tuple[str, ...]
    completions: tuple[str | None, ...]


def read_prompt_rows(file: Path, limit: int, option: str = "") -> PromptRows:
    """The fields ``prompt`` and, where there is one, ``completion`` of the first ``limit`` JSON lines; blank lines are skipped.

    Args:
        file: JSON lines; other fields are ignored.
        limit: rows at most.
        option: what the user gave the file to, for the message about a file that cannot be read.

    Raises:
        UserError: no such file, a malformed line (with its number), or no prompts.
    """
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"{option} {file}: {reason}".lstrip()) from error
    prompts: list[str] = []
    completions: list[str | None] = []
    for number, line in enumerate(lines, 1):
        if len(prompts) == limit:
            break
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{file}, line {number}: not JSON ({error.msg} at column {error.colno})") from None
        prompt, completion = (row.get("prompt"), row.get("completion")) if isinstance(row, dict) else (None, None)
        if not isinstance(prompt, str) or not prompt.strip():
            raise UserError(f'{file}, line {number}: an object with a text "prompt" was expected')
        if not isinstance(completion, str | None):
            raise UserError(f'{file}, line {number}: "completion" is {completion!r:.60}, a text was expected')
        prompts.append(prompt)
        completions.append(completion if completion and completion.strip() else None)
    if not prompts:
        raise UserError(f'{file}: no prompts; JSON lines like {{"prompt": "..."}} were expected')
    return PromptRows(tuple(prompts), tuple(completions))
