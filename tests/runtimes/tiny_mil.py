"""Small Core ML packages for tests: made by coremltools from a builder's program or from a traced module, and saved."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specstream.runtimes.coreml_import import import_coremltools

ct = import_coremltools()
mb = ct.converters.mil.Builder
TYPES = {np.dtype(np.float16): "fp16", np.dtype(np.float32): "fp32", np.dtype(np.int32): "int32"}

VOCAB, WIDTH, HEADS, LAYERS, CAPACITY = 64, 16, 2, 2, 24


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """coremltools and the tracer warn about what these tests do on purpose, and draw progress bars."""
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def save_program(path: Path, body: Callable[..., Any], *inputs: tuple[tuple[int, ...], type[np.generic]], target: Any = None) -> Path:
    """A package with one function of what a builder's program computes.

    Args:
        body: takes as many variables as there are inputs, by names; uses ``mb``.
        inputs: shape and type of each.
    """
    target = target or ct.target.iOS18
    types = ct.converters.mil.mil.types
    specs = [mb.TensorSpec(shape=shape, dtype=types.numpy_type_to_builtin_type(kind)) for shape, kind in inputs]
    with quiet():
        program = mb.program(input_specs=specs, opset_version=target)(body)
        options = {"compute_precision": ct.precision.FLOAT32, "minimum_deployment_target": target, "skip_model_load": True}
        ct.convert(program, convert_to="mlprogram", pass_pipeline=ct.PassPipeline.EMPTY, **options).save(str(path))
    return path


class TinyDecoder(torch.nn.Module):
    """A decoder with a cache in two buffers: rows go in at ``start``; a row sees what the mask says."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.rows = rows
        self.embed = torch.nn.Embedding(VOCAB, WIDTH)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(LAYERS)])
        self.outs = torch.nn.ModuleList([torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
        for name in ("keyCache", "valueCache"):
            self.register_buffer(name, torch.zeros(LAYERS, HEADS, CAPACITY, WIDTH // HEADS))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, start: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """ids int32 [1, rows], mask [1, 1, rows, CAPACITY] (added), start int32 [1] -> logits, argmax, three best ids."""
        states = self.embed(ids)
        begin = start[0]
        for layer, (project, out) in enumerate(zip(self.layers, self.outs, strict=True)):
            normal = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + 1e-5)
            parts = project(normal).reshape(1, self.rows, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
            self.keyCache[layer, :, begin : begin + self.rows] = parts[1, 0]
            self.valueCache[layer, :, begin : begin + self.rows] = parts[2, 0]
            keys, values = self.keyCache[layer : layer + 1], self.valueCache[layer : layer + 1]
            seen = torch.nn.functional.scaled_dot_product_attention(parts[0], keys, values, attn_mask=mask)
            states = states + torch.nn.functional.silu(out(seen.transpose(1, 2).reshape(1, self.rows, WIDTH)))
        logits = torch.nn.functional.linear(states, self.embed.weight)
        return logits, logits.argmax(-1).to(torch.int32), torch.topk(logits, 3)[1].to(torch.int32)

    def step(self, ids: Sequence[int], start: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What PyTorch computes for a causal call; the buffers keep the cache."""
        inputs = decoder_inputs(ids, start, np.float32)
        with torch.no_grad():
            return tuple(value.numpy() for value in self(*(torch.tensor(array) for array in inputs.values())))


def decoder_inputs(ids: Sequence[int], start: int, kind: type[np.generic] = np.float16) -> dict[str, np.ndarray]:
    seen = np.arange(CAPACITY)[None] <= start + np.arange(len(ids))[:, None]
    return {
        "ids": np.array([ids], dtype=np.int32),
        "mask": np.where(seen, 0, -1e4).astype(kind)[None, None],
        "start": np.array([start], dtype=np.int32),
    }


def convert_decoder(rows: int, half: bool = True) -> Any:
    """The decoder as coremltools' model, not saved yet."""
    kind = np.float16 if half else np.float32
    model = TinyDecoder(rows).eval()
    cache = (LAYERS, HEADS, CAPACITY, WIDTH // HEADS)
    example = tuple(torch.tensor(array) for array in decoder_inputs([0] * rows, 0, np.float32).values())
    with quiet():
        return ct.convert(
            torch.jit.trace(model, example, check_trace=False),
            inputs=[
                ct.TensorType("ids", (1, rows), dtype=np.int32),
                ct.TensorType("mask", (1, 1, rows, CAPACITY), dtype=kind),
                ct.TensorType("start", (1,), dtype=np.int32),
            ],
            outputs=[ct.TensorType("logits", dtype=kind), ct.TensorType("next_ids"), ct.TensorType("best_ids")],
            states=[ct.StateType(ct.TensorType(shape=cache, dtype=np.float16), name=name) for name in ("keyCache", "valueCache")],
            minimum_deployment_target=ct.target.iOS18,
            compute_precision=ct.precision.FLOAT16 if half else ct.precision.FLOAT32,
            skip_model_load=True,
        )


def save_decoder(path: Path, rows: int = 4, half: bool = True) -> Path:
    """A package with the decoder as its only function."""
    with quiet():
        convert_decoder(rows, half).save(str(path))
    return path


def join_functions(path: Path, packages: dict[str, Path]) -> Path:
    """One package of several functions, the first being the default one."""
    joined = ct.utils.MultiFunctionDescriptor()
    for name, package in packages.items():
        joined.add_function(str(package), src_function_name="main", target_function_name=name)
    joined.default_function_name = next(iter(packages))
    with quiet():
        ct.utils.save_multifunction(joined, str(path))
    return path
