"""Exported graphs of tiny models, each made once in a test session."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specstream.export import contract
from specstream.export.parity import Graph, compare
from specstream.export.trace import GRAPH_FILE, GraphInfo, export_graph
from specstream.models.attention import DenseCache
from specstream.models.stream_model import StreamModel

from .tiny import tiny_model

CAPACITY = 160


@dataclass
class Exported:
    """A network, its graph, and a session of each that take the same calls."""

    model: StreamModel
    folder: Path
    info: GraphInfo
    graph: Graph = field(init=False)
    dense: DenseCache = field(init=False)

    def __post_init__(self) -> None:
        self.graph = Graph(self.folder / GRAPH_FILE, CAPACITY)
        self.reset()

    def reset(self) -> None:
        """Forget what was committed. The graph's cache keeps its old rows: a call must not see them."""
        self.graph.length = 0
        self.dense = DenseCache(self.model.num_layers)

    def call(
        self,
        ids: list[int],
        depths: list[int] | None = None,
        mask: np.ndarray | None = None,
        *,
        scored: list[int] | None = None,
        streams: list[int] | None = None,
    ) -> dict[str, Any]:
        """Rows of a chunk (a triangle) or of a tree through both; returns the comparison, which has passed."""
        rows, past = len(ids), self.graph.length
        inputs = {
            contract.INPUT_IDS: np.array([ids], dtype=np.int64),
            contract.POSITION_IDS: past + np.array([range(rows) if depths is None else depths], dtype=np.int64),
            contract.TREE_MASK: np.tril(np.ones((rows, rows), dtype=bool)) if mask is None else mask,
            contract.PAST_LENGTH: np.array([past], dtype=np.int32),
            contract.LOGIT_ROWS: np.array(range(rows) if scored is None else scored, dtype=np.int64),
            contract.STREAM_ROWS: np.array(streams or [], dtype=np.int64),
        }
        given = {name: torch.from_numpy(array) for name, array in inputs.items()}
        with torch.inference_mode():
            step = self.model(
                given[contract.INPUT_IDS],
                given[contract.POSITION_IDS],
                given[contract.TREE_MASK],
                given[contract.LOGIT_ROWS],
                given[contract.STREAM_ROWS] if self.model.config is not None else None,
                self.dense,
            )
        expected = {contract.NEXT_IDS: step.next_ids.numpy(), contract.LOGITS: step.logits.numpy()}
        if step.stream_ids is not None and step.stream_logprobs is not None:
            expected |= {contract.STREAM_IDS: step.stream_ids.numpy(), contract.STREAM_LOGPROBS: step.stream_logprobs.numpy()}
        found = self.graph.run(inputs)
        assert {name: array.shape for name, array in found.items()} == {name: array.shape for name, array in expected.items()}
        result = compare(expected, found)
        assert result["ok"], result
        return result

    def commit(self, rows: list[int]) -> None:
        self.graph.commit(rows)
        self.dense.commit(rows)

    def assert_same_cache(self) -> None:
        for layer in range(self.model.num_layers):
            for which, dense in enumerate((self.dense.keys[layer], self.dense.values[layer])):
                assert dense is not None
                np.testing.assert_allclose(self.graph.cache[layer, which, :, :, : self.graph.length], dense.numpy(), atol=1e-4)


Export = Callable[..., Exported]


@pytest.fixture(scope="session")
def export(tmp_path_factory: pytest.TempPathFactory) -> Export:
    """``export(architecture, profile, streams=True)``: the tiny model's graph, fresh of any call's state."""
    made: dict[tuple[Any, ...], Exported] = {}

    def get(architecture: str, profile: contract.Profile, streams: bool = True) -> Exported:
        key = (architecture, profile, streams)
        if key not in made:
            folder = tmp_path_factory.mktemp(f"{architecture}-{profile}")
            model = tiny_model(architecture, streams)
            made[key] = Exported(model, folder, export_graph(model, folder, profile))
        made[key].reset()
        return made[key]

    return get
