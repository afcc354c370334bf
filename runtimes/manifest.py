"""What `specstream.json` says of a bundle: frozen dataclasses with an exact JSON round trip. Touches no file and no tensor."""

from __future__ import annotations

import dataclasses
import json
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, Union, get_args, get_origin, get_type_hints

from specstream.export.contract import CONTRACT_VERSION
from specstream.export.coreml_contract import CoreMLContract
from specstream.models.config import Placement
from specstream.models.errors import UserError

BUNDLE_FORMAT = 1
MANIFEST_NAME = "specstream.json"
CACHE_WIDTHS: Final = {"float32": 4, "float16": 2, "int8": 1}  # bytes of a number in the cache, by its type


@dataclass(frozen=True)
class ModelInfo:
    """The base model: sizes that the runtime needs, identity, licence (None when the weights did not state one)."""

    name: str
    architecture: str
    fingerprint: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    parameters: int
    license: str | None


@dataclass(frozen=True)
class StreamInfo:
    """The streams in the graph. ``parameters`` counts what they add; ``main_parameters`` the fine-tune of all rows.

    ``graph`` is the file of the streams' own pass when ``placement`` is ``delayed``, else None. ``calibration`` has one
    temperature for each stream (see :func:`specstream.runtimes.drafters.calibrate`).
    """

    LATER: ClassVar[frozenset[str]] = frozenset({"graph"})  # keys that manifests of earlier versions lack

    num_streams: int
    stream_layers: int
    top_k: int
    placement: Placement
    graph: str | None
    mode: str
    draft_vocab_size: int
    parameters: int
    main_parameters: int
    adapter_sha256: str
    calibration: tuple[float, ...]


@dataclass(frozen=True)
class ContractInfo:
    """Which contract the graph holds. ``profile`` is ``coreml`` for a Core ML package, whose sizes are in ``coreml``."""

    LATER: ClassVar[frozenset[str]] = frozenset({"coreml"})  # keys that manifests of earlier versions lack

    version: int
    profile: Literal["ort", "portable", "coreml"]
    opset: int
    cache_dtype: str
    coreml: CoreMLContract | None = None

    def __post_init__(self) -> None:
        if (self.profile == "coreml") != (self.coreml is not None):
            raise UserError(
                f"contract: profile {self.profile} and coreml {'missing' if self.coreml is None else 'given'} do not go together"
            )


@dataclass(frozen=True)
class QuantizationInfo:
    """How weights and activations are rounded. All but ``scheme`` are None in bundles of fp32 or fp16 weights.

    Attributes:
        scheme: ``fp32``, ``int4``, ``int8``, ``w8a8`` or ``mixed``; of Core ML ``fp16``, ``int8``, ``int4``, ``palette4`` or ``palette6``.
        head: scheme of the embedding and the head, of Core ML.
        group_size: output channels that share a table of values, where there are palettes.
        block_size: weights of a column that share a scale, where there are blocks.
        accuracy_level: of the products with blocks: 4 rounds activations to 8 bits, 0 keeps them.
        rows_independent: whether no scale of a row's activations depends on the rows beside it.
        products: how many matrices each kind of operator holds.
        requires: what a processor needs for right results, in words; None when any will do.
        quality: figures of the bundle beside those of the one it was made of; None when no texts were given to compare.
    """

    LATER: ClassVar[frozenset[str]] = frozenset(  # keys that manifests of earlier versions lack
        {"block_size", "accuracy_level", "rows_independent", "products", "requires", "quality", "head", "group_size"}
    )

    scheme: str
    block_size: int | None = None
    accuracy_level: int | None = None
    rows_independent: bool | None = None
    products: dict[str, int] | None = None
    requires: str | None = None
    quality: dict[str, Any] | None = None
    head: str | None = None
    group_size: int | None = None


@dataclass(frozen=True)
class TokenizerInfo:
    """``stop_ids`` end a text; ``bos_id`` is None for tokenizers without one."""

    stop_ids: tuple[int, ...]
    bos_id: int | None
    has_chat_template: bool


@dataclass(frozen=True)
class FileEntry:
    """A file of the bundle: POSIX path relative to the folder, sha256 in hex, size."""

    path: str
    sha256: str
    bytes: int


@dataclass(frozen=True)
class Parity:
    """How the graph agreed with PyTorch when it was exported; ``cases`` has the figures of each case.

    ``near_tie`` is how close two logits must be for rounding to decide between them; None where it is that of fp32.
    """

    LATER: ClassVar[frozenset[str]] = frozenset({"near_tie"})  # keys that manifests of earlier versions lack

    top1_agreement: float
    max_abs_diff: float
    cases: dict[str, Any]
    near_tie: float | None = None


@dataclass(frozen=True)
class ExportCost:
    seconds: float
    peak_rss_bytes: int
    weight_bytes: int
    bundle_bytes: int


Target = Literal["ios", "android", "linux-arm64"]


@dataclass(frozen=True)
class PackageInfo:
    """That the bundle is a package for devices of one kind.

    Attributes:
        target: what it is for.
        capacity: rows of cache that it was checked and measured with.
        source: of the bundle that it was made of, sha256 over names and hashes of its files.
    """

    target: Target
    capacity: int
    source: str


@dataclass(frozen=True)
class Manifest:
    """All of `specstream.json`. Unknown keys are refused, so that nothing in a bundle is silently ignored."""

    LATER: ClassVar[frozenset[str]] = frozenset({"package"})  # keys that manifests of earlier versions lack

    model: ModelInfo
    streams: StreamInfo | None
    contract: ContractInfo
    quantization: QuantizationInfo
    tokenizer: TokenizerInfo
    graph: str
    tools: dict[str, str]
    parity: Parity | None = None
    export: ExportCost | None = None
    verified: dict[str, Any] | None = None
    package: PackageInfo | None = None
    files: tuple[FileEntry, ...] = ()
    format: int = BUNDLE_FORMAT

    @property
    def rounds_activations(self) -> bool:
        """Whether activations, or keys and values, have 8 bits somewhere: kernels for one row and for several then give other roundings."""
        scheme, level = self.quantization.scheme, self.quantization.accuracy_level
        return scheme in ("w8a8", "mixed") or level == 4 or self.contract.cache_dtype == "int8"

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str, source: Path | str = MANIFEST_NAME) -> Manifest:
        """Read what :meth:`to_json` wrote.

        Raises:
            UserError: not JSON, made by a newer specstream, or other keys and types than a manifest has (all problems at once).
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(f"{source}: not JSON ({error}); the bundle is damaged, export it again") from None
        if not isinstance(data, dict) or not isinstance(data.get("format"), int):
            raise UserError(f"{source}: not the manifest of a specstream bundle (an object with an integer 'format' was expected)")
        # Versions come first: a newer manifest may well have keys that this version would call unknown.
        if data["format"] > BUNDLE_FORMAT:
            raise UserError(
                f"{source}: bundle format {data['format']}, made by a newer specstream (this one reads {BUNDLE_FORMAT}); update specstream"
            )
        if data["format"] < BUNDLE_FORMAT:
            raise UserError(f"{source}: bundle format {data['format']}, this specstream reads {BUNDLE_FORMAT}; export the bundle again")
        contract = data.get("contract")
        version = contract.get("version") if isinstance(contract, dict) else None
        if isinstance(version, int) and version > CONTRACT_VERSION:
            raise UserError(
                f"{source}: graph contract {version}, made by a newer specstream (this one reads {CONTRACT_VERSION}); update specstream"
            )
        problems: list[str] = []
        manifest = decode(cls, data, "", problems)
        if problems:
            raise UserError(f"{source}: {'; '.join(problems)}")
        assert isinstance(manifest, cls)
        return manifest


def decode(kind: Any, value: Any, where: str, problems: list[str]) -> Any:
    """``value`` (from JSON) as ``kind`` (a type hint). What does not fit is added to ``problems``."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, dict):
            return _wrong(kind.__name__, value, where, problems)
        fields = {f.name: f for f in dataclasses.fields(kind)}
        hints = get_type_hints(kind)
        prefix = f"{where}." if where else ""
        known = {}
        for name, entry in value.items():
            if name in fields:
                known[name] = decode(hints[name], entry, prefix + name, problems)
            else:
                problems.append(f"unknown key {prefix}{name}")
        # Written files have every key; a missing one is damage, whatever default the dataclass offers to writers. Only what a class
        # says came later may be missing, and is None then.
        known |= {name: None for name in getattr(kind, "LATER", ()) if name not in value}
        missing = [name for name in fields if name not in value and name not in known]
        problems += [f"missing key {prefix}{name}" for name in missing]
        return None if missing or any(v is _WRONG for v in known.values()) else kind(**known)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return decode(next(a for a in arguments if a is not type(None)), value, where, problems)
    if origin is Literal:
        return value if value in arguments else _wrong(f"one of {', '.join(map(str, arguments))}", value, where, problems)
    if origin is tuple:
        if not isinstance(value, list):
            return _wrong("a list", value, where, problems)
        return tuple(decode(arguments[0], entry, f"{where}[{i}]", problems) for i, entry in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            return _wrong("an object", value, where, problems)
        return {k: v if arguments[1] is Any else decode(arguments[1], v, f"{where}.{k}", problems) for k, v in value.items()}
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value if type(value) is kind else _wrong(kind.__name__, value, where, problems)


_WRONG = object()


def _wrong(expected: str, value: Any, where: str, problems: list[str]) -> object:
    problems.append(f"{where or 'manifest'} is {value!r:.60} ({expected} was expected)")
    return _WRONG
