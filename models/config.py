"""What describes the streams of a model: sizes, placement, mode. No tensors, no files of weights; imports neither torch nor NumPy."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from specstream.models.errors import UserError

Mode = Literal["lossless", "shared", "two-stage"]
Placement = Literal["fused", "delayed"]

ADAPTER_FORMAT = 1


@dataclass(frozen=True)
class BaseIdentity:
    """Which base weights an adapter was trained on.

    ``fingerprint`` is a sha256 over names, shapes and fp32 values of the original base's tensors.
    """

    architecture: str
    fingerprint: str
    hidden_size: int
    num_layers: int
    vocab_size: int


@dataclass(frozen=True)
class StreamConfig:
    """Sizes of the stream-fused network (arXiv 2402.11131, section 3), with the words of the paper in brackets.

    Attributes:
        base: identity of the base weights.
        mode: how it was trained: ``lossless`` (base frozen), ``shared`` (one LoRA for all rows, joint loss) or
            ``two-stage`` (fine-tune, merge, then lossless on the merged model).
        num_streams: streams beside a row [γ].
        stream_layers: top layers that run stream rows [N_s].
        top_k: candidates that a graph returns for each stream [k].
        stream_rank: LoRA rank on stream rows of the top layers; 0 when streams have no LoRA of their own (shared mode).
        stream_alpha: LoRA scale numerator; the update is ``alpha / rank * B A x``.
        main_rank: LoRA rank of the fine-tune on all rows; 0 when the base is untouched.
        main_alpha: as ``stream_alpha``.
        main_targets: module names that the fine-tune's LoRA covers.
        prune_rank: rank of the pruning adapter [o_θ].
        entry_rank: rank of the entry map [f_η]; 0 is the identity.
        draft_vocab_size: tokens that streams choose from; 0 is the whole vocabulary.
        placement: ``fused``: stream rows in the same pass as the tree. ``delayed``: a pass of their own after acceptance, beside
            the last accepted row only, which knows the correction token.
        correction_rank: rank of the map from the correction token's embedding into the entry state (delayed only).
        pair_rank: rank of the head that re-scores a stream's candidates once their parent token is known (delayed only); 0: none.
    """

    base: BaseIdentity
    mode: Mode
    num_streams: int = 4
    stream_layers: int = 4
    top_k: int = 8
    stream_rank: int = 8
    stream_alpha: float = 16.0
    main_rank: int = 0
    main_alpha: float = 16.0
    main_targets: tuple[str, ...] = ()
    prune_rank: int = 8
    entry_rank: int = 0
    draft_vocab_size: int = 0
    placement: Placement = "fused"
    correction_rank: int = 0
    pair_rank: int = 0
    format: int = ADAPTER_FORMAT

    def __post_init__(self) -> None:
        problems = []
        if self.format != ADAPTER_FORMAT:
            problems.append(f"format {self.format} (this version reads {ADAPTER_FORMAT}; update specstream)")
        if self.mode not in get_args(Mode):
            problems.append(f"mode {self.mode!r} (one of {', '.join(get_args(Mode))})")
        if self.placement not in get_args(Placement):
            problems.append(f"placement {self.placement!r} (one of {', '.join(get_args(Placement))})")
        if not 1 <= self.num_streams <= 32:
            problems.append(f"num_streams {self.num_streams} (1 to 32)")
        if not 1 <= self.stream_layers <= self.base.num_layers:
            problems.append(f"stream_layers {self.stream_layers} (1 to {self.base.num_layers}, the model's layers)")
        vocab = self.draft_vocab_size or self.base.vocab_size
        if not 1 <= self.top_k <= vocab:
            problems.append(f"top_k {self.top_k} (1 to {vocab})")
        problems += [
            f"{name} {getattr(self, name)} (0 or more)"
            for name in ("stream_rank", "main_rank", "prune_rank", "entry_rank", "draft_vocab_size", "correction_rank", "pair_rank")
            if getattr(self, name) < 0
        ]
        if self.draft_vocab_size > self.base.vocab_size:
            problems.append(f"draft_vocab_size {self.draft_vocab_size} (at most {self.base.vocab_size})")
        if self.placement == "fused" and (self.correction_rank or self.pair_rank):
            problems.append("correction_rank and pair_rank need placement delayed: fused streams do not know the correction token")
        if self.placement == "delayed" and self.correction_rank < 1:
            problems.append("placement delayed needs a correction_rank of at least 1")
        if (self.main_rank > 0) != bool(self.main_targets):
            problems.append("main_rank and main_targets go together: both or neither")
        if problems:
            raise UserError("adapter config: " + "; ".join(problems))

    @property
    def entry_layer(self) -> int:
        """Index of the first layer that runs stream rows [N - N_s]."""
        return self.base.num_layers - self.stream_layers

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, source: Path | str = "config.json") -> StreamConfig:
        """Read what :meth:`to_json` wrote; unknown and missing keys are refused.

        Raises:
            UserError: not JSON, or not the keys and types of a stream config.
        """
        try:
            data: Any = json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(f"{source}: not JSON ({error})") from None
        if not isinstance(data, dict) or not isinstance(data.get("base"), dict):
            raise UserError(f"{source}: not an adapter config (an object with 'base' was expected)")
        base = data.pop("base")
        for name, given, kind in (("base", base, BaseIdentity), ("config", data, cls)):
            fields = {f.name: f for f in dataclasses.fields(kind)}
            fields.pop("base", None)
            unknown = sorted(set(given) - set(fields))
            missing = sorted(n for n, f in fields.items() if n not in given and f.default is dataclasses.MISSING)
            if unknown or missing:
                said = [f"unknown keys {', '.join(unknown)}"] * bool(unknown)
                said += [f"missing keys {', '.join(missing)}"] * bool(missing)
                raise UserError(f"{source}: {name}: {'; '.join(said)}")
        if "main_targets" in data:
            data["main_targets"] = tuple(data["main_targets"])
        try:
            return cls(base=BaseIdentity(**base), **data)
        except TypeError as error:
            raise UserError(f"{source}: {error}") from None
