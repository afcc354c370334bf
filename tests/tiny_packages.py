"""Bundles to make packages of: a tiny network with delayed streams and words for tokens, as ONNX graphs or as a Core ML package."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from specstream.export.trace import GRAPH_FILE, STREAMS_FILE, export_graph, export_streams
from specstream.runtimes.bundle import Bundle, BundleWriter
from specstream.runtimes.manifest import ContractInfo, Manifest, ModelInfo, QuantizationInfo, StreamInfo, TokenizerInfo

from .export.tiny import HEAD_DIM, HIDDEN, KV_HEADS, LAYERS, VOCAB, tiny_model

CONTEXT = 512
STOP = 2
TEMPLATE = "{% for m in messages %}<user> {{ m.content }} {% endfor %}<assistant>"
PROMPTS = '{"prompt": "w5 w9 w11 w30"}\n{"prompt": "w60 w7 w8 w60 w7"}\n'


def word_tokenizer() -> Tokenizer:
    """Token i is the word ``wi``, but for a few special ones."""
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, "<user>": 3, "<assistant>": 4} | {f"w{i}": i for i in range(5, VOCAB)}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>", "<user>", "<assistant>")])
    return made


def write_onnx_bundle(out: Path, architecture: str = "Llama", profile: str = "ort") -> Bundle:
    """Two graphs, as an export writes them."""
    model = tiny_model(architecture, delayed=True)
    with BundleWriter(out) as writer:
        export_graph(model, writer.folder, "ort" if profile == "ort" else "portable")
        export_streams(model, writer.folder, "ort" if profile == "ort" else "portable")
        contract = ContractInfo(1, "ort" if profile == "ort" else "portable", 24, "float32")
        return finish(writer, contract, GRAPH_FILE, STREAMS_FILE)


def finish(writer: BundleWriter, contract: ContractInfo, graph: str, streams_graph: str | None, scheme: str = "fp32") -> Bundle:
    """Tokenizer, licence and manifest of a bundle whose model is written."""
    writer.path("tokenizer.json").write_text(word_tokenizer().to_str(), encoding="utf-8")
    writer.path("tokenizer_config.json").write_text('{"eos_token": "</s>"}', encoding="utf-8")
    writer.path("chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    writer.path("LICENSE").write_text("the licence's text\n", encoding="utf-8")
    manifest = Manifest(
        model=ModelInfo(
            name="tiny",
            architecture="LlamaForCausalLM",
            fingerprint="0" * 64,
            num_layers=LAYERS,
            hidden_size=HIDDEN,
            num_heads=4,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            vocab_size=VOCAB,
            context_length=CONTEXT,
            parameters=12345,
            license="apache-2.0",
        ),
        streams=StreamInfo(
            num_streams=3,
            stream_layers=1,
            top_k=4,
            placement="delayed",
            graph=streams_graph,
            mode="lossless",
            draft_vocab_size=0,
            parameters=1,
            main_parameters=0,
            adapter_sha256="1" * 64,
            calibration=(1.0, 1.0, 1.5),
        ),
        contract=contract,
        quantization=QuantizationInfo(scheme),
        tokenizer=TokenizerInfo(stop_ids=(STOP,), bos_id=None, has_chat_template=True),
        graph=graph,
        tools={"onnx": "1"},
    )
    return writer.finish(manifest)


def write_coreml_bundle(out: Path) -> Bundle:
    """The same network as a Core ML package."""
    from .coreml_tiny import write_package

    with BundleWriter(out) as writer:
        made = write_package("Llama", "delayed", writer.path("model.mlpackage"))
        return finish(writer, ContractInfo(1, "coreml", 9, "float16", made.sizes), "model.mlpackage", None, "fp16")
