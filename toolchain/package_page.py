"""The page in a package: what its files are, and how to drive the model there, step by step. Text only."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import Final

from specstream.runtimes.golden import Golden
from specstream.runtimes.manifest import CACHE_WIDTHS, Manifest

PAGE_FILE: Final = "README.md"

ABOUT: Final = {
    "model.ort": "the graph and its weights, optimised, in ONNX Runtime's own format",
    "streams.ort": "the streams' own pass, likewise",
    "model.onnx": "the graph",
    "model.onnx.data": "its weights",
    "streams.onnx": "the streams' own pass",
    "streams.onnx.data": "its weights",
    "model.mlpackage": "the model: a Core ML package of several functions over one pair of states (iOS 18, macOS 15)",
    "required_operators.config": "operators of all graphs, for a reduced build of ONNX Runtime",
    "specstream.json": "the manifest: sizes, stop tokens, and sha256 and size of every other file",
    "golden.json": "complete traces of the loop: see below",
    "replay.py": "the loop in one file, with ONNX Runtime and NumPy only; compares with `golden.json`",
    "tokenizer.json": "the tokenizer, in the format of Hugging Face's `tokenizers`",
    "tokenizer_config.json": "names of special tokens",
    "chat_template.jinja": "the conversation's form",
    "ngrams.npz": "what follows what in the task's outputs, another source of drafts",
    "LICENSE": "of the weights",
    "ADAPTER.md": "the adapter's card: its data and their licences",
    "ADAPTER_LICENSE": "of the adapter, where it has one of its own",
}

PADDED: Final = (
    "A call of one row takes a copy of that row along, neither seeing the other, and the copy's output is not used: with 8-bit activations "
    "kernels for one row round differently, and plain decoding would not agree with trees.",
)


def page(manifest: Manifest, golden: Golden, files: Iterable[str]) -> str:
    """Markdown for the package that the manifest describes.

    Args:
        files: names of its files, or of their folders.
    """
    assert manifest.package is not None
    target = manifest.package.target
    parts = [_head(manifest, golden), _files(manifest, set(files)), _numbers(manifest, golden)]
    if target == "linux-arm64":
        parts.append(_linux())
    elif target == "android":
        parts.append(_android(manifest.contract.cache_dtype))
    else:
        parts.append(_ios(manifest))
    parts += [_loop(golden, target == "ios"), _checking(golden, target == "ios"), _licences()]
    return "\n".join(parts)


def _text(*sentences: str) -> str:
    """A paragraph."""
    return _fill(" ".join(sentences)) + "\n"


def _item(mark: str, *sentences: str) -> str:
    """An entry of a list."""
    return _fill(" ".join(sentences), f"{mark} ", " " * (len(mark) + 1)) + "\n"


def _fill(text: str, first: str = "", rest: str = "") -> str:
    return textwrap.fill(text, 110, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False)


def _table(rows: Iterable[tuple[str, str]], head: tuple[str, str] = ("", "")) -> str:
    lines = [f"| {head[0]} | {head[1]} |", "| --- | --- |", *(f"| {left} | {right} |" for left, right in rows)]
    return "\n".join(lines) + "\n"


def _head(manifest: Manifest, golden: Golden) -> str:
    assert manifest.package is not None
    streams = "no streams: plain decoding, or drafts looked up in the text"
    if golden.num_streams:
        streams = (
            f"{golden.num_streams} {golden.placement} streams through the top {golden.stream_layers} layers, {golden.top_k} candidates each"
        )
    model = manifest.model
    return f"# {model.name} for {manifest.package.target}\n\n" + _text(
        f"{model.architecture}, {model.parameters:,} parameters, weights `{golden.scheme}`, {streams}.",
        f"Made by `specstream package`; contract version {golden.contract}, profile `{manifest.contract.profile}`.",
    )


def _files(manifest: Manifest, files: set[str]) -> str:
    assert manifest.package is not None
    about = dict(ABOUT)
    if manifest.package.target == "android":
        about["model.onnx"] = "the same graph as ONNX; its weights are bytes inside the `.ort` files, so it needs them beside it"
        about["streams.onnx"] = "likewise"
    rows = [(f"`{name}`", text) for name, text in about.items() if name in files | {"specstream.json"}]
    return "## Files\n\n" + _table(rows, ("file", "what it is"))


def _numbers(manifest: Manifest, golden: Golden) -> str:
    width = CACHE_WIDTHS[manifest.contract.cache_dtype]
    row = golden.num_layers * 2 * golden.num_kv_heads * golden.head_dim * width
    sizes = (golden.num_layers, golden.num_kv_heads, golden.head_dim, golden.hidden_size, f"{golden.vocab_size:,}")
    streams = (golden.num_streams, golden.stream_layers, golden.top_k, golden.placement or "none")
    rows = [
        ("layers, key/value heads, head size, hidden size, vocabulary", ", ".join(map(str, sizes))),
        ("γ, streams' layers, k, placement", ", ".join(map(str, streams))),
        ("capacity that the traces had", f"{golden.capacity:,} rows, {row:,} bytes of cache each: {golden.capacity * row / 1e6:.1f} MB"),
        ("rows of a prompt's call, of a tree, at most", f"{golden.prompt_chunk:,}, {golden.max_tree_rows:,}"),
        ("stop tokens", ", ".join(map(str, golden.stop_ids))),
    ]
    return "## What a loop must know\n\n" + _table(rows) + "\n`golden.json` has the same numbers.\n"


def _linux() -> str:
    return (
        "## Run it\n\nOn the device, with Python 3.11 or newer:\n\n"
        "    pip install specstream-toolchain\n"
        '    specstream generate . "Name three rivers."\n'
        "    specstream tune . --prompts prompts.jsonl      # once: finds threads, rows and drafts that pay on this device\n\n"
        + _text(
            "`specstream verify . --prompts prompts.jsonl` compares speculative text with plain decoding there.",
            "What follows is for a loop of one's own.",
        )
    )


def _android(cache_dtype: str) -> str:
    return (
        "## Load it\n\n"
        + _text(
            "Either form runs in the full `com.microsoft.onnxruntime:onnxruntime-android` library; a minimal build reads `.ort` only.",
            "Take a version of ONNX Runtime not older than the one in `specstream.json` under `tools`.",
        )
        + "\n"
        + _item("-", "Put the files where the app can open them by path, not into compressed assets: weights are then mapped, not copied.")
        + _item(
            "-",
            "Session options: `setMemoryPatternOptimization(false)`, since shapes repeat while the past grows; `setIntraOpNumThreads` with",
            "the number of big cores; for `.ort` the entries `session.use_memory_mapped_ort_model` = `1` and",
            "`session.use_ort_model_bytes_for_initializers` = `1` (`addConfigEntry`), else weights are in memory twice while they load.",
        )
        + _item(
            "-",
            "The cache: for each layer a direct `ByteBuffer` for keys and one for values",
            f"({cache_dtype}, {8 * CACHE_WIDTHS[cache_dtype]} bits a number), an `OnnxTensor` over",
            "each, given to `run` both as",
            "the input `past_key_values.N.*` and as the pinned output `present.N.*`: new rows are written in place, nothing is copied.",
        )
        + _item(
            "-",
            "Leave `*.onnx` out of the app if it loads `.ort`. Not the other way round: the ONNX graphs' weights are in the `.ort` files.",
        )
        + "\nA complete loop in Kotlin, step by step: docs/android.md of specstream.\n"
    )


def _ios(manifest: Manifest) -> str:
    coreml = manifest.contract.coreml
    assert coreml is not None
    rows = []
    for function in coreml.functions:
        streams = f", {function.stream_rows} with streams" if function.stream_rows else ""
        rows.append((f"`{function.name}`", f"{function.rows} {'row' if function.rows == 1 else 'rows'}, {function.scored} scored{streams}"))
    if coreml.draft is not None:
        rows.append((f"`{coreml.draft}`", "the streams of the last committed row"))
    return (
        "## Load it\n\n"
        + _text(
            "Load one `MLModel` per function (`MLModelConfiguration.functionName`) from the one package, and one",
            "`MLState` with `makeState()`:",
            "all functions share weights and states. A call of fewer rows than a function has is padded: any",
            "token, position `past_length`,",
            "and a mask in which padding sees itself alone. Choose the smallest function that holds the rows.",
        )
        + "\n"
        + _table(rows, ("function", "holds"))
        + "\n"
        + _text(
            "The cache is in the states, which only calls can write. So rows that were accepted are moved by the",
            "*next* call, before anything",
            f"else it does: slot `commit_start + i` gets what slot `commit_rows[i]` holds, {coreml.commit_width} slots at a time;",
            "where nothing moves, `commit_rows[i]` is `commit_start + i` itself.",
        )
        + "\nInputs, outputs and a complete loop in Swift, step by step: docs/ios.md of specstream.\n"
    )


def _loop(golden: Golden, ios: bool) -> str:
    delayed = golden.placement == "delayed"
    beside = golden.num_streams > 0 and not delayed
    carried = ", `stream_rows` (the rows that carry streams, or none)" if beside else ""
    entries = [
        _item(
            "1.",
            f"**Prompt.** Render the chat template, tokenize, run in chunks of at most {golden.prompt_chunk} rows: `input_ids` [1, T],",
            "`position_ids` [1, T] (from the committed length on), `tree_mask` [T, T] (the lower triangle),",
            "`past_length` [1], `logit_rows`",
            f"(the last row){carried}. Commit every row. `next_ids[0]` is the first token.",
        ),
        _item(
            "2.",
            "**Tree.** Row 0 is the last token of the text, which is not in the cache yet; then the likeliest",
            "chain of drafts, then the rest,",
            "parents before children. `position_ids` are committed rows + depth; in `tree_mask` a row sees its ancestors and itself;",
            "all rows are scored. Without drafts the tree is row 0 alone: plain decoding.",
        ),
        _item(
            "3.",
            "**Call.** One for the whole tree. Committed rows, the tree's rows and γ for each row that carries streams"
            if beside
            else "**Call.** One for the whole tree. Committed rows and the tree's rows together",
            f"must not exceed the capacity. Trees have {golden.max_tree_rows:,} rows at most.",
            *PADDED[: golden.pad_single],
        ),
        _item(
            "4.",
            "**Accept.** From row 0, go to the child whose token equals `next_ids` of the row you are at, while",
            "there is one. The tokens to",
            "emit are `next_ids` of the accepted rows, one at least; cut behind a stop token. To sample, take the keyed sample of a row's",
            "logits (docs/sampling.md of specstream) in place of its `next_ids`: the text is then the same with any drafts.",
        ),
        _item(
            "5.",
            "**Commit.** The accepted rows of every layer's cache move together, to the places from `past_length` on; raise the length by",
            "their number and forget the other rows. A chain of first rows moves nothing.",
        ),
    ]
    if delayed:
        entries.append(
            _item(
                "6.",
                "**Draft.** Run the streams' pass once: `entry_state` is the last committed row's part of",
                "`entry_states`, `root_id` the last",
                f"token, `past_length` the committed rows. It needs {golden.num_streams} rows of room behind them, for scratch.",
                "Grow the next tree from `stream_ids` and `stream_logprobs`, best first by path probability. With",
                "`stream_pairs`, candidate b",
                "below candidate a has log-probability l_b + s_ab, renormalised with the rest of the distribution as one more outcome.",
            )
        )
    elif beside:
        entries.append(
            _item(
                "6.",
                "**Draft.** `stream_ids` and `stream_logprobs` of the last accepted row that carried streams are the",
                "next drafts, best first",
                "by path probability. Stream j is about the token j places after the one that its row predicts: skip",
                "as many as the text has",
                "gone past.",
            )
        )
    return "## The loop\n\n" + ("" if ios else "`replay.py` is this, written out in NumPy.\n\n") + "".join(entries)


def _checking(golden: Golden, ios: bool) -> str:
    places = ", ".join(f"{name} {value}" for name, value in sorted(golden.recorded_on.items()))
    here = (
        "    python -m specstream.toolchain.golden_replay .     # Core ML on a Mac, elsewhere specstream's reference evaluator\n"
        if ios
        else "    python replay.py                                   # needs ONNX Runtime and NumPy\n"
    )
    return (
        f"## Check a loop\n\n{here}\n"
        + _text(
            "In an app, feed the `prompt_ids` of a trace and compare after every call: the tree's `tokens`, `parents` and `positions`,",
            "`next_ids`, `accepted`, `emitted`, `length`, and the `streams` that came out; at the end `token_ids` and `text`. Trees of",
            "traces with draft *streams* follow from the streams alone. Those of *joined* and *lookup* follow",
            "from n-grams and from the text",
            "too (`sources` has what these said at the root): take them as recorded until the app has those sources.",
        )
        + "\n"
        + _text(
            f"Recorded on: {places}. There everything repeats bit for bit. Another processor rounds sums",
            "differently, so a token may differ",
            f"where the two best were close: its `margins` say how close. In this backend {golden.near_tie:.2g}",
            "is close; between processors",
            "with 8-bit or 16-bit arithmetic a few tenths can be. A difference at a larger margin is a fault of the loop: most often",
            "the mask, the positions, or rows committed in another order.",
        )
    )


def _licences() -> str:
    return "## Licences\n\n" + _text(
        "The weights are under the licence in `LICENSE`. An adapter and its data may have a licence of their own: see `ADAPTER_LICENSE`",
        "and `ADAPTER.md`, where there are any. No part of ONNX Runtime is in this package.",
    )
