"""What a GGUF file says about itself: metadata, names of tensors, and its byte-level BPE tokenizer. Reads no weights; needs no torch.

The weights are read by transformers. The tokenizer is not: transformers' conversion takes another end of sequence than the file
names, puts a first token where the file wants none, and has one way of splitting text for all vocabularies.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, TypeVar

from specstream.models.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

T = TypeVar("T")

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_STRING: Final = 8
_ARRAY: Final = 9
# Value types of the format's specification: type number -> struct code.
_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

_CONTROL_TOKEN: Final = 3
_USER_TOKEN: Final = 4

# How text is cut before the merges, by `tokenizer.ggml.pre`. The patterns are those of the models' own tokenizer.json files.
_QWEN2: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3: Final = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


@dataclass(frozen=True)
class GgufHeader:
    """Metadata values by key (numbers, strings, lists of them) and the names of the tensors, in the file's order."""

    path: Path
    metadata: dict[str, Any]
    tensors: tuple[str, ...]

    @property
    def architecture(self) -> str:
        """The format's own name of the architecture (``llama``, ``qwen2``, ...)."""
        return self.require("general.architecture", str)

    def require(self, key: str, kind: type[T]) -> T:
        """The value of ``key``.

        Raises:
            UserError: missing, or of another type.
        """
        value = self.metadata.get(key)
        if not isinstance(value, kind):
            found = "nothing" if value is None else type(value).__name__
            raise UserError(f"{self.path}: GGUF metadata {key!r}: {kind.__name__} expected, found {found}")
        return value

    def token_id(self, name: str) -> int | None:
        """Id of a special token (``bos``, ``eos``, ``eot``, ...), when the file names one."""
        key = f"tokenizer.ggml.{name}_token_id"
        return self.require(key, int) if key in self.metadata else None


def read_header(path: Path) -> GgufHeader:
    """Read everything before the weights of the GGUF file at ``path``.

    Raises:
        UserError: not a GGUF file, of a version that is not known, or cut off.
    """
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            if file.read(4) != _MAGIC:
                raise UserError(f"{path}: not a GGUF file (it does not begin with {_MAGIC.decode()})")
            version = _scalar(file, "I")
            if version not in _VERSIONS:
                raise UserError(f"{path}: GGUF version {version}; versions {_VERSIONS[0]} and {_VERSIONS[1]} (little-endian) can be read")
            num_tensors, num_values = _scalar(file, "Q"), _scalar(file, "Q")
            metadata = {}
            for _ in range(num_values):
                key = _string(file, size)
                metadata[key] = _value(file, _scalar(file, "I"), size)
            tensors = []
            for _ in range(num_tensors):
                tensors.append(_string(file, size))
                num_dimensions = _scalar(file, "I")
                _take(file, 8 * num_dimensions + 4 + 8, size)  # sizes, type, offset
    except (EOFError, KeyError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(
            f"{path}: damaged or cut off: its GGUF header cannot be read ({type(error).__name__}); get the file again"
        ) from None
    return GgufHeader(path, metadata, tuple(tensors))


def _take(file: IO[bytes], count: int, size: int) -> bytes:
    if count > size:  # a damaged length must not ask for terabytes
        raise EOFError
    data = file.read(count)
    if len(data) != count:
        raise EOFError
    return data


def _scalar(file: IO[bytes], code: str) -> Any:
    count = struct.calcsize("<" + code)
    return struct.unpack("<" + code, _take(file, count, count))[0]


def _string(file: IO[bytes], size: int) -> str:
    return _take(file, _scalar(file, "Q"), size).decode("utf-8")


def _value(file: IO[bytes], kind: int, size: int) -> Any:
    if kind == _STRING:
        return _string(file, size)
    if kind != _ARRAY:
        return _scalar(file, _SCALARS[kind])
    kind, count = _scalar(file, "I"), _scalar(file, "Q")
    if kind not in _SCALARS:
        if count > size:
            raise EOFError
        return [_value(file, kind, size) for _ in range(count)]
    code = f"<{count}{_SCALARS[kind]}"
    if count > size:
        raise EOFError
    return list(struct.unpack(code, _take(file, struct.calcsize(code), size)))


def build_tokenizer(header: GgufHeader) -> Tokenizer:
    """The file's byte-level BPE vocabulary as a ``tokenizers`` tokenizer, control tokens special, ready to be saved.

    It puts the beginning-of-sequence token before a text only where the file asks for that.

    Raises:
        UserError: another kind of vocabulary, or a way of splitting text that is not known: guessing would give other ids.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, processors

    model = header.require("tokenizer.ggml.model", str)
    if model != "gpt2":
        raise UserError(
            f"{header.path}: its vocabulary is of kind {model!r}; from a GGUF file only byte-level BPE ('gpt2') is read. "
            "Use the model's Hugging Face id or folder instead"
        )
    tokens = header.require("tokenizer.ggml.tokens", list)
    merges = [tuple(merge.split(" ", 1)) for merge in header.require("tokenizer.ggml.merges", list)]
    vocab = {token: index for index, token in enumerate(tokens)}
    split = header.require("tokenizer.ggml.pre", str)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=split == "llama-bpe"))
    _set_splitting(tokenizer, split, header.path)
    tokenizer.decoder = decoders.ByteLevel()
    kinds = header.metadata.get("tokenizer.ggml.token_type") or [0] * len(tokens)
    for token, kind in zip(tokens, kinds, strict=True):
        if kind in (_CONTROL_TOKEN, _USER_TOKEN):
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=kind == _CONTROL_TOKEN)])
    if header.metadata.get("tokenizer.ggml.add_bos_token", False):
        bos = header.require("tokenizer.ggml.bos_token_id", int)
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)])
    else:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def _set_splitting(tokenizer: Tokenizer, name: str, path: Path) -> None:
    from tokenizers import Regex, normalizers, pre_tokenizers

    if name in ("smollm", "gpt-2"):
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        digits = [pre_tokenizers.Digits(individual_digits=True)] if name == "smollm" else []
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, byte_level])
    elif name in ("qwen2", "llama-bpe"):
        pattern = Regex(_QWEN2 if name == "qwen2" else _LLAMA3)
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, behavior="isolated"), byte_level])
        if name == "qwen2":
            tokenizer.normalizer = normalizers.NFC()
    else:
        raise UserError(
            f"{path}: its tokenizer splits text as {name!r}; known are gpt-2, llama-bpe, qwen2, smollm. "
            "Use the model's Hugging Face id or folder instead"
        )
