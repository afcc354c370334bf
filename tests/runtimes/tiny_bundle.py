"""A bundle for tests: a two-layer network written out as ONNX by hand, the same in NumPy, and a byte-level tokenizer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper, save
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from specstream.runtimes.bundle import Bundle, BundleWriter
from specstream.runtimes.manifest import ContractInfo, Manifest, ModelInfo, QuantizationInfo, StreamInfo, TokenizerInfo

LAYERS, HEADS, KV_HEADS, HEAD_DIM, CONTEXT, STREAMS, TOP_K = 2, 4, 2, 8, 64, 3, 4
HIDDEN = HEADS * HEAD_DIM
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}<|assistant|>"


def tokenizer() -> Tokenizer:
    """Byte-level BPE over all bytes, with merges that split characters in the middle."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    made.train_from_iterator(["the cat sat on the mat", "zażółć gęślą jaźń", "東京東京都 日本語", "😀😁😂 👩‍👩‍👧"] * 20, trainer)
    made.add_special_tokens([AddedToken(text, special=True) for text in ("<|end|>", "<|user|>", "<|assistant|>")])
    return made


def weights(vocab_size: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)

    def matrix(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)

    made = {"embed": rng.standard_normal((vocab_size, HIDDEN)).astype(np.float32)}
    made["place"] = rng.standard_normal((CONTEXT + STREAMS, HIDDEN)).astype(np.float32)
    made["vectors"] = rng.standard_normal((STREAMS, HIDDEN)).astype(np.float32)
    made["head"] = matrix(HIDDEN, vocab_size)
    for layer in range(LAYERS):
        made |= {f"q{layer}": matrix(HIDDEN, HIDDEN), f"o{layer}": matrix(HIDDEN, HIDDEN)}
        made |= {f"{name}{layer}": matrix(HIDDEN, KV_HEADS * HEAD_DIM) for name in "kv"}
    return made


def graph(vocab_size: int, streams: bool = True, seed: int = 0) -> ModelProto:
    """Contract v1: token and place embeddings, attention with residuals, a head. Streams are the main row plus a vector."""
    nodes = []
    constants = {
        "zero": np.array(0.0, dtype=np.float32),
        "low": np.array(-1e9, dtype=np.float32),
        "one_i32": np.array([1], dtype=np.int32),
        "first": np.array([0], dtype=np.int64),
        "top_k": np.array([TOP_K], dtype=np.int64),
        "axis_1": np.array([1], dtype=np.int64),
    }

    def node(kind: str, inputs: list[str], outputs: list[str], **attributes: object) -> None:
        nodes.append(helper.make_node(kind, inputs, outputs, **attributes))  # type: ignore[arg-type]

    # bias [1, 1, T, past + T]: zeros over the cache, the tree's mask over the call's own rows
    node("Shape", ["input_ids"], ["rows"], start=1, end=2)
    node("Cast", ["past_length"], ["past"], to=TensorProto.INT64)
    node("Concat", ["rows", "past"], ["cached_shape"], axis=0)
    node("ConstantOfShape", ["cached_shape"], ["cached"])
    node("Where", ["tree_mask", "zero", "low"], ["own"])
    node("Concat", ["cached", "own"], ["bias_2d"], axis=1)
    node("Unsqueeze", ["bias_2d", "two_axes"], ["bias"])
    constants["two_axes"] = np.array([0, 1], dtype=np.int64)
    node("Cast", ["rows"], ["rows_i32"], to=TensorProto.INT32)
    node("Add", ["past_length", "rows_i32"], ["total_1d"])
    node("Squeeze", ["total_1d", "first"], ["total"])
    node("Sub", ["total_1d", "one_i32"], ["seqlens_k_1d"])
    node("Unsqueeze", ["seqlens_k_1d", "axis_1"], ["seqlens_k"])
    node("Gather", ["embed", "input_ids"], ["x_tokens"], axis=0)
    node("Gather", ["place", "position_ids"], ["x_places"], axis=0)
    node("Add", ["x_tokens", "x_places"], ["x0"])
    for layer in range(LAYERS):
        for name in "qkv":
            node("MatMul", [f"x{layer}", f"{name}{layer}"], [f"{name}_{layer}"])
        projected = [f"{name}_{layer}" for name in "qkv"]
        past, present = ([f"{name}.{layer}.key", f"{name}.{layer}.value"] for name in ("past_key_values", "present"))
        node(
            "GroupQueryAttention",
            [*projected, *past, "seqlens_k", "total", "", "", "", "bias"],
            [f"attention_{layer}", *present],
            domain="com.microsoft",
            num_heads=HEADS,
            kv_num_heads=KV_HEADS,
        )
        node("MatMul", [f"attention_{layer}", f"o{layer}"], [f"out_{layer}"])
        node("Add", [f"x{layer}", f"out_{layer}"], [f"x{layer + 1}"])
    node("Squeeze", [f"x{LAYERS}", "first"], ["states"])
    node("Gather", ["states", "logit_rows"], ["scored"], axis=0)
    node("MatMul", ["scored", "head"], ["logits"])
    node("ArgMax", ["logits"], ["next_ids"], axis=1, keepdims=0)
    if streams:
        node("Gather", ["states", "stream_rows"], ["carrying"], axis=0)
        node("Unsqueeze", ["carrying", "axis_1"], ["carrying_3d"])
        node("Add", ["carrying_3d", "vectors"], ["stream_states"])
        node("MatMul", ["stream_states", "head"], ["stream_logits"])
        node("LogSoftmax", ["stream_logits"], ["stream_all"], axis=-1)
        node("TopK", ["stream_all", "top_k"], ["stream_logprobs", "stream_ids"], axis=-1)
    cache: list[int | str] = [1, KV_HEADS, "capacity", HEAD_DIM]
    inputs = [
        ("input_ids", TensorProto.INT64, [1, "T"]),
        ("position_ids", TensorProto.INT64, [1, "T"]),
        ("tree_mask", TensorProto.BOOL, ["T", "T"]),
        ("past_length", TensorProto.INT32, [1]),
        ("logit_rows", TensorProto.INT64, ["L"]),
        *([("stream_rows", TensorProto.INT64, ["S"])] if streams else []),
        *((f"past_key_values.{i}.{kind}", TensorProto.FLOAT, cache) for i in range(LAYERS) for kind in ("key", "value")),
    ]
    outputs = [
        ("next_ids", TensorProto.INT64, ["L"]),
        ("logits", TensorProto.FLOAT, ["L", vocab_size]),
        *([("stream_ids", TensorProto.INT64, ["S", STREAMS, TOP_K])] if streams else []),
        *([("stream_logprobs", TensorProto.FLOAT, ["S", STREAMS, TOP_K])] if streams else []),
        *((f"present.{i}.{kind}", TensorProto.FLOAT, cache) for i in range(LAYERS) for kind in ("key", "value")),
    ]
    stored = weights(vocab_size, seed) | constants
    made = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info(*value) for value in inputs],
        [helper.make_tensor_value_info(*value) for value in outputs],
        [numpy_helper.from_array(array, name) for name, array in stored.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(made, opset_imports=opsets, ir_version=10)


def dense_logits(tokens: list[int], vocab_size: int, seed: int = 0) -> np.ndarray:
    """[len(tokens), V]: the same network over a plain sequence, in NumPy, without a cache."""
    w = weights(vocab_size, seed)
    x = w["embed"][tokens] + w["place"][: len(tokens)]
    causal = np.where(np.tri(len(tokens), dtype=bool), 0, -np.inf)
    for layer in range(LAYERS):
        q = (x @ w[f"q{layer}"]).reshape(-1, HEADS, HEAD_DIM)
        k, v = ((x @ w[f"{name}{layer}"]).reshape(-1, KV_HEADS, HEAD_DIM).repeat(HEADS // KV_HEADS, axis=1) for name in "kv")
        scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(HEAD_DIM) + causal
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        x = x + np.einsum("hts,shd->thd", shares, v).reshape(-1, HIDDEN) @ w[f"o{layer}"]
    return x @ w["head"]  # type: ignore[no-any-return]


def manifest(vocab_size: int, streams: bool = True, stop_ids: tuple[int, ...] = (), has_chat_template: bool = True) -> Manifest:
    return Manifest(
        model=ModelInfo(
            name="tiny",
            architecture="TinyForCausalLM",
            fingerprint="0" * 64,
            num_layers=LAYERS,
            hidden_size=HIDDEN,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            vocab_size=vocab_size,
            context_length=CONTEXT,
            parameters=12345,
            license=None,
        ),
        streams=StreamInfo(
            num_streams=STREAMS,
            stream_layers=1,
            top_k=TOP_K,
            placement="fused",
            graph=None,
            mode="lossless",
            draft_vocab_size=0,
            parameters=STREAMS * HIDDEN,
            main_parameters=0,
            adapter_sha256="1" * 64,
            calibration=(1.0, 1.0, 1.5),
        )
        if streams
        else None,
        contract=ContractInfo(version=1, profile="ort", opset=21, cache_dtype="float32"),
        quantization=QuantizationInfo("fp32"),
        tokenizer=TokenizerInfo(stop_ids=stop_ids, bos_id=None, has_chat_template=has_chat_template),
        graph="model.onnx",
        tools={"onnx": "1"},
    )


def write_bundle(out: Path, streams: bool = True, stops: bool = True, seed: int = 0, force: bool = False) -> Bundle:
    made = tokenizer()
    vocab_size = made.get_vocab_size()
    with BundleWriter(out, force=force) as writer:
        model = graph(vocab_size, streams, seed)
        save(model, writer.path("model.onnx"), save_as_external_data=True, location="model.onnx.data", size_threshold=256)
        writer.path("tokenizer.json").write_text(made.to_str(), encoding="utf-8")
        writer.path("tokenizer_config.json").write_text('{"eos_token": {"content": "<|end|>"}}', encoding="utf-8")
        writer.path("chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
        stop_ids = (made.token_to_id("<|end|>"),) if stops else ()
        return writer.finish(manifest(vocab_size, streams, stop_ids))
