"""Base weights from every kind of source, on models of a few thousand parameters, and what is refused before weights load."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specstream.models import base
from specstream.models.base import BaseSource, identity, load_base, load_config, load_license, load_tokenizer, resolve_base
from specstream.models.errors import UserError
from specstream.models.gguf_file import build_tokenizer, read_header

HIDDEN, LAYERS = 32, 2
# All bytes in the alphabet of byte-level BPE, one merge, four special tokens (257 to 260).
TOKENS = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "<s>", "</s>", "<|end|>", "<pad>"]
VOCAB = len(TOKENS)


def tiny_config(**changes: Any) -> LlamaConfig:
    sizes: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "bos_token_id": 257,
        "eos_token_id": 258,
    }
    return LlamaConfig(**sizes | changes)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole Hugging Face folder: config, weights, tokenizer, model card, licence."""
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    torch.manual_seed(0)
    LlamaForCausalLM(tiny_config()).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(TOKENS)}, merges=[("h", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    (folder / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\n# Tiny\n")
    (folder / "LICENSE").write_text("the licence's text")
    return folder


@pytest.fixture
def own_folder(model_folder: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(model_folder, tmp_path / "copy"))


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


# Resolving names


def test_a_folder_a_file_and_a_hub_id_are_told_apart(model_folder: Path, tmp_path: Path) -> None:
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"")
    assert resolve_base(str(model_folder)) == BaseSource("tiny-llama", "folder", model_folder)
    assert resolve_base(str(gguf)) == BaseSource("m", "gguf", gguf)
    assert resolve_base("owner/some.model-1") == BaseSource("owner/some.model-1", "hub", None, None)
    assert resolve_base("owner/name@v1.0") == BaseSource("owner/name", "hub", None, "v1.0")


def test_an_existing_folder_wins_over_a_hub_id(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model_folder.parent.parent)
    assert resolve_base(f"{model_folder.parent.name}/tiny-llama").kind == "folder"


@pytest.mark.parametrize("name", ["smollm", "./nowhere", "a/b/c", "nowhere/model.gguf", "", "owner/", "/absolute/path"])
def test_names_of_nothing_list_the_forms_that_work(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"owner/name.*folder.*\.gguf.*smollm2-135m") if name else pytest.raises(UserError):
        load_config(resolve_base(name))


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(UserError, match="neither"):
        resolve_base(str(tmp_path / "model.bin"))


def test_a_hub_id_without_connection_is_one_clear_error() -> None:
    with pytest.raises(UserError, match=r"cannot be reached .*owner/name"):
        load_config(resolve_base("no-such-owner/no-such-model"))


def test_a_hub_id_that_the_hub_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import RepositoryNotFoundError
    from requests import Response

    def unknown(*_: object, **__: object) -> None:
        raise RepositoryNotFoundError("404", response=Response())

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unknown)
    with pytest.raises(UserError, match="no model 'unknown-owner/unknown' on the Hugging Face hub"):
        load_config(resolve_base("unknown-owner/unknown"))


# Loading a folder


def test_model_and_tokenizer_of_a_folder(model_folder: Path) -> None:
    model, tokenizer = load_base(resolve_base(str(model_folder)))
    assert type(model) is LlamaForCausalLM
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.dtype == torch.float32
    assert tokenizer.stop_ids == [258]
    assert tokenizer.bos_id is None
    assert tokenizer.chat_template is None
    assert tokenizer.tokenizer.decode(tokenizer.tokenizer("hé").input_ids) == "hé"


def test_another_type_of_weights(model_folder: Path) -> None:
    model, _ = load_base(resolve_base(str(model_folder)), dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16


def test_loading_says_nothing(model_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load_base(resolve_base(str(model_folder)))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_weights_behind_links_load(model_folder: Path, tmp_path: Path, link: Any) -> None:
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in model_folder.iterdir():
        link(file, linked / file.name)
    expected, _ = load_base(resolve_base(str(model_folder)))
    found, _ = load_base(resolve_base(str(linked)))
    assert identity(found, "LlamaForCausalLM") == identity(expected, "LlamaForCausalLM")


def test_stop_ids_come_from_the_generation_configuration(own_folder: Path) -> None:
    (own_folder / "generation_config.json").write_text('{"eos_token_id": [259, 258]}')
    assert load_tokenizer(resolve_base(str(own_folder))).stop_ids == [258, 259]
    (own_folder / "generation_config.json").write_text('{"eos_token_id": 259}')
    assert load_tokenizer(resolve_base(str(own_folder))).stop_ids == [259]
    (own_folder / "generation_config.json").write_text("{}")
    assert load_tokenizer(resolve_base(str(own_folder))).stop_ids == [258]


def test_licence_of_a_folder(model_folder: Path, own_folder: Path) -> None:
    licence = load_license(resolve_base(str(model_folder)))
    assert (licence.name, licence.text) == ("apache-2.0", "the licence's text")
    (own_folder / "README.md").unlink()
    (own_folder / "LICENSE").unlink()
    licence = load_license(resolve_base(str(own_folder)))
    assert (licence.name, licence.text) == (None, None)


# Refused before weights load: these folders hold no weights at all.


def folder_with(tmp_path: Path, config: dict[str, Any]) -> BaseSource:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return resolve_base(str(tmp_path))


@pytest.mark.parametrize("architecture", ["GPT2LMHeadModel", "MambaForCausalLM", "NoSuchModel"])
def test_an_architecture_that_is_not_supported_lists_those_that_are(tmp_path: Path, architecture: str) -> None:
    source = folder_with(tmp_path, {"architectures": [architecture], "model_type": "whatever"})
    with pytest.raises(UserError) as error:
        load_base(source)
    assert architecture in str(error.value)
    for name in base.SUPPORTED:
        assert name in str(error.value)


def test_a_multimodal_model_is_told_so(tmp_path: Path) -> None:
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": {}, "vision_config": {}}
    with pytest.raises(UserError, match=r"Gemma3ForConditionalGeneration .*only text-only models work.*Gemma3ForCausalLM"):
        load_base(folder_with(tmp_path, config))


@pytest.mark.parametrize("config", [{}, {"architectures": []}, {"architectures": None}, []])
def test_a_config_that_names_no_architecture(tmp_path: Path, config: Any) -> None:
    with pytest.raises(UserError, match="names no architecture"):
        load_config(folder_with(tmp_path, config))


def test_a_config_that_is_not_json(own_folder: Path) -> None:
    (own_folder / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json: not JSON"):
        load_config(resolve_base(str(own_folder)))


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.json"):
        load_config(resolve_base(str(tmp_path)))
    (tmp_path / "weights.gguf").write_bytes(b"")
    with pytest.raises(UserError, match=r"name the file itself: .*weights\.gguf"):
        load_config(resolve_base(str(tmp_path)))


def test_quantized_weights(own_folder: Path) -> None:
    change_config(own_folder, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(UserError, match=r"quantized \(gptq\)"):
        load_config(resolve_base(str(own_folder)))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_embeddings_that_switch(own_folder: Path, kind: str) -> None:
    scaling = {"rope_type": kind, "factor": 2.0, "long_factor": [1.0] * 4, "short_factor": [1.0] * 4}
    change_config(own_folder, rope_scaling=scaling)
    with pytest.raises(UserError, match=f"'{kind}'"):
        load_config(resolve_base(str(own_folder)))


def test_fixed_rotary_scaling_is_fine(own_folder: Path) -> None:
    change_config(own_folder, rope_scaling={"rope_type": "linear", "factor": 2.0})
    assert load_config(resolve_base(str(own_folder))).rope_scaling["factor"] == 2.0


# Weights and tokenizers that do not fit


def test_no_weights(own_folder: Path) -> None:
    (own_folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="weights cannot be loaded"):
        load_base(resolve_base(str(own_folder)))


def test_weights_cut_off(own_folder: Path) -> None:
    file = own_folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match="weights cannot be loaded"):
        load_base(resolve_base(str(own_folder)))


def test_weights_of_fewer_layers_are_not_filled_up_with_random_numbers(own_folder: Path) -> None:
    change_config(own_folder, num_hidden_layers=LAYERS + 1)
    with pytest.raises(UserError, match=r"9 weights missing \(model\.layers\.2\."):
        load_base(resolve_base(str(own_folder)))


def test_weights_of_another_shape(own_folder: Path) -> None:
    change_config(own_folder, intermediate_size=64)
    with pytest.raises(UserError, match=r"6 weights of another shape \(model\.layers\.0\.mlp\.down_proj\.weight, "):
        load_base(resolve_base(str(own_folder)))


def test_no_tokenizer(own_folder: Path) -> None:
    for file in own_folder.glob("*token*"):
        file.unlink()
    with pytest.raises(UserError, match="tokenizer"):
        load_tokenizer(resolve_base(str(own_folder)))


def test_no_token_that_ends_a_text(own_folder: Path) -> None:
    (own_folder / "generation_config.json").unlink()
    file = own_folder / "tokenizer_config.json"
    file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "eos_token"}))
    (own_folder / "special_tokens_map.json").write_text("{}")
    with pytest.raises(UserError, match="ends a text"):
        load_tokenizer(resolve_base(str(own_folder)))


# Identity


def test_identity_is_of_values_not_of_how_they_were_loaded(own_folder: Path) -> None:
    source = resolve_base(str(own_folder))
    model, _ = load_base(source)
    found = identity(model, "LlamaForCausalLM")
    assert (found.hidden_size, found.num_layers, found.vocab_size) == (HIDDEN, LAYERS, VOCAB)
    assert identity(load_base(source)[0], "LlamaForCausalLM") == found
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] += 1e-3
    assert identity(model, "LlamaForCausalLM").fingerprint != found.fingerprint


def test_a_tied_head_counts_once(own_folder: Path) -> None:
    model, _ = load_base(resolve_base(str(own_folder)))
    names = [name for name, _ in model.named_parameters()]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def test_pieces_do_not_change_the_fingerprint(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = load_base(resolve_base(str(model_folder)))
    whole = identity(model, "LlamaForCausalLM")
    monkeypatch.setattr(base, "_HASH_VALUES", 7)
    assert identity(model, "LlamaForCausalLM") == whole


# GGUF


def write_gguf(
    path: Path,
    changes: dict[str, Any] | None = None,
    *,
    architecture: str = "llama",
    model: str = "gpt2",
    pre: str = "smollm",
    extra_tensors: tuple[str, ...] = (),
) -> Path:
    """A GGUF file of the tiny model's shape with random weights; ``changes`` are metadata, None leaves a value out."""
    writer = GGUFWriter(path, architecture)
    metadata: dict[str, Any] = {
        f"{architecture}.block_count": LAYERS,
        f"{architecture}.context_length": 64,
        f"{architecture}.embedding_length": HIDDEN,
        f"{architecture}.feed_forward_length": 48,
        f"{architecture}.attention.head_count": 4,
        f"{architecture}.attention.head_count_kv": 2,
        f"{architecture}.rope.dimension_count": 8,
        "tokenizer.ggml.bos_token_id": 257,
        "tokenizer.ggml.eos_token_id": 258,
        "tokenizer.ggml.padding_token_id": 260,
    }
    metadata |= changes or {}
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32(f"{architecture}.rope.freq_base", 10000.0)
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * 257 + [3] * 4)
    writer.add_token_merges(["h e"])
    random = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_q.weight": (HIDDEN, HIDDEN),
            f"blk.{layer}.attn_k.weight": (HIDDEN // 2, HIDDEN),
            f"blk.{layer}.attn_v.weight": (HIDDEN // 2, HIDDEN),
            f"blk.{layer}.attn_output.weight": (HIDDEN, HIDDEN),
            f"blk.{layer}.ffn_gate.weight": (48, HIDDEN),
            f"blk.{layer}.ffn_up.weight": (48, HIDDEN),
            f"blk.{layer}.ffn_down.weight": (HIDDEN, 48),
            f"blk.{layer}.attn_norm.weight": (HIDDEN,),
            f"blk.{layer}.ffn_norm.weight": (HIDDEN,),
        }
    for name, shape in shapes.items():
        writer.add_tensor(name, random.standard_normal(shape, dtype=np.float32))
    for name in extra_tensors:
        writer.add_tensor(name, np.ones(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_model_and_tokenizer_of_a_gguf_file(tmp_path: Path) -> None:
    source = resolve_base(str(write_gguf(tmp_path / "tiny.gguf", {"general.license": "mit"})))
    config = load_config(source)
    assert config.architectures == ["LlamaForCausalLM"]
    assert (config.hidden_size, config.num_hidden_layers, config.num_key_value_heads) == (HIDDEN, LAYERS, 2)
    model, tokenizer = load_base(source)
    assert type(model) is LlamaForCausalLM
    assert model.config.tie_word_embeddings
    assert torch.isfinite(model(input_ids=torch.tensor([[1, 2, 3]])).logits).all()
    assert tokenizer.stop_ids == [258]
    assert tokenizer.bos_id is None
    assert tokenizer.tokenizer.eos_token == "</s>"
    assert tokenizer.tokenizer.pad_token == "<pad>"
    assert load_license(source).name == "mit"


def test_loading_a_gguf_file_says_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load_base(resolve_base(str(write_gguf(tmp_path / "tiny.gguf"))))
    assert capfd.readouterr() == ("", "")


def test_special_tokens_are_those_of_the_metadata(tmp_path: Path) -> None:
    changes = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.eot_token_id": 259, "tokenizer.chat_template": "{{ messages }}"}
    bundle = load_tokenizer(resolve_base(str(write_gguf(tmp_path / "tiny.gguf", changes))))
    assert bundle.bos_id == 257
    assert bundle.stop_ids == [258, 259]
    assert bundle.chat_template == "{{ messages }}"
    h, he = TOKENS.index("h"), TOKENS.index("he")
    assert bundle.tokenizer("hhe<|end|>").input_ids == [257, h, he, 259]
    assert bundle.tokenizer("hhe", add_special_tokens=False).input_ids == [h, he]


def test_a_saved_tokenizer_gives_the_same_ids(tmp_path: Path) -> None:
    bundle = load_tokenizer(resolve_base(str(write_gguf(tmp_path / "tiny.gguf", {"tokenizer.ggml.add_bos_token": True}))))
    bundle.tokenizer.save_pretrained(tmp_path / "saved")
    text = "the  12 h\u00e9 \U0001f389<|end|>\n"
    saved = Tokenizer.from_file(str(tmp_path / "saved" / "tokenizer.json"))
    assert saved.encode(text).ids == bundle.tokenizer(text).input_ids


@given(st.text(max_size=40))
def test_text_comes_back_from_its_ids(tiny_gguf_tokenizer: Tokenizer, text: str) -> None:
    assert tiny_gguf_tokenizer.decode(tiny_gguf_tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.fixture(scope="module")
def tiny_gguf_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return build_tokenizer(read_header(write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")))


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["a", "  ", "1", "2", "3", "4", " b"]),
        ("gpt-2", ["a", " ", " 1234", " b"]),
        ("qwen2", ["a", " ", " ", "1", "2", "3", "4", " b"]),
        ("llama-bpe", ["a", " ", " ", "123", "4", " b"]),
    ],
)
def test_text_is_cut_as_the_file_says(tmp_path: Path, pre: str, pieces: list[str]) -> None:
    tokenizer = build_tokenizer(read_header(write_gguf(tmp_path / "tiny.gguf", pre=pre)))
    found = [piece.replace("\u0120", " ") for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("a  1234 b")]
    assert found == pieces


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "mamba"}, r"architecture 'mamba' is not supported.*llama \(Llama\)"),
        ({"changes": {"llama.rope.scaling.type": "yarn"}}, r"scales rotary positions \(yarn\)"),
        ({"extra_tensors": ("rope_freqs.weight",)}, r"scales rotary positions \(rope_freqs\)"),
        ({"model": "llama"}, r"vocabulary is of kind 'llama'"),
        ({"pre": "chatglm-bpe"}, r"splits text as 'chatglm-bpe'"),
        ({"changes": {"tokenizer.ggml.eos_token_id": None}}, r"no token that ends a text"),
    ],
)
def test_gguf_files_that_would_load_wrongly_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    source = resolve_base(str(write_gguf(tmp_path / "tiny.gguf", **options)))
    with pytest.raises(UserError, match=message):
        load_base(source)


def test_not_a_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"PK\x03\x04")
    with pytest.raises(UserError, match="not a GGUF file"):
        load_config(resolve_base(str(tmp_path / "m.gguf")))


@given(cut=st.floats(0, 1, exclude_max=True), place=st.floats(0, 1, exclude_max=True), value=st.integers(0, 255))
def test_a_damaged_header_is_a_clear_error_or_harmless(damaged: Path, cut: float, place: float, value: int) -> None:
    whole = damaged.with_name("whole.gguf").read_bytes()
    for data in (whole[: int(cut * len(whole))], _with_byte(whole, int(place * len(whole)), value)):
        damaged.write_bytes(data)
        with contextlib.suppress(UserError):  # any other exception fails the test
            read_header(damaged)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damaged")
    write_gguf(folder / "whole.gguf")
    return folder / "damaged.gguf"


def _with_byte(data: bytes, index: int, value: int) -> bytes:
    return data[:index] + bytes([value]) + data[index + 1 :]


# The real model


@pytest.mark.slow
def test_the_real_model_answers(smollm2_path: Path) -> None:
    model, bundle = load_base(resolve_base("smollm2-135m"))
    assert bundle.stop_ids == [2]
    assert bundle.tokenizer.convert_ids_to_tokens(2) == "<|im_end|>"
    # Digits apart and two spaces in one token: the ids of the model's own tokenizer.json.
    assert bundle.tokenizer("a  12 b").input_ids == [81, 256, 33, 34, 278]
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = bundle.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
    assert "Paris" in bundle.tokenizer.decode(out[0, ids.shape[1] :])
    assert int(out[0, -1]) == 2
    assert load_license(resolve_base("smollm2-135m")).name == "apache-2.0"
