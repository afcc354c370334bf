"""From a bundle to a package for one kind of device: the model in that device's form, traces to check a loop against, and a page.

What can be refused is refused before the expensive steps; files go to a temporary folder that becomes OUT at the very end, its zip with it.
Whatever converts or runs a graph to be measured does so in a process of its own.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, get_args

from specstream.models.errors import CheckFailed, UserError
from specstream.runtimes.bundle import Bundle, BundleWriter
from specstream.runtimes.coreml_session import has_core_ml
from specstream.runtimes.drafters import Drafter
from specstream.runtimes.golden import GOLDEN_FILE, Golden, Trace, record, replay
from specstream.runtimes.joined import PRIOR_WEIGHTS
from specstream.runtimes.language_model import LanguageModel, open_session, stream_policy
from specstream.runtimes.manifest import CACHE_WIDTHS, FileEntry, Manifest, PackageInfo, Target
from specstream.runtimes.ngrams import NGRAM_FILE, NgramTable
from specstream.runtimes.ort_session import OrtSession
from specstream.runtimes.profile import bundle_id
from specstream.runtimes.sampling import Sampling
from specstream.runtimes.session import Session
from specstream.runtimes.text import TextCodec
from specstream.toolchain import golden_replay, replay_script
from specstream.toolchain.archive import pack
from specstream.toolchain.extras import require
from specstream.toolchain.package_page import PAGE_FILE, page
from specstream.toolchain.zoo import ADAPTER_FILES, adapter_with

TARGETS: Final[tuple[Target, ...]] = get_args(Target)
DEFAULT_CAPACITY: Final = 1024  # rows of cache
REPLAY_FILE: Final = "replay.py"
OPERATORS_FILE: Final = "required_operators.config"
ADAPTER_CARD: Final = ADAPTER_FILES["README.md"]
SAMPLED: Final = Sampling(temperature=0.8, top_k=40, top_p=0.95, repetition_penalty=1.1, seed=1)  # what sampled traces are made with
NEW_TOKENS: Final = 32  # of each trace
EVALUATED: Final = (2, 12)  # prompts and tokens where the reference evaluator stands in for Core ML: seconds a call
STREAM_BUDGET, JOINED_BUDGET = 8, 16  # rows of a call
SCRATCH_BYTES: Final = 64 << 20  # beside weights: tokenizer, traces, page

# Short and of different kinds, for when nobody gives others: a fact, something to copy from, and other scripts.
PROMPTS: Final = (
    "Name three rivers.",
    "Repeat this list twice: red, green, blue, red, green, blue.",
    "Translate to French: The café is closed – naïve 東京 😀.",
)

_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(|[kKMGT]?i?[bB])")
_UNITS: Final = {"": 1, "B": 1, "KB": 1000, "MB": 1000**2, "GB": 1000**3, "TB": 1000**4}
_UNITS_BINARY: Final = {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


@dataclass(frozen=True)
class Memory:
    """What a process that runs the package holds.

    Attributes:
        weights: bytes of the graphs' files.
        cache: of all rows.
        overhead: the rest of what a fresh process held at most when it had loaded the package and answered one prompt; None when it
            was not measured.
    """

    weights: int
    cache: int
    overhead: int | None = None

    @property
    def total(self) -> int:
        return self.weights + self.cache + (self.overhead or 0)

    def __str__(self) -> str:
        rest = "" if self.overhead is None else f" + {_mb(self.overhead)} overhead"
        return f"{_mb(self.weights)} weights + {_mb(self.cache)} cache{rest} = {_mb(self.total)}"


@dataclass(frozen=True)
class Budget:
    """Bytes that a package may have on the disk and in memory."""

    size: int | None = None
    memory: int | None = None

    def check_size(self, size: int) -> None:
        if self.size is not None and size > self.size:
            raise CheckFailed(f"over the size budget of {_mb(self.size)}: {_mb(size)}; quantize the bundle, or raise --max-size")

    def check_memory(self, memory: Memory) -> None:
        if self.memory is not None and memory.total > self.memory:
            before = "" if memory.overhead is not None else ", before any overhead"
            raise CheckFailed(
                f"over the memory budget of {_mb(self.memory)}: {memory}{before}; "
                "quantize the bundle, lower --capacity, or raise --max-memory"
            )


def parse_bytes(text: str, option: str) -> int:
    """``300MB``, ``1.5GB``, ``256MiB`` or a plain number of bytes.

    Raises:
        UserError: something else, or 0.
    """
    match = _SIZE.fullmatch(text.strip())
    factor = (_UNITS | _UNITS_BINARY).get(match[2].upper()) if match else None
    value = round(float(match[1]) * factor) if match and factor else 0
    if not value:
        raise UserError(f"{option}: {text!r} given; a size such as 300MB, 1.5GB or 256MiB expected")
    return value


def package_bundle(
    source: Path,
    out: Path,
    target: str,
    *,
    prompts: Sequence[str] = PROMPTS,
    capacity: int | None = None,
    budget: Budget | None = None,
    force: bool = False,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Make a package and its zip.

    Args:
        source: folder of a bundle.
        out: folder to make.
        target: one of ``TARGETS``.
        prompts: of the traces.
        capacity: rows of cache; 1,024 when left out, or what the model can do.
        budget: what the package may cost.
        force: replace ``out`` and its zip when ``out`` is a package or bundle already.
        progress: called with the name of each step.

    Returns:
        The report: ``seconds``, ``target``, ``package_bytes``, ``archive_bytes``, ``memory`` (``weights``, ``cache``, ``overhead``,
        ``total``), ``capacity``, ``traces`` (``name``, ``tokens``, ``calls``), ``operators`` (android), ``model``, ``scheme``.

    Raises:
        UserError: bad input, a bundle of another form than the target needs.
        CheckFailed: over the budget, or the package does not say what the bundle says. Neither leaves anything behind.
    """
    begun = time.monotonic()
    say = progress or (lambda _step: None)
    budget = budget or Budget()
    wanted = next((name for name in TARGETS if name == target), None)
    if wanted is None:
        raise UserError(f"target {target!r} is unknown; one of {', '.join(TARGETS)} expected")
    bundle = Bundle.load(source)
    _check_form(bundle, wanted)
    rows = _capacity(bundle, capacity)
    _check_prompts(bundle, rows, prompts)
    cache = cache_bytes(bundle.manifest, rows)
    budget.check_size(sum(entry.bytes for entry in bundle.manifest.files))
    budget.check_memory(Memory(sum(bundle.path(name).stat().st_size for name in _model_files(bundle)), cache))
    with BundleWriter(out, force=force, archive=pack) as writer:
        writer.reserve(2 * sum(entry.bytes for entry in bundle.manifest.files) + SCRATCH_BYTES)
        manifest = _write_android(bundle, writer, say) if wanted == "android" else _copy(bundle, writer, say)
        info = PackageInfo(wanted, rows, bundle_id(bundle.manifest))
        manifest = dataclasses.replace(manifest, package=info, files=_found(writer.folder))
        _write_licences(bundle, writer)
        say("recording traces")
        traces = _record(Bundle(writer.folder, manifest), rows, prompts)
        writer.path(GOLDEN_FILE).write_text(traces.to_json(), encoding="utf-8")
        if wanted == "android":  # the others' graphs are the bundle's own
            say("comparing with the bundle")
            _compare(bundle, traces, rows)
        if wanted != "ios":
            writer.path(REPLAY_FILE).write_bytes(Path(replay_script.__file__).read_bytes())
        writer.path(PAGE_FILE).write_text(page(manifest, traces, _names(writer.folder)), encoding="utf-8")
        say("replaying the traces in a fresh process")
        sealed = writer.seal(manifest)
        peak = _replay_alone(sealed)
        weights = sum(sealed.path(name).stat().st_size for name in _loaded_files(sealed))
        memory = Memory(weights, cache, max(peak - weights - cache, 0) if peak else None)
        budget.check_size(sum(file.stat().st_size for file in writer.folder.rglob("*") if file.is_file()))
        budget.check_memory(memory)
        say("packing")
        final = writer.finish(manifest)
    return {
        "seconds": time.monotonic() - begun,
        "target": wanted,
        "package_bytes": sum(file.stat().st_size for file in out.rglob("*") if file.is_file()),
        "archive_bytes": writer.archive.stat().st_size,
        "memory": dataclasses.asdict(memory) | {"total": memory.total},
        "capacity": rows,
        "traces": [_summary(trace) for trace in traces.traces],
        "operators": _operator_lines(out / OPERATORS_FILE) if final.has(OPERATORS_FILE) else None,
        "model": manifest.model.name,
        "scheme": manifest.quantization.scheme,
    }


def cache_bytes(manifest: Manifest, rows: int) -> int:
    """Bytes of keys and values of all layers; a Core ML package has its states whole, whatever is used of them."""
    model, coreml = manifest.model, manifest.contract.coreml
    width = CACHE_WIDTHS[manifest.contract.cache_dtype]
    return model.num_layers * 2 * model.num_kv_heads * model.head_dim * width * (rows if coreml is None else coreml.slots)


def _check_form(bundle: Bundle, target: Target) -> None:
    """Whether the bundle's model has the form that the target starts from."""
    manifest = bundle.manifest
    if manifest.package is not None:
        raise UserError(f"{bundle.folder}: is a package for {manifest.package.target} already; package the bundle that it was made of")
    is_onnx = manifest.contract.coreml is None
    if target == "ios" and is_onnx:
        raise UserError(f"{bundle.folder}: an ONNX bundle, and ios needs a Core ML one: specstream export MODEL OUT --format coreml")
    if target == "android":
        require("export")
    if target != "ios" and not is_onnx:
        raise UserError(f"{bundle.folder}: not an ONNX bundle, which {target} needs: specstream export MODEL OUT --format onnx")


def _capacity(bundle: Bundle, asked: int | None) -> int:
    coreml = bundle.manifest.contract.coreml
    most = bundle.manifest.model.context_length if coreml is None else coreml.capacity
    if asked is not None and not 1 <= asked <= most:
        why = "the model's context" if coreml is None else "what the bundle was exported with"
        raise UserError(f"--capacity: {asked} given, 1 to {most} ({why}) expected")
    if asked is None:
        return min(DEFAULT_CAPACITY, most) if coreml is None else most
    return asked


def _check_prompts(bundle: Bundle, rows: int, prompts: Sequence[str]) -> None:
    """Whether the cache holds each prompt and a token behind it."""
    codec = TextCodec.from_bundle(bundle)
    for number, prompt in enumerate(prompts, 1):
        if (tokens := len(codec.encode(prompt))) >= rows:
            raise UserError(f"prompt {number} has {tokens} tokens, the package's cache {rows} rows; shorten it or raise --capacity")


def graph_names(manifest: Manifest) -> list[str]:
    """The bundle's graphs, the main one first."""
    streams = manifest.streams.graph if manifest.streams is not None else None
    return [manifest.graph] if streams is None else [manifest.graph, streams]


def _model_files(bundle: Bundle) -> set[str]:
    """Graphs and the files that hold their weights."""
    files = [entry.path for entry in bundle.manifest.files]
    if bundle.manifest.contract.coreml is not None:
        return {path for path in files if path.startswith(f"{bundle.manifest.graph}/")}
    return set(graph_names(bundle.manifest)) | {path for path in files if path.endswith(".onnx.data")}


def _loaded_files(bundle: Bundle) -> set[str]:
    """Of a package, the model's files that a session reads: not the ONNX graphs beside ``.ort`` ones."""
    names = graph_names(bundle.manifest)
    return set(names) if names[0].endswith(".ort") else _model_files(bundle)


def _names(folder: Path) -> set[str]:
    """What lies in a folder."""
    return {path.name for path in folder.iterdir()}


def _found(folder: Path) -> tuple[FileEntry, ...]:
    """Files written so far; nobody compares hashes of these."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return tuple(FileEntry(file.relative_to(folder).as_posix(), "", file.stat().st_size) for file in files)


def _copy(bundle: Bundle, writer: BundleWriter, say: Callable[[str], None]) -> Manifest:
    """The bundle's own files: ``specstream generate`` runs the package as it is, and an app takes the Core ML package in it."""
    say("copying the bundle")
    for entry in bundle.manifest.files:
        shutil.copyfile(bundle.path(entry.path), writer.path(entry.path))
    return bundle.manifest


def _write_android(bundle: Bundle, writer: BundleWriter, say: Callable[[str], None]) -> Manifest:
    """Graphs in ``.ort`` form with their weights inside, the ONNX graphs that take their weights from there, and the operators of both."""
    from specstream.export.ort_format import LARGEST_FILE, config_text, onnx_operators, operators, share_weights

    manifest = bundle.manifest
    graphs = graph_names(manifest)
    largest = max(entry.bytes for entry in manifest.files)
    if largest > LARGEST_FILE:
        raise UserError(f"{bundle.folder}: {largest / 1e9:.2f} GB of weights, an .ort file holds 2.14 GB at most; quantize the bundle")
    for entry in manifest.files:
        if entry.path not in _model_files(bundle):
            shutil.copyfile(bundle.path(entry.path), writer.path(entry.path))
    converted = []
    for name in graphs:
        say(f"converting {name}")
        file = writer.path(f"{Path(name).stem}.ort")
        _run("specstream.export.ort_format", str(bundle.path(name)), str(file), *_linked_weights(bundle, name))
        converted.append(file)
    for name in graphs:
        share_weights(bundle.path(name), writer.path(name), converted)
    # Optimising changes operators: a reduced build that reads .ort needs the one kind, one that reads ONNX both.
    needed = [operators(converted), *(onnx_operators(bundle.path(name)) for name in graphs)]
    config = config_text(needed, [*(file.name for file in converted), *graphs])
    writer.path(OPERATORS_FILE).write_text(config, encoding="utf-8")
    streams = manifest.streams
    if streams is not None and len(converted) > 1:
        streams = dataclasses.replace(streams, graph=converted[1].name)
    tools = manifest.tools | {"onnxruntime": importlib.metadata.version("onnxruntime")}
    return dataclasses.replace(manifest, graph=converted[0].name, streams=streams, tools=tools, verified=None)


def _linked_weights(bundle: Bundle, graph: str) -> list[str]:
    """ONNX Runtime reads no weights behind a link that leaves the graph's folder: those are handed to it."""
    weights = [bundle.path(name) for name in sorted(_model_files(bundle)) if name.endswith(".data")]
    home = bundle.path(graph).resolve().parent
    linked = any(not file.resolve().is_relative_to(home) for file in weights)
    return [argument for file in weights for argument in ("--weights", str(file))] if linked else []


def _write_licences(bundle: Bundle, writer: BundleWriter) -> None:
    """Licences of the base and of the adapter are files of the bundle; bundles of earlier versions lack the card of an adapter of ours."""
    streams = bundle.manifest.streams
    folder = adapter_with(streams.adapter_sha256) if streams is not None else None
    if folder is not None and not bundle.has(ADAPTER_CARD):
        shutil.copyfile(folder / "README.md", writer.path(ADAPTER_CARD))


def _open(bundle: Bundle, rows: int) -> Session:
    return open_session(bundle, threads=1 if bundle.manifest.contract.coreml is None else None, capacity=rows)


def _record(bundle: Bundle, rows: int, prompts: Sequence[str]) -> Golden:
    """Traces of the package's own model: plain, from streams, from all sources, and sampled."""
    manifest = bundle.manifest
    codec = TextCodec.from_bundle(bundle)
    session = _open(bundle, rows)
    pad_single = isinstance(session, OrtSession) and manifest.rounds_activations
    if isinstance(session, OrtSession):
        session.pad_single = pad_single  # in plain traces too: then all greedy traces of a prompt have one text
    ngrams = NgramTable.load(bundle.path(NGRAM_FILE), manifest.model.vocab_size) if bundle.has(NGRAM_FILE) else None
    model = LanguageModel(manifest, session, codec, None, ngrams)
    new_tokens = NEW_TOKENS
    if manifest.contract.coreml is not None and not has_core_ml():
        prompts, new_tokens = prompts[: EVALUATED[0]], min(EVALUATED[1], NEW_TOKENS)
    streams = manifest.streams
    kinds: list[tuple[str, int]] = [("joined" if streams is not None or ngrams is not None else "lookup", JOINED_BUDGET)]
    if streams is not None:
        kinds.insert(0, ("streams", STREAM_BUDGET))
    traces: list[Trace] = []

    def add(number: int, draft: str, size: int, sampling: Sampling | None = None) -> None:
        kind = "greedy" if sampling is None else "sampled"
        drafter: Drafter = model.drafter(draft)
        traces.append(
            record(
                session,
                codec,
                drafter,
                name=f"prompt {number + 1}, {kind}, {draft}",
                prompt=prompts[number],
                draft=draft,
                budget=size,
                max_new_tokens=new_tokens,
                sampling=sampling,
                policy=stream_policy(1),
            )
        )

    for number in range(len(prompts)):
        if number == 0:
            add(number, "none", 1)
        for draft, size in kinds:
            add(number, draft, size)
        if number < 2:
            add(number, *kinds[0], dataclasses.replace(SAMPLED, seed=SAMPLED.seed + number))
    joined = any(trace.draft in ("joined", "lookup") for trace in traces)
    return Golden(
        contract=manifest.contract.version,
        placement=None if streams is None else streams.placement,
        num_streams=0 if streams is None else streams.num_streams,
        stream_layers=0 if streams is None else streams.stream_layers,
        top_k=0 if streams is None else streams.top_k,
        temperatures=() if streams is None else streams.calibration,
        weights=PRIOR_WEIGHTS if joined else None,
        num_layers=manifest.model.num_layers,
        num_kv_heads=manifest.model.num_kv_heads,
        head_dim=manifest.model.head_dim,
        hidden_size=manifest.model.hidden_size,
        vocab_size=manifest.model.vocab_size,
        capacity=rows,
        prompt_chunk=session.prompt_chunk,
        max_tree_rows=min(session.max_tree_rows, rows),
        max_stream_rows=min(session.max_stream_rows, rows),
        near_tie=session.near_tie,
        pad_single=pad_single,
        stop_ids=tuple(sorted(codec.stop_ids)),
        bos_id=manifest.tokenizer.bos_id,
        scheme=manifest.quantization.scheme,
        recorded_on=_recorded_on(manifest),
        traces=tuple(traces),
    )


def _compare(bundle: Bundle, recorded: Golden, rows: int) -> None:
    """Replay the package's traces with the bundle that it was made of."""
    session = _open(bundle, rows)
    differences = [difference for trace in recorded.traces for difference in replay(session, recorded, trace)]
    if differences:
        raise CheckFailed(f"the package does not say what the bundle says: {differences[0]}; nothing was written")


def _recorded_on(manifest: Manifest) -> dict[str, str]:
    """What the traces' numbers depend on."""
    if manifest.contract.coreml is None:
        return {"machine": platform.machine(), "onnxruntime": importlib.metadata.version("onnxruntime")}
    if has_core_ml():
        return {"machine": platform.machine(), "core_ml": f"macOS {platform.mac_ver()[0]}"}
    return {"machine": platform.machine(), "core_ml": "reference evaluator of specstream, no Core ML"}


def _replay_alone(package: Bundle) -> int:
    """Replay the traces in a process of its own: by the package's own script, which needs ONNX Runtime and NumPy only, or through the
    session of a Core ML package.

    Returns:
        Bytes which that process had held at most when it had loaded the model and answered one prompt; 0 where that says nothing of a
        device: the system does not tell, or the reference evaluator stood in for Core ML.

    Raises:
        CheckFailed: it found a difference, or did not run.
    """
    script = [str(package.folder / REPLAY_FILE)] if package.has(REPLAY_FILE) else ["-m", golden_replay.__name__, str(package.folder)]
    # The evaluator repeats itself, and takes its time: one text shows that the files are whole and the traces theirs.
    short = ["--traces", "1"] if package.manifest.contract.coreml is not None and not has_core_ml() else []
    child = subprocess.run([sys.executable, "-P", *script, "--json", *short], capture_output=True, text=True, check=False)
    try:
        result: dict[str, Any] = json.loads(child.stdout)
    except json.JSONDecodeError:
        lines = child.stderr.strip().splitlines()
        ended = f"ended by signal {-child.returncode}" if child.returncode < 0 else f"ended with code {child.returncode}"
        raise CheckFailed(f"the replay {ended}: {lines[-1] if lines else 'no message'}; nothing was written") from None
    different = [trace for trace in result["traces"] if trace["difference"]]
    if different:
        first = different[0]
        raise CheckFailed(f"{GOLDEN_FILE} does not replay in a fresh process: {first['name']}, {first['difference']}; nothing was written")
    return 0 if short else int(result["peak_rss_bytes"])


def _run(module: str, *arguments: str) -> None:
    """Run a module in a process of its own.

    Raises:
        UserError, CheckFailed: it ended with the exit code of either.
    """
    # -P: a file in the user's folder must not be taken for a module of ours.
    child = subprocess.run([sys.executable, "-P", "-m", module, *arguments], capture_output=True, text=True, check=False)
    if child.returncode == 0:
        return
    lines = child.stderr.strip().splitlines()
    said = lines[-1] if lines else "no message"
    if said.startswith("specstream.models.errors.UserError: "):
        raise UserError(said.partition(": ")[2])
    ended = f"ended by signal {-child.returncode}" if child.returncode < 0 else f"ended with code {child.returncode}"
    raise CheckFailed(f"{module.rpartition('.')[2]} {ended}: {said}; nothing was written")


def _summary(trace: Trace) -> dict[str, Any]:
    return {"name": trace.name, "tokens": len(trace.token_ids), "calls": len(trace.steps), "finish_reason": trace.finish_reason}


def _operator_lines(file: Path) -> list[str]:
    return [line for line in file.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]


def _mb(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
