"""Joins the stages of quantizing: a bundle of fp32 weights in, a quantized one out, with what the rounding cost.

What can be refused is refused before weights are read; files go to a temporary folder that becomes OUT at the very end. Whatever
runs a graph does so in a process of its own.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specstream.models.errors import CheckFailed, UserError
from specstream.runtimes.bundle import Bundle, BundleWriter
from specstream.runtimes.manifest import MANIFEST_NAME, FileEntry, Manifest, QuantizationInfo
from specstream.toolchain.export_pipeline import peak_rss_bytes
from specstream.toolchain.prompt_rows import PromptRows, read_prompt_rows

if TYPE_CHECKING:
    from specstream.quantize.calibrate import Sample
    from specstream.quantize.formats import FloatArray
    from specstream.quantize.schemes import Plan, Quantizer, Written

SCRATCH = "scratch"  # inside the temporary folder: texts, their log-probabilities, samples of activations
MAX_NEW_TOKENS = 48
LEAST_MOMENTS = 1 << 28  # bytes of moments that are gathered at a time, whatever the weights' size; half of that if it is more
MIXED_MAX_KL = 0.01  # of a mixed bundle when no limit is given, in nats


@dataclass(frozen=True)
class Limits:
    """What a quantized bundle may cost: nats of KL from fp32 on average, and the share of rows whose argmax siblings' rows change."""

    max_kl: float | None = None
    max_flips: float | None = None

    def missed(self, quality: Mapping[str, Any], original: str = "fp32") -> list[str]:
        """What is beyond them, in words; ``original`` names what the bundle was compared with."""
        found = []
        if self.max_kl is not None and not quality["kl"] <= self.max_kl:
            found.append(f"KL from {original} is {quality['kl']:.4f} nats (at most {self.max_kl:g} allowed)")
        rate = quality["flip_rate"]
        if self.max_flips is not None and rate is None:
            found.append("flip rate is unknown: the prompts leave no room in the context to compare rows")
        elif self.max_flips is not None and not rate <= self.max_flips:
            found.append(f"flip rate is {rate:.4f} (at most {self.max_flips:g} allowed)")
        return found


def quantize_bundle(
    source: Path,
    out: Path,
    scheme: str,
    *,
    block_size: int | None = None,
    accuracy_level: int = 4,
    cache: str = "float32",
    calibration: Path | None = None,
    held_out: Path | None = None,
    limit: int = 24,
    limits: Limits | None = None,
    threads: int | None = None,
    force: bool = False,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Quantize a bundle and compare it with the original.

    Args:
        source: folder of a bundle with fp32 weights, profile ``ort``.
        out: folder to make.
        scheme: ``int4``, ``int8``, ``w8a8`` or ``mixed``.
        block_size, accuracy_level: of products in blocks, see :class:`specstream.quantize.formats.BlockFormat`; the largest usual block
            size that divides all products when left out.
        cache: type of the cache's keys and values: ``float32`` or ``int8``.
        calibration: JSON lines with ``prompt``; needed by ``w8a8`` and ``mixed``, by an int8 cache, for limits and figures of quality, and
            for ``int4`` to make up for errors.
        held_out: JSON lines with ``prompt``, to compare on in place of those; what rounding was fitted to flatters it a little.
        limit: take the first prompts only, of each file.
        limits: what may be lost.
        threads: of the processes that run graphs.
        force: replace ``out`` when it is a bundle already.
        progress: called with the name of each step.

    Returns:
        The report: ``seconds``, ``peak_rss_bytes`` (of the largest process), ``weight_bytes``, ``bundle_bytes``, ``bundle_share`` (of the
        original's), ``scheme``, ``products``, ``packed``, ``rows_independent``, ``quality`` and ``reference`` (None without prompts).

    Raises:
        UserError: bad input.
        CheckFailed: a limit was missed, or the quantized bundle does not run. Neither leaves anything behind.
    """
    begun = time.monotonic()
    say = progress or (lambda _step: None)
    limits = limits or Limits()
    from specstream.quantize.schemes import NEEDS_SAMPLES, TAKES_MOMENTS, Options, check_graphs, usual_block_size

    options = Options(scheme, 32 if block_size is None else block_size, accuracy_level)  # complains of others, before anything is read
    if calibration is None and scheme in NEEDS_SAMPLES:
        raise UserError(f"scheme {scheme} needs --calibration FILE: JSON lines with prompts like those the bundle will see")
    if calibration is None and cache != "float32":
        raise UserError(f"--cache {cache} needs --calibration FILE: JSON lines with prompts like those the bundle will see")
    asked, others = read_prompt_files(calibration, held_out, limit, limits)
    bundle = Bundle.load(source)
    graphs = _graphs(bundle)
    if block_size is None:
        options = dataclasses.replace(options, block_size=usual_block_size(bundle.folder, graphs))
    check_graphs(bundle.folder, graphs, options)
    with BundleWriter(out, force=force) as writer:
        writer.reserve(sum(entry.bytes for entry in bundle.manifest.files))
        scratch = writer.path(f"{SCRATCH}/texts").parent
        before: dict[str, Any] | None = None
        samples: dict[str, dict[str, Sample]] | None = None
        moments: dict[str, Mapping[str, FloatArray]] | None = None
        channels: FloatArray | None = None
        if asked is not None:
            say("writing texts with the fp32 bundle")
            before = write_reference(bundle.folder, scratch, asked, threads)
        if scheme in NEEDS_SAMPLES:
            say("collecting activations")
            samples = _collect(bundle.folder, scratch)
        if asked is not None and scheme in TAKES_MOMENTS:
            say("collecting moments of activations")
            moments = _collect_moments(bundle.folder, scratch)
        if cache != "float32":
            say("measuring keys and values")
            channels = _collect_cache(bundle.folder, scratch)
        say("quantizing")
        from specstream.quantize.schemes import Quantizer

        quantizer = Quantizer(bundle.folder, graphs, options, samples, bundle.manifest.model.context_length, moments, channels)
        for name in _other_files(bundle, graphs):
            shutil.copyfile(bundle.path(name), writer.path(name))
        attempt = _Attempt(bundle, writer, quantizer, scratch, threads, begun)
        if scheme == "mixed":
            say("searching the products to keep finer")
            plans = quantizer.search(attempt.divergence, limits.max_kl if limits.max_kl is not None else MIXED_MAX_KL)
            if plans is None:
                raise CheckFailed(f"no mixed bundle has KL within {limits.max_kl or MIXED_MAX_KL:g} nats; nothing was written")
        else:
            plans = quantizer.plans()
        written = attempt.write(plans)
        quality: dict[str, Any] | None = None
        if others is not None:
            say("writing held-out texts with the fp32 bundle")
            before = write_reference(bundle.folder, scratch, others, threads)
        if before is not None:
            say("comparing with the fp32 bundle")
            quality = {**attempt.compare(), "held_out": others is not None}
            if missed := limits.missed(quality):
                raise CheckFailed(f"{scheme}: {'; '.join(missed)}; nothing was written")
        shutil.rmtree(scratch)
        manifest = attempt.manifest(written, quality, before)
        final = writer.finish(manifest)
    bundle_bytes = sum(entry.bytes for entry in final.manifest.files)
    return {
        "seconds": time.monotonic() - begun,
        "peak_rss_bytes": max(peak_rss_bytes(), children_peak()),
        "weight_bytes": written.weight_bytes,
        "bundle_bytes": bundle_bytes,
        "bundle_share": bundle_bytes / sum(entry.bytes for entry in bundle.manifest.files),
        "model": bundle.manifest.model.name,
        "scheme": scheme,
        "block_size": options.block_size,
        "accuracy_level": accuracy_level,
        "cache_dtype": cache,
        "products": written.products,
        "packed": written.packed,
        "rows_independent": True,
        "quality": quality,
        "reference": before,
        "calibration": None if calibration is None else str(calibration),
        "held_out": None if held_out is None else str(held_out),
    }


def read_prompt_files(
    calibration: Path | None, held_out: Path | None, limit: int, limits: Limits
) -> tuple[PromptRows | None, PromptRows | None]:
    """Prompts to calibrate with and others to compare on, as far as there are any.

    Raises:
        UserError: a file that holds no prompts, the same file twice, a limit without prompts to compare on.
    """
    if calibration is None and held_out is None and limits != Limits():
        raise UserError("a limit needs --held-out or --calibration FILE: JSON lines with prompts to compare on")
    if calibration is not None and held_out is not None and held_out.exists() and calibration.exists() and held_out.samefile(calibration):
        raise UserError(f"--held-out {held_out}: the file of --calibration; give other prompts, or leave it out")
    asked = read_prompt_rows(calibration, limit, "--calibration") if calibration is not None else None
    return asked, read_prompt_rows(held_out, limit, "--held-out") if held_out is not None else None


@dataclass
class _Attempt:
    """Writes quantized graphs into the bundle that is being made, and runs it."""

    source: Bundle
    writer: BundleWriter
    quantizer: Quantizer
    scratch: Path
    threads: int | None
    begun: float

    def write(self, plans: Mapping[str, Plan]) -> Written:
        return self.quantizer.write(self.writer.folder, plans)

    def divergence(self, plans: Mapping[str, Plan]) -> float:
        """Mean KL of the bundle that these plans make."""
        self.write(plans)
        return float(self.compare("--no-generate")["kl"])

    def compare(self, *arguments: str) -> dict[str, Any]:
        """Load what is written so far as a bundle, in a process of its own."""
        folder = self.writer.folder
        files = [file for file in folder.rglob("*") if file.is_file() and self.scratch not in file.parents and file.name != MANIFEST_NAME]
        entries = tuple(FileEntry(file.relative_to(folder).as_posix(), "", file.stat().st_size) for file in files)
        manifest = dataclasses.replace(self.manifest(None, None, None), files=entries)
        (folder / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
        return measure_quality("compare", folder, self.scratch, self.threads, *arguments)

    def manifest(self, written: Written | None, quality: dict[str, Any] | None, before: dict[str, Any] | None) -> Manifest:
        options = self.quantizer.options
        from specstream.quantize.schemes import REQUIRES

        products = {} if written is None else written.products
        info = QuantizationInfo(
            scheme=options.scheme,
            block_size=options.block_size,
            accuracy_level=options.accuracy_level,
            rows_independent=True,
            products=products,
            requires=REQUIRES if "MatMulIntegerToFloat" in products else None,
            quality=None if quality is None else {**quality, "reference": before},
        )
        tools = self.source.manifest.tools | {
            name: importlib.metadata.version(name) for name in ("specstream-toolchain", "onnx", "onnx-ir", "onnxruntime")
        }
        held = dataclasses.replace(self.source.manifest.contract, cache_dtype="float32" if self.quantizer.cache is None else "int8")
        return dataclasses.replace(self.source.manifest, contract=held, quantization=info, tools=tools, verified=None, files=())


def _graphs(bundle: Bundle) -> list[str]:
    """Names of the bundle's graphs, the main one first.

    Raises:
        UserError: a bundle that is quantized already, or whose operators are not ONNX Runtime's own.
    """
    manifest = bundle.manifest
    if manifest.quantization.scheme != "fp32":
        raise UserError(f"{bundle.folder}: is quantized already ({manifest.quantization.scheme}); quantize the fp32 bundle it was made of")
    if manifest.contract.profile != "ort":
        raise UserError(
            f"{bundle.folder}: has profile {manifest.contract.profile}; quantized products are operators of ONNX Runtime: "
            "export the model with --profile ort"
        )
    streams = manifest.streams.graph if manifest.streams is not None else None
    return [manifest.graph] if streams is None else [manifest.graph, streams]


def _other_files(bundle: Bundle, graphs: list[str]) -> list[str]:
    """Files of a bundle that are neither graphs nor weights of graphs."""
    import onnx_ir as ir

    weights = set()
    for graph in graphs:
        tensors = (value.const_value for value in ir.load(bundle.path(graph)).graph.initializers.values())
        weights |= {str(tensor.location) for tensor in tensors if isinstance(tensor, ir.ExternalTensor)}
    return [entry.path for entry in bundle.manifest.files if entry.path not in weights and entry.path not in graphs]


def write_reference(folder: Path, scratch: Path, asked: PromptRows, threads: int | None) -> dict[str, Any]:
    from specstream.toolchain.quantize_quality import write_prompts

    write_prompts(scratch, asked.prompts, asked.completions, MAX_NEW_TOKENS)
    return measure_quality("reference", folder, scratch, threads)


def _collect(folder: Path, scratch: Path) -> dict[str, dict[str, Sample]]:
    from specstream.quantize.calibrate import read_samples
    from specstream.toolchain.quantize_quality import TEXTS

    rows = scratch / "rows.npz"
    run_module("specstream.quantize.calibrate", str(folder), str(scratch / TEXTS), str(rows))
    return read_samples(rows)


def _collect_moments(folder: Path, scratch: Path) -> dict[str, Mapping[str, FloatArray]]:
    from specstream.quantize.calibrate import read_moments
    from specstream.toolchain.quantize_quality import TEXTS

    most = max(LEAST_MOMENTS, sum(file.stat().st_size for file in folder.rglob("*.data")) // 2)
    run_module("specstream.quantize.calibrate", str(folder), str(scratch / TEXTS), str(scratch / "moments"), "--moments", str(most))
    return read_moments(scratch / "moments")


def _collect_cache(folder: Path, scratch: Path) -> FloatArray:
    import numpy as np

    from specstream.toolchain.quantize_quality import TEXTS

    file = scratch / "cache.npy"
    run_module("specstream.quantize.calibrate", str(folder), str(scratch / TEXTS), str(file), "--cache")
    channels: FloatArray = np.load(file, allow_pickle=False)
    return channels


def measure_quality(what: str, bundle: Path, scratch: Path, threads: int | None, *arguments: str) -> dict[str, Any]:
    given = () if threads is None else ("--threads", str(threads))
    result: dict[str, Any] = json.loads(
        run_module("specstream.toolchain.quantize_quality", what, str(bundle), str(scratch), *given, *arguments)
    )
    return result


def run_module(module: str, *arguments: str) -> str:
    """Run a module in a process of its own; returns what it printed.

    Raises:
        UserError, CheckFailed: it ended with the exit code of either.
    """
    # -P: a file in the user's folder must not be taken for a module of ours.
    child = subprocess.run([sys.executable, "-P", "-m", module, *arguments], capture_output=True, text=True, check=False)
    if child.returncode == 0:
        return child.stdout
    lines = child.stderr.strip().splitlines()
    said = lines[-1] if lines else "no message"
    if said.startswith("specstream.models.errors.UserError: "):
        raise UserError(said.partition(": ")[2])
    ended = f"ended by signal {-child.returncode}" if child.returncode < 0 else f"ended with code {child.returncode}"
    raise CheckFailed(f"{module.rpartition('.')[2]} {ended}: {said}; nothing was written")


def children_peak() -> int:
    """Most memory that any process started from this one has held."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
