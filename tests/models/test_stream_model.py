"""The network against itself: calls of the loop, whole sequences and Hugging Face's own forward agree."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specstream.models.attention import DenseCache
from specstream.models.stream_model import StreamModel, fused_rows, shared_prefix

from ..export.tiny import ARCHITECTURES, LAYERS, VOCAB, tiny_base, tiny_model


def tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, (1, count), generator=torch.Generator().manual_seed(seed))


def call(
    model: StreamModel,
    ids: Tensor,
    cache: DenseCache,
    streams: list[int] | None = None,
    mask: Tensor | None = None,
    depth: Tensor | None = None,
):  # type: ignore[no-untyped-def]
    rows = ids.shape[1]
    mask = torch.ones(rows, rows, dtype=torch.bool).tril() if mask is None else mask
    depth = torch.arange(rows) if depth is None else depth
    with torch.no_grad():
        return model(
            ids,
            cache.length + depth[None],
            mask,
            torch.arange(rows),
            None if streams is None else torch.tensor(streams, dtype=torch.int64),
            cache,
        )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_main_rows_equal_the_original_model(architecture: str) -> None:
    """Streams and their LoRA leave main rows exactly as they were, in one call or in chunks."""
    base = tiny_base(architecture)
    base.set_attn_implementation("eager")  # the default one leaves Gemma 2's soft cap out
    ids = tokens(24)
    with torch.no_grad():
        expected = base(ids).logits[0]
    model = tiny_model(architecture)
    cache = DenseCache(LAYERS)
    first = call(model, ids[:, :9], cache, [8])
    cache.commit(list(range(9)))
    rest = call(model, ids[:, 9:], cache, [0, 5, 14])
    torch.testing.assert_close(torch.cat([first.logits, rest.logits]), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("architecture", ["Llama", "Gemma3", "Qwen3"])
def test_lossless_bit_for_bit(architecture: str) -> None:
    """Main logits are the same bits with and without stream rows beside them."""
    model = tiny_model(architecture)
    ids = tokens(16)
    with_streams = call(model, ids, DenseCache(LAYERS), [3, 15]).logits
    without = call(model, ids, DenseCache(LAYERS), []).logits
    torch.testing.assert_close(with_streams, without, atol=1e-5, rtol=1e-5)
    assert torch.equal(with_streams.argmax(-1), without.argmax(-1))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_training_and_decoding_see_the_same_streams(architecture: str) -> None:
    """The pass over whole sequences gives the streams that a call beside the same rows gives."""
    model = tiny_model(architecture)
    assert model.config is not None
    ids = tokens(20)
    anchors = [4, 11, 19]
    cache = DenseCache(LAYERS)
    step = call(model, ids, cache, anchors)
    with torch.no_grad():
        main = model.main_pass(ids)
        states = model.stream_pass(main, torch.tensor([anchors]))
        scores = torch.log_softmax(model.draft_head(states)[0].float(), dim=-1)
    best, index = scores.topk(model.config.top_k, dim=-1)
    torch.testing.assert_close(step.stream_logprobs, best, atol=1e-4, rtol=1e-4)
    if model.config.draft_vocab_size:
        index = model.draft_vocab[index]
    assert torch.equal(step.stream_ids, index)


def test_padding_on_the_right_changes_nothing() -> None:
    model = tiny_model("Llama")
    ids = tokens(12)
    padded = torch.cat([ids, torch.zeros(1, 5, dtype=torch.int64)], dim=1)
    with torch.no_grad():
        torch.testing.assert_close(model.main_pass(padded).final[:, :12], model.main_pass(ids).final, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("architecture", ["Llama", "Mistral", "Gemma2", "Gemma3", "SmolLM3"])
@pytest.mark.parametrize("common", [1, 9, 30])
def test_a_beginning_that_sequences_share_is_run_once(architecture: str, common: int) -> None:
    """Windows and soft caps included, and gradients: those of the sequences one by one."""
    model = tiny_model(architecture)
    ids = tokens(5 * 33).view(5, 33)
    ids[:, :common] = ids[0, :common]
    ids[:, common] = torch.arange(5)
    assert shared_prefix(ids, least=4) == common
    assert shared_prefix(ids) == (common if common * 4 >= 64 else 0)
    assert shared_prefix(ids[:1]) == 0
    parameters = [p.requires_grad_(True) for n, p in model.decoder.named_parameters() if "k_proj" in n and "lora" not in n]
    results = []
    for parts in ([ids], list(ids.split(1))):
        passes = [model.main_pass(part) for part in parts]
        flat = [torch.cat(x) for x in zip(*((p.entry, p.final, *p.keys, *p.values) for p in passes), strict=True)]
        loss = flat[1].pow(2).mean() + flat[2].sin().mean()
        results.append([*flat, *torch.autograd.grad(loss, parameters)])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)


def test_a_tree_equals_its_paths() -> None:
    """Every node's logits are those of its path as a plain sequence, and its streams those of the path's last row."""
    model = tiny_model("Gemma3")
    prompt, tree = tokens(10), tokens(6, seed=3)
    parents = [-1, 0, 1, 0, 3, 3]
    mask = torch.zeros(6, 6, dtype=torch.bool)
    for i, parent in enumerate(parents):
        mask[i, i] = True
        if parent >= 0:
            mask[i] |= mask[parent]
    depth = mask.sum(1) - 1
    cache = DenseCache(LAYERS)
    call(model, prompt, cache)
    cache.commit(list(range(10)))
    got = call(model, tree, cache, list(range(6)), mask, depth)
    for node in range(6):
        path = torch.cat([prompt, tree[:, mask[node]]], dim=1)
        alone = call(model, path, DenseCache(LAYERS), [path.shape[1] - 1])
        torch.testing.assert_close(got.logits[node], alone.logits[-1], atol=1e-4, rtol=1e-4)
        assert got.stream_logprobs is not None
        assert alone.stream_logprobs is not None
        torch.testing.assert_close(got.stream_logprobs[node], alone.stream_logprobs[0], atol=1e-4, rtol=1e-4)


def test_the_paths_streams_differ_where_paths_do() -> None:
    """A check of the check above: another parent gives other streams."""
    model = tiny_model("Gemma3")
    one = call(model, tokens(8, seed=1), DenseCache(LAYERS), [7])
    two = call(model, tokens(8, seed=2), DenseCache(LAYERS), [7])
    assert not torch.allclose(one.stream_logprobs, two.stream_logprobs, atol=1e-2)


@given(st.integers(1, 6), st.integers(1, 4), st.data())
def test_fused_rows_by_definition(rows: int, gamma: int, data: st.DataObject) -> None:
    parents = [-1] + [data.draw(st.integers(0, i - 1)) for i in range(1, rows)]
    carriers = data.draw(st.lists(st.integers(0, rows - 1), max_size=4))
    sees = [{i} for i in range(rows)]
    for i, parent in enumerate(parents):
        if parent >= 0:
            sees[i] |= sees[parent]
    mask = torch.tensor([[j in sees[i] for j in range(rows)] for i in range(rows)])
    depth = mask.sum(1) - 1
    positions, visible = fused_rows(depth + 7, mask, torch.tensor(carriers, dtype=torch.int64), gamma)
    assert positions.shape == (rows + len(carriers) * gamma,)
    for i in range(rows):
        assert {j for j in range(visible.shape[0]) if visible[i, j]} == sees[i]
    for s, carrier in enumerate(carriers):
        for j in range(gamma):
            row = rows + s * gamma + j
            assert positions[row] == depth[carrier] + 7 + j + 1
            own = {rows + s * gamma + i for i in range(j + 1)}
            assert {k for k in range(visible.shape[0]) if visible[row, k]} == sees[carrier] | own


def test_pruning_adapter_by_definition() -> None:
    """z = H(norm(M + U D M)): PMLR v262, section 3.3, as a residual low-rank map."""
    model = tiny_model("Llama")
    state = torch.randn(5, 32)
    with torch.no_grad():
        moved = state + state @ model.prune_down.T @ model.prune_up.T
        expected = model.base.lm_head(model.decoder.norm(moved))
        torch.testing.assert_close(model.prune_logits(state), expected)


def test_commit_and_rewind() -> None:
    model = tiny_model("Llama")
    ids = tokens(9)
    cache = DenseCache(LAYERS)
    call(model, ids[:, :5], cache)
    cache.commit([0, 1, 2, 3, 4])
    call(model, tokens(4, seed=8), cache)
    cache.commit([0, 2])
    cache.rewind(5)
    again = call(model, ids[:, 5:], cache).logits
    expected = call(model, ids, DenseCache(LAYERS)).logits[5:]
    torch.testing.assert_close(again, expected, atol=1e-5, rtol=1e-5)
