"""The cache of the ``portable`` profile: standard operators of opset 24 only, in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specstream.export.visibility import Visibility


class PortableCache:
    def __init__(self, past_length: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        self.past_length = past_length
        self.keys = list(keys)
        self.values = list(values)
