from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from specstream.models.errors import UserError
from specstream.runtimes.manifest import ExportCost, FileEntry, Manifest, PackageInfo, Parity

from .tiny_bundle import manifest


def full() -> Manifest:
    return dataclasses.replace(
        manifest(40, stop_ids=(2, 7)),
        parity=Parity(1.0, 2.5e-5, {"prompt": {"rows": 7, "top1": True}}),
        export=ExportCost(1.5, 10, 20, 30),
        verified={"differences": 0, "prompts": 200},
        files=(FileEntry("model.onnx", "a" * 64, 123),),
    )


@pytest.mark.parametrize("value", [full(), manifest(40, streams=False, has_chat_template=False)])
def test_round_trip_is_exact(value: Manifest) -> None:
    assert Manifest.from_json(value.to_json()) == value
    assert Manifest.from_json(value.to_json()).to_json() == value.to_json()
    assert list(json.loads(value.to_json())) == [f.name for f in dataclasses.fields(Manifest)]


def test_whole_numbers_are_fine_where_floats_are_expected() -> None:
    data = json.loads(full().to_json())
    data["export"]["seconds"] = 2
    read = Manifest.from_json(json.dumps(data)).export
    assert read is not None
    assert isinstance(read.seconds, float)


def changed(path: str, value: Any) -> str:
    data = json.loads(full().to_json())
    target = data
    *parents, last = path.split(".")
    for name in parents:
        target = target[int(name)] if name.isdigit() else target[name]
    if value is ...:
        del target[last]
    else:
        target[last] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("surprise", 1, "unknown key surprise"),
        ("model.surprise", 1, r"unknown key model\.surprise"),
        ("graph", ..., "missing key graph"),
        ("parity", ..., "missing key parity"),
        ("model.name", ..., r"missing key model\.name"),
        ("model.num_layers", "30", r"model\.num_layers is '30' \(int was expected\)"),
        ("model.num_layers", True, r"model\.num_layers is True"),
        ("model.num_layers", 1.5, r"model\.num_layers is 1\.5"),
        ("model", None, r"model is None \(ModelInfo was expected\)"),
        ("contract.profile", "cuda", r"contract\.profile is 'cuda' \(one of ort, portable"),
        ("tokenizer.stop_ids", 3, r"tokenizer\.stop_ids is 3 \(a list"),
        ("files.0.bytes", "x", r"files\[0\]\.bytes is 'x'"),
        ("tools", [], r"tools is \[\] \(an object"),
        ("format", "1", "not the manifest of a specstream bundle"),
        ("format", 2, "made by a newer specstream"),
        ("format", 0, "export the bundle again"),
        ("contract.version", 2, "graph contract 2, made by a newer specstream"),
    ],
)
def test_other_keys_and_types_are_refused(path: str, value: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Manifest.from_json(changed(path, value))


def test_a_newer_format_is_named_before_its_unknown_keys() -> None:
    data = json.loads(full().to_json()) | {"format": 9, "surprise": 1}
    with pytest.raises(UserError, match=r"here: bundle format 9, made by a newer specstream \(this one reads 1\)"):
        Manifest.from_json(json.dumps(data), "here")


def test_all_problems_are_listed_at_once() -> None:
    data = json.loads(full().to_json())
    data["surprise"] = 1
    data["graph"] = 7
    data["files"][0]["sha256"] = None
    with pytest.raises(UserError, match=r"unknown key surprise.*|graph is 7") as caught:
        Manifest.from_json(json.dumps(data))
    assert all(part in str(caught.value) for part in ("surprise", "graph is 7", "files[0].sha256 is None"))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": null}', "\x00"])
def test_what_is_no_manifest(text: str) -> None:
    with pytest.raises(UserError, match=r"not JSON|not the manifest"):
        Manifest.from_json(text)


def test_a_package_says_so_and_earlier_bundles_are_none() -> None:
    value = dataclasses.replace(full(), package=PackageInfo("android", 1024, "f" * 64))
    assert Manifest.from_json(value.to_json()) == value
    assert Manifest.from_json(changed("package", ...)) == full()
    with pytest.raises(UserError, match=r"package\.target is 'phone' \(one of ios, android, linux-arm64 was expected\)"):
        Manifest.from_json(changed("package", {"target": "phone", "capacity": 1, "source": "0"}))
