"""The network in the form that Core ML gets, run by PyTorch in fp32: padding, commits, windows, norms, rotary tables."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from specstream.export import contract
from specstream.export.coreml_contract import COMMIT_ROWS, COMMIT_START, FUNCTIONS, count_slots, plan_functions
from specstream.export.coreml_module import SafeRmsNorm, TableRotary, fp16_safe, safe_logprobs
from specstream.export.coreml_trace import plan_contract
from specstream.models.attention import DenseCache
from specstream.models.errors import UserError

from ..coreml_tiny import CAPACITY, SMALL, TorchFunction, streams_model
from .tiny import ARCHITECTURES, VOCAB, WINDOW, tiny_base

PARENTS = [-1, 0, 1, 0, 3]


def ancestors(parents: list[int]) -> np.ndarray:
    mask = np.eye(len(parents), dtype=bool)
    for row, parent in enumerate(parents[1:], 1):
        mask[row] |= mask[parent]
    return mask


class Driver:
    """Calls one function of a package by hand, as an app would, and the dense network beside it."""

    def __init__(self, architecture: str, streams: str, name: str) -> None:
        self.model = streams_model(architecture, streams)
        self.sizes = plan_contract(self.model, CAPACITY, SMALL)
        self.function = TorchFunction(self.model, self.sizes, name)
        self.spec = next(f for f in self.sizes.functions if f.name == name)
        self.state = self.function.make_state()
        self.dense = DenseCache(self.model.num_layers)
        self.length = 0
        self.move: tuple[int, list[int]] = (0, [])

    def call(self, ids: list[int], mask: np.ndarray, streams: list[int] | None = None) -> dict[str, np.ndarray]:
        """Padding is filled with rubbish: a row that sees it gives other results."""
        rows, padded = len(ids), self.spec.rows
        rng = np.random.default_rng(len(ids))
        depth = mask.sum(axis=1) - 1
        tree = np.eye(padded, dtype=np.float16)
        tree[:rows, :rows] = mask
        start, moved = self.move
        commit = np.arange(start, start + self.sizes.commit_width, dtype=np.int32)
        commit[: len(moved)] = moved
        places = np.full(padded, self.length, dtype=np.int32)
        places[:rows] = self.length + depth
        inputs: dict[str, np.ndarray] = {
            contract.INPUT_IDS: np.array([ids + rng.integers(0, VOCAB, padded - rows).tolist()], dtype=np.int32),
            contract.POSITION_IDS: places[None],
            contract.TREE_MASK: tree,
            contract.PAST_LENGTH: np.array([self.length], dtype=np.int32),
            COMMIT_START: np.array([start], dtype=np.int32),
            COMMIT_ROWS: commit,
        }
        if self.spec.scored < padded:
            inputs[contract.LOGIT_ROWS] = np.array([rows - 1], dtype=np.int32)
        if self.spec.stream_rows:
            inputs[contract.STREAM_ROWS] = np.array(streams, dtype=np.int32)
        found = self.function.predict(inputs, self.state)
        self.move = (0, [])
        scored = list(range(rows)) if self.spec.scored == padded else [rows - 1]
        with torch.inference_mode():
            step = self.model(
                torch.tensor([ids]),
                torch.from_numpy(self.length + depth)[None],
                torch.from_numpy(mask),
                torch.tensor(scored),
                torch.tensor(streams) if self.spec.stream_rows else None,
                self.dense,
            )
        np.testing.assert_allclose(found[contract.LOGITS][: len(scored)], step.logits, atol=2e-4)
        np.testing.assert_array_equal(found[contract.NEXT_IDS][: len(scored)], step.next_ids)
        if step.stream_logprobs is not None:
            np.testing.assert_allclose(found[contract.STREAM_LOGPROBS], step.stream_logprobs, atol=2e-4)
            np.testing.assert_array_equal(found[contract.STREAM_IDS], step.stream_ids)
        if step.entry is not None:
            np.testing.assert_allclose(found[contract.ENTRY_STATES][: len(scored)], step.entry[scored], atol=2e-4)
        return found

    def commit(self, rows: list[int]) -> None:
        self.dense.commit(rows)
        if rows != list(range(len(rows))):
            self.move = (self.length, [self.length + row for row in rows])
        self.length += len(rows)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_trees_and_commits(architecture: str) -> None:
    """Rows beyond a window, a commit that moves rows, a call behind it; in every architecture."""
    driver = Driver(architecture, "delayed", "tree_8")
    rng = np.random.default_rng(0)
    for _ in range(3):
        driver.call(rng.integers(0, VOCAB, 8).tolist(), np.tri(8, dtype=bool))
        driver.commit(list(range(8)))
    assert driver.length > 2 * WINDOW
    for rows in ([0, 3, 4], [0, 1, 2], [0]):
        driver.call(rng.integers(0, VOCAB, 5).tolist(), ancestors(PARENTS))
        driver.commit(rows)
    driver.call([3], np.ones((1, 1), dtype=bool))


@pytest.mark.parametrize("architecture", ["Llama", "Gemma3"])
def test_streams_beside_rows(architecture: str) -> None:
    driver = Driver(architecture, "fused", "tree_8_streams")
    driver.call([5, 6, 7, 8, 9, 10, 11, 12], np.tri(8, dtype=bool), [7])
    driver.commit(list(range(8)))
    for carrier, rows in ((4, [0, 3, 4]), (0, [0, 1])):
        driver.call([3, 1, 4, 1, 5], ancestors(PARENTS), [carrier])
        driver.commit(rows)


def test_a_prompt_scores_one_row() -> None:
    driver = Driver("Qwen2", "none", "prefill_64")
    found = driver.call(list(range(40)), np.tri(40, dtype=bool))
    assert found[contract.LOGITS].shape == (1, VOCAB)
    driver.commit(list(range(40)))
    driver.call(list(range(7)), np.tri(7, dtype=bool))


def test_a_skipped_commit_changes_the_result() -> None:
    driver = Driver("Llama", "none", "tree_8")
    driver.call([3, 1, 4, 1, 5], ancestors(PARENTS))
    driver.commit([0, 3, 4])
    driver.move = (0, [])
    with pytest.raises(AssertionError):
        driver.call([2], np.ones((1, 1), dtype=bool))


# Arithmetic of 16 bits


def norms(x: torch.Tensor, epsilon: float = 1e-5) -> tuple[torch.Tensor, torch.Tensor]:
    """The safe norm in fp16, and the right answer."""
    weight = torch.linspace(0.5, 2.0, x.shape[-1])
    wide = x.double()
    expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * weight
    return SafeRmsNorm(weight, epsilon).half()(x.half()), expected


@pytest.mark.parametrize("size", [1e-4, 1e-2, 1.0, 100.0, 3e3, 6e4])
def test_norm_in_16_bits(size: float) -> None:
    torch.manual_seed(0)
    x = (torch.rand(4, 576) * 2 - 1) * size
    found, expected = norms(x.half().float())
    torch.testing.assert_close(found.double(), expected, rtol=5e-3, atol=1e-3)


def test_norm_with_one_huge_entry() -> None:
    """Massive activations: the small entries keep their precision."""
    torch.manual_seed(0)
    x = torch.randn(2, 576)
    x[:, 7] = 2e4
    found, expected = norms(x.half().float())
    torch.testing.assert_close(found.double(), expected, rtol=5e-3, atol=1e-5)


def test_a_plain_norm_overflows_there() -> None:
    """What the safe form is for."""
    x = torch.full((1, 576), 300.0).half()
    assert torch.isinf(x.square()).any()
    assert torch.isfinite(norms(x.float())[0]).all()


def test_logprobs_in_16_bits() -> None:
    logits = torch.tensor([[10.0, 30.0, -20.0, 25.0, -60.0]])
    best = logits.topk(3).values
    expected = torch.log_softmax(logits, dim=-1).topk(3).values
    torch.testing.assert_close(safe_logprobs(logits, best), expected)
    torch.testing.assert_close(safe_logprobs(logits.half(), best.half()).float(), expected, atol=0.02, rtol=0)
    assert torch.isinf(torch.exp(logits.half())).any()  # what a plain log-sum-exp would add up


def test_rotary_tables_are_those_of_fp32() -> None:
    base = tiny_base("Llama")
    table = TableRotary(base.model.rotary_emb, 5000)
    places = torch.tensor([[0, 17, 4999]])
    for found, expected in zip(table(torch.zeros(1), places), base.model.rotary_emb(torch.zeros(1), places), strict=True):
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(found.half().float(), expected, atol=1e-3, rtol=0)


def test_the_model_is_as_before() -> None:
    model = streams_model("Gemma3", "delayed")
    before = dict(model.named_modules())
    with contextlib.suppress(KeyError), fp16_safe(model, 64):
        assert any(isinstance(module, SafeRmsNorm) for module in model.modules())
        raise KeyError
    after = dict(model.named_modules())
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)
    assert "stream_logprobs" not in vars(model)


def test_unknown_norms_are_refused() -> None:
    model: Any = streams_model("Llama", "none")

    class OddRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.rand(32)), 1e-5

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    model.decoder.norm = OddRMSNorm()
    with pytest.raises(NotImplementedError, match="OddRMSNorm is not an RMS norm of a known form"), fp16_safe(model, 64):
        pass


# Plan


def test_functions_of_a_package() -> None:
    assert [(f.name, f.rows, f.scored) for f in plan_functions(reversed(FUNCTIONS), fused_streams=False)] == [
        ("decode_1", 1, 1),
        ("tree_8", 8, 8),
        ("tree_16", 16, 16),
        ("prefill_64", 64, 1),
    ]
    fused = plan_functions(["tree_4", "prefill_32"], fused_streams=True)
    assert [(f.name, f.stream_rows) for f in fused] == [("tree_4", 0), ("tree_4_streams", 1), ("prefill_32", 0), ("prefill_32_streams", 1)]


def test_one_function_is_enough() -> None:
    sizes = plan_contract(streams_model("Llama", "none"), 100, ["tree_16"])
    assert (len(sizes.functions), sizes.commit_width, sizes.slots) == (1, 16, 128)


@pytest.mark.parametrize(("capacity", "rows", "gamma"), [(1, 64, 0), (96, 64, 3), (1024, 16, 8), (1000, 1, 0)])
def test_slots_leave_room_for_padding(capacity: int, rows: int, gamma: int) -> None:
    slots = count_slots(capacity, rows, gamma)
    assert slots >= capacity - 1 + rows + gamma
    assert slots % 32 == 0


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "none given; each once, and decode_1 or a tree among them"),
        (["prefill_64"], "prefill_64 given; each once, and decode_1 or a tree among them"),
        (["tree_8", "tree_8"], "tree_8, tree_8 given; each once"),
        (["tree_1"], "'tree_1' given; decode_1, tree_N and prefill_N expected, N from 2 to 512"),
        (["decode_2"], "'decode_2' given"),
        (["tree_8", "draft"], "'draft' given"),
        (["tree_513"], "'tree_513' given"),
        (["tree_8 "], "'tree_8 ' given"),
    ],
)
def test_functions_that_make_no_sense(names: list[str], message: str) -> None:
    with pytest.raises(UserError, match=f"functions: {message}"):
        plan_functions(names, fused_streams=False)
