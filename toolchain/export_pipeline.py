"""Joins the stages of an export: base weights and an adapter in, a bundle out.

Everything that can be refused is refused before weights load; files go to a temporary folder that becomes OUT at the very end.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from specstream.export import contract
from specstream.export.coreml_contract import FUNCTIONS, plan_functions
from specstream.models.errors import CheckFailed, UserError
from specstream.models.fetch import HUB_IDS
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
from specstream.toolchain.zoo import ADAPTER_FILES

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from specstream.export.coreml_package import PackageMetadata
    from specstream.export.sizes import ModelSizes
    from specstream.models.adapter import Adapter
    from specstream.models.base import BaseSource, License, TokenizerBundle
    from specstream.models.stream_model import StreamModel

SPARE_BYTES = 64 << 20  # beside the weights: graph, tokenizer, the adapter's part
TOOLS = ("specstream-toolchain", "torch", "transformers", "onnx", "onnx-ir", "onnxscript", "onnxruntime")
COREML_TOOLS = ("specstream-toolchain", "torch", "transformers", "coremltools")
PACKAGE = "model.mlpackage"
COREML_CAPACITY = 1024  # rows of text in the states of a Core ML package, unless asked for otherwise
PARITY_TEXT = "List the names of all museums that opened after 1990, newest first. Answer with one SQL query and nothing else."
REFERENCE = "reference.npz"

Format = Literal["onnx", "coreml"]


@dataclass(frozen=True)
class _Written:
    """The model in the bundle's form, compared with PyTorch.

    Attributes:
        graph: its file or folder in the bundle.
        streams_graph: file of the delayed streams' own pass, where it has one.
        contract: what the manifest says of it.
        scheme: how its weights are stored.
        weight_bytes: a shared weight once.
        parity: the comparison, see :func:`specstream.export.parity.check`.
        figures: what only this form's report has.
    """

    graph: str
    streams_graph: str | None
    contract: ContractInfo
    scheme: str
    weight_bytes: int
    parity: dict[str, Any]
    figures: dict[str, Any]


def export_bundle(
    model: str,
    out: Path,
    adapter: Path | None = None,
    profile: contract.Profile = "ort",
    force: bool = False,
    progress: Callable[[str], None] | None = None,
    format: Format = "onnx",
    capacity: int = COREML_CAPACITY,
    functions: tuple[str, ...] = FUNCTIONS,
) -> dict[str, Any]:
    """Export a model, with streams when an adapter is given, and compare the graph with PyTorch in a process of its own.

    Args:
        model: hub id, folder, ``.gguf`` file or short name.
        out: folder to make.
        adapter: folder of streams trained on this model.
        profile: operators of an ONNX graph.
        force: replace ``out`` when it is a bundle already.
        progress: called with the name of each step.
        format: of the model in the bundle.
        capacity: rows of text that a Core ML package can hold.
        functions: of that package, see :func:`specstream.export.coreml_contract.plan_functions`; ``draft`` comes with delayed streams.

    Returns:
        The report: ``seconds``, ``peak_rss_bytes`` (of this process), ``weight_bytes``, ``bundle_bytes``, ``parity``, ``model``,
        ``format``, ``profile``, ``opset``, ``operators``; ``passes`` for ONNX, ``functions``, ``capacity`` and ``slots`` for Core ML.

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
        if format == "coreml":
            _check_coreml(capacity, functions, sizes)
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
        delayed = fused is not None and fused.config.placement == "delayed"
        times: float
        if format == "coreml":  # each function is a package of 16 bits before they are joined
            times = 2 * (1 + len(plan_functions(functions, fused is not None and not delayed)) + delayed)
        else:
            times = 4 * (1 + (fused.config.stream_layers / sizes.num_layers if fused is not None and delayed else 0.0))
        writer.reserve(round(times * _count_parameters(config)) + SPARE_BYTES)

        say("loading weights")
        base, tokenizer = load_base(source)
        known = identity(base, architecture)
        if fused is not None:
            assert adapter is not None
            check_base(fused, known, adapter)
        parameters = sum(p.numel() for p in base.parameters())

        from specstream.models.adapter import build_stream_model

        stream_models = [build_stream_model(base, fused)]
        del base
        prompt = [int(token) for token in tokenizer.tokenizer(PARITY_TEXT).input_ids]
        license_ = load_license(source)
        model_info = _model_info(source.name, architecture, known.fingerprint, sizes, parameters, license_)
        tokenizer_info = TokenizerInfo(tuple(tokenizer.stop_ids), tokenizer.bos_id, tokenizer.chat_template is not None)
        if format == "coreml":
            about = _coreml_metadata(source, model_info, _stream_info(fused, adapter, None), tokenizer_info)
            written = _write_coreml(writer, stream_models, prompt, capacity, functions, about, say)
        else:
            written = _write_onnx(writer, stream_models, prompt, profile, say)

        say("writing the bundle")
        _write_tokenizer(writer, tokenizer)
        if adapter is not None and (adapter / NGRAM_FILE).is_file():
            ngrams = NgramTable.load(adapter / NGRAM_FILE, sizes.vocab_size)
            ngrams.save(writer.path(NGRAM_FILE))
        writer.path("LICENSE").write_text(_license_note(source.name, license_), encoding="utf-8")
        if adapter is not None:
            for name, file in ADAPTER_FILES.items():
                if (adapter / name).is_file():
                    shutil.copyfile(adapter / name, writer.path(file))
        total = sum(file.stat().st_size for file in writer.folder.rglob("*") if file.is_file())
        cost = ExportCost(time.monotonic() - begun, peak_rss_bytes(), written.weight_bytes, total)
        parity = written.parity
        manifest = Manifest(
            model=model_info,
            streams=_stream_info(fused, adapter, written.streams_graph),
            contract=written.contract,
            quantization=QuantizationInfo(written.scheme),
            tokenizer=tokenizer_info,
            graph=written.graph,
            tools={name: importlib.metadata.version(name) for name in (COREML_TOOLS if format == "coreml" else TOOLS)},
            parity=Parity(parity["top1_agreement"], parity["max_abs_diff"], parity["cases"], parity.get("near_tie")),
            export=cost,
        )
        writer.finish(manifest)
    return {
        **asdict(cost),
        "parity": {key: parity[key] for key in ("top1_agreement", "max_abs_diff", "near_ties", "cases")},
        "model": source.name,
        "adapter": str(adapter) if adapter is not None else None,
        "format": format,
        "profile": written.contract.profile,
        "scheme": written.scheme,
        "opset": written.contract.opset,
        **written.figures,
    }


def _write_onnx(
    writer: BundleWriter, models: list[StreamModel], prompt: list[int], profile: contract.Profile, say: Callable[[str], None]
) -> _Written:
    """Graph and weights. ``models`` holds the one model and is emptied, so that the comparison has its memory."""
    from specstream.export.parity import write_reference
    from specstream.export.trace import GRAPH_FILE, OPSET, STREAMS_FILE, export_graph, export_streams

    model = models.pop()
    delayed = model.config is not None and model.config.placement == "delayed"
    say("running PyTorch for comparison")
    write_reference(model, prompt, writer.path(REFERENCE))
    say("tracing and writing the graph")
    info = export_graph(model, writer.folder, profile)
    weight_bytes = info.weight_bytes
    if delayed:
        weight_bytes += export_streams(model, writer.folder, profile).weight_bytes
    del model
    gc.collect()
    say("comparing the graph with PyTorch")
    arguments = [writer.path(GRAPH_FILE), writer.path(REFERENCE)]
    options = ["--streams", str(writer.path(STREAMS_FILE))] if delayed else []
    parity = _run_parity("ONNX Runtime", ["specstream.export.parity", *map(str, arguments), *options])
    writer.path(REFERENCE).unlink()
    made = ContractInfo(contract.CONTRACT_VERSION, profile, OPSET, "float32")
    figures = {"operators": info.operators, "passes": info.passes}
    return _Written(GRAPH_FILE, STREAMS_FILE if delayed else None, made, "fp32", weight_bytes, parity, figures)


def _check_coreml(capacity: int, functions: tuple[str, ...], sizes: ModelSizes) -> None:
    """Refuse what can be refused before weights load.

    Raises:
        UserError: functions or a capacity that make no sense; coremltools is missing.
    """
    from specstream.runtimes.coreml_import import import_coremltools

    most_rows = max(function.rows for function in plan_functions(functions, fused_streams=False))
    most = sizes.context_length
    if not most_rows <= capacity <= most:
        raise UserError(f"capacity: {capacity} given, {most_rows} (rows of the largest function) to {most} (the model's context) expected")
    import_coremltools()


def _write_coreml(
    writer: BundleWriter,
    models: list[StreamModel],
    prompt: list[int],
    capacity: int,
    functions: tuple[str, ...],
    about: PackageMetadata,
    say: Callable[[str], None],
) -> _Written:
    """The package. ``models`` as for :func:`_write_onnx`."""
    from specstream.export.coreml_contract import FUSED_STREAM_ROWS
    from specstream.export.coreml_trace import OPSET, export_package, plan_contract
    from specstream.export.parity import write_reference

    model = models.pop()
    sizes = plan_contract(model, capacity, functions)
    say("running PyTorch for comparison")
    write_reference(model, prompt[: capacity // 2], writer.path(REFERENCE), FUSED_STREAM_ROWS, sizes.commit_width)
    info = export_package(model, writer.path(PACKAGE), sizes, about, lambda name: say(f"converting {name}"))
    del model
    gc.collect()
    say("comparing the package with PyTorch")
    sizes_file = writer.path("sizes.json")
    sizes_file.write_text(json.dumps(asdict(sizes)), encoding="utf-8")
    arguments = [writer.path(PACKAGE), sizes_file, writer.path(REFERENCE)]
    parity = _run_parity("the package's session", ["specstream.toolchain.coreml_parity", *map(str, arguments)])
    writer.path(REFERENCE).unlink()
    sizes_file.unlink()
    made = ContractInfo(contract.CONTRACT_VERSION, "coreml", OPSET, "float16", sizes)
    names = [function.name for function in sizes.functions] + [sizes.draft] * (sizes.draft is not None)
    figures = {"operators": info.operators, "functions": names, "capacity": sizes.capacity, "slots": sizes.slots}
    return _Written(PACKAGE, None, made, "fp16", info.weight_bytes, parity, figures)


def _coreml_metadata(source: BaseSource, model: ModelInfo, streams: StreamInfo | None, tokenizer: TokenizerInfo) -> PackageMetadata:
    """What the package says of itself; the contract is added when it is written."""
    from specstream.export.coreml_package import TOKENIZER_KEY, PackageMetadata

    keys = {"specstream.model": model, "specstream.streams": streams, "specstream.tokenizer": tokenizer}
    user_defined = {key: json.dumps(asdict(value), sort_keys=True) for key, value in keys.items() if value is not None}
    tokenizer_id = source.name if source.kind == "hub" else HUB_IDS.get(source.name)
    if tokenizer_id is not None:
        user_defined[TOKENIZER_KEY] = tokenizer_id
    speculation = f", with {streams.num_streams} speculative streams" if streams is not None else ""
    return PackageMetadata(
        short_description=f"{model.name} ({model.architecture}){speculation}: several functions over one pair of states",
        author=f"made from {model.name} by specstream",
        license=model.license or "not stated by the weights",
        version=importlib.metadata.version("specstream-toolchain"),
        user_defined=user_defined,
    )


def _count_parameters(config: PretrainedConfig) -> int:
    """Parameters of the network, a tied head once, without memory for them."""
    import torch
    import transformers

    assert config.architectures
    with torch.device("meta"):
        network = getattr(transformers, config.architectures[0])(config)
    return sum(p.numel() for p in network.parameters())


def _run_parity(runtime: str, arguments: list[str]) -> dict[str, Any]:
    """Compare in a process of its own: what it loads does not add to this one's memory, and a crash of the runtime is a result.

    Args:
        runtime: its name, for messages.
        arguments: the module to run and what it takes.
    """
    # -P: a file in the user's folder must not be taken for a module of ours.
    child = subprocess.run([sys.executable, "-P", "-m", *arguments], capture_output=True, text=True, check=False)
    try:
        result: dict[str, Any] = json.loads(child.stdout)
    except json.JSONDecodeError:
        lines = child.stderr.strip().splitlines()
        ended = f"ended by signal {-child.returncode}" if child.returncode < 0 else f"ended with code {child.returncode}"
        raise CheckFailed(f"parity: {runtime} could not run the graph ({ended}): {lines[-1] if lines else 'no message'}") from None
    if not result["ok"]:
        failed = ", ".join(name for name, case in result["cases"].items() if not case["ok"])
        streams = max((case["stream_max_abs_diff"] or 0.0 for case in result["cases"].values()), default=0.0)
        of_streams = f", of streams {streams:.1e}" if streams else ""
        raise CheckFailed(
            f"parity: the graph does not compute what PyTorch computes (cases: {failed}): top-1 agreement "
            f"{result['top1_agreement']:.2%}, largest difference {result['max_abs_diff']:.1e}{of_streams}; the bundle was not written"
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
