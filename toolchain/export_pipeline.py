"""Joins the stages of an export: base weights and an adapter in, a bundle out.

Everything that can be refused is refused before weights load; files go to a temporary folder that becomes OUT at the very end.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specstream.export import contract
from specstream.models.errors import CheckFailed
from specstream.runtimes.bundle import BundleWriter, sha256
from specstream.runtimes.manifest import (
    ContractInfo,
    ExportCost,
    Manifest,
    ModelInfo,
    Parity,
    QuantizationInfo,
    StreamInfo,
    TokenizerInfo,
)
from specstream.runtimes.ngrams import NGRAM_FILE, NgramTable
from specstream.runtimes.text import CHAT_TEMPLATE, TOKENIZER, TOKENIZER_CONFIG

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from specstream.export.sizes import ModelSizes
    from specstream.models.adapter import Adapter
    from specstream.models.base import License, TokenizerBundle

SPARE_BYTES = 64 << 20  # beside the weights: graph, tokenizer, the adapter's part
TOOLS = ("specstream-toolchain", "torch", "transformers", "onnx", "onnx-ir", "onnxscript", "onnxruntime")
PARITY_TEXT = "List the names of all museums that opened after 1990, newest first. Answer with one SQL query and nothing else."
REFERENCE = "reference.npz"


def export_bundle(
    model: str,
    out: Path,
    adapter: Path | None = None,
    profile: contract.Profile = "ort",
    force: bool = False,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Export a model, with streams when an adapter is given, and compare the graph with PyTorch in a process of its own.

    Args:
        model: hub id, folder, ``.gguf`` file or short name.
        out: folder to make.
        adapter: folder of streams trained on this model.
        profile: operators of the graph.
        force: replace ``out`` when it is a bundle already.
        progress: called with the name of each step.

    Returns:
        The report: ``seconds``, ``peak_rss_bytes`` (of this process), ``weight_bytes``, ``bundle_bytes``, ``parity``, ``model``,
        ``profile``, ``opset``, ``operators``, ``passes``.

    Raises:
        UserError: bad input.
        CheckFailed: the graph does not compute what PyTorch computes. Neither leaves anything behind.
    """
    begun = time.monotonic()
    say = progress or (lambda _step: None)
    with BundleWriter(out, force=force) as writer:
        say("reading the model's configuration")
        from specstream.models.base import identity, load_base, load_config, load_license, resolve_base

        source = resolve_base(model)
        config = load_config(source)
        assert config.architectures
        architecture = config.architectures[0]

        from specstream.export.sizes import read_sizes
        from specstream.models.adapter import check_base, load_adapter

        sizes = read_sizes(config)
        fused = load_adapter(adapter) if adapter is not None else None
        if fused is not None:
            assert adapter is not None
            # All of the base's identity but the fingerprint is known without its weights.
            like = replace(
                fused.config.base,
                architecture=architecture,
                hidden_size=sizes.hidden_size,
                num_layers=sizes.num_layers,
                vocab_size=sizes.vocab_size,
            )
            check_base(fused, like, adapter)
        again = fused.config.stream_layers / sizes.num_layers if fused is not None and fused.config.placement == "delayed" else 0.0
        writer.reserve(round(4 * _count_parameters(config) * (1 + again)) + SPARE_BYTES)

        say("loading weights")
        base, tokenizer = load_base(source)
        known = identity(base, architecture)
        if fused is not None:
            assert adapter is not None
            check_base(fused, known, adapter)
        parameters = sum(p.numel() for p in base.parameters())

        from specstream.export.parity import write_reference
        from specstream.export.trace import GRAPH_FILE, OPSET, STREAMS_FILE, export_graph, export_streams
        from specstream.models.adapter import build_stream_model

        stream_model = build_stream_model(base, fused)
        say("running PyTorch for comparison")
        prompt = [int(token) for token in tokenizer.tokenizer(PARITY_TEXT).input_ids]
        write_reference(stream_model, prompt, writer.path(REFERENCE))
        say("tracing and writing the graph")
        info = export_graph(stream_model, writer.folder, profile)
        weight_bytes = info.weight_bytes
        delayed = fused is not None and fused.config.placement == "delayed"
        if delayed:
            weight_bytes += export_streams(stream_model, writer.folder, profile).weight_bytes
        del base, stream_model
        gc.collect()

        say("comparing the graph with PyTorch")
        parity = _run_parity(writer.path(GRAPH_FILE), writer.path(REFERENCE), writer.path(STREAMS_FILE) if delayed else None)
        writer.path(REFERENCE).unlink()

        say("writing the bundle")
        _write_tokenizer(writer, tokenizer)
        if adapter is not None and (adapter / NGRAM_FILE).is_file():
            ngrams = NgramTable.load(adapter / NGRAM_FILE, sizes.vocab_size)
            ngrams.save(writer.path(NGRAM_FILE))
        license_ = load_license(source)
        writer.path("LICENSE").write_text(_license_note(source.name, license_), encoding="utf-8")
        written = sum(file.stat().st_size for file in writer.folder.rglob("*") if file.is_file())
        cost = ExportCost(time.monotonic() - begun, peak_rss_bytes(), weight_bytes, written)
        manifest = Manifest(
            model=_model_info(source.name, architecture, known.fingerprint, sizes, parameters, license_),
            streams=_stream_info(fused, adapter, STREAMS_FILE if delayed else None),
            contract=ContractInfo(contract.CONTRACT_VERSION, profile, OPSET, "float32"),
            quantization=QuantizationInfo("fp32"),
            tokenizer=TokenizerInfo(tuple(tokenizer.stop_ids), tokenizer.bos_id, tokenizer.chat_template is not None),
            graph=GRAPH_FILE,
            tools={name: importlib.metadata.version(name) for name in TOOLS},
            parity=Parity(parity["top1_agreement"], parity["max_abs_diff"], parity["cases"]),
            export=cost,
        )
        writer.finish(manifest)
    return {
        **asdict(cost),
        "parity": {key: parity[key] for key in ("top1_agreement", "max_abs_diff", "near_ties", "cases")},
        "model": source.name,
        "adapter": str(adapter) if adapter is not None else None,
        "profile": profile,
        "scheme": "fp32",
        "opset": OPSET,
        "operators": info.operators,
        "passes": info.passes,
    }


def _count_parameters(config: PretrainedConfig) -> int:
    """Parameters of the network, a tied head once, without memory for them."""
    import torch
    import transformers

    assert config.architectures
    with torch.device("meta"):
        network = getattr(transformers, config.architectures[0])(config)
    return sum(p.numel() for p in network.parameters())


def _run_parity(graph: Path, reference: Path, streams: Path | None = None) -> dict[str, Any]:
    """Compare in a process of its own: what it loads does not add to this one's memory, and a crash of the runtime is a result."""
    # -P: a file in the user's folder must not be taken for a module of ours.
    command = [sys.executable, "-P", "-m", "specstream.export.parity", str(graph), str(reference)]
    command += ["--streams", str(streams)] if streams is not None else []
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        result: dict[str, Any] = json.loads(child.stdout)
    except json.JSONDecodeError:
        lines = child.stderr.strip().splitlines()
        ended = f"ended by signal {-child.returncode}" if child.returncode < 0 else f"ended with code {child.returncode}"
        raise CheckFailed(f"parity: ONNX Runtime could not run the graph ({ended}): {lines[-1] if lines else 'no message'}") from None
    if not result["ok"]:
        failed = ", ".join(name for name, case in result["cases"].items() if not case["ok"])
        raise CheckFailed(
            f"parity: the graph does not compute what PyTorch computes (cases: {failed}): top-1 agreement "
            f"{result['top1_agreement']:.2%}, largest difference {result['max_abs_diff']:.1e}; the bundle was not written"
        )
    return result


def _write_tokenizer(writer: BundleWriter, tokenizer: TokenizerBundle) -> None:
    scratch = writer.path("scratch/x").parent
    tokenizer.tokenizer.save_pretrained(scratch)
    for name in (TOKENIZER, TOKENIZER_CONFIG):
        os.replace(scratch / name, writer.path(name))
    for left in scratch.iterdir():
        left.unlink()
    scratch.rmdir()
    if tokenizer.chat_template is not None:
        writer.path(CHAT_TEMPLATE).write_text(tokenizer.chat_template, encoding="utf-8")


def _license_note(name: str, license_: License) -> str:
    if license_.text is not None:
        return license_.text
    stated = f"Their source states the licence: {license_.name}." if license_.name else "Their source states no licence."
    return f"The weights in this bundle were made from {name}. {stated}\n"


def _model_info(name: str, architecture: str, fingerprint: str, sizes: ModelSizes, parameters: int, license_: License) -> ModelInfo:
    return ModelInfo(
        name=name,
        architecture=architecture,
        fingerprint=fingerprint,
        num_layers=sizes.num_layers,
        hidden_size=sizes.hidden_size,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        vocab_size=sizes.vocab_size,
        context_length=sizes.context_length,
        parameters=parameters,
        license=license_.name,
    )


def _stream_info(adapter: Adapter | None, folder: Path | None, graph: str | None) -> StreamInfo | None:
    if adapter is None or folder is None:
        return None
    from specstream.models.adapter import WEIGHTS_NAME

    config = adapter.config
    return StreamInfo(
        num_streams=config.num_streams,
        stream_layers=config.stream_layers,
        top_k=config.top_k,
        placement=config.placement,
        graph=graph,
        mode=config.mode,
        draft_vocab_size=config.draft_vocab_size,
        parameters=adapter.count("streams"),
        main_parameters=adapter.count("main"),
        adapter_sha256=sha256(folder / WEIGHTS_NAME),
        calibration=tuple(adapter.calibration),
    )


def peak_rss_bytes() -> int:
    """Most memory this process has held so far."""
    status = Path("/proc/self/status")
    if status.is_file():  # the resource module's figure begins with that of the process that started this one
        for line in status.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    try:
        import resource
    except ImportError:  # Windows has neither
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
