"""package as a user meets it: a folder and a zip for each target, the same bytes each time, and nothing left behind when it fails."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from specstream.models.errors import CheckFailed, UserError
from specstream.runtimes import load
from specstream.runtimes.bundle import Bundle, BundleWriter
from specstream.runtimes.golden import Golden, Trace
from specstream.toolchain import golden_replay, package_pipeline
from specstream.toolchain.cli import run
from specstream.toolchain.package_pipeline import Budget, Memory, parse_bytes
from specstream.toolchain.quantize_pipeline import quantize_bundle

from ..runtimes.tiny_bundle import write_bundle
from ..tiny_packages import PROMPTS, write_coreml_bundle, write_onnx_bundle

FUSED_PROMPTS = '{"prompt": "the cat"}\n{"prompt": "on 東"}\n'


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bundles of several kinds, and prompts for them. Nobody changes them."""
    folder = tmp_path_factory.mktemp("bundles")
    write_bundle(folder / "fused")
    write_onnx_bundle(folder / "delayed")
    (folder / "words.jsonl").write_text(PROMPTS)
    (folder / "fused.jsonl").write_text(FUSED_PROMPTS)
    for name, cache in (("w8a8", "float32"), ("w8a8-int8", "int8")):
        quantize_bundle(
            folder / "delayed", folder / name, "w8a8", block_size=16, cache=cache, calibration=folder / "words.jsonl", threads=1
        )
    return folder


@pytest.fixture
def place(bundles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, with the bundles beside it."""
    for path in bundles.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(package_pipeline, "NEW_TOKENS", 10)
    return tmp_path


def new(place: Path) -> list[str]:
    """What was made, and nothing else may be there."""
    return sorted(path.name for path in place.iterdir() if not path.is_symlink())


def package(*arguments: str) -> int:
    return run(["package", *arguments])


def alone(place: Path) -> dict[str, Any]:
    """How to start a Python that has ONNX Runtime and NumPy and no other package."""
    site = place / "site"
    site.mkdir()
    for module in (onnxruntime, np):
        origin = Path(module.__file__).parent
        (site / origin.name).symlink_to(origin)
        if (libraries := origin.with_name(f"{origin.name}.libs")).is_dir():
            (site / libraries.name).symlink_to(libraries)
    # -S: no site-packages; -s: nor the user's.
    return {"prefix": [sys.executable, "-S", "-s", "-P"], "env": {"PYTHONPATH": str(site), "PATH": os.environ["PATH"]}}


@pytest.mark.parametrize(
    ("bundle", "prompts"),
    [("fused", "fused.jsonl"), ("delayed", "words.jsonl"), ("w8a8", "words.jsonl"), ("w8a8-int8", "words.jsonl")],
)
def test_android_replays_with_onnxruntime_alone(bundle: str, prompts: str, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    asked = ["--target", "android", "--prompts", prompts, "--capacity", "64", "--json", "r.json"]
    assert package(bundle, "out", *asked, "--max-size", "5MB", "--max-memory", "1GB") == 0
    said = capfd.readouterr()
    assert "out.zip beside it" in said.out
    assert "overhead = " in said.out
    assert said.err == ""
    data = json.loads(Path("r.json").read_text())
    expected = {
        "seconds",
        "target",
        "package_bytes",
        "archive_bytes",
        "memory",
        "capacity",
        "traces",
        "operators",
        "model",
        "scheme",
        "schema",
    }
    assert expected <= set(data)
    memory = data["memory"]
    assert memory["total"] == memory["weights"] + memory["cache"] + memory["overhead"]
    assert memory["overhead"] > 10e6  # Python and ONNX Runtime are there at least

    python = alone(place)
    without = subprocess.run([*python["prefix"], "-c", "import specstream"], capture_output=True, text=True, check=False, env=python["env"])
    assert "No module named 'specstream'" in without.stderr
    for form in ("ort", "onnx"):
        command = [*python["prefix"], "out/replay.py", "--form", form, "--json", "--tolerance", "0"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=python["env"])
        assert done.returncode == 0, done.stdout + done.stderr
        result = json.loads(done.stdout)
        assert len(result["traces"]) == len(data["traces"]) >= 6
        assert all(trace["difference"] == "" and trace["largest"] == 0 for trace in result["traces"])

    # The same through specstream, which runs the package as it is.
    assert golden_replay.main(["out"]) == 0
    made = Bundle.load("out")
    assert made.manifest.package is not None
    assert (made.manifest.package.target, made.manifest.package.capacity) == ("android", 64)
    assert made.manifest.graph == "model.ort"
    golden = Golden.from_json(Path("out/golden.json").read_text())
    assert golden.pad_single == bundle.startswith("w8a8")
    streams = next(trace for trace in golden.traces if trace.draft == "streams" and trace.sampling is None)
    assert load("out", threads=1).generate(streams.prompt, 10, "streams", budget=8).token_ids == streams.token_ids
    # Greedy texts of one prompt are the same with any drafts, rounded activations or not.
    for trace in golden.traces:
        texts = {other.token_ids for other in golden.traces if other.prompt == trace.prompt and other.sampling is None}
        assert bundle.startswith("w8a8") or len(texts) == 1


def test_android_has_what_it_needs_and_nothing_else(place: Path) -> None:
    assert package("delayed", "out", "--target", "android", "--prompts", "words.jsonl", "--capacity", "64") == 0
    wanted = {
        "model.ort",
        "streams.ort",
        "model.onnx",
        "streams.onnx",
        "required_operators.config",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    wanted |= {"chat_template.jinja", "LICENSE", "golden.json", "replay.py", "README.md", "specstream.json"}
    assert {path.name for path in Path("out").iterdir()} == wanted
    made = Bundle.load("out")
    assert {entry.path for entry in made.manifest.files} == wanted - {"specstream.json"}
    # Every hash is there and right: another byte in any file is seen by us and by the script.
    for entry in made.manifest.files:
        assert hashlib.sha256(Path("out", entry.path).read_bytes()).hexdigest() == entry.sha256
    # The operators are those of the graphs' own nodes.
    listed = {name for line in Path("out/required_operators.config").read_text().splitlines()[1:] for name in line.split(";")[2].split(",")}
    for graph in ("model.onnx", "streams.onnx"):
        assert {node.op_type for node in onnx.load(f"out/{graph}", load_external_data=False).graph.node} <= listed
    assert "GroupQueryAttention" in listed
    page = Path("out/README.md").read_text()
    for name in wanted:
        assert f"`{name}`" in page or name == "README.md"
    assert "3, 1, 4, delayed" in page
    # The zip holds the same.
    with zipfile.ZipFile("out.zip") as archive:
        assert set(archive.namelist()) == wanted
        assert archive.read("model.ort") == Path("out/model.ort").read_bytes()


def test_linux_arm64_is_a_bundle(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert package("fused", "out", "--target", "linux-arm64", "--prompts", "fused.jsonl", "--capacity", "60") == 0
    assert run(["generate", "out", "the cat", "--max-new-tokens", "4"]) == 0
    assert "error" not in capfd.readouterr().err
    names = {path.name for path in Path("out").iterdir()}
    assert names == {path.name for path in Path("fused").iterdir()} | {"golden.json", "replay.py", "README.md"}
    assert subprocess.run([sys.executable, "-P", "out/replay.py"], check=False, capture_output=True).returncode == 0
    assert run(["info", "out"]) == 0
    assert "linux-arm64" in capfd.readouterr().out


@pytest.mark.parametrize("target", ["android", "linux-arm64"])
def test_the_same_command_twice_is_the_same_bytes(target: str, place: Path) -> None:
    """In two processes, with other hashes and another time."""
    for out, seed in (("one", "1"), ("two", "2")):
        command = [sys.executable, "-P", "-m", "specstream.toolchain", "package", "delayed", out, "--target", target]
        command += ["--prompts", "words.jsonl", "--capacity", "64", "--limit", "1"]
        subprocess.run(command, check=True, capture_output=True, env=os.environ | {"PYTHONHASHSEED": seed})
        time.sleep(1.1)  # a zip's clock counts seconds
    for path in sorted(Path("one").rglob("*")):
        assert path.read_bytes() == Path("two", path.name).read_bytes(), path.name
    assert Path("one.zip").read_bytes() == Path("two.zip").read_bytes()


@pytest.fixture(scope="module")
def coreml_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("coreml") / "bundle"
    write_coreml_bundle(folder)
    return folder


def test_ios_has_the_core_ml_package(coreml_bundle: Path, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    asked = ["--target", "ios", "--prompts", "words.jsonl", "--limit", "1"]
    for out in ("out", "again"):
        assert package(str(coreml_bundle), out, *asked) == 0
    assert "overhead not measured" in capfd.readouterr().out or sys.platform == "darwin"
    assert Path("out.zip").read_bytes() == Path("again.zip").read_bytes()
    names = {path.name for path in Path("out").iterdir()}
    wanted = {"model.mlpackage", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "LICENSE", "golden.json", "README.md"}
    assert names == wanted | {"specstream.json"}
    golden = Golden.from_json(Path("out/golden.json").read_text())
    assert golden.placement == "delayed"
    assert {trace.draft for trace in golden.traces} == {"none", "streams", "joined"}
    assert any(trace.sampling is not None for trace in golden.traces)
    assert golden_replay.main(["out"]) == 0
    assert golden_replay.main(["out", "--traces", "1", "--json"]) == 0
    page = Path("out/README.md").read_text()
    assert "`tree_8`" in page
    assert "commit_rows" in page
    # A file of the package that changed is seen.
    weights = next(Path("out/model.mlpackage").rglob("weight.bin"))
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    assert golden_replay.main(["out"]) == 2
    assert "another sha256" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "out", "--target", "android"], "nowhere: no such bundle"),
        (["delayed", "out", "--target", "windows"], "target 'windows' is unknown; one of ios, android, linux-arm64 expected"),
        (
            ["delayed", "out", "--target", "ios"],
            "delayed: an ONNX bundle, and ios needs a Core ML one: specstream export MODEL OUT --format coreml",
        ),
        (
            ["delayed", "out", "--target", "android", "--capacity", "1000"],
            "--capacity: 1000 given, 1 to 512 (the model's context) expected",
        ),
        (["delayed", "out", "--target", "android", "--capacity", "3"], "prompt 1 has 6 tokens, the package's cache 3 rows"),
        (["delayed", "out", "--target", "android", "--max-size", "many"], "--max-size: 'many' given; a size such as 300MB"),
        (["delayed", "out", "--target", "android", "--prompts", "none.jsonl"], "--prompts none.jsonl: No such file"),
        (["delayed", "delayed", "--target", "android"], "exists already; choose another folder"),
        (["tampered", "out", "--target", "linux-arm64"], "tokenizer.json is not the file that was written (another sha256)"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(place / "delayed", place / "tampered")
    file = place / "tampered" / "tokenizer.json"
    file.write_text(file.read_text().replace("w5", "w4", 1))
    before = new(place)
    prompts = [] if "--prompts" in arguments else ["--prompts", "words.jsonl"]
    assert package(*arguments, *prompts) == 2
    err = capfd.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert new(place) == before


def test_a_core_ml_bundle_is_for_ios_alone(coreml_bundle: Path, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert package(str(coreml_bundle), "out", "--target", "android") == 2
    assert "not an ONNX bundle, which android needs: specstream export MODEL OUT --format onnx" in capfd.readouterr().err
    assert package(str(coreml_bundle), "out", "--target", "ios", "--capacity", "97") == 2
    assert "1 to 96 (what the bundle was exported with) expected" in capfd.readouterr().err
    assert new(place) == []


def test_a_package_is_not_packaged_again(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    asked = ["--target", "linux-arm64", "--prompts", "words.jsonl", "--limit", "1"]
    assert package("delayed", "out", *asked) == 0
    assert package("out", "again", *asked) == 2
    assert "is a package for linux-arm64 already" in capfd.readouterr().err
    # OUT or its zip is there: refused, then replaced.
    assert package("delayed", "out", *asked) == 2
    shutil.rmtree("out")
    assert package("delayed", "out", *asked) == 2
    assert "out.zip: exists already" in capfd.readouterr().err
    assert package("delayed", "out", *asked, "--force") == 0
    assert package("delayed", "out", *asked, "--force") == 0
    assert new(place) == ["out", "out.zip"]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--max-size", "10KB"], "over the size budget of 0.0 MB: "),
        (["--max-memory", "40KB"], "cache = "),  # known before anything is converted
        (["--max-memory", "1MB"], "overhead = "),
    ],
)
def test_over_the_budget_nothing_is_written(option: list[str], message: str, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert package("delayed", "out", "--target", "android", "--prompts", "words.jsonl", "--capacity", "64", *option) == 1
    err = capfd.readouterr().err
    assert err.startswith("failed: over the ")
    assert message in err
    assert err.count("\n") == 1
    assert new(place) == []


def test_sizes_are_read() -> None:
    assert [parse_bytes(text, "--x") for text in ("300MB", "1.5 GB", "256MiB", "12", "7kb")] == [300e6, 1.5e9, 256 << 20, 12, 7000]
    for text in ("", "MB", "-3MB", "0", "1e3", "3XB", "1.5.2MB"):
        with pytest.raises(UserError, match="a size such as 300MB"):
            parse_bytes(text, "--x")


def test_the_numbers_of_a_missed_budget_are_said() -> None:
    with pytest.raises(CheckFailed, match=r"300\.0 MB: 200\.0 MB weights \+ 50\.0 MB cache \+ 60\.0 MB overhead = 310\.0 MB; quantize"):
        Budget(memory=300_000_000).check_memory(Memory(200_000_000, 50_000_000, 60_000_000))
    with pytest.raises(CheckFailed, match="before any overhead"):
        Budget(memory=200_000_000).check_memory(Memory(200_000_000, 50_000_000))
    Budget(300_000_000, 310_000_000).check_memory(Memory(200_000_000, 50_000_000, 60_000_000))


def test_a_conversion_that_changes_the_model_is_refused(
    place: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph with other weights in place of the converted one: the package would not say what the bundle says."""
    other = place / "other"
    shutil.copytree(place / "delayed", other)
    weights = np.fromfile(other / "model.onnx.data", dtype=np.float32)
    weights[: len(weights) // 2] *= 1.5
    weights.tofile(other / "model.onnx.data")
    convert = package_pipeline._run

    def swapped(module: str, graph: str, *arguments: str) -> None:
        convert(module, str(other / Path(graph).name), *arguments)

    monkeypatch.setattr(package_pipeline, "_run", swapped)
    assert package("delayed", "out", "--target", "android", "--prompts", "words.jsonl") == 1
    err = capfd.readouterr().err
    assert "failed: the package does not say what the bundle says: prompt 1, greedy, none, " in err
    assert err.count("\n") == 1
    assert new(place) == ["other"]


def test_traces_that_do_not_replay_are_refused(place: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    real = package_pipeline.record

    def wrong(*arguments: Any, **options: Any) -> Trace:
        trace = real(*arguments, **options)
        step = dataclasses.replace(trace.steps[0], emitted=tuple(token ^ 1 for token in trace.steps[0].emitted))
        return dataclasses.replace(trace, steps=(step, *trace.steps[1:]))

    monkeypatch.setattr(package_pipeline, "record", wrong)
    assert package("delayed", "out", "--target", "linux-arm64", "--prompts", "words.jsonl") == 1
    assert "golden.json does not replay in a fresh process: prompt 1, greedy, none, step 0: emitted" in capfd.readouterr().err
    assert new(place) == []


def test_a_damaged_package_is_seen_by_its_script(place: Path) -> None:
    assert package("delayed", "out", "--target", "android", "--prompts", "words.jsonl", "--limit", "1") == 0
    script = [sys.executable, "-P", "out/replay.py"]
    golden = Path("out/golden.json")
    text = golden.read_text()
    golden.write_text(text.replace('"past":', '"past" :', 1))
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("golden.json is not the file that was packaged (another sha256)\n")
    golden.unlink()
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.stderr.endswith("golden.json is missing\n")


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("tokens", lambda v: [v[0], *(t ^ 1 for t in v[1:])]),
        ("parents", lambda v: [-1, *[0] * (len(v) - 1)]),
        ("next_ids", lambda v: [v[0] ^ 1, *v[1:]]),
        ("accepted", lambda v: v[:-1]),
        ("length", lambda v: v + 1),
        ("positions", lambda v: [p + 1 for p in v]),
    ],
)
def test_the_script_sees_every_kind_of_fault(field: str, change: Any, package_to_spoil: Path) -> None:
    """A recorded step that is wrong stands for a loop that is."""
    golden = json.loads((package_to_spoil / "golden.json").read_text())
    for trace in golden["traces"]:
        step = next(
            (s for s in trace["steps"] if len(s["accepted"]) > 1 and len(set(s["parents"])) > 2 and trace["draft"] == "streams"), None
        )
        if step is not None:
            break
    assert step is not None
    golden["traces"] = [trace]
    step[field] = change(step[field])
    done = replayed(package_to_spoil, golden)
    assert done.returncode == 1
    assert f"step {trace['steps'].index(step)}: " in done.stdout
    assert "same" not in done.stdout


def test_the_script_sees_other_streams(package_to_spoil: Path) -> None:
    golden = json.loads((package_to_spoil / "golden.json").read_text())
    trace = next(t for t in golden["traces"] if t["prefill"]["streams"])
    golden["traces"] = [trace]
    trace["prefill"]["streams"][0]["logprobs"][0][0] -= 0.01
    done = replayed(package_to_spoil, golden)
    assert "prefill: stream log-probabilities differ by 0.01" in done.stdout
    trace["finish_reason"] = "neither"
    trace["prefill"]["streams"][0]["logprobs"][0][0] += 0.01
    assert "recorded neither" in replayed(package_to_spoil, golden).stdout


@pytest.fixture(scope="module")
def spoilt(bundles: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("spoilt") / "out"
    package_pipeline.package_bundle(bundles / "delayed", out, "android", prompts=["w5 w9 w11 w30", "w60 w7 w8 w60 w7"], capacity=64)
    return out


@pytest.fixture
def package_to_spoil(spoilt: Path) -> Iterator[Path]:
    golden, manifest = (spoilt / name for name in ("golden.json", "specstream.json"))
    before = golden.read_bytes(), manifest.read_bytes()
    yield spoilt
    golden.write_bytes(before[0])
    manifest.write_bytes(before[1])


def replayed(package: Path, golden: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """Run the script on other traces, with their hash in the manifest."""
    data = json.dumps(golden).encode()
    (package / "golden.json").write_bytes(data)
    manifest = json.loads((package / "specstream.json").read_text())
    for entry in manifest["files"]:
        if entry["path"] == "golden.json":
            entry |= {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    (package / "specstream.json").write_text(json.dumps(manifest))
    return subprocess.run([sys.executable, "-P", str(package / "replay.py")], capture_output=True, text=True, check=False)


def test_ctrl_c_leaves_nothing(place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def interrupt(*_arguments: object) -> None:
        raise KeyboardInterrupt

    for step in ("_run", "_replay_alone", "pack"):
        with monkeypatch.context() as patch:
            patch.setattr(package_pipeline, step, interrupt)
            assert package("delayed", "out", "--target", "android", "--prompts", "words.jsonl") == 130
        assert capfd.readouterr().err.split() == ["interrupted"]
        assert new(place) == []


def test_a_killed_run_is_cleaned_up_by_the_next(place: Path) -> None:
    """SIGKILL leaves a hidden folder, and perhaps a part of a zip; the next run to the same place removes both."""
    program = (
        "import os, signal\n"
        "from pathlib import Path\n"
        "from specstream.toolchain import archive, package_pipeline\n"
        "def die(folder, file):\n"
        "    file.write_bytes(b'half a zip')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "package_pipeline.pack = die\n"
        "package_pipeline.package_bundle(Path('delayed'), Path('out'), 'linux-arm64', prompts=['w5 w9'])\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], check=False, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    left = new(place)
    assert [name.startswith(".out.partial-") for name in left] == [True, True]
    assert package("delayed", "out", "--target", "linux-arm64", "--prompts", "words.jsonl", "--limit", "1") == 0
    assert new(place) == ["out", "out.zip"]


def test_a_full_disk_is_said_before_the_work(place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(package_pipeline, "SCRATCH_BYTES", 1 << 62)
    assert package("delayed", "out", "--target", "android", "--prompts", "words.jsonl") == 2
    assert "GB needed" in capfd.readouterr().err
    assert new(place) == []


def test_weights_too_large_for_an_ort_file_are_refused_first(
    place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from specstream.export import ort_format

    monkeypatch.setattr(ort_format, "LARGEST_FILE", 1000)
    assert package("delayed", "out", "--target", "android", "--prompts", "words.jsonl") == 2
    err = capfd.readouterr().err
    assert "an .ort file holds 2.14 GB at most; quantize the bundle" in err
    assert new(place) == []


def test_an_adapters_card_goes_along(place: Path, bundles: Path) -> None:
    """The zoo's adapter, known by its hash, brings the licence of its data."""
    from specstream.models.fetch import sha256_of
    from specstream.toolchain.zoo import zoo_folder

    zoo = zoo_folder() / "smollm2-135m-sql"
    old = Bundle.load(bundles / "delayed")
    assert old.manifest.streams is not None
    with BundleWriter("adapted") as writer:
        for entry in old.manifest.files:
            shutil.copyfile(old.path(entry.path), writer.path(entry.path))
        streams = dataclasses.replace(old.manifest.streams, adapter_sha256=sha256_of(zoo / "adapter.safetensors"))
        writer.finish(dataclasses.replace(old.manifest, streams=streams))
    assert package("adapted", "out", "--target", "linux-arm64", "--prompts", "words.jsonl", "--limit", "1") == 0
    assert "CC BY-SA 4.0" in Path("out/ADAPTER.md").read_text()
    assert "`ADAPTER.md`" in Path("out/README.md").read_text()
