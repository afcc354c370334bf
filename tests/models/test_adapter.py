"""Adapter folders: round trip, merging, checks, PEFT's layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specstream.models import adapter as adapters
from specstream.models.base import identity
from specstream.models.config import StreamConfig
from specstream.models.errors import UserError
from specstream.models.stream_model import StreamModel

from ..export.tiny import VOCAB, tiny_base


def make(folder: Path) -> tuple[StreamConfig, dict[str, Tensor]]:
    """A two-stage adapter with random values for a tiny Llama."""
    base = tiny_base("Llama")
    known = identity(base, "LlamaForCausalLM")
    torch.manual_seed(3)
    wrapped = adapters.wrap_main(base, ("q_proj", "down_proj"), 3, 6.0)
    for layer in wrapped.values():
        torch.nn.init.normal_(layer.lora_B, std=0.1)
    main = adapters.main_tensors(wrapped)
    adapters.unwrap(base, merge=False)
    config = StreamConfig(
        base=known, mode="two-stage", num_streams=2, stream_layers=1, top_k=3, stream_rank=2, draft_vocab_size=20,
        main_rank=3, main_alpha=6.0, main_targets=("down_proj", "q_proj"),
    )  # fmt: skip
    model = StreamModel(base, config)
    for parameter in model.stream_parameters().values():
        torch.nn.init.normal_(parameter, std=0.2)
    model.draft_vocab.copy_(torch.randperm(VOCAB)[:20].sort().values)
    tensors = main | adapters.stream_tensors(model) | {"streams.calibration": torch.tensor([0.5, 1.5])}
    folder.mkdir()
    adapters.save_adapter(folder, config, tensors)
    return config, tensors


def test_round_trip_in_16_bits(tmp_path: Path) -> None:
    config, tensors = make(tmp_path / "a")
    loaded = adapters.load_adapter(tmp_path / "a")
    assert loaded.config == config
    assert set(loaded.tensors) == set(tensors)
    for name, tensor in tensors.items():
        torch.testing.assert_close(loaded.tensors[name].float(), tensor.float(), atol=1e-3, rtol=1e-3)
    assert loaded.calibration == [0.5, 1.5]
    # vectors 2·32, pruning adapter 2·8·32, LoRA of rank 2 on the 7 linear layers of one layer
    sizes = {"q_proj": (32, 32), "k_proj": (16, 32), "v_proj": (16, 32), "o_proj": (32, 32)}
    sizes |= {"gate_proj": (48, 32), "up_proj": (48, 32), "down_proj": (32, 48)}
    assert loaded.count("streams") == 2 * 32 + 2 * 8 * 32 + sum(2 * (a + b) for a, b in sizes.values())
    assert loaded.count("main") == 2 * 3 * (32 + 32) + 2 * 3 * (48 + 32)


def test_merging_equals_adding_the_update(tmp_path: Path) -> None:
    make(tmp_path / "a")
    loaded = adapters.load_adapter(tmp_path / "a")
    base, original = tiny_base("Llama"), tiny_base("Llama")
    assert adapters.merge_main(base, loaded) == 4
    a = loaded.tensors["main.model.layers.1.mlp.down_proj.lora_A.weight"].float()
    b = loaded.tensors["main.model.layers.1.mlp.down_proj.lora_B.weight"].float()
    got = base.get_parameter("model.layers.1.mlp.down_proj.weight")
    torch.testing.assert_close(got, original.get_parameter("model.layers.1.mlp.down_proj.weight") + 2.0 * b @ a)
    untouched = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(base.get_parameter(untouched), original.get_parameter(untouched))


def test_another_base_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "a")
    loaded = adapters.load_adapter(tmp_path / "a")
    base = tiny_base("Llama")
    adapters.check_base(loaded, identity(base, "LlamaForCausalLM"), tmp_path)
    with torch.no_grad():
        base.get_parameter("model.norm.weight")[0] += 1e-3
    with pytest.raises(UserError, match=r"another base.*same sizes, other weights"):
        adapters.check_base(loaded, identity(base, "LlamaForCausalLM"), tmp_path)
    other = identity(tiny_base("Qwen2"), "Qwen2ForCausalLM")
    with pytest.raises(UserError, match="architecture Qwen2ForCausalLM"):
        adapters.check_base(loaded, other, tmp_path)


def test_another_gamma_is_refused(tmp_path: Path) -> None:
    config, _ = make(tmp_path / "a")
    (tmp_path / "a" / "config.json").write_text(replace(config, num_streams=3).to_json())
    with pytest.raises(UserError, match=r"stream_vectors has shape \(2, 32\), expected \(3, 32\)"):
        adapters.load_adapter(tmp_path / "a")


def test_missing_and_unknown_tensors_are_named(tmp_path: Path) -> None:
    make(tmp_path / "a")
    file = tmp_path / "a" / "adapter.safetensors"
    tensors = load_file(file)
    tensors["streams.colour"] = tensors.pop("streams.prune_up")
    save_file(tensors, file)
    with pytest.raises(UserError, match=r"prune_up is missing; unknown tensor streams\.colour"):
        adapters.load_adapter(tmp_path / "a")


def test_a_cut_file_and_no_folder(tmp_path: Path) -> None:
    make(tmp_path / "a")
    file = tmp_path / "a" / "adapter.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(UserError, match="not a whole safetensors file"):
        adapters.load_adapter(tmp_path / "a")
    with pytest.raises(UserError, match="not an adapter folder"):
        adapters.load_adapter(tmp_path / "b")


def test_peft_layout_both_ways(tmp_path: Path) -> None:
    make(tmp_path / "a")
    loaded = adapters.load_adapter(tmp_path / "a")
    (tmp_path / "peft").mkdir()
    adapters.save_peft(tmp_path / "peft", loaded)
    names = set(load_file(tmp_path / "peft" / "adapter_model.safetensors"))
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in names
    tensors, rank, alpha, targets = adapters.load_peft(tmp_path / "peft")
    assert (rank, alpha, targets) == (3, 6.0, ("down_proj", "q_proj"))
    assert all(torch.equal(tensor, loaded.tensors[name]) for name, tensor in tensors.items())
    assert set(tensors) == {name for name in loaded.tensors if name.startswith("main.")}
