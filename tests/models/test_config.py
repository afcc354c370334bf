"""Stream configs: an exact JSON round trip, and every inconsistency named."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from specstream.models.config import BaseIdentity, StreamConfig
from specstream.models.errors import UserError

BASE = BaseIdentity("LlamaForCausalLM", "f" * 64, 32, 4, 97)
CONFIG = StreamConfig(base=BASE, mode="two-stage", main_rank=4, main_targets=("q_proj", "v_proj"), draft_vocab_size=50)


def test_round_trip() -> None:
    assert StreamConfig.from_json(CONFIG.to_json()) == CONFIG


def test_entry_layer() -> None:
    assert replace(CONFIG, stream_layers=3).entry_layer == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_streams": 0}, "num_streams 0"),
        ({"stream_layers": 5}, "1 to 4, the model's layers"),
        ({"top_k": 51}, "top_k 51 (1 to 50)"),
        ({"mode": "lossy"}, "mode 'lossy'"),
        ({"placement": "late"}, "placement 'late'"),
        ({"draft_vocab_size": 98}, "at most 97"),
        ({"main_rank": 0}, "both or neither"),
        ({"prune_rank": -1}, "prune_rank -1"),
        ({"format": 2}, "format 2"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match="adapter config") as error:
        replace(CONFIG, **change)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda d: d.update(colour="blue"), "unknown keys colour"),
        (lambda d: d["base"].pop("fingerprint"), "missing keys fingerprint"),
        (lambda d: d.pop("base"), "not an adapter config"),
    ],
)
def test_other_keys_are_refused(edit: Any, words: str) -> None:
    data = json.loads(CONFIG.to_json())
    edit(data)
    with pytest.raises(UserError, match=words):
        StreamConfig.from_json(json.dumps(data), "here/config.json")


def test_not_json() -> None:
    with pytest.raises(UserError, match=r"here/config.json: not JSON"):
        StreamConfig.from_json("{", "here/config.json")
