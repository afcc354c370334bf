"""Whether a written graph computes what the network computes.

The parent, which has the network, writes inputs and PyTorch's outputs of a few calls into one file; a process of its own loads
graph and file and compares, without PyTorch and after the parent has let go of the weights:

    python -m specstream.export.parity model.onnx reference.npz [--streams streams.onnx]

It prints one JSON object and exits with 1 when the graph fails. The calls are those of a session: a prompt, one token, trees.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from specstream.export import contract

if TYPE_CHECKING:
    from specstream.models.stream_model import StreamModel

LIMIT = 1e-3  # of the largest difference; also how close two best logits may be before their order stops mattering

# Of each call, by name: rows, rows that are kept afterwards. Past grows from 0.
_INPUTS = (contract.INPUT_IDS, contract.POSITION_IDS, contract.TREE_MASK, contract.PAST_LENGTH, contract.LOGIT_ROWS, contract.STREAM_ROWS)
_STREAM_OUTPUTS = (contract.STREAM_IDS, contract.STREAM_LOGPROBS, contract.STREAM_PAIRS)
_OUTPUTS = (contract.NEXT_IDS, contract.LOGITS, contract.ENTRY_STATES, *_STREAM_OUTPUTS)

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Call:
    """One call of the graph: its inputs by contract name, the rows to commit afterwards, and, for delayed streams, the token
    that follows the last of them: their own pass runs then."""

    name: str
    inputs: dict[str, Array]
    commit: list[int]
    root_id: int | None = None


class Graph:
    """A graph of contract v1 under ONNX Runtime with a cache of fixed capacity, for checks.

    Args:
        path: ``model.onnx``.
        capacity: slots of the cache.
        streams: graph of the delayed streams' own pass, on the same cache.
    """

    def __init__(self, path: Path, capacity: int, streams: Path | None = None) -> None:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.enable_mem_pattern = False
        options.log_severity_level = 3
        self.session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.draft_session = ort.InferenceSession(streams, options, providers=["CPUExecutionProvider"]) if streams else None
        self.shapes = {value.name: value.shape for value in self.session.get_inputs()}
        self.output_names = [value.name for value in self.session.get_outputs()]
        self.num_layers = sum(name.startswith("past_key_values.") for name in self.shapes) // 2
        _, kv_heads, _, head_dim = self.shapes[contract.past_key(0)]
        self.cache = np.zeros((self.num_layers, 2, 1, kv_heads, capacity, head_dim), dtype=np.float32)
        self.length = 0
        self._value = ort.OrtValue.ortvalue_from_numpy

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """One call, past and present bound to the same memory; returns the outputs that are not cache."""
        return self._run(self.session, inputs)

    def draft(self, entry_state: Array, root_id: int) -> dict[str, Array]:
        """The streams' own pass after a commit: entry_state float [1, H] of the last committed row, and the token after it."""
        inputs = {
            contract.ENTRY_STATE: entry_state,
            contract.ROOT_ID: np.array([root_id], dtype=np.int64),
            contract.PAST_LENGTH: np.array([self.length], dtype=np.int32),
        }
        return self._run(self.draft_session, inputs)

    def _run(self, session: Any, inputs: dict[str, Array]) -> dict[str, Array]:
        binding = session.io_binding()
        known = {value.name for value in session.get_inputs()}
        produced = {value.name for value in session.get_outputs()}
        for name, array in inputs.items():
            if name in known:
                binding.bind_ortvalue_input(name, self._value(array))
        names = [name for name in _OUTPUTS if name in produced]
        for name in names:  # first, since results come in the order of binding
            binding.bind_output(name)
        for layer in range(self.num_layers):
            if contract.past_key(layer) not in known:
                continue
            key, value = self._value(self.cache[layer, 0]), self._value(self.cache[layer, 1])
            binding.bind_ortvalue_input(contract.past_key(layer), key)
            binding.bind_ortvalue_input(contract.past_value(layer), value)
            binding.bind_ortvalue_output(contract.present_key(layer), key)
            binding.bind_ortvalue_output(contract.present_value(layer), value)
        session.run_with_iobinding(binding)
        return {name: value.numpy() for name, value in zip(names, binding.get_outputs(), strict=False)}

    def commit(self, rows: Sequence[int]) -> None:
        kept = self.length + np.asarray(rows, dtype=np.int64)
        self.cache[..., self.length : self.length + len(rows), :] = self.cache[..., kept, :]
        self.length += len(rows)


def make_calls(
    prompt: Sequence[int],
    vocab_size: int,
    streams: bool,
    seed: int = 0,
    max_stream_rows: int | None = None,
    max_tree_rows: int | None = None,
) -> list[Call]:
    """A prompt, one token, a tree with some stream rows, the same tree with all and with none; past grows through them.

    Args:
        prompt: token ids, at least one.
        vocab_size: ids of the trees are drawn below it.
        streams: whether any row carries streams.
        seed: of the trees.
        max_stream_rows: of one call, where the graph has a limit.
        max_tree_rows: likewise; trees have eight rows otherwise.
    """
    rng = np.random.default_rng(seed)
    parents = [-1, 0, 1, 2, 0, 1, 4, 4][:max_tree_rows]  # the primary chain first
    mask = np.eye(len(parents), dtype=bool)
    for row, parent in enumerate(parents[1:], 1):
        mask[row] |= mask[parent]
    depth = mask.sum(axis=1) - 1
    tree = rng.integers(0, vocab_size, len(parents))

    def call(name: str, ids: Sequence[int] | Array, places: Array, see: Array, past: int, carriers: Sequence[int], keep: list[int]) -> Call:
        rows = len(ids)
        scored = np.arange(rows) if rows <= len(parents) else np.array([rows - 1])
        inputs = {
            contract.INPUT_IDS: np.asarray(ids, dtype=np.int64)[None],
            contract.POSITION_IDS: (past + places).astype(np.int64)[None],
            contract.TREE_MASK: see,
            contract.PAST_LENGTH: np.array([past], dtype=np.int32),
            contract.LOGIT_ROWS: scored.astype(np.int64),
            contract.STREAM_ROWS: np.array(carriers[:max_stream_rows] if streams else [], dtype=np.int64),
        }
        return Call(name, inputs, keep)

    def inside(rows: Sequence[int]) -> list[int]:
        return [row for row in rows if row < len(parents)]

    path = np.flatnonzero(mask[min(6, len(parents) - 1)]).tolist()  # of a row off the primary chain
    length = len(prompt)
    triangle = np.tril(np.ones((length, length), dtype=bool))
    one = np.ones((1, 1), dtype=bool)
    past = length + 1
    return [
        call("prompt", prompt, np.arange(length), triangle, 0, [length - 1], list(range(length))),
        call("token", tree[:1], np.zeros(1, dtype=np.int64), one, length, [], [0]),
        call("tree", tree, depth, mask, past, inside([0, 3, 5]), path),
        call("tree_all_streams", tree, depth, mask, past + len(path), list(range(len(parents))), inside([0, 1])),
        call("tree_no_streams", tree, depth, mask, past + len(path) + len(inside([0, 1])), [], []),
    ]


def run_reference(model: StreamModel, calls: Sequence[Call]) -> tuple[list[Call], list[dict[str, Array]]]:
    """PyTorch's outputs of each call, with a dense cache; the calls again, with the tokens that delayed streams began from."""
    import torch

    from specstream.models.attention import DenseCache

    cache = DenseCache(model.num_layers)
    made, results = [], []
    for call in calls:
        given = {name: torch.from_numpy(array) for name, array in call.inputs.items()}
        stream_rows = given[contract.STREAM_ROWS] if model.config is not None else None
        with torch.inference_mode():
            step = model(
                given[contract.INPUT_IDS],
                given[contract.POSITION_IDS],
                given[contract.TREE_MASK],
                given[contract.LOGIT_ROWS],
                stream_rows,
                cache,
            )
        outputs = dict(zip(_OUTPUTS, (step.next_ids, step.logits, step.entry, step.stream_ids, step.stream_logprobs), strict=False))
        if call.commit:
            cache.commit(call.commit)
            if step.entry is not None:
                call = replace(call, root_id=int(step.next_ids[-1]))
                with torch.inference_mode():
                    draft = model.draft(step.entry[call.commit[-1:]], step.next_ids[-1:], torch.tensor([cache.length]), cache)
                outputs |= dict(zip(_STREAM_OUTPUTS, (draft.stream_ids, draft.stream_logprobs, draft.stream_pairs), strict=True))
        made.append(call)
        results.append({name: tensor.numpy() for name, tensor in outputs.items() if tensor is not None})
    return made, results


def write_reference(
    model: StreamModel, prompt: Sequence[int], file: Path, max_stream_rows: int | None = None, max_tree_rows: int | None = None
) -> None:
    """Write calls and PyTorch's outputs into ``file`` (.npz), for :func:`check` in another process; arguments as of :func:`make_calls`."""
    fused = model.config is not None and model.config.placement == "fused"
    vocab_size = model.base.config.vocab_size
    made = make_calls(prompt, vocab_size, fused, max_stream_rows=max_stream_rows, max_tree_rows=max_tree_rows)
    calls, results = run_reference(model, made)
    stored: dict[str, Any] = {"names": np.array([call.name for call in calls])}
    for call, outputs in zip(calls, results, strict=True):
        stored |= {f"{call.name}/in/{name}": array for name, array in call.inputs.items()}
        stored |= {f"{call.name}/out/{name}": array for name, array in outputs.items()}
        stored[f"{call.name}/commit"] = np.array(call.commit, dtype=np.int64)
        if call.root_id is not None:
            stored[f"{call.name}/root_id"] = np.array(call.root_id)
    np.savez(file, **stored)


def read_reference(file: Path) -> tuple[list[Call], list[dict[str, Array]]]:
    """What :func:`write_reference` wrote."""
    with np.load(file, allow_pickle=False) as stored:
        calls, outputs = [], []
        for name in (str(entry) for entry in stored["names"]):
            parts = {
                kind: {key.rpartition("/")[2]: stored[key] for key in stored if key.startswith(f"{name}/{kind}/")} for kind in ("in", "out")
            }
            root = int(stored[f"{name}/root_id"]) if f"{name}/root_id" in stored else None
            calls.append(Call(name, parts["in"], [int(row) for row in stored[f"{name}/commit"]], root))
            outputs.append(parts["out"])
    return calls, outputs


def compare(expected: dict[str, Array], found: dict[str, Array], limit: float = LIMIT, stream_limit: float | None = None) -> dict[str, Any]:
    """Figures of one call.

    Args:
        limit: of every difference, and how close two logits may be for their order not to matter.
        stream_limit: likewise of what streams return, which decides nothing about the text; ``limit`` when left out.

    Returns:
        ``rows``, ``agreeing`` (rows of equal argmax), ``near_ties`` (other argmax where the reference's two best logits are closer
        than the limit), ``max_abs_diff`` (logits), and for streams ``stream_max_abs_diff`` (log-probabilities) and
        ``stream_top1_agreement`` (None without stream rows), ``ok``.
    """
    stream_limit = limit if stream_limit is None else stream_limit
    logits = expected[contract.LOGITS]
    same = expected[contract.NEXT_IDS] == found[contract.NEXT_IDS]
    rows = np.arange(len(logits))
    gap = logits[rows, expected[contract.NEXT_IDS]] - logits[rows, found[contract.NEXT_IDS]]
    near = ~same & (gap < limit)
    result: dict[str, Any] = {
        "rows": len(rows),
        "agreeing": int(same.sum()),
        "near_ties": int(near.sum()),
        "max_abs_diff": _largest(logits, found[contract.LOGITS]),
    }
    ok = bool((same | near).all()) and result["max_abs_diff"] <= limit
    if expected.get(contract.STREAM_IDS) is not None and expected[contract.STREAM_IDS].size:
        wanted = expected[contract.STREAM_LOGPROBS]
        first = expected[contract.STREAM_IDS][..., 0] == found[contract.STREAM_IDS][..., 0]
        tied = wanted[..., 0] - wanted[..., min(1, wanted.shape[-1] - 1)] < stream_limit
        result["stream_max_abs_diff"] = _largest(wanted, found[contract.STREAM_LOGPROBS])
        if contract.STREAM_PAIRS in expected and bool((expected[contract.STREAM_IDS] == found[contract.STREAM_IDS]).all()):
            pairs = _largest(expected[contract.STREAM_PAIRS], found[contract.STREAM_PAIRS])
            result["stream_max_abs_diff"] = max(result["stream_max_abs_diff"], pairs)
        result["stream_top1_agreement"] = float(first.mean())
        ok = ok and bool((first | tied).all()) and result["stream_max_abs_diff"] <= stream_limit
    else:
        result["stream_max_abs_diff"] = result["stream_top1_agreement"] = None
    return {**result, "ok": ok}


def _largest(expected: Array, found: Array) -> float:
    """Largest difference; infinite where either has no number or the shapes differ."""
    if expected.shape != found.shape:
        return float("inf")
    difference = np.abs(expected.astype(np.float64) - found.astype(np.float64))
    return float(np.where(np.isnan(difference), np.inf, difference).max(initial=0.0))


def check(graph: Path, reference: Path, streams: Path | None = None) -> dict[str, Any]:
    """Run the stored calls on a graph, and the streams' own passes on theirs.

    Returns:
        ``top1_agreement``, ``max_abs_diff``, ``near_ties``, ``ok``, ``cases`` (see :func:`compare`, by call).
    """
    calls, outputs = read_reference(reference)
    # Every call fits: rows, and a generous number of stream rows behind them (their number is not known from here).
    needed = max(int(call.inputs[contract.PAST_LENGTH][0]) + call.inputs[contract.INPUT_IDS].shape[1] for call in calls)
    spare = max((out[contract.STREAM_IDS].size for out in outputs if contract.STREAM_IDS in out), default=0)
    runner = Graph(graph, needed + spare, streams)
    cases = {}
    for call, expected in zip(calls, outputs, strict=True):
        found = runner.run(call.inputs)
        runner.commit(call.commit)
        if call.root_id is not None:
            found |= runner.draft(found[contract.ENTRY_STATES][call.commit[-1:]], call.root_id)
        cases[call.name] = compare(expected, found)
    rows = sum(case["rows"] for case in cases.values())
    return {
        "top1_agreement": sum(case["agreeing"] for case in cases.values()) / rows,
        "max_abs_diff": max(case["max_abs_diff"] for case in cases.values()),
        "near_ties": sum(case["near_ties"] for case in cases.values()),
        "ok": all(case["ok"] for case in cases.values()),
        "cases": cases,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m specstream.export.parity", description="Compare a graph with a stored reference.")
    parser.add_argument("graph", type=Path)
    parser.add_argument("reference", type=Path, help=".npz written by write_reference")
    parser.add_argument("--streams", type=Path, help="graph of delayed streams")
    given = parser.parse_args(arguments)
    result = check(given.graph, given.reference, given.streams)
    print(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
