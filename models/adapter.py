"""A stream adapter on disk: one folder with ``adapter.safetensors``, ``config.json`` and a card.

The file has two optional parts: ``main.*`` (LoRA of the fine-tune, named as PEFT names it) and ``streams.*`` (vectors, entry
map, pruning adapter, LoRA of stream rows, draft vocabulary, calibration). Weights are stored in 16 bits. Knows how to put both
into a model and get them out; nothing of training.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from specstream.models.config import BaseIdentity, StreamConfig
from specstream.models.errors import UserError
from specstream.models.lora import LoraLinear, linear_names, unwrap, wrap
from specstream.models.stream_model import StreamModel

WEIGHTS_NAME = "adapter.safetensors"
CONFIG_NAME = "config.json"
PEFT_WEIGHTS_NAME = "adapter_model.safetensors"
PEFT_CONFIG_NAME = "adapter_config.json"
_PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True)
class Adapter:
    """A checked adapter: its config and its tensors by name (``main.*`` and ``streams.*``)."""

    config: StreamConfig
    tensors: dict[str, Tensor]

    @property
    def calibration(self) -> list[float]:
        """Temperature of each stream's distribution, fitted on held-out rows; ones where none was fitted."""
        stored = self.tensors.get("streams.calibration")
        return [1.0] * self.config.num_streams if stored is None else [float(x) for x in stored]

    def count(self, part: str) -> int:
        """Trained parameters of a part: ``main`` or ``streams`` (index lists and calibration are not parameters)."""
        bare = {"streams.draft_vocab", "streams.calibration"}
        return sum(t.numel() for name, t in self.tensors.items() if name.startswith(part + ".") and name not in bare)


def load_adapter(folder: Path) -> Adapter:
    """Read an adapter folder and check every name and shape against its config.

    Raises:
        UserError: not an adapter folder, a future format, or tensors that do not fit the config.
    """
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        if not (folder / name).is_file():
            raise UserError(f"{folder}: not an adapter folder ({name} is missing); give the OUT folder of 'specstream train'")
    config = StreamConfig.from_json((folder / CONFIG_NAME).read_text(encoding="utf-8"), folder / CONFIG_NAME)
    try:
        tensors = load_file(folder / WEIGHTS_NAME)
    except SafetensorError as error:
        raise UserError(f"{folder / WEIGHTS_NAME}: not a whole safetensors file ({error})") from None
    _check(config, tensors, folder)
    return Adapter(config, tensors)


def _check(config: StreamConfig, tensors: dict[str, Tensor], folder: Path) -> None:
    hidden, gamma = config.base.hidden_size, config.num_streams
    expected: dict[str, tuple[int, ...]] = {"streams.stream_vectors": (gamma, hidden)}
    for name, rank in (("entry", config.entry_rank), ("correction", config.correction_rank), ("prune", config.prune_rank)):
        if rank:
            expected |= {f"streams.{name}_down": (rank, hidden), f"streams.{name}_up": (hidden, rank)}
    if config.pair_rank:
        expected |= {f"streams.pair_{name}": (config.pair_rank, hidden) for name in ("parent", "state", "child")}
    if config.draft_vocab_size:
        expected["streams.draft_vocab"] = (config.draft_vocab_size,)
    problems = [f"{name} is missing" for name in expected if name not in tensors]
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        if name in expected:
            if shape != expected[name]:
                problems.append(f"{name} has shape {shape}, expected {expected[name]}")
        elif name == "streams.calibration":
            if shape != (gamma,):
                problems.append(f"{name} has shape {shape}, expected {(gamma,)}")
        elif name.startswith(("main.", "streams.layers.")) and ".lora_" in name:
            rank = config.main_rank if name.startswith("main.") else config.stream_rank
            if rank not in shape:
                problems.append(f"{name} has shape {shape}, expected rank {rank}")
        else:
            problems.append(f"unknown tensor {name}")
    if bool(config.main_rank) != any(name.startswith("main.") for name in tensors):
        problems.append("config and file disagree about a fine-tune (main.*)")
    if problems:
        more = f" and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise UserError(f"{folder}: adapter does not fit its config: {'; '.join(problems[:4])}{more}")


def save_adapter(folder: Path, config: StreamConfig, tensors: dict[str, Tensor]) -> None:
    """Write weights (fp16) and config into an existing folder."""
    stored = {name: (t if name == "streams.draft_vocab" else t.detach().to(torch.float16)).contiguous() for name, t in tensors.items()}
    for name, tensor in stored.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ValueError(f"{name} has values that 16 bits cannot hold")
    save_file(stored, folder / WEIGHTS_NAME, metadata={"format": "pt"})
    (folder / CONFIG_NAME).write_text(config.to_json(), encoding="utf-8")


def check_base(adapter: Adapter, identity: BaseIdentity, where: Path) -> None:
    """Refuse an adapter of other base weights.

    Raises:
        UserError: architecture, sizes or fingerprint differ.
    """
    wanted = adapter.config.base
    if wanted == identity:
        return
    differing = [
        f"{name} {getattr(identity, name)} (the adapter's: {getattr(wanted, name)})"
        for name in ("architecture", "hidden_size", "num_layers", "vocab_size")
        if getattr(identity, name) != getattr(wanted, name)
    ]
    said = "; ".join(differing) or f"same sizes, other weights (fingerprint {identity.fingerprint[:12]}, not {wanted.fingerprint[:12]})"
    raise UserError(f"{where}: this adapter was trained on another base: the model has {said}. Train one with 'specstream train'.")


# Into a model


def merge_main(base: PreTrainedModel, adapter: Adapter) -> int:
    """Add the fine-tune's LoRA to the base weights in place; returns how many layers it touched."""
    config = adapter.config
    if not config.main_rank:
        return 0
    names = sorted({name.removeprefix("main.").rpartition(".lora_")[0] for name in adapter.tensors if name.startswith("main.")})
    wrapped = wrap(base, names, config.main_rank, config.main_alpha, None)
    with torch.no_grad():
        for name, layer in wrapped.items():
            layer.lora_A.copy_(adapter.tensors[f"main.{name}.lora_A.weight"])
            layer.lora_B.copy_(adapter.tensors[f"main.{name}.lora_B.weight"])
    return unwrap(base, merge=True)


def build_stream_model(base: PreTrainedModel, adapter: Adapter | None) -> StreamModel:
    """The stream-fused model of an adapter: fine-tune merged into ``base`` (in place), streams loaded, evaluation mode."""
    if adapter is None:
        return StreamModel(base, None).eval()
    merge_main(base, adapter)
    model = StreamModel(base, adapter.config)
    load_streams(model, adapter.tensors)
    model.freeze()
    return model.eval().requires_grad_(False)


@torch.no_grad()
def load_streams(model: StreamModel, tensors: dict[str, Tensor]) -> None:
    """Copy the ``streams.*`` tensors into a model of the same config."""
    for name, parameter in model.stream_parameters().items():
        parameter.copy_(tensors[f"streams.{name}"])
    if "streams.draft_vocab" in tensors:
        model.draft_vocab.copy_(tensors["streams.draft_vocab"])


def check_begin(wanted: StreamConfig, other: StreamConfig, where: Path) -> None:
    """Refuse streams of other sizes as a beginning: layers, ranks and placement must be equal, and no fewer streams.

    Raises:
        UserError: they are not.
    """
    names = ("placement", "stream_layers", "stream_rank", "entry_rank", "correction_rank", "pair_rank", "prune_rank")
    differing = [
        f"{name} {getattr(other, name)}, not {getattr(wanted, name)}" for name in names if getattr(other, name) != getattr(wanted, name)
    ]
    if other.num_streams < wanted.num_streams:
        differing.append(f"{other.num_streams} streams, {wanted.num_streams} wanted")
    if differing:
        raise UserError(f"{where}: no beginning for these streams ({'; '.join(differing)}); train with its sizes, or from the start")


@torch.no_grad()
def begin_streams(model: StreamModel, other: Adapter) -> None:
    """Start a model's streams from trained ones (see :func:`check_begin`); nothing of their draft vocabulary."""
    for name, parameter in model.stream_parameters().items():
        tensor = other.tensors[f"streams.{name}"]
        parameter.copy_(tensor[: parameter.shape[0]] if name == "stream_vectors" else tensor)


def stream_tensors(model: StreamModel) -> dict[str, Tensor]:
    """The ``streams.*`` tensors of a model."""
    found: dict[str, Tensor] = {f"streams.{name}": p.detach() for name, p in model.stream_parameters().items()}
    if model.config is not None and model.config.draft_vocab_size:
        found["streams.draft_vocab"] = model.draft_vocab.to(torch.int32)
    return found


# The fine-tune


def wrap_main(base: PreTrainedModel, targets: tuple[str, ...], rank: int, alpha: float) -> dict[str, LoraLinear]:
    """LoRA for all rows around the linear layers of the decoder whose last name is in ``targets``."""
    names = [f"model.{name}" for name in linear_names(base.get_submodule("model")) if name.rpartition(".")[2] in targets]
    return wrap(base, names, rank, alpha, None)


def check_begin_main(rank: int, other: StreamConfig, where: Path) -> None:
    """Refuse a fine-tune that one of LoRA ``rank`` cannot go on with.

    Raises:
        UserError: it has another rank or scale, or there is none.
    """
    if not other.main_rank:
        raise UserError(f"{where}: has no fine-tune (main.*) to go on with")
    if other.main_rank != rank:
        raise UserError(f"{where}: its fine-tune has rank {other.main_rank}, not {rank}; give --main-rank {other.main_rank}")
    if other.main_alpha != 2.0 * rank:
        raise UserError(f"{where}: its fine-tune has LoRA scale {other.main_alpha:g} / {rank}; only {2 * rank} / {rank} can go on")


@torch.no_grad()
def begin_main(wrapped: dict[str, LoraLinear], other: Adapter) -> None:
    """Start a fine-tune from a trained one (see :func:`check_begin_main`).

    Raises:
        UserError: that one is of other layers.
    """
    had = {name.removeprefix("main.").rpartition(".lora_")[0] for name in other.tensors if name.startswith("main.")}
    if had != set(wrapped):
        raise UserError(f"the fine-tune to go on with covers other layers than this one would ({sorted(had ^ set(wrapped))[0]})")
    for name, layer in wrapped.items():
        layer.lora_A.copy_(other.tensors[f"main.{name}.lora_A.weight"])
        layer.lora_B.copy_(other.tensors[f"main.{name}.lora_B.weight"])


def main_tensors(wrapped: dict[str, LoraLinear]) -> dict[str, Tensor]:
    """The ``main.*`` tensors of wrapped layers."""
    found = {}
    for name, layer in wrapped.items():
        found[f"main.{name}.lora_A.weight"] = layer.lora_A.detach()
        found[f"main.{name}.lora_B.weight"] = layer.lora_B.detach()
    return found


def default_targets(base: PreTrainedModel) -> tuple[str, ...]:
    """Last names of all linear layers inside the decoder's layers."""
    layers: Any = base.get_submodule("model.layers")
    return tuple(sorted({name.rpartition(".")[2] for name in linear_names(layers)}))


def save_peft(folder: Path, adapter: Adapter) -> None:
    """Write the fine-tune as a PEFT LoRA folder, for use without specstream.

    Raises:
        UserError: the adapter has no fine-tune.
    """
    config = adapter.config
    if not config.main_rank:
        raise UserError("this adapter has no fine-tune (mode lossless): there is no main LoRA to save")
    tensors = {_PEFT_PREFIX + n.removeprefix("main."): t for n, t in adapter.tensors.items() if n.startswith("main.")}
    save_file(tensors, folder / PEFT_WEIGHTS_NAME, metadata={"format": "pt"})
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": config.main_rank,
        "lora_alpha": config.main_alpha,
        "target_modules": list(config.main_targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    (folder / PEFT_CONFIG_NAME).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def load_peft(folder: Path) -> tuple[dict[str, Tensor], int, float, tuple[str, ...]]:
    """Read the LoRA of a PEFT folder as ``main.*`` tensors: (tensors, rank, alpha, target module names).

    Raises:
        UserError: not a PEFT folder, or a kind of adapter other than plain LoRA.
    """
    if not (folder / PEFT_CONFIG_NAME).is_file() or not (folder / PEFT_WEIGHTS_NAME).is_file():
        raise UserError(f"{folder}: not a PEFT LoRA folder ({PEFT_CONFIG_NAME} and {PEFT_WEIGHTS_NAME} are expected)")
    described = json.loads((folder / PEFT_CONFIG_NAME).read_text(encoding="utf-8"))
    odd = [key for key in ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save") if described.get(key)]
    if described.get("peft_type") != "LORA" or described.get("bias", "none") != "none" or odd:
        found = ", ".join([str(described.get("peft_type")), *odd])
        raise UserError(f"{folder}: only plain LoRA without biases can be merged (found {found})")
    tensors = {}
    for name, tensor in load_file(folder / PEFT_WEIGHTS_NAME).items():
        if not name.startswith(_PEFT_PREFIX) or not name.endswith((".lora_A.weight", ".lora_B.weight")):
            raise UserError(f"{folder}: unexpected tensor {name} in a LoRA of linear layers")
        tensors["main." + name.removeprefix(_PEFT_PREFIX)] = tensor
    targets = tuple(sorted({name.rpartition(".lora_")[0].rpartition(".")[2] for name in tensors}))
    return tensors, int(described["r"]), float(described["lora_alpha"]), targets
