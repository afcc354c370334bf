"""Base weights: from a hub id, a folder, a GGUF file or a short name to a Hugging Face model, its tokenizer and its identity.

Whatever can be refused is refused from the configuration, before weights load. Knows nothing of streams.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from specstream.models.config import BaseIdentity
from specstream.models.errors import UserError
from specstream.models.fetch import MODELS, fetch
from specstream.models.gguf_file import GgufHeader, build_tokenizer, read_header

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

SUPPORTED: Final[dict[str, str]] = {
    "LlamaForCausalLM": "Llama",
    "Qwen2ForCausalLM": "Qwen2",
    "Qwen3ForCausalLM": "Qwen3",
    "Gemma3ForCausalLM": "Gemma 3",
    "MistralForCausalLM": "Mistral",
    "Phi3ForCausalLM": "Phi-3",
    "SmolLM3ForCausalLM": "SmolLM3",
    "Olmo2ForCausalLM": "OLMo 2",
    "GraniteForCausalLM": "Granite",
    "Gemma2ForCausalLM": "Gemma 2",
}

# Architectures that transformers reads from GGUF, by the format's own name.
_GGUF_ARCHITECTURES: Final = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
}

# Rotary embeddings whose table depends on how long the text has become: rows cached earlier would be wrong ever after.
_SWITCHING_ROPE: Final = ("dynamic", "longrope", "su")

_HUB_ID: Final = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?")
_HUB_SECONDS: Final = 10
_HASH_VALUES: Final = 1 << 22  # values hashed at a time: 16 MB in fp32


@dataclass(frozen=True)
class BaseSource:
    """Where base weights come from.

    Attributes:
        name: what the user calls it: hub id, short name, or the name of the folder or file.
        path: the folder or the GGUF file; None for a hub id.
        revision: branch, tag or commit of a hub id, from ``id@revision``.
    """

    name: str
    kind: Literal["hub", "folder", "gguf"]
    path: Path | None
    revision: str | None = None


@dataclass(frozen=True)
class TokenizerBundle:
    """A tokenizer with the ids that generation needs.

    Attributes:
        stop_ids: tokens that end a text, sorted, at least one.
        bos_id: the token that the tokenizer itself puts before a plain text; None when it puts none there.
        chat_template: Jinja source; None when the model has none.
    """

    tokenizer: PreTrainedTokenizerFast
    stop_ids: list[int]
    bos_id: int | None
    chat_template: str | None


@dataclass(frozen=True)
class License:
    """Licence of base weights: its identifier and its text, each when the source has it."""

    name: str | None
    text: str | None


def resolve_base(model: str) -> BaseSource:
    """Find out what ``model`` names. A short name is fetched to the cache; a hub id is not contacted yet.

    Raises:
        UserError: it names nothing; the message lists the forms that work.
    """
    if model in MODELS:
        return BaseSource(name=model, kind="gguf", path=fetch(model))
    path = Path(model).expanduser()
    if path.is_dir():
        return BaseSource(name=path.resolve().name, kind="folder", path=path)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise UserError(f"{model}: a model is a folder or a .gguf file, this is neither. {_forms()}")
        return BaseSource(name=path.stem, kind="gguf", path=path)
    # A hub id looks like a path of two parts: `./name`, `~/name` or `folder/name.gguf` was meant as a path.
    match = _HUB_ID.fullmatch(model)
    if match is None or path.suffix.lower() == ".gguf":
        raise UserError(f"no model {model!r}: there is no such file or folder, and it is no short name. {_forms()}")
    return BaseSource(name=match["id"], kind="hub", path=None, revision=match["revision"])


def _forms() -> str:
    short = ", ".join(sorted(MODELS))
    return f"MODEL is a Hugging Face id (owner/name or owner/name@revision), a folder, a .gguf file, or a short name ({short})"


def load_config(source: BaseSource) -> PretrainedConfig:
    """Read the model's configuration, and nothing of its weights. ``config.architectures`` names its class afterwards.

    Raises:
        UserError: unknown hub id or no connection, no or a damaged ``config.json``, an architecture that is not supported,
            weights in a quantized format, or a rotary embedding that changes with the text's length.
    """
    import transformers

    config: PretrainedConfig
    if source.kind == "gguf":
        header = _gguf_header(source)
        architecture = _GGUF_ARCHITECTURES[header.architecture]
        with _quiet():
            config = transformers.AutoConfig.from_pretrained(str(header.path.parent), gguf_file=header.path.name)
        config.architectures = [architecture]
    else:
        file = _config_file(source)
        architecture = _check_config(source, file)
        with _quiet():
            config = getattr(transformers, architecture).config_class.from_pretrained(file)
    _check_rope(source, config)
    return config


def load_base(source: BaseSource, *, dtype: torch.dtype | None = None) -> tuple[PreTrainedModel, TokenizerBundle]:
    """Load model and tokenizer: evaluation mode, no parameter requires a gradient.

    Args:
        source: from :func:`resolve_base`.
        dtype: type of the weights in memory; fp32 when None.

    Raises:
        UserError: as :func:`load_config` and :func:`load_tokenizer`; weights missing, damaged, or not those of the configuration.
    """
    import torch
    import transformers
    from safetensors import SafetensorError

    config = load_config(source)
    tokenizer = load_tokenizer(source)
    assert config.architectures
    model_class = getattr(transformers, config.architectures[0])
    where: dict[str, Any]
    if source.kind == "gguf":
        assert source.path is not None
        where = {"pretrained_model_name_or_path": str(source.path.parent), "gguf_file": source.path.name}
    else:
        where = {"pretrained_model_name_or_path": str(source.path or source.name), "use_safetensors": True, **_hub_options(source)}
    try:
        with _quiet():
            # Shapes that differ are reported with the missing weights, below.
            model, loaded = model_class.from_pretrained(
                config=config, dtype=dtype or torch.float32, output_loading_info=True, ignore_mismatched_sizes=True, **where
            )
    except (OSError, SafetensorError, ValueError, RuntimeError) as error:
        raise UserError(f"{source.name}: its weights cannot be loaded: {_first_line(error)}") from error
    # transformers would go on with random numbers in the place of missing weights.
    problems = [
        f"{len(keys)} weights {words} ({', '.join(keys[:3])}{', ...' if len(keys) > 3 else ''})"
        for kind, words in (("missing_keys", "missing"), ("mismatched_keys", "of another shape"))
        if (keys := sorted(loaded[kind]))
    ]
    if problems:
        raise UserError(f"{source.name}: the weights are not those of its configuration: {'; '.join(problems)}")
    model.eval()
    model.requires_grad_(False)
    return model, tokenizer


def load_tokenizer(source: BaseSource) -> TokenizerBundle:
    """Load the tokenizer with its stop ids, taken from the metadata of a GGUF file or from the generation configuration.

    Raises:
        UserError: no tokenizer, one that is not of the `tokenizers` library, or no token that ends a text.
    """
    if source.kind == "gguf":
        return _gguf_tokenizer(_gguf_header(source))
    import transformers

    where = str(source.path or source.name)
    try:
        with _quiet():
            tokenizer = transformers.AutoTokenizer.from_pretrained(where, use_fast=True, **_hub_options(source))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError) as error:  # of conversions without their library
        raise UserError(f"{source.name}: its tokenizer cannot be loaded: {_first_line(error)}") from error
    if not isinstance(tokenizer, transformers.PreTrainedTokenizerFast):
        raise UserError(f"{source.name}: its tokenizer has no tokenizer.json, which the runtime needs")
    stop_ids = _stop_ids(source, tokenizer.eos_token_id)
    if not stop_ids:
        raise UserError(f"{source.name}: neither its generation configuration nor its tokenizer names a token that ends a text")
    first = tokenizer("", add_special_tokens=True).input_ids
    bos_id = tokenizer.bos_token_id if tokenizer.bos_token_id is not None and first[:1] == [tokenizer.bos_token_id] else None
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    return TokenizerBundle(tokenizer, stop_ids, bos_id, template)


def load_license(source: BaseSource) -> License:
    """The licence that the source states: in GGUF metadata or a model card's first lines, and the text in a file ``LICENSE*``."""
    if source.kind == "gguf":
        header = _gguf_header(source)
        return License(header.metadata.get("general.license"), _license_text(header.path.parent))
    if source.path is not None:
        return License(_card_license(source.path / "README.md"), _license_text(source.path))
    files = {name: _hub_file(source, name, required=False) for name in ("README.md", "LICENSE")}
    card, text = files["README.md"], files["LICENSE"]
    return License(_card_license(card) if card else None, text.read_text(encoding="utf-8") if text else None)


def identity(model: PreTrainedModel, architecture: str) -> BaseIdentity:
    """Identity of base weights, for adapters to name the base that they were trained on.

    The fingerprint is a sha256 over name, shape and values (little-endian fp32) of every parameter in the order of names, a tied
    head counted once, under the name of the embedding. Values are copied in pieces of at most 16 MB. Take it from a model loaded
    in fp32, before anything is added to it.
    """
    import torch

    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name}{list(parameter.shape)}\n".encode())
        for piece in parameter.detach().reshape(-1).split(_HASH_VALUES):
            digest.update(piece.to(device="cpu", dtype=torch.float32).numpy().astype("<f4", copy=False))
    config = model.config
    return BaseIdentity(architecture, digest.hexdigest(), config.hidden_size, config.num_hidden_layers, config.vocab_size)


# --- GGUF ---


def _gguf_header(source: BaseSource) -> GgufHeader:
    assert source.path is not None
    header = read_header(source.path)
    if header.architecture not in _GGUF_ARCHITECTURES:
        known = ", ".join(f"{name} ({SUPPORTED[cls]})" for name, cls in _GGUF_ARCHITECTURES.items())
        raise UserError(f"{source.path}: architecture {header.architecture!r} is not supported; GGUF files can be of: {known}")
    # transformers drops both without a word, and the model would be another one.
    scaling = header.metadata.get(f"{header.architecture}.rope.scaling.type", "none")
    if scaling != "none" or any(name.startswith("rope_f") for name in header.tensors):
        raise UserError(
            f"{source.path}: it scales rotary positions ({scaling if scaling != 'none' else 'rope_freqs'}), which is not read from "
            "GGUF files; use the model's Hugging Face id or folder instead"
        )
    return header


def _gguf_tokenizer(header: GgufHeader) -> TokenizerBundle:
    from transformers import PreTrainedTokenizerFast

    tokens = header.require("tokenizer.ggml.tokens", list)
    stop_ids = {index for name in ("eos", "eot", "eom") if (index := header.token_id(name)) is not None}
    if not stop_ids:
        raise UserError(f"{header.path}: its metadata names no token that ends a text (tokenizer.ggml.eos_token_id)")
    named = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    special = {word: tokens[index] for name, word in named.items() if (index := header.token_id(name)) is not None}
    bos_id = header.token_id("bos") if header.metadata.get("tokenizer.ggml.add_bos_token", False) else None
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=build_tokenizer(header),
        clean_up_tokenization_spaces=False,
        model_max_length=header.require(f"{header.architecture}.context_length", int),
        **special,
    )
    template = header.metadata.get("tokenizer.chat_template")
    tokenizer.chat_template = template
    return TokenizerBundle(tokenizer, sorted(stop_ids), bos_id, template)


# --- folders and the hub ---


def _config_file(source: BaseSource) -> Path:
    if source.path is None:
        file = _hub_file(source, "config.json", required=True)
        assert file is not None
        return file
    file = source.path / "config.json"
    if not file.is_file():
        ggufs = sorted(source.path.glob("*.gguf"))
        hint = f"; name the file itself: {ggufs[0]}" if ggufs else ""
        raise UserError(f"{source.path}: no config.json in this folder, so it holds no Hugging Face model{hint}. {_forms()}")
    return file


def _check_config(source: BaseSource, file: Path) -> str:
    """The class that ``config.json`` names, when it is one that works."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: not JSON ({error})") from None
    supported = "; supported are: " + ", ".join(f"{name} ({cls})" for cls, name in SUPPORTED.items())
    names = data.get("architectures") if isinstance(data, dict) else None
    if not isinstance(names, list) or not names:
        raise UserError(f"{file}: it names no architecture ('architectures')" + supported)
    architecture = str(names[0])
    if architecture not in SUPPORTED:
        parts = "" if "text_config" not in data else " (a model of text and other input; only text-only models work)"
        raise UserError(f"{source.name}: architecture {architecture}{parts} is not supported{supported}")
    if "quantization_config" in data:
        method = data["quantization_config"].get("quant_method", "unknown")
        raise UserError(f"{source.name}: its weights are quantized ({method}); start from the original weights")
    return architecture


def _check_rope(source: BaseSource, config: PretrainedConfig) -> None:
    scaling = getattr(config, "rope_scaling", None) or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind in _SWITCHING_ROPE:
        raise UserError(
            f"{source.name}: its rotary embedding changes with the text's length (rope type {kind!r}), which is not supported; "
            "use a variant of the model for a shorter context"
        )


def _stop_ids(source: BaseSource, eos_id: int | None) -> list[int]:
    """End-of-sequence ids as ``generate`` of transformers takes them: the generation configuration's, else the tokenizer's."""
    file = _hub_file(source, "generation_config.json", required=False) if source.path is None else source.path / "generation_config.json"
    found: Any = None
    if file is not None and file.is_file():
        try:
            found = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        except (json.JSONDecodeError, UnicodeDecodeError, AttributeError) as error:
            raise UserError(f"{file}: not a generation configuration ({error})") from None
    if found is None:
        found = eos_id
    ids = found if isinstance(found, list) else [found]
    return sorted({index for index in ids if isinstance(index, int)})


def _hub_options(source: BaseSource) -> dict[str, Any]:
    if source.kind != "hub":
        return {}
    return {"revision": source.revision, "local_files_only": not _hub_answers(source)}


@functools.lru_cache(maxsize=8)
def _hub_answers(source: BaseSource) -> bool:
    """Ask the hub once for the model: False without a connection, when only files in the user's hub cache can be used.

    Asking first keeps a missing connection or a misspelt name from being retried for half a minute.

    Raises:
        UserError: the hub answers that it has no such model or revision, or does not let this user in.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        HfApi().model_info(source.name, revision=source.revision, timeout=_HUB_SECONDS)
    except GatedRepoError:
        raise UserError(f"{source.name}: the hub asks you to accept its terms and to log in first (hf auth login)") from None
    except RevisionNotFoundError:
        raise UserError(f"{source.name}: the hub has no revision {source.revision!r} of it") from None
    except RepositoryNotFoundError:
        raise UserError(f"no model {source.name!r} on the Hugging Face hub (or it is private: hf auth login). {_forms()}") from None
    except (HfHubHTTPError, OSError):
        return False
    return True


def _hub_file(source: BaseSource, name: str, *, required: bool) -> Path | None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    options = _hub_options(source)
    try:
        with _quiet():
            return Path(hf_hub_download(source.name, name, **options))
    except (EntryNotFoundError, OSError) as error:  # LocalEntryNotFoundError is of both kinds
        if not required:
            return None
        if options["local_files_only"]:
            raise UserError(
                f"no model {source.name!r}: the Hugging Face hub cannot be reached (or is switched off), and it is not in the local hub "
                f"cache. {_forms()}"
            ) from None
        raise UserError(f"{source.name}: no {name} on the hub: {_first_line(error)}") from None


def _card_license(card: Path) -> str | None:
    """``license:`` of a model card's front matter."""
    if not card.is_file():
        return None
    parts = card.read_text(encoding="utf-8", errors="replace").split("---", 2)
    if len(parts) < 3 or parts[0].strip():
        return None
    match = re.search(r"^license:\s*['\"]?([\w.+-]+)", parts[1], re.MULTILINE)
    return match[1] if match else None


def _license_text(folder: Path) -> str | None:
    for path in sorted(folder.glob("LICENSE*")):
        if path.is_file():
            return path.read_text(encoding="utf-8", errors="replace")
    return None


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the libraries' own bars and warnings off the user's terminal while a model loads; downloads keep their bar."""
    from transformers.utils import logging as library

    gguf_loading: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    loggers = [logging.getLogger(name) for name in ("transformers", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    bars, gguf_bar = library.is_progress_bar_enabled(), gguf_loading.tqdm
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    library.disable_progress_bar()
    gguf_loading.tqdm = functools.partial(gguf_bar, disable=True)
    try:
        yield
    finally:
        gguf_loading.tqdm = gguf_bar
        if bars:
            library.enable_progress_bar()
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
