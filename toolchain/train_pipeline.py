"""Joins the stages of training: base weights and rows in, an adapter folder out.

A run works in ``OUT.partial`` (checkpoints and log) and renames it at the end, so OUT is whole or absent; the same command
given again goes on where a killed run stopped.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specstream.models.errors import UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from specstream.models.base import TokenizerBundle
    from specstream.models.config import StreamConfig
    from specstream.models.data import TokenRow
    from specstream.models.train import TrainOptions
    from specstream.runtimes.ngrams import NgramTable

REPORT_SCHEMA = 1
WORK_FILES = (
    "run.json",
    "main.pt",
    "checkpoint-main.pt",
    "checkpoint-streams.pt",
    "checkpoint-joint.pt",
    "distilled.jsonl",
)
PROMPT_TAIL = 4  # tokens of the prompt before an output, as far back as an n-gram's context reaches
FREE_BYTES = 256 << 20  # checkpoints of a run hold three copies of the trained parameters

Progress = Callable[[str, int, int, dict[str, Any]], None]


def work_folder(out: Path) -> Path:
    """Where a run that will end in ``out`` keeps its checkpoints."""
    return out.with_name(out.name + ".partial")


def train_adapter(
    model: str,
    data: Path,
    out: Path,
    options: TrainOptions,
    *,
    start_from: Path | None = None,
    main_from: Path | None = None,
    streams_from: Path | None = None,
    valid: Path | None = None,
    max_length: int = 1024,
    data_license: str | None = None,
    force: bool = False,
    command: str = "",
    progress: Progress | None = None,
    say: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Train an adapter for ``model`` on the rows of ``data`` and write it to ``out``.

    Args:
        model: hub id, folder, ``.gguf`` file or short name.
        data: JSON lines with ``prompt`` and ``completion``.
        out: folder to make.
        options: the run.
        start_from: adapter folder whose fine-tune (``main.*``) the streams are trained on, or a PEFT LoRA folder.
        main_from: adapter folder (or PEFT LoRA folder) whose fine-tune is trained further before the streams.
        streams_from: adapter folder whose streams training begins with.
        valid: held-out rows on which each stream's temperature is fitted; without it every 50th training row is held out.
        max_length: longer rows are left out.
        data_license: written on the card.
        force: replace ``out`` and forget an unfinished run of it.
        command: written on the card.
        progress: called after each step.
        say: gets lines of information for the user.

    Returns:
        The report (see docs): counts, seconds, losses, stream accuracies.

    Raises:
        UserError: bad input; nothing is left behind.
    """
    if say is None or os.environ.get("RANK", "0") != "0":
        say = _silent
    work = work_folder(out)
    if out.exists() and not force:
        raise UserError(f"{out} exists; choose another folder or give --force to replace it")
    if not out.parent.is_dir():
        raise UserError(f"{out.parent}: no such folder to make {out.name} in")
    primary = os.environ.get("RANK", "0") == "0"
    if force and primary and work.exists():
        shutil.rmtree(work)
    free = shutil.disk_usage(out.parent).free
    if free < FREE_BYTES:
        raise UserError(f"{out.parent}: {free >> 20} MB free, a run needs {FREE_BYTES >> 20} MB for its checkpoints")

    if options.mode == "shared" and start_from is not None:
        raise UserError("--main trains streams on a finished fine-tune: use --mode lossless or two-stage, not shared")
    if main_from is not None and (options.mode != "two-stage" or start_from is not None):
        raise UserError("--main-from trains a fine-tune further: use --mode two-stage, without --main")

    from specstream.models.data import encode_rows, read_rows

    # Nobody looks at completions when the model itself answers and there is no fine-tune to learn them.
    needed = options.mode != "lossless" or not options.self_distill
    rows = read_rows(data, needed)
    held = read_rows(valid, needed) if valid is not None else []

    from specstream.models.base import identity, load_base, load_config, load_tokenizer, resolve_base

    source = resolve_base(model)
    config = load_config(source)
    sizes = check_sizes(options, config)
    begin = None
    if streams_from is not None:
        from specstream.models.adapter import check_begin, load_adapter

        begin = load_adapter(streams_from)
        check_begin(sizes, begin.config, streams_from)
    tokenizer = load_tokenizer(source)
    limit = min(max_length, int(config.max_position_embeddings) - options.self_distill)
    encode_prompt, encode_text, stop_id = encoders(tokenizer)
    encoded, too_long = encode_rows(rows, encode_prompt, encode_text, stop_id, limit)
    if too_long:
        say(f"{too_long} of {len(rows)} rows are longer than {limit} tokens and left out")
    if held:
        held_rows, _ = encode_rows(held, encode_prompt, encode_text, stop_id, limit)
    else:
        held_rows, encoded = encoded[::50], [row for i, row in enumerate(encoded) if i % 50] or encoded
    if (work / "run.json").exists():
        say(f"going on with the unfinished run in {work}")

    from specstream.models.adapter import check_base, check_begin_main
    from specstream.models.calibrate import fit_temperatures, held_out_drafts
    from specstream.models.train import train
    from specstream.toolchain.draft_quality import BUDGETS, text_loss, tokens_per_call

    base, _ = load_base(source)
    assert config.architectures
    known = identity(base, config.architectures[0])
    start = load_start(start_from, known) if start_from is not None else None
    earlier = load_start(main_from, known) if main_from is not None else None
    if earlier is not None:
        assert main_from is not None
        check_begin_main(options.main_rank, earlier.config, main_from)
    if begin is not None:
        assert streams_from is not None
        check_base(begin, known, streams_from)
    trained = train(
        base,
        known,
        encoded,
        work,
        options,
        start_from=start,
        start_main=earlier,
        start_streams=begin,
        held_out=held_rows[:200],
        progress=progress if primary else None,
    )
    if not trained.primary:
        return {}  # another process of this run writes the result
    drafts = held_out_drafts(trained.model, trained.held_out)
    held_out = fit_temperatures(drafts)
    per_call = {b: tokens_per_call(trained.held_out, drafts, held_out.temperatures.tolist(), b) for b in BUDGETS}
    trained.tensors["streams.calibration"] = held_out.temperatures

    from specstream.models.adapter import Adapter, save_adapter
    from specstream.models.plot import plot_log
    from specstream.runtimes.ngrams import NGRAM_FILE

    save_adapter(work, trained.config, trained.tensors)
    # Of a fine-tune's task, the rows' own completions are outputs like those to come; a bare base may answer quite otherwise.
    of_task = needed or (start_from is not None and all(row.completion for row in rows))
    outputs = (encoded if of_task else []) + (trained.rows if options.self_distill else [])
    task_ngrams(outputs, known.vocab_size).save(work / NGRAM_FILE)
    plot_log(work / "train.jsonl", work / "train.png")
    adapter = Adapter(trained.config, trained.tensors)
    report: dict[str, Any] = {
        "schema": REPORT_SCHEMA,
        "model": source.name,
        "mode": options.mode,
        "rows": len(encoded),
        "rows_too_long": too_long,
        "data_sha256": hashlib.sha256(data.read_bytes()).hexdigest(),
        "seconds": seconds_spent(work / "train.jsonl"),
        "main_parameters": adapter.count("main"),
        "stream_parameters": adapter.count("streams"),
        "held_out_rows": len(trained.held_out),
        "held_out_agreement": [round(x, 4) for x in held_out.agreement],
        "held_out_loss": [round(x, 4) for x in held_out.loss],
        "held_out_main_loss": text_loss(drafts) if not options.self_distill else None,
        "held_out_tokens_per_call": {str(budget): round(x, 3) for budget, x in per_call.items()},
        "temperatures": [round(float(x), 4) for x in held_out.temperatures],
        "main_from": main_from.name if main_from is not None else None,
        "streams_from": streams_from.name if streams_from is not None else None,
        "options": dataclasses.asdict(options),
        "command": command,
    }
    (work / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    (work / "README.md").write_text(card(report, data.name, data_license), encoding="utf-8")
    for name in WORK_FILES:
        (work / name).unlink(missing_ok=True)
    if out.exists():
        shutil.rmtree(out)
    work.rename(out)
    return report


def task_ngrams(rows: Sequence[TokenRow], vocab_size: int) -> NgramTable:
    """The table of the task's outputs that ships with its adapter; the prompt's last tokens help to predict the first ones."""
    from specstream.runtimes.ngrams import build_ngrams

    return build_ngrams((row.ids[max(row.start - PROMPT_TAIL, 0) :] for row in rows), vocab_size)


def seconds_spent(log: Path) -> float:
    """Time of all stages, resumed parts included: the log's clock goes on where a checkpoint was."""
    stages: dict[str, float] = {}
    for line in log.read_text(encoding="utf-8").splitlines():
        data = json.loads(line)
        stages[data["stage"]] = data["seconds"]
    return round(sum(stages.values()), 1)


def check_sizes(options: TrainOptions, config: PretrainedConfig) -> StreamConfig:
    """Refuse streams that do not fit the model, before its weights load.

    Returns:
        Sizes of the streams; nothing of the base's identity.

    Raises:
        UserError: as :class:`StreamConfig`.
    """
    from specstream.models.config import BaseIdentity
    from specstream.models.train import stream_config

    return stream_config(options, BaseIdentity("", "", config.hidden_size, config.num_hidden_layers, config.vocab_size), main_rank=0)


def _silent(_line: str) -> None:
    """Where nobody listens, and in all processes of a run but the first."""


def encoders(bundle: TokenizerBundle) -> tuple[Callable[[str], list[int]], Callable[[str], list[int]], int]:
    """How a prompt and a completion become tokens, and the token that ends an answer.

    The prompt goes through the chat template, as in the runtime; a model without one gets the bare text.
    """
    tokenizer: Any = bundle.tokenizer

    def plain(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    if bundle.chat_template is None:
        start = [] if bundle.bos_id is None else [bundle.bos_id]
        return (lambda prompt: start + plain(prompt)), plain, bundle.stop_ids[0]

    def chat(prompt: str) -> list[int]:
        message = [{"role": "user", "content": prompt}]
        return list(tokenizer.apply_chat_template(message, chat_template=bundle.chat_template, add_generation_prompt=True))

    turn = tokenizer.apply_chat_template(
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], chat_template=bundle.chat_template
    )
    ends = [token for token in turn if token in bundle.stop_ids]
    return chat, plain, ends[-1] if ends else bundle.stop_ids[0]


def load_start(folder: Path, known: Any) -> Any:
    """The fine-tune to begin from, out of an adapter folder of ours or a PEFT LoRA folder."""
    from specstream.models.adapter import PEFT_CONFIG_NAME, Adapter, check_base, load_adapter, load_peft
    from specstream.models.config import StreamConfig

    if (folder / PEFT_CONFIG_NAME).is_file():
        tensors, rank, alpha, targets = load_peft(folder)
        config = StreamConfig(base=known, mode="two-stage", stream_layers=1, main_rank=rank, main_alpha=alpha, main_targets=targets)
        return Adapter(config, tensors)
    adapter = load_adapter(folder)
    check_base(adapter, known, folder)
    if not adapter.config.main_rank:
        raise UserError(f"{folder}: has no fine-tune (main.*) to begin from")
    return adapter


def card(report: dict[str, Any], data_name: str, data_license: str | None) -> str:
    """The adapter's README."""
    o = report["options"]
    agreement = " ".join(f"{x:.2f}" for x in report["held_out_agreement"])
    loss = " ".join(f"{x:.2f}" for x in report["held_out_loss"])
    per_call = ", ".join(f"{x:.2f} at {budget}" for budget, x in report["held_out_tokens_per_call"].items())
    steps = f"{o['main_steps']} of the fine-tune, then {o['steps']} of the streams" if o["mode"] == "two-stage" else str(o["steps"])
    if report["main_from"]:
        steps += f"; the fine-tune began with that of {report['main_from']}"
    own = f" (prompts only: the model's own answers of up to {o['self_distill']} tokens)" if o["self_distill"] else ""
    return f"""# Stream adapter for {report["model"]}

| | |
| --- | --- |
| base | {report["model"]} |
| mode | {report["mode"]} |
| data | {data_name}, {report["rows"]} rows{own}{f", {data_license}" if data_license else ""} |
| steps | {steps}, batch {o["batch_size"]} |
| streams began | {f"with those of {report['streams_from']}" if report["streams_from"] else "at random"} |
| parameters | fine-tune {report["main_parameters"]:,}, streams {report["stream_parameters"]:,} |
| held-out agreement of streams 1 to {o["num_streams"]} with the model's own choice | {agreement} |
| held-out loss of each stream | {loss} |
| tokens per call on held-out rows, streams alone | {per_call} rows a call |
| time | {report["seconds"] / 60:.0f} minutes |

Trained with

    {report["command"]}

`train.jsonl` and `train.png` show the losses, `report.json` every option.
"""
