"""From a folder of weights to a bundle: contents, refusals that leave nothing, links, the real model."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specstream.models.adapter import load_adapter, save_adapter, stream_tensors
from specstream.models.base import identity
from specstream.models.config import StreamConfig
from specstream.models.errors import CheckFailed, UserError
from specstream.models.stream_model import StreamModel
from specstream.runtimes.bundle import Bundle
from specstream.runtimes.language_model import load
from specstream.runtimes.ngrams import NGRAM_FILE, build_ngrams
from specstream.runtimes.ort_session import OrtSession
from specstream.runtimes.session import Rows
from specstream.toolchain import export_pipeline
from specstream.toolchain.export_pipeline import export_bundle

from .tiny import VOCAB, tiny_base


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer of single bytes, as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("base")
    tiny_base("Llama").save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: VOCAB - 3]
    vocab = {token: index for index, token in enumerate(["<unk>", "<s>", "</s>", *alphabet])}
    made = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def adapter_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random streams for that base."""
    base = tiny_base("Llama")
    config = StreamConfig(
        identity(base, "LlamaForCausalLM"), "lossless", num_streams=3, stream_layers=1, top_k=4, stream_rank=2, draft_vocab_size=40
    )
    folder = tmp_path_factory.mktemp("adapter")
    torch.manual_seed(2)
    model = StreamModel(base, config)
    for parameter in model.stream_parameters().values():
        torch.nn.init.normal_(parameter, std=0.3)
    model.draft_vocab.copy_(torch.arange(0, 80, 2))
    save_adapter(folder, config, stream_tensors(model))
    (folder / "README.md").write_text("data: for research only")
    (folder / "LICENSE").write_text("CC BY-NC-SA 4.0")
    return folder


def test_a_delayed_bundle_speaks_the_plain_text(base_folder: Path, tmp_path: Path) -> None:
    """Two graphs on one cache, the task's n-grams beside them; drafts of every kind leave the text as it is."""
    base = tiny_base("Llama")
    config = StreamConfig(
        identity(base, "LlamaForCausalLM"), "lossless", num_streams=3, stream_layers=1, top_k=4, stream_rank=2, draft_vocab_size=40,
        placement="delayed", correction_rank=3, pair_rank=2, prune_rank=0,
    )  # fmt: skip
    torch.manual_seed(2)
    model = StreamModel(base, config)
    for parameter in model.stream_parameters().values():
        torch.nn.init.normal_(parameter, std=0.3)
    model.draft_vocab.copy_(torch.arange(0, 80, 2))
    (tmp_path / "adapter").mkdir()
    save_adapter(tmp_path / "adapter", config, stream_tensors(model))
    rng = np.random.default_rng(0)
    build_ngrams(rng.integers(0, VOCAB, (20, 12)), VOCAB, min_count=1).save(tmp_path / "adapter" / NGRAM_FILE)
    report = export_bundle(str(base_folder), tmp_path / "bundle", tmp_path / "adapter")
    assert report["parity"]["top1_agreement"] == 1.0
    lm = load(tmp_path / "bundle", profile=False)
    assert lm.session.delayed
    assert lm.ngrams is not None
    for prompt in ("hello", "a b a b a b", "?"):
        plain = lm.generate(prompt, 40, "none")
        assert plain.drafted == 0
        for draft in ("streams", "joined", "lookup"):
            for budget in (1, 5, 16, "adaptive"):
                result = lm.generate(prompt, 40, draft, budget=budget)  # type: ignore[arg-type]
                assert result.token_ids == plain.token_ids
        assert lm.generate(prompt, 40, "streams", budget=16).drafted > 0
    lm.session.rewind(0)
    with pytest.raises(ValueError, match="without a row committed"):
        lm.session.draft(1)


@pytest.fixture(scope="module")
def made(base_folder: Path, adapter_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object], list[str]]:
    steps: list[str] = []
    out = tmp_path_factory.mktemp("out") / "bundle"
    report = export_bundle(str(base_folder), out, adapter_folder, progress=steps.append)
    return out, report, steps


def test_bundle_and_report(made: tuple[Path, dict[str, object], list[str]], base_folder: Path, adapter_folder: Path) -> None:
    out, report, steps = made
    assert sorted(path.name for path in out.iterdir()) == [
        "ADAPTER.md",
        "ADAPTER_LICENSE",
        "LICENSE",
        "chat_template.jinja",
        "model.onnx",
        "model.onnx.data",
        "specstream.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert [path.name for path in out.parent.iterdir()] == ["bundle"]
    bundle = Bundle.load(out)
    assert bundle.path("ADAPTER.md").read_text() == "data: for research only"
    assert bundle.path("ADAPTER_LICENSE").read_text() == "CC BY-NC-SA 4.0"
    manifest = bundle.manifest
    assert manifest.streams is not None
    assert (manifest.streams.num_streams, manifest.streams.top_k, manifest.streams.draft_vocab_size) == (3, 4, 40)
    assert manifest.streams.parameters == load_adapter(adapter_folder).count("streams")
    assert manifest.model.license == "apache-2.0"
    assert manifest.tokenizer.stop_ids == (2,)
    assert manifest.parity is not None
    assert manifest.parity.top1_agreement == 1.0
    assert report["parity"] == {**report["parity"], "top1_agreement": 1.0}  # type: ignore[dict-item]
    assert 0 < report["weight_bytes"] < report["bundle_bytes"]  # type: ignore[operator]
    assert report["peak_rss_bytes"] > 50e6  # type: ignore[operator]
    assert steps[0] == "reading the model's configuration"


def links(folder: Path, to: Path, link: str) -> None:
    for file in folder.iterdir():
        if link == "soft":
            (to / file.name).symlink_to(file)
        else:
            os.link(file, to / file.name)


@pytest.mark.parametrize("link", ["soft", "hard"])
def test_bundle_of_links(made: tuple[Path, dict[str, object], list[str]], tmp_path: Path, link: str) -> None:
    links(made[0], tmp_path, link)
    session = OrtSession(Bundle.load(tmp_path), threads=1)
    step = session.run(
        Rows(
            input_ids=np.arange(5),
            position_ids=np.arange(5),
            tree_mask=np.tril(np.ones((5, 5), dtype=bool)),
            logit_rows=np.array([4]),
            stream_rows=np.array([4]),
        )
    )
    assert step.next_ids.shape == (1,)


@pytest.mark.parametrize("link", ["soft", "hard"])
def test_weights_behind_links(base_folder: Path, tmp_path: Path, link: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a hub cache: every file of the model is a link to a blob elsewhere."""
    linked = tmp_path / "linked"
    linked.mkdir()
    links(base_folder, linked, link)
    export_bundle(str(linked), tmp_path / "bundle")
    assert Bundle.load(tmp_path / "bundle").manifest.streams is None


def test_failed_parity_leaves_nothing(base_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: object) -> dict[str, object]:
        raise CheckFailed("parity: other")

    monkeypatch.setattr(export_pipeline, "_run_parity", wrong)
    with pytest.raises(CheckFailed):
        export_bundle(str(base_folder), tmp_path / "bundle")
    assert not list(tmp_path.iterdir())


def test_parity_process_reports_failure(made: tuple[Path, dict[str, object], list[str]], tmp_path: Path) -> None:
    with pytest.raises(CheckFailed, match="ONNX Runtime could not run the graph"):
        export_pipeline._run_parity("ONNX Runtime", ["specstream.export.parity", str(made[0] / "model.onnx"), str(tmp_path / "absent.npz")])


def refused(match: str, base: Path, out: Path, adapter: Path | None) -> None:
    with pytest.raises(UserError, match=match):
        export_bundle(str(base), out, adapter)
    assert not out.exists()
    assert not [path for path in out.parent.iterdir() if path.name.startswith(".")]


def test_adapter_of_other_weights(adapter_folder: Path, base_folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(adapter_folder, other)
    config = load_adapter(other).config
    (other / "config.json").write_text(replace(config, base=replace(config.base, fingerprint="1" * 64)).to_json(), encoding="utf-8")
    refused("other weights", base_folder, tmp_path / "bundle", other)


def test_adapter_of_another_size_is_refused_before_weights_load(
    adapter_folder: Path, base_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    shutil.copytree(adapter_folder, other)
    config = load_adapter(other).config
    (other / "config.json").write_text(replace(config, base=replace(config.base, num_layers=30)).to_json(), encoding="utf-8")
    monkeypatch.setattr("specstream.models.base.load_base", None)
    refused("num_layers 2", base_folder, tmp_path / "bundle", other)


def test_adapter_of_another_gamma(adapter_folder: Path, base_folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(adapter_folder, other)
    (other / "config.json").write_text(replace(load_adapter(other).config, num_streams=4).to_json(), encoding="utf-8")
    refused("stream_vectors has shape", base_folder, tmp_path / "bundle", other)


def test_unsupported_architecture(base_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other"
    shutil.copytree(base_folder, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "architectures": ["OddForCausalLM"]}))
    monkeypatch.setattr("specstream.models.base.load_base", None)
    refused("OddForCausalLM is not supported", other, tmp_path / "bundle", None)


def test_no_disk_space(base_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: full)
    monkeypatch.setattr("specstream.models.base.load_base", None)
    refused("GB needed", base_folder, tmp_path / "bundle", None)


def test_existing_folder(base_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    with pytest.raises(UserError, match="exists already"):
        export_bundle(str(base_folder), tmp_path / "bundle")
    assert not list((tmp_path / "bundle").iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_export_leaves_nothing(base_folder: Path, tmp_path: Path, number: signal.Signals) -> None:
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a job in the background ignores it
        "from pathlib import Path; from specstream.toolchain.export_pipeline import export_bundle\n"
        "export_bundle(sys.argv[1], Path(sys.argv[2]), progress=lambda step: print(step, flush=True))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(base_folder), str(tmp_path / "bundle")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith("tracing"):
                break
        assert list(tmp_path.iterdir()), "the temporary folder exists while it works"
        time.sleep(0.2)
        child.send_signal(number)
        child.stdout.read()
    assert child.returncode != 0
    assert not list(tmp_path.iterdir())
