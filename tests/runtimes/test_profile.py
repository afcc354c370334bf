from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from specstream.models.errors import UserError
from specstream.runtimes.adaptive import CallCosts
from specstream.runtimes.joined import PRIOR_WEIGHTS
from specstream.runtimes.manifest import FileEntry, Manifest
from specstream.runtimes.profile import DeviceProfile, MeasuredCall, Speed, bundle_id, load_profile, profile_path, save_profile

from .tiny_bundle import manifest as tiny_manifest

PROFILE = DeviceProfile(
    bundle="0" * 64,
    model="tiny",
    scheme="fp32",
    cores=2,
    threads=2,
    draft="joined",
    budget=12,
    stream_rows=1,
    placement="fused",
    costs=CallCosts((1, 8), (1.0, 1.5), 0.3),
    weights=PRIOR_WEIGHTS,
    tokens_per_second=200.0,
    plain_tokens_per_second=80.0,
    prompts=4,
    call_cost=(MeasuredCall(2, 128, 1, 0, 12.5),),
    speeds=(Speed("joined", 12, 1, 3.9, 200.0),),
    versions={"python": "3"},
)


@pytest.fixture
def manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Manifest:
    monkeypatch.setenv("SPECSTREAM_CACHE", str(tmp_path / "cache"))
    return dataclasses.replace(tiny_manifest(300), files=(FileEntry("model.onnx", "a" * 64, 10), FileEntry("b", "b" * 64, 1)))


def test_json_round_trip() -> None:
    assert DeviceProfile.from_json(PROFILE.to_json()) == PROFILE
    plain = dataclasses.replace(PROFILE, weights=None, placement=None, draft="none", stream_rows=0)
    assert DeviceProfile.from_json(plain.to_json()) == plain


def test_kept_by_bundle_and_cores(manifest: Manifest, tmp_path: Path) -> None:
    assert load_profile(manifest, 2) is None
    profile = dataclasses.replace(PROFILE, bundle=bundle_id(manifest))
    path = save_profile(profile, manifest)
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert path.is_relative_to(tmp_path / "cache")
    assert load_profile(manifest, 2) == profile
    assert load_profile(manifest, 4) is None
    other = dataclasses.replace(manifest, files=manifest.files[:1])
    assert bundle_id(other) != bundle_id(manifest)
    assert load_profile(other, 2) is None
    # What verify notes in a manifest does not make it another bundle.
    assert load_profile(dataclasses.replace(manifest, verified={"prompts": 1}), 2) == profile
    profile_path(other, 2).write_text(profile.to_json())
    with pytest.raises(UserError, match="of another bundle"):
        load_profile(other, 2)


def without(data: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in data.items() if name != key}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "not a device profile of schema 1"),
        (json.dumps({"schema": 2}), "found 2"),
        ({"threads": "two"}, "threads is 'two'"),
        ({"threads": 0}, "threads is 0"),
        ({"budget": -1, "stream_rows": -1}, "budget is -1; stream_rows is -1"),
        ({"draft": "magic"}, "draft is 'magic'"),
        ({"surprise": 1}, "unknown key surprise"),
        ({"costs": {"rows": [2], "costs": [1.0], "streams": 0}}, "do not ascend from 1"),
        ({"weights": {"streams": []}}, "missing key weights.ngrams"),
        ({"tokens_per_second": float("nan")}, "not a positive number"),
        ({"call_cost": [{"threads": 1, "context": 1, "rows": 1, "stream_rows": 0, "ms": -3}]}, "not a positive number"),
        ({"speeds": 3}, "speeds is 3"),
    ],
)
def test_nonsense_is_refused(text: str | dict[str, Any], message: str, manifest: Manifest) -> None:
    if isinstance(text, dict):
        text = json.dumps(dataclasses.asdict(PROFILE) | text)
    path = profile_path(manifest, 2)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        load_profile(manifest, 2)
    assert str(path) in str(caught.value)
    assert "run 'specstream tune' again" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_keys_are_named() -> None:
    with pytest.raises(UserError, match="missing key costs"):
        DeviceProfile.from_json(json.dumps(without(dataclasses.asdict(PROFILE), "costs")))


def test_a_profile_that_cannot_be_read_or_written(manifest: Manifest, tmp_path: Path) -> None:
    path = profile_path(manifest, 2)
    path.mkdir(parents=True)
    with pytest.raises(UserError, match="directory"):
        load_profile(manifest, 2)
    with pytest.raises(UserError, match="cannot write the profile"):
        save_profile(PROFILE, manifest)
    assert list(path.parent.iterdir()) == [path]
