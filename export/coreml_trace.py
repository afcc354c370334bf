"""From a :class:`StreamModel` to a Core ML package of several functions that share weights and states.

Each function is traced with its static shapes and converted to an ML Program for iOS 18; coremltools then joins them and stores
equal weights once. Nothing of tokenizers or bundles.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specstream.export import contract
from specstream.export.coreml_contract import (
    COMMIT_ROWS,
    COMMIT_START,
    DRAFT,
    FUNCTIONS,
    KEY_CACHE,
    VALUE_CACHE,
    CoreMLContract,
    CoreMLFunction,
    count_slots,
    plan_functions,
)
from specstream.export.coreml_module import DraftModule, RowsModule, fp16_safe, state_shape
from specstream.export.coreml_package import CONTRACT_KEY, WEIGHTS, PackageMetadata, canonicalise
from specstream.models.stream_model import StreamModel

OPSET = 8  # CoreML8: iOS 18, macOS 15


@dataclass(frozen=True)
class PackageInfo:
    """What was written.

    Attributes:
        contract: sizes of functions and states.
        weight_bytes: of the file of weights, a shared one once.
        operators: how many operations of each type, by function.
    """

    contract: CoreMLContract
    weight_bytes: int
    operators: dict[str, dict[str, int]]


def plan_contract(model: StreamModel, capacity: int, names: Iterable[str] = FUNCTIONS) -> CoreMLContract:
    """Functions and sizes of the package of a model.

    Raises:
        UserError: names that make no sense.
    """
    config, text = model.config, model.base.config
    delayed = config is not None and config.placement == "delayed"
    gamma = config.num_streams if config is not None else 0
    functions = plan_functions(names, fused_streams=config is not None and not delayed)
    return CoreMLContract(
        functions=functions,
        draft=DRAFT if delayed else None,
        capacity=capacity,
        slots=count_slots(capacity, max(function.rows for function in functions), gamma),
        commit_width=max(function.rows for function in functions if function.scored == function.rows),
        vocab_size=int(text.vocab_size),
        hidden_size=int(text.hidden_size),
        num_streams=gamma,
        top_k=config.top_k if config is not None else 0,
        pairs=config is not None and config.pair_rank > 0,
    )


def export_package(
    model: StreamModel,
    package: Path,
    sizes: CoreMLContract,
    metadata: PackageMetadata,
    on_function: Callable[[str], None] | None = None,
) -> PackageInfo:
    """Write an ``.mlpackage``, in canonical form.

    Args:
        model: fp32, on the CPU, its fine-tune merged and its streams frozen.
        package: folder to make.
        sizes: from :func:`plan_contract`.
        metadata: what the package says about itself; the contract is added.
        on_function: called with the name of each function before it is converted.

    Raises:
        RuntimeError: a layer's attention did not become the fused operator.
    """
    import coremltools as ct

    operators: dict[str, dict[str, int]] = {}
    descriptor = ct.utils.MultiFunctionDescriptor()
    with tempfile.TemporaryDirectory(prefix=".functions-", dir=package.parent) as folder, fp16_safe(model, sizes.slots), _quiet():
        for name, module, inputs, outputs in _functions(model, sizes):
            if on_function is not None:
                on_function(name)
            part = Path(folder) / f"{name}.mlpackage"
            operators[name] = _convert(name, module, inputs, outputs, state_shape(model, sizes.slots), part)
            descriptor.add_function(str(part), "main", name)
        descriptor.default_function_name = sizes.functions[0].name
        ct.utils.save_multifunction(descriptor, str(package))
    keys = metadata.user_defined | {CONTRACT_KEY: json.dumps(asdict(sizes), sort_keys=True)}
    canonicalise(package, replace(metadata, user_defined=keys))
    return PackageInfo(sizes, (package / WEIGHTS).stat().st_size, operators)


def output_names(sizes: CoreMLContract, function: CoreMLFunction | None) -> list[str]:
    """What a function returns, in order; None is the delayed streams' own."""
    if function is None:
        return [contract.STREAM_IDS, contract.STREAM_LOGPROBS] + [contract.STREAM_PAIRS] * sizes.pairs
    names = [contract.NEXT_IDS, contract.LOGITS]
    names += [contract.STREAM_IDS, contract.STREAM_LOGPROBS] if function.stream_rows else []
    return names + [contract.ENTRY_STATES] * (sizes.draft is not None)


def _functions(model: StreamModel, sizes: CoreMLContract) -> Iterator[tuple[str, RowsModule | DraftModule, dict[str, Tensor], list[str]]]:
    """Name, module, example inputs by name, names of outputs."""
    for function in sizes.functions:
        module = RowsModule(model, function, sizes.slots, sizes.commit_width)
        yield function.name, module, _rows_inputs(function, sizes), output_names(sizes, function)
    if sizes.draft is not None:
        inputs = {
            contract.ENTRY_STATE: torch.zeros(1, sizes.hidden_size),
            contract.ROOT_ID: torch.zeros(1, dtype=torch.int32),
            **_cache_inputs(sizes),
        }
        yield sizes.draft, DraftModule(model, sizes.slots, sizes.commit_width), inputs, output_names(sizes, None)


def _rows_inputs(function: CoreMLFunction, sizes: CoreMLContract) -> dict[str, Tensor]:
    rows = function.rows
    inputs = {
        contract.INPUT_IDS: torch.zeros(1, rows, dtype=torch.int32),
        contract.POSITION_IDS: torch.arange(rows, dtype=torch.int32)[None],
        contract.TREE_MASK: torch.ones(rows, rows).tril(),
        **_cache_inputs(sizes),
    }
    if function.scored < rows:
        inputs[contract.LOGIT_ROWS] = torch.zeros(function.scored, dtype=torch.int32)
    if function.stream_rows:
        inputs[contract.STREAM_ROWS] = torch.zeros(function.stream_rows, dtype=torch.int32)
    return inputs


def _cache_inputs(sizes: CoreMLContract) -> dict[str, Tensor]:
    return {
        contract.PAST_LENGTH: torch.tensor([7], dtype=torch.int32),
        COMMIT_START: torch.tensor([0], dtype=torch.int32),
        COMMIT_ROWS: torch.arange(sizes.commit_width, dtype=torch.int32),
    }


def _convert(
    name: str,
    module: RowsModule | DraftModule,
    inputs: dict[str, Tensor],
    outputs: list[str],
    state: tuple[int, int, int, int],
    package: Path,
) -> dict[str, int]:
    """One function as a package of its own; returns how many operations of each type it has."""
    import coremltools as ct

    def kind(tensor: Tensor) -> Any:
        return np.float16 if tensor.is_floating_point() else np.int32

    with torch.no_grad():
        traced = torch.jit.trace(module.eval(), example_kwarg_inputs=inputs, check_trace=False)
    ids = (contract.NEXT_IDS, contract.STREAM_IDS)
    converted = ct.convert(
        traced,
        convert_to="mlprogram",
        minimum_deployment_target=ct.target.iOS18,
        compute_precision=ct.precision.FLOAT16,
        inputs=[ct.TensorType(name=key, shape=tuple(tensor.shape), dtype=kind(tensor)) for key, tensor in inputs.items()],
        outputs=[ct.TensorType(name=key, dtype=np.int32 if key in ids else np.float16) for key in outputs],
        states=[ct.StateType(ct.TensorType(shape=state, dtype=np.float16), name=key) for key in (KEY_CACHE, VALUE_CACHE)],
        skip_model_load=True,
        package_dir=str(package),  # without it, a copy stays in the system's folder for temporary files until the process ends
    )
    counts = Counter(operation.op_type for operation in converted._mil_program.functions["main"].operations)
    if counts["scaled_dot_product_attention"] != module.fused:
        raise RuntimeError(
            f"{name}: {counts['scaled_dot_product_attention']} fused attentions of {module.fused}; the converter took the others apart"
        )
    return {operator: count for operator, count in counts.most_common() if operator != "const"}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Chatter of tracer and converter that says nothing about our program: progress bars, versions, shapes taken as constants."""
    logger = logging.getLogger("coremltools")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
