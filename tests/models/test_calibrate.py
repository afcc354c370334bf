"""Temperatures are fitted for the formula that devices use."""

from __future__ import annotations

import numpy as np
import torch

from specstream.models.calibrate import _GRID, _outcome_losses
from specstream.runtimes.drafters import calibrate


def test_the_fitted_likelihood_is_the_devices() -> None:
    torch.manual_seed(0)
    logprobs = torch.log_softmax(torch.randn(5, 20), dim=-1).topk(4).values
    known = torch.zeros(5, 4, dtype=torch.bool)
    known[torch.arange(4), torch.tensor([0, 2, 0, 3])] = True  # the last row: none of the top four came true
    losses = _outcome_losses(logprobs, known)
    for i in (0, 10, 32):
        device = np.exp(calibrate(logprobs.numpy(), [float(_GRID[i])] * 5))
        chance = [device[0, 0], device[1, 2], device[2, 0], device[3, 3], 1 - device[4].sum()]
        np.testing.assert_allclose(float(losses[i]), -np.log(chance).sum(), rtol=1e-4)


def test_overconfident_streams_get_a_higher_temperature() -> None:
    """Streams that claim 97 % and are right half the time are best softened, honest ones left alone."""
    claimed = torch.log(torch.tensor([[0.97, 0.01, 0.01, 0.005]])).expand(100, -1)
    known = torch.zeros(100, 4, dtype=torch.bool)
    known[:50, 0] = True
    known[50:, 1] = True
    assert _GRID[_outcome_losses(claimed, known).argmin()] > 1.5
    honest = torch.log(torch.tensor([[0.6, 0.2, 0.1, 0.05]])).expand(100, -1)
    known = torch.zeros(100, 4, dtype=torch.bool)
    for place, rows in enumerate((range(60), range(60, 80), range(80, 90), range(90, 95))):
        known[list(rows), place] = True
    assert abs(_GRID[_outcome_losses(honest, known).argmin()] - 1.0) < 0.3
