"""Joins the stages of quantizing a Core ML bundle: one of fp16 weights in, one of fewer bits out, with what the rounding cost.

The twin of ``quantize_pipeline.py`` for packages. Quality is measured by the same code, through whatever computes packages here: Core
ML on a Mac, the reference evaluator elsewhere, which takes about a second a call for a small model.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from specstream.models.errors import CheckFailed, UserError
from specstream.quantize.coreml_formats import FloatArray
from specstream.quantize.coreml_moments import read_moments
from specstream.quantize.coreml_schemes import COREML_REQUIRES, CompressedPackage, CoreMLOptions, check_package, compress_package
from specstream.runtimes.bundle import Bundle, BundleWriter
from specstream.runtimes.coreml_import import import_coremltools
from specstream.runtimes.manifest import MANIFEST_NAME, FileEntry, Manifest, QuantizationInfo
from specstream.toolchain.export_pipeline import peak_rss_bytes
from specstream.toolchain.quantize_pipeline import (
    SCRATCH,
    Limits,
    children_peak,
    measure_quality,
    read_prompt_files,
    run_module,
    write_reference,
)

COMPENSATED = ("int4", "palette4", "palette6")  # schemes whose errors are made up for when there are texts; 8 bits have none to speak of
ROW_PROMPTS = 2  # prompts on which rows are compared: it takes two calls for each token


def quantize_package_bundle(
    source: Path,
    out: Path,
    options: CoreMLOptions,
    *,
    calibration: Path | None = None,
    held_out: Path | None = None,
    limit: int = 24,
    limits: Limits | None = None,
    force: bool = False,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Quantize a Core ML bundle and compare it with the original.

    Args:
        source: folder of a Core ML bundle with fp16 weights.
        out: folder to make.
        options: the scheme and its settings.
        calibration: JSON lines with ``prompt``: for figures of quality, limits, and to make up for rounding errors.
        held_out, limit, limits, force, progress: as for :func:`specstream.toolchain.quantize_pipeline.quantize_bundle`.

    Returns:
        The report, with the keys of :func:`specstream.toolchain.quantize_pipeline.quantize_bundle`, without ``packed`` and
        ``accuracy_level``; beside them ``head``, ``group_size``, ``compensated`` (whether rounding errors were made up for) and
        ``package_share`` (of the original package's bytes).

    Raises:
        UserError: bad input.
        CheckFailed: a limit was missed, or the quantized bundle does not run. Neither leaves anything behind.
    """
    begun = time.monotonic()
    say = progress or (lambda _step: None)
    limits = limits or Limits()
    asked, others = read_prompt_files(calibration, held_out, limit, limits)
    import_coremltools()
    bundle = Bundle.load(source)
    scheme = bundle.manifest.quantization.scheme
    if scheme != "fp16":
        raise UserError(f"{source}: is quantized already ({scheme}); quantize the fp16 bundle it was made of")
    package, vocab_size = bundle.path(bundle.manifest.graph), bundle.manifest.model.vocab_size
    check_package(package, options, vocab_size)
    with BundleWriter(out, force=force) as writer:
        writer.reserve(sum(entry.bytes for entry in bundle.manifest.files))
        scratch = writer.path(f"{SCRATCH}/texts").parent
        before: dict[str, Any] | None = None
        if asked is not None:
            say("writing texts with the fp16 bundle")
            before = write_reference(bundle.folder, scratch, asked, None)
        moments: Mapping[int, FloatArray] | None = None
        if before is not None and options.scheme in COMPENSATED:
            say("collecting activations")
            file = scratch / "moments.npz"
            run_module("specstream.toolchain.coreml_calibrate", str(bundle.folder), str(scratch), str(file))
            moments = read_moments(file)
        say("quantizing")
        written = compress_package(package, writer.path(bundle.manifest.graph), options, vocab_size, moments)
        for entry in bundle.manifest.files:
            if not entry.path.startswith(f"{bundle.manifest.graph}/"):
                shutil.copyfile(bundle.path(entry.path), writer.path(entry.path))
        quality: dict[str, Any] | None = None
        if others is not None:
            say("writing held-out texts with the fp16 bundle")
            before = write_reference(bundle.folder, scratch, others, None)
        if before is not None:
            say("comparing with the fp16 bundle")
            _write_manifest(writer.folder, scratch, _manifest(bundle.manifest, options, written, None))
            quality = measure_quality("compare", writer.folder, scratch, None, "--row-prompts", str(ROW_PROMPTS))
            quality["held_out"] = others is not None
            if missed := limits.missed(quality, "fp16"):
                raise CheckFailed(f"{options.scheme}: {'; '.join(missed)}; nothing was written")
        shutil.rmtree(scratch)
        stored = None if quality is None else {**quality, "reference": before}
        final = writer.finish(_manifest(bundle.manifest, options, written, stored))
    sizes = [sum(entry.bytes for entry in made.manifest.files) for made in (bundle, final)]
    packages = [_package_bytes(made.manifest) for made in (bundle, final)]
    return {
        "seconds": time.monotonic() - begun,
        "peak_rss_bytes": max(peak_rss_bytes(), children_peak()),
        "weight_bytes": written.weight_bytes,
        "bundle_bytes": sizes[1],
        "bundle_share": sizes[1] / sizes[0],
        "package_share": packages[1] / packages[0],
        "model": bundle.manifest.model.name,
        "scheme": options.scheme,
        "head": options.head,
        "block_size": options.block_size,
        "group_size": options.group_size,
        "compensated": moments is not None,
        "products": written.matrices,
        "rows_independent": True,
        "quality": quality,
        "reference": before,
        "calibration": None if calibration is None else str(calibration),
        "held_out": None if held_out is None else str(held_out),
    }


def _manifest(source: Manifest, options: CoreMLOptions, written: CompressedPackage, quality: dict[str, Any] | None) -> Manifest:
    used = {options.scheme, options.head}
    info = QuantizationInfo(
        scheme=options.scheme,
        head=options.head,
        block_size=options.block_size if "int4" in used else None,
        group_size=options.group_size if used & {"palette4", "palette6"} else None,
        rows_independent=True,
        products=written.matrices,
        requires=next((COREML_REQUIRES[scheme] for scheme in sorted(used) if scheme in COREML_REQUIRES), None),
        quality=quality,
    )
    tools = source.tools | {name: importlib.metadata.version(name) for name in ("specstream-toolchain", "coremltools")}
    return dataclasses.replace(source, quantization=info, tools=tools, verified=None, files=())


def _write_manifest(folder: Path, scratch: Path, manifest: Manifest) -> None:
    """So that what is written so far loads as a bundle."""
    files = [file for file in folder.rglob("*") if file.is_file() and scratch not in file.parents and file.name != MANIFEST_NAME]
    entries = tuple(FileEntry(file.relative_to(folder).as_posix(), "", file.stat().st_size) for file in files)
    (folder / MANIFEST_NAME).write_text(dataclasses.replace(manifest, files=entries).to_json(), encoding="utf-8")


def _package_bytes(manifest: Manifest) -> int:
    return sum(entry.bytes for entry in manifest.files if entry.path.startswith(f"{manifest.graph}/"))
