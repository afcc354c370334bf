"""Kept main passes are those of the batch, and are computed once."""

from __future__ import annotations

import torch

from specstream.models.data import TokenRow, make_batch
from specstream.models.loss import stream_sums
from specstream.models.main_cache import MainCache

from ..export.tiny import tiny_model

ROWS = [TokenRow((3, 9, 4, 10, 11, 2), 3), TokenRow((5, 6, 7, 8, 9, 10, 11, 12, 2), 2), TokenRow((1, 2, 3), 1)]


def test_a_batch_of_kept_passes_gives_the_same_losses() -> None:
    for architecture in ("Llama", "Gemma3"):
        model = tiny_model(architecture, delayed=True)
        batch = make_batch(ROWS)
        cache = MainCache(model, ROWS)
        with torch.no_grad():
            whole = model.main_pass(batch.ids)
            kept = cache.batch([0, 1, 2], batch.ids.shape[1])
            one, two = (stream_sums(model, rows, batch, 0, 16, "model", None) for rows in (whole, kept))
        torch.testing.assert_close(two.losses, one.losses, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(two.pair, one.pair, atol=1e-4, rtol=1e-4)
        assert torch.equal(two.correct, one.correct)


def test_a_row_is_run_once() -> None:
    model = tiny_model("Llama", delayed=True)
    cache = MainCache(model, ROWS)
    first = cache.batch([1, 0], 16)
    held = cache.nbytes
    assert held > 0
    model.main_pass = None  # type: ignore[assignment, method-assign]
    again = cache.batch([0, 1], 32)
    assert cache.nbytes == held
    torch.testing.assert_close(again.entry[0, :16], first.entry[1])
    assert not again.entry[0, 6:].any()
