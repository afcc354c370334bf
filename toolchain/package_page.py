"""The page in a package: what its files are, and how to drive the model there, step by step. Text only."""

from __future__ import annotations

from typing import Final

from specstream.runtimes.golden import Golden
from specstream.runtimes.manifest import Manifest

PAGE_FILE: Final = "README.md"


def page(manifest: Manifest, golden: Golden) -> str:
    """Markdown for the package that the manifest describes."""
    assert manifest.package is not None
    parts = [_head(manifest, golden), _files(manifest), _numbers(manifest, golden)]
    if manifest.package.target == "linux-arm64":
        parts.append(LINUX)
    if manifest.package.target == "android":
        parts.append(ANDROID)
    if manifest.package.target != "ios":
        parts += [_loop(golden), _checking(golden)]
    parts.append(LICENCES)
    return "\n".join(parts)


def _head(manifest: Manifest, golden: Golden) -> str:
    assert manifest.package is not None
    streams = "no streams: plain decoding, or drafts looked up in the text"
    if golden.num_streams:
        streams = f"{golden.num_streams} {golden.placement} streams through the top {golden.stream_layers} layers, {golden.top_k} candidates each"
    return f"""# {manifest.model.name} for {manifest.package.target}

{manifest.model.architecture}, {manifest.model.parameters:,} parameters, weights `{golden.scheme}`, {streams}.
Made by `specstream package`. Contract of the graphs: version {golden.contract}, profile `{manifest.contract.profile}`.
"""


def _files(manifest: Manifest) -> str:
    assert manifest.package is not None
    about = {
        "specstream.json": "the manifest: sizes, stop tokens, and sha256 and size of every other file",
        "golden.json": "complete traces of the loop: see below",
        "replay.py": "the loop in one file, with ONNX Runtime and NumPy only: compares with `golden.json`",
        "tokenizer.json": "the tokenizer, in the format of Hugging Face's `tokenizers`",
        "tokenizer_config.json": "names of special tokens",
        "chat_template.jinja": "the conversation's form",
        "ngrams.npz": "what follows what in the task's outputs, another source of drafts",
        "LICENSE": "of the weights",
        "ADAPTER.md": "the adapter's card: its data and their licences",
    }
    model = {
        "model.ort": "the graph and its weights, optimised, in ONNX Runtime's own format",
        "streams.ort": "the streams' own pass, likewise",
        "model.onnx": "the same graph as ONNX; its weights are the bytes inside the `.ort` files, so it needs them beside it",
        "streams.onnx": "likewise",
        "required_operators.config": "operators of all graphs, for a reduced build of ONNX Runtime",
    }
    if manifest.package.target == "linux-arm64":
        model = {
            "model.onnx": "the graph",
            "model.onnx.data": "its weights",
            "streams.onnx": "the streams' own pass",
            "streams.onnx.data": "its weights",
        }
    names = {entry.path for entry in manifest.files} | {"specstream.json", "golden.json", "replay.py", "ADAPTER.md"}
    if not any(entry.path == "ADAPTER.md" for entry in manifest.files) and manifest.streams is None:
        names.discard("ADAPTER.md")
    rows = [f"| `{name}` | {text} |" for name, text in (model | about).items() if name in names]
    return "## Files\n\n| file | what it is |\n| --- | --- |\n" + "\n".join(rows) + "\n"


def _numbers(manifest: Manifest, golden: Golden) -> str:
    stop = ", ".join(str(token) for token in golden.stop_ids)
    row = manifest.model.num_layers * 2 * manifest.model.num_kv_heads * manifest.model.head_dim * 4
    return f"""## What a loop must know

| | |
| --- | --- |
| layers, key/value heads, head size, hidden size, vocabulary | {golden.num_layers}, {golden.num_kv_heads}, {golden.head_dim}, {golden.hidden_size}, {golden.vocab_size:,} |
| γ, streams' layers, k, placement | {golden.num_streams}, {golden.stream_layers}, {golden.top_k}, {golden.placement or "none"} |
| capacity this package was checked with | {golden.capacity:,} rows, {golden.capacity * row / 1e6:.1f} MB of cache ({row:,} bytes a row); another number works as well |
| rows of a prompt's call at most | {golden.prompt_chunk} |
| stop tokens | {stop} |

`golden.json` has the same numbers.
"""


LINUX: Final = """## Run it

On the device, with Python 3.11 or newer:

    pip install specstream-toolchain
    specstream generate . "Name three rivers."
    specstream tune . --prompts prompts.jsonl      # once: finds threads, rows and drafts that pay on this device

`specstream verify . --prompts prompts.jsonl` compares speculative text with plain decoding there. `python replay.py` needs no specstream.
"""

ANDROID: Final = """## Load it

Either form runs in the full `com.microsoft.onnxruntime:onnxruntime-android` library; a reduced (minimal) build reads `.ort` only. Take a
version of ONNX Runtime that is not older than the one in `specstream.json` under `tools`.

- Put the files where the app can open them by path (its files folder), not into compressed assets: weights are then mapped, not copied.
- Session options: memory pattern optimisation off (`setMemoryPatternOptimization(false)`); threads as many as big cores
  (`setIntraOpNumThreads`); for `.ort` the entries `session.use_memory_mapped_ort_model` = `1` and
  `session.use_ort_model_bytes_for_initializers` = `1` (`addConfigEntry`), else the file is in memory twice while it loads.
- The cache: one direct `ByteBuffer` per layer for keys and one for values, `OnnxTensor.createTensor` over each, given to `run` both as
  input `past_key_values.N.*` and as *pinned output* `present.N.*`: new rows are written in place, nothing is copied.
- Delete what you do not use: `*.onnx` if the app loads `.ort`. The other way round is not possible: the ONNX graphs' weights are in the
  `.ort` files.
"""


def _loop(golden: Golden) -> str:
    delayed = golden.placement == "delayed"
    streams = ""
    if delayed:
        streams = """6. **Draft.** Run the streams' graph once: `entry_state` is the last committed row's part of `entry_states`, `root_id` the last token,
   `past_length` the committed rows; its caches are those of the top layers, the same memory. It needs γ rows of room behind the committed
   ones. Grow the next tree from `stream_ids` and `stream_logprobs`: best first by path probability; with `stream_pairs`, candidate b below
   candidate a has log-probability l_b + s_ab, renormalised together with the rest of the distribution as one more outcome.
"""
    elif golden.num_streams:
        streams = """6. **Draft.** `stream_ids` and `stream_logprobs` of the last accepted row that carried streams are the next drafts, best first by path
   probability. Stream j is about the token j places after the one that its row predicts: skip as many as the text has gone past.
"""
    carried = ", `stream_rows` (the rows that carry streams, or none)" if golden.num_streams and not delayed else ""
    return f"""## The loop

`replay.py` is this, written out in NumPy.

1. **Prompt.** Render the chat template, tokenize, run in chunks of at most {golden.prompt_chunk} rows: `input_ids` [1, T], `position_ids` [1, T] (from the
   committed length on), `tree_mask` [T, T] (the lower triangle), `past_length` [1], `logit_rows` (the last row){carried}.
   Commit every row. `next_ids[0]` is the first token.
2. **Tree.** Row 0 is the last token of the text, which is not in the cache yet; then the likeliest chain of drafts, then the rest, parents
   before children. `position_ids` are committed rows + depth; `tree_mask` row i has its ancestors and itself; `logit_rows` are all rows.
   With no drafts the tree is row 0 alone: plain decoding.
3. **Call.** One run for the whole tree. `past + rows{" + stream rows · γ" if golden.num_streams and not delayed else ""}` must not exceed the capacity.
4. **Accept.** From row 0, go to the child whose token equals `next_ids` of the row you are at, while there is one. The tokens to emit are
   `next_ids` of the accepted rows, so at least one; cut behind a stop token. To sample, use the keyed sample of the row's logits in place
   of `next_ids`: the text is then the same with any drafts.
5. **Commit.** Move the accepted rows of every layer's cache together, to the places from `past_length` on, and raise the length by their
   number. A chain of first rows moves nothing.
{streams}
"""


def _checking(golden: Golden) -> str:
    return f"""## Check a loop

    python replay.py          # here: needs ONNX Runtime and NumPy

In an app, feed `prompt_ids` of a trace and compare after every call: tree `tokens`, `parents`, `positions`, `next_ids`, `accepted`, `emitted`,
`length`, the `streams` that came out; at the end `token_ids` and `text`. Trees of traces named *streams* follow from the streams alone;
those of *joined* also from n-grams and from the text (`sources` has what these said at the root), so take them as recorded until the app
has those sources too.

Recorded on {golden.recorded_on.get("machine", "?")} with ONNX Runtime {golden.recorded_on.get("onnxruntime", "?")}. There, everything repeats bit for bit. Another processor rounds sums differently:
ids should agree wherever `margins` (best minus second-best logit) is above about 0.001, with 8-bit activations above a few tenths; log-probabilities
agree to a few decimals. A difference at a larger margin is a fault of the loop: most often a mask, a position, or rows committed in another
order.
"""


LICENCES: Final = """## Licences

The weights are under the licence in `LICENSE`. An adapter's data may have a licence of their own: `ADAPTER.md`, where there is one. No part
of ONNX Runtime is in this package.
"""
