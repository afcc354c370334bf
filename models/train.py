"""Training: the fine-tune, the streams, or both at once; logged, checkpointed, resumable, the same for a seed.

Three recipes over two kinds of stage. ``lossless`` trains streams on a frozen base; ``two-stage`` first fine-tunes the base
with plain LoRA (stage ``main``), merges, then trains streams on the merged model (stage ``streams``), if asked for on completions
that the frozen model itself gives (``distill``); ``shared`` trains one LoRA
for main and stream rows with the joint loss (stage ``joint``). Knows a loaded base and rows of token ids; nothing of model
names, folders of adapters or the command line.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel

from specstream.models.adapter import (
    Adapter,
    begin_main,
    begin_streams,
    default_targets,
    main_tensors,
    merge_main,
    stream_tensors,
    wrap_main,
)
from specstream.models.config import BaseIdentity, Mode, Placement, StreamConfig
from specstream.models.data import Batch, TokenRow, draft_vocabulary, make_batch, plan_batches
from specstream.models.distill import distill
from specstream.models.errors import UserError
from specstream.models.lora import unwrap
from specstream.models.loss import Targets, main_loss_sum, stream_sums
from specstream.models.main_cache import MainCache
from specstream.models.stream_model import StreamModel

Stage = Literal["main", "distill", "streams", "joint"]

VECTOR_SCALE = 0.3  # standard deviation of stream vectors at the start, in units of the entry states' RMS


@dataclass(frozen=True)
class TrainOptions:
    """What a run does. Two runs with equal options, rows and base give the same adapter.

    Attributes:
        mode: see the module.
        steps: optimizer steps of the streams (or joint) stage.
        main_steps: optimizer steps of the fine-tune (two-stage only).
        batch_size: rows a step, over all processes.
        learning_rate: peak rate of the streams' LoRA (and of everything in ``shared``).
        main_learning_rate: peak rate of the fine-tune.
        stream_decay: weight of stream j is ``stream_weight * decay ** (j - 1)``.
        stream_weight: see above; in ``shared`` it is reached over the first half of the run, since large stream losses from
            the first step on wreck a small model's main stream.
        stream_weighting: ``chance``: the weights above times the chance that the streams before were right, row by row (see
            :func:`specstream.models.loss.stream_sums`); ``decay``: the weights alone.
        chance_power: of that chance. A tree has several candidates for a place, so it gets past a stream more often than the chance of
            its first guess says; with 1, far streams begin to learn only when near ones are good.
        targets: ``model``: the model's own distribution; ``reference``: the tokens of the rows (the papers).
        segment: anchors a row whose streams are in memory at once.
        placement, correction_rank, pair_rank: see :class:`StreamConfig`; the ranks count for delayed placement only.
        kept_rows: rows that streams on a frozen base are trained on, chosen by the seed, their main passes kept in memory from
            the first visit on; 0 takes all rows and keeps none.
        self_distill: tokens of a completion at most that the model itself gives to each prompt, in place of the rows' own; 0 takes
            the rows'. Streams only: a fine-tune is trained on the rows as they are.
        precision: of the base's weights and activations while training.
    """

    mode: Mode = "two-stage"
    steps: int = 1500
    main_steps: int = 800
    batch_size: int = 8
    learning_rate: float = 2e-3
    main_learning_rate: float = 1e-3
    num_streams: int = 6
    stream_layers: int = 0  # 0: a third of the layers
    stream_rank: int = 8
    main_rank: int = 8
    entry_rank: int = 0
    prune_rank: int = 0
    placement: Placement = "delayed"
    correction_rank: int = 64
    pair_rank: int = 48
    kept_rows: int = 2048
    self_distill: int = 0
    top_k: int = 8
    draft_vocab_size: int = 8192
    stream_decay: float = 0.85
    stream_weight: float | None = None  # 1.0 on a frozen base, 0.1 in shared mode (the papers' value)
    stream_weighting: Literal["decay", "chance"] = "chance"
    chance_power: float = 0.5
    targets: Targets = "model"
    segment: int = 64
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    seed: int = 0
    checkpoint_every: int = 100
    log_every: int = 10

    def __post_init__(self) -> None:
        positive = ("steps", "batch_size", "segment", "num_streams", "top_k", "checkpoint_every", "log_every")
        problems = [f"{name} must be at least 1" for name in positive if getattr(self, name) < 1]
        if self.mode == "two-stage" and (self.main_steps < 1 or self.main_rank < 1):
            problems.append("two-stage needs main_steps and main_rank of at least 1")
        if self.mode == "shared" and self.main_rank < 1:
            problems.append("shared needs a main_rank of at least 1")
        if self.mode != "shared" and self.stream_rank < 1:
            problems.append("stream_rank must be at least 1")
        if self.placement == "delayed" and self.correction_rank < 1:
            problems.append("delayed placement needs a correction_rank of at least 1")
        problems += [f"{name} must be 0 or more" for name in ("kept_rows", "pair_rank", "self_distill") if getattr(self, name) < 0]
        if self.mode == "shared" and self.self_distill:
            problems.append("self_distill needs a frozen base: lossless or two-stage, not shared")
        above_zero = ("learning_rate", "main_learning_rate", "chance_power")
        problems += [f"{name} must be above 0" for name in above_zero if getattr(self, name) <= 0]
        if problems:
            raise UserError("training options: " + "; ".join(problems))

    def stream_weights(self) -> Tensor:
        """α_1 to α_γ."""
        first = self.stream_weight if self.stream_weight is not None else 0.1 if self.mode == "shared" else 1.0
        return torch.tensor([first * self.stream_decay**j for j in range(self.num_streams)])


@dataclass
class Trained:
    """The result: config and tensors of the adapter, the model itself, and whether this process is the one that writes.

    ``rows`` are those that streams were trained on, ``held_out`` those to calibrate them on: the model's own completions with
    self-distillation, else as given.
    """

    config: StreamConfig
    tensors: dict[str, Tensor]
    model: StreamModel
    primary: bool
    rows: list[TokenRow]
    held_out: list[TokenRow]


Progress = Callable[[Stage, int, int, dict[str, Any]], None]


def cpu_has_bf16() -> bool:
    """Whether this CPU multiplies bf16 in hardware (AVX-512 BF16 or AMX, or Arm's BF16)."""
    capability = torch.backends.cpu.get_cpu_capability()
    if not capability.startswith("AVX512") and "SVE" not in capability:
        return False
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags or " bf16" in flags


def stream_config(options: TrainOptions, base: BaseIdentity, **main: Any) -> StreamConfig:
    """The config of the adapter that a run makes; ``main`` says what is known of the fine-tune (rank, alpha, targets).

    Raises:
        UserError: sizes that do not fit the base.
    """
    return StreamConfig(
        base=base,
        mode=options.mode,
        num_streams=options.num_streams,
        stream_layers=options.stream_layers or max(1, base.num_layers // 3),
        top_k=options.top_k,
        stream_rank=0 if options.mode == "shared" else options.stream_rank,
        stream_alpha=2.0 * options.stream_rank,
        prune_rank=options.prune_rank,
        draft_vocab_size=0 if options.draft_vocab_size >= base.vocab_size else options.draft_vocab_size,
        entry_rank=options.entry_rank,
        placement=options.placement,
        correction_rank=options.correction_rank if options.placement == "delayed" else 0,
        pair_rank=options.pair_rank if options.placement == "delayed" else 0,
        **main,
    )


def training_dtype(options: TrainOptions, accelerator: Accelerator) -> torch.dtype:
    """bf16 where the device has it, else fp32."""
    if options.precision != "auto":
        return torch.bfloat16 if options.precision == "bf16" else torch.float32
    on_gpu = accelerator.device.type != "cpu"
    return torch.bfloat16 if on_gpu or cpu_has_bf16() else torch.float32


def train(
    base: PreTrainedModel,
    identity: BaseIdentity,
    rows: list[TokenRow],
    work: Path,
    options: TrainOptions,
    *,
    start_from: Adapter | None = None,
    start_main: Adapter | None = None,
    start_streams: Adapter | None = None,
    held_out: Sequence[TokenRow] = (),
    progress: Progress | None = None,
    stop_after: int | None = None,
) -> Trained:
    """Train the streams of ``base`` (changed in place: a fine-tune is merged into it).

    Args:
        base: fp32, frozen.
        identity: its fingerprint.
        rows: encoded examples.
        work: folder for checkpoints and ``train.jsonl``; a run found there is resumed exactly where it was.
        options: the run.
        start_from: a fine-tune (``main.*``) to train streams on, instead of stage ``main``.
        start_main: a fine-tune that stage ``main`` goes on with, in place of a fresh LoRA; of the same rank, scale and layers.
        start_streams: trained streams to begin from, in place of random ones; see :func:`begin_streams`.
        held_out: rows that are not trained on, returned with completions as the streams' rows have them.
        progress: called after each step with (stage, step, steps, last logged figures).
        stop_after: stop with KeyboardInterrupt after so many steps in all (tests of resuming).

    Raises:
        UserError: a run with other options is in ``work``.
    """
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    run = _Run(base, identity, rows, list(held_out), work, options, accelerator, progress, stop_after, start_streams, start_main)
    if options.mode == "shared":
        assert start_from is None, "shared mode trains its own fine-tune"
        return run.joint()
    main: dict[str, Tensor] = {}
    targets: tuple[str, ...] = ()
    rank, alpha = 0, 16.0
    if start_from is not None:
        main = {name: t for name, t in start_from.tensors.items() if name.startswith("main.")}
        targets, rank, alpha = start_from.config.main_targets, start_from.config.main_rank, start_from.config.main_alpha
    elif options.mode == "two-stage":
        main, targets = run.fine_tune()
        rank, alpha = options.main_rank, 2.0 * options.main_rank
    config = stream_config(options, identity, main_rank=rank, main_alpha=alpha, main_targets=targets)
    if main:
        merge_main(base, Adapter(config, main))
    if options.self_distill:
        run.distill()
    return run.streams(config, main)


class _Run:
    """What the stages of one run share: rows, batches, checkpoints, the log."""

    def __init__(
        self,
        base: PreTrainedModel,
        identity: BaseIdentity,
        rows: list[TokenRow],
        held_out: list[TokenRow],
        work: Path,
        options: TrainOptions,
        accelerator: Accelerator,
        progress: Progress | None,
        stop_after: int | None,
        start_streams: Adapter | None,
        start_main: Adapter | None,
    ) -> None:
        self.base, self.identity, self.rows, self.held_out, self.options = base, identity, rows, held_out, options
        self.work, self.accelerator, self.progress, self.stop_after = work, accelerator, progress, stop_after
        self.start_streams, self.start_main = start_streams, start_main
        self.lengths = [len(row.ids) for row in rows]
        self.dtype = training_dtype(options, accelerator)
        self.steps_done = 0
        # Gradients to be clipped apart from those that parameters hold, by the names of these; the names are known before the first step.
        self.apart: dict[str, Tensor] = {}
        self.apart_names: list[str] = []
        self._check_work()

    def _check_work(self) -> None:
        self.accelerator.wait_for_everyone()  # the first process may have just taken an old run away
        rows = hashlib.sha256(repr([(row.ids, row.start) for row in self.rows]).encode()).hexdigest()
        known = {"options": dataclasses.asdict(self.options), "fingerprint": self.identity.fingerprint, "rows": rows}
        if self.start_streams is not None:
            known["start_streams"] = _digest(self.start_streams.tensors)
        if self.start_main is not None:
            known["start_main"] = _digest({n: t for n, t in self.start_main.tensors.items() if n.startswith("main.")})
        described = json.dumps(known, indent=2)
        path = self.work / "run.json"
        if path.is_file():
            if path.read_text(encoding="utf-8") != described:
                raise UserError(f"{self.work} holds a run with other options, rows or base; repeat its command, or start anew with --force")
        elif self.accelerator.is_main_process:
            self.work.mkdir(parents=True, exist_ok=True)
            _write_whole(path, described.encode())
        self.accelerator.wait_for_everyone()

    def place(self) -> None:
        """The base on this process's device, in the run's precision."""
        module: nn.Module = self.base
        module.to(device=self.accelerator.device, dtype=self.dtype)

    # Stages

    def fine_tune(self) -> tuple[dict[str, Tensor], tuple[str, ...]]:
        """Stage ``main``: plain LoRA on all linear layers, next-token loss on completions."""
        done = self.work / "main.pt"
        targets = default_targets(self.base)
        if done.is_file():
            self.steps_done += self.options.main_steps
            tensors: dict[str, Tensor] = torch.load(done, weights_only=True)
            return tensors, targets
        torch.manual_seed(self.options.seed)
        self.place()
        wrapped = wrap_main(self.base, targets, self.options.main_rank, 2.0 * self.options.main_rank)
        if self.start_main is not None:
            begin_main(wrapped, self.start_main)
        model = StreamModel(self.base, None)
        parameters = {n: p for n, p in model.named_parameters() if ".lora_" in n}
        for parameter in parameters.values():
            parameter.data = parameter.data.float()

        def step(batch: Batch, part: Batch, _own: list[int]) -> dict[str, Tensor]:
            # Divided by the whole batch's count, so that processes' parts simply add up.
            loss = main_loss_sum(model, model.main_pass(part.ids), part) / float(batch.counts.sum())
            loss.backward()
            return {"main_loss": loss.detach()}

        groups = [{"params": list(parameters.values()), "lr": self.options.main_learning_rate}]
        self.loop("main", self.options.main_steps, parameters, groups, step)
        # What ships has 16 bits: the streams are trained on exactly that.
        tensors = {name: t.to("cpu", torch.float16) for name, t in main_tensors(wrapped).items()}
        unwrap(self.base, merge=False)
        if self.accelerator.is_main_process:
            _save_whole(done, tensors)
        self.accelerator.wait_for_everyone()
        return tensors, targets

    def distill(self) -> None:
        """Rows of the streams' stage become the model's own completions of the chosen rows' prompts."""
        self.place()
        chosen = [self.rows[i] for i in self.pool(self.options.kept_rows)]
        both, tokens, file = chosen + self.held_out, self.options.self_distill, self.work / "distilled.jsonl"

        def count(done: int, total: int) -> None:
            if self.progress is not None:
                self.progress("distill", done, total, {})

        if self.accelerator.is_main_process:
            distill(self.base, both, tokens, file, count)
        self.accelerator.wait_for_everyone()
        completed = distill(self.base, both, tokens, file)  # reads the file, in every process
        self.rows, self.held_out = completed[: len(chosen)], completed[len(chosen) :]
        self.lengths = [len(row.ids) for row in self.rows]

    def streams(self, config: StreamConfig, main: dict[str, Tensor]) -> Trained:
        """Stage ``streams``: the base frozen, main rows without gradients."""
        torch.manual_seed(self.options.seed + 1)
        self.place()
        model = self.prepare(config)
        parameters = model.stream_parameters()
        weights = self.options.stream_weights()
        token_index = self.token_index(model)

        kept = self.options.kept_rows
        cache = MainCache(model, self.rows) if kept else None

        def step(batch: Batch, part: Batch, own: list[int]) -> dict[str, Tensor]:
            if cache is not None:
                rows = cache.batch(own, part.ids.shape[1])
            else:
                with torch.no_grad():
                    rows = model.main_pass(part.ids)
            return self.stream_step(model, rows, batch, part, weights, token_index)

        self.loop("streams", self.options.steps, parameters, self.stream_groups(parameters), step, kept)
        return self.trained(config, main | stream_tensors(model), model)

    def trained(self, config: StreamConfig, tensors: dict[str, Tensor], model: StreamModel) -> Trained:
        return Trained(config, tensors, model, self.accelerator.is_main_process, self.rows, self.held_out)

    def joint(self) -> Trained:
        """Stage ``joint``: one LoRA for main and stream rows, α_j ramped up over the first half.

        Gradients of the main loss and of the stream losses are clipped apart: streams' are many times as large at first, and clipped
        together they would leave next to nothing of the main loss's.
        """
        torch.manual_seed(self.options.seed)
        self.place()
        targets = default_targets(self.base)
        alpha = 2.0 * self.options.main_rank
        config = stream_config(self.options, self.identity, main_rank=self.options.main_rank, main_alpha=alpha, main_targets=targets)
        wrapped = wrap_main(self.base, targets, self.options.main_rank, alpha)
        model = self.prepare(config)
        shared = {f"main.{name}.{leaf}": getattr(layer, leaf) for name, layer in wrapped.items() for leaf in ("lora_A", "lora_B")}
        own = model.stream_parameters()
        weights = self.options.stream_weights()
        token_index = self.token_index(model)

        def step(batch: Batch, part: Batch, _own: list[int]) -> dict[str, Tensor]:
            ramp = min(1.0, 2.0 * self.stage_step / self.options.steps)
            rows = model.main_pass(part.ids)
            leaves = rows.detach()
            figures = self.stream_step(model, leaves, batch, part, weights * ramp, token_index)
            # The streams' gradients reach main rows through their entry states, keys and values.
            pairs = zip([rows.entry, *rows.keys, *rows.values], [leaves.entry, *leaves.keys, *leaves.values], strict=True)
            reached = [(x, leaf.grad) for x, leaf in pairs if leaf.grad is not None]
            if reached:
                torch.autograd.backward([x for x, _ in reached], [g for _, g in reached], retain_graph=True)
            loss = main_loss_sum(model, rows, part) / float(batch.counts.sum())
            found = torch.autograd.grad(loss, list(shared.values()))
            self.apart = dict(zip(self.apart_names, found, strict=True))
            return {"main_loss": loss.detach()} | figures

        self.apart_names = list(shared)
        groups = [*self.stream_groups(own), {"params": list(shared.values()), "lr": self.options.main_learning_rate}]
        self.loop("joint", self.options.steps, own | shared, groups, step)
        tensors = main_tensors(wrapped) | stream_tensors(model)
        return self.trained(config, tensors, model)

    # Pieces of a step

    def prepare(self, config: StreamConfig) -> StreamModel:
        """Put streams into the base: vectors at the size of the entry states, else they are noise beside them and stay alike."""
        model = StreamModel(self.base, config).to(self.accelerator.device)
        if config.draft_vocab_size:
            vocab = draft_vocabulary(self.rows, config.draft_vocab_size, config.base.vocab_size)
            model.draft_vocab.copy_(torch.tensor(vocab))
        batch = make_batch([self.rows[i] for i in self.plan("prepare", 1)[0]])
        with torch.no_grad():
            entry = model.main_pass(batch.ids.to(self.accelerator.device)).entry.float()
            anchors = batch.anchors.to(entry.device).unsqueeze(2).expand(-1, -1, entry.shape[2])
            self.entry_rms = float(entry.gather(1, anchors).pow(2).mean(-1).sqrt().median())
            model.stream_vectors.copy_(torch.randn(model.stream_vectors.shape) * VECTOR_SCALE * self.entry_rms)
        if self.start_streams is not None:
            begin_streams(model, self.start_streams)
        for parameter in model.stream_parameters().values():
            parameter.data = parameter.data.float()
        return model

    def stream_groups(self, parameters: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
        rate = self.options.learning_rate
        # What is added to the entry state must grow to its size.
        large = ("stream_vectors", "correction_up")
        vectors = [p for n, p in parameters.items() if n in large]
        others = [p for n, p in parameters.items() if n not in large]
        return [{"params": others, "lr": rate}, {"params": vectors, "lr": rate * max(1.0, 0.3 * self.entry_rms)}]

    def token_index(self, model: StreamModel) -> Tensor | None:
        if model.config is None or not model.config.draft_vocab_size:
            return None
        index = torch.full((model.config.base.vocab_size,), -1, dtype=torch.int64, device=model.draft_vocab.device)
        index[model.draft_vocab] = torch.arange(model.config.draft_vocab_size, device=index.device)
        return index

    def stream_step(
        self, model: StreamModel, main: Any, batch: Batch, part: Batch, weights: Tensor, token_index: Tensor | None
    ) -> dict[str, Tensor]:
        """Backward of the stream and pruning losses of ``part``, segment by segment."""
        gamma = weights.shape[0]
        # Stream j of a row with n anchors has n - j targets.
        totals = torch.stack([(batch.counts - j - 1).clamp(min=0).sum() for j in range(gamma)]).clamp(min=1).to(part.ids.device)
        anchors_total = float(batch.counts.sum())
        sums = torch.zeros(gamma)
        correct = torch.zeros(gamma)
        prune, pair = torch.zeros(()), torch.zeros(())
        pair_total = float((totals.sum() - totals[0]).clamp(min=1))
        for first in range(0, part.anchors.shape[1], self.options.segment):
            power = self.options.chance_power if self.options.stream_weighting == "chance" else 0.0
            piece = stream_sums(model, main, part, first, first + self.options.segment, self.options.targets, token_index, power)
            loss = (weights.to(totals.device) * piece.weighted / totals).sum() + piece.prune / anchors_total + piece.pair / pair_total
            loss.backward()
            sums += (piece.losses.detach() / totals).cpu()
            correct += (piece.correct / totals).cpu()
            prune = prune + (piece.prune.detach() / anchors_total).cpu()
            pair = pair + (piece.pair.detach() / pair_total).cpu()
        figures = {"stream_loss": sums, "stream_accuracy": correct}
        assert model.config is not None
        if model.config.prune_rank:
            figures["prune_loss"] = prune
        if model.config.pair_rank:
            figures["pair_loss"] = pair
        return figures

    # The loop

    def pool(self, kept: int) -> list[int]:
        """A fixed choice of ``kept`` rows, or all of them for 0."""
        pool = list(range(len(self.rows)))
        return sorted(random.Random(f"{self.options.seed}/kept").sample(pool, kept)) if 0 < kept < len(pool) else pool

    def plan(self, stage: str, epoch: int, kept: int = 0) -> list[list[int]]:
        """Batches of an epoch, over a fixed choice of ``kept`` rows, or over all for 0."""
        pool = self.pool(kept)
        seed = self.options.seed * 1000 + len(stage)
        batches = plan_batches([self.lengths[i] for i in pool], self.options.batch_size, seed, epoch)
        return [[pool[i] for i in batch] for batch in batches]

    def loop(
        self,
        stage: Stage,
        steps: int,
        parameters: dict[str, nn.Parameter],
        groups: list[dict[str, Any]],
        step_function: Callable[[Batch, Batch, list[int]], dict[str, Tensor]],
        kept: int = 0,
    ) -> None:
        """Run a stage from its checkpoint, or from the start, to its last step; ``kept`` as for :meth:`plan`."""
        for parameter in parameters.values():
            parameter.requires_grad_(True)
        optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: _rate(s, steps))
        first, spent = self.restore(stage, parameters, optimizer, schedule)
        self.steps_done += first
        begun = time.monotonic() - spent
        per_epoch = len(self.plan(stage, 0, kept))
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        epoch, order = -1, []
        figures: dict[str, Any] = {}
        for number in range(first, steps):
            self.stage_step = number
            if number // per_epoch != epoch:
                epoch = number // per_epoch
                order = self.plan(stage, epoch, kept)
            chosen = order[number % per_epoch]
            batch = make_batch([self.rows[i] for i in chosen])
            # A process without a row of its own (a batch smaller than the processes) still takes part in the sums.
            own = chosen[rank::world]
            optimizer.zero_grad(set_to_none=False)
            self.apart = {}
            part = _to(make_batch([self.rows[i] for i in own]), self.accelerator.device) if own else None
            got = step_function(batch, part, own) if part is not None else {}
            got = self.share(got, parameters, stage)
            norm = nn.utils.clip_grad_norm_(list(parameters.values()), 1.0)
            if self.apart:
                scale = 1.0 / max(1.0, float(nn.utils.get_total_norm(list(self.apart.values()))))
                for name, gradient in self.apart.items():
                    held = parameters[name].grad
                    parameters[name].grad = gradient * scale if held is None else held + gradient * scale
            optimizer.step()
            schedule.step()
            self.steps_done += 1
            done = number + 1
            if done % self.options.log_every == 0 or done == steps:
                figures = {name: [round(float(x), 4) for x in t] if t.dim() else round(float(t), 4) for name, t in got.items()}
                self.log(
                    {"stage": stage, "step": done, **figures, "grad_norm": round(float(norm), 4), "lr": schedule.get_last_lr()[0]},
                    time.monotonic() - begun,
                )
            if self.progress is not None:
                self.progress(stage, done, steps, figures)
            if done % self.options.checkpoint_every == 0 or done == steps:
                self.save(stage, done, parameters, optimizer, schedule, time.monotonic() - begun)
            if self.stop_after is not None and self.steps_done >= self.stop_after:
                raise KeyboardInterrupt

    def share(self, figures: dict[str, Tensor], parameters: dict[str, nn.Parameter], stage: Stage) -> dict[str, Tensor]:
        """Sum gradients and figures over processes (losses are already divided by the whole batch's counts)."""
        if self.accelerator.num_processes == 1:
            return figures
        gamma = self.options.num_streams
        names = {"main": ["main_loss"], "streams": [], "joint": ["main_loss"]}[stage]
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(names, ())
        if stage != "main":
            shapes |= {"stream_loss": (gamma,), "stream_accuracy": (gamma,)}
            shapes |= {"prune_loss": ()} if self.options.prune_rank else {}
            shapes |= {"pair_loss": ()} if self.options.placement == "delayed" and self.options.pair_rank else {}
        device = self.accelerator.device
        pieces = [figures.get(name, torch.zeros(shape)).to(device).reshape(-1).float() for name, shape in shapes.items()]
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters.values()]
        apart = [self.apart.get(name, torch.zeros_like(parameters[name])) for name in self.apart_names]
        flat = torch.cat([*pieces, *(g.reshape(-1) for g in (*grads, *apart))])
        flat = self.accelerator.reduce(flat, reduction="sum")
        parts = flat.split([*(p.numel() for p in pieces), *(g.numel() for g in (*grads, *apart))])
        for parameter, grad in zip(parameters.values(), parts[len(pieces) :], strict=False):
            parameter.grad = grad.reshape(parameter.shape).clone()
        for name, grad in zip(self.apart_names, parts[len(pieces) + len(grads) :], strict=True):
            self.apart[name] = grad.reshape(parameters[name].shape).clone()
        return {name: part.reshape(shape).cpu() for (name, shape), part in zip(shapes.items(), parts[: len(pieces)], strict=True)}

    def log(self, line: dict[str, Any], seconds: float) -> None:
        if self.accelerator.is_main_process:
            with (self.work / "train.jsonl").open("a", encoding="utf-8") as log:
                log.write(json.dumps(line | {"seconds": round(seconds, 1)}) + "\n")

    # Checkpoints

    def save(self, stage: Stage, step: int, parameters: dict[str, nn.Parameter], optimizer: Any, schedule: Any, seconds: float) -> None:
        if self.accelerator.is_main_process:
            state = {
                "step": step,
                "seconds": seconds,
                "parameters": {name: p.detach().cpu() for name, p in parameters.items()},
                "optimizer": optimizer.state_dict(),
                "schedule": schedule.state_dict(),
            }
            _save_whole(self.work / f"checkpoint-{stage}.pt", state)
        self.accelerator.wait_for_everyone()

    @torch.no_grad()
    def restore(self, stage: Stage, parameters: dict[str, nn.Parameter], optimizer: Any, schedule: Any) -> tuple[int, float]:
        """Load the stage's checkpoint if there is one; returns the steps and seconds already spent. The log is cut back to it."""
        path = self.work / f"checkpoint-{stage}.pt"
        if not path.is_file():
            self.cut_log(stage, 0)
            return 0, 0.0
        state = torch.load(path, weights_only=True, map_location=self.accelerator.device)
        for name, parameter in parameters.items():
            parameter.copy_(state["parameters"][name])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        self.cut_log(stage, state["step"])
        return int(state["step"]), float(state["seconds"])

    def cut_log(self, stage: Stage, step: int) -> None:
        """Forget what a killed run logged of ``stage`` after ``step``: it is done again."""
        path = self.work / "train.jsonl"
        if not self.accelerator.is_main_process or not path.is_file():
            return
        kept = []
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            if not line.endswith("\n"):
                continue  # killed while writing it
            data = json.loads(line)
            if data["stage"] != stage or data["step"] <= step:
                kept.append(line)
        _write_whole(path, "".join(kept).encode())


def _rate(step: int, steps: int) -> float:
    """Linear warm-up over 3 % of the steps, then a cosine down to 2 % of the peak."""
    warm = max(1, round(0.03 * steps))
    if step < warm:
        return (step + 1) / warm
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warm) / max(1, steps - warm))))


def _digest(tensors: dict[str, Tensor]) -> str:
    """Of names and values."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _to(batch: Batch, device: torch.device) -> Batch:
    return Batch(batch.ids.to(device), batch.anchors.to(device), batch.counts.to(device))


def _write_whole(path: Path, data: bytes) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(data)
    partial.replace(path)


def _save_whole(path: Path, state: Any) -> None:
    partial = path.with_name(path.name + ".partial")
    torch.save(state, partial)
    partial.replace(path)
