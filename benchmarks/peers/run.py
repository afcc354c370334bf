"""Other runtimes on the same weights and prompts as our bundles, in turn in one run.

    python benchmarks/peers/run.py --bundle sql-int4 --bundle sql-fp32 --adapter smollm2-135m-sql --data benchmarks/data/sql.jsonl

Each peer gets an environment of its own below ``--work`` and its own conversion of one set of weights: the base with the adapter's
fine-tune merged. Each variant of a peer, and of ours, is a process that waits on a pipe (protocol.py); the runner gives every prompt
to all of them in turn, as token ids, with the same stop ids and threads, greedily. What is there from the run before is used again.
Run it with nothing else running.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import click

from specstream.models.errors import CheckFailed, UserError
from specstream.models.fetch import sha256_of
from specstream.runtimes.bundle import Bundle
from specstream.runtimes.ort_session import usable_cores
from specstream.runtimes.text import TextCodec
from specstream.toolchain.bench_pipeline import Task, rate, read_task
from specstream.toolchain.cli import run as run_command
from specstream.toolchain.report import json_option, versions, write_report
from specstream.toolchain.zoo import resolve_adapter

HERE: Final = Path(__file__).resolve().parent
SETTLE_SECONDS: Final = 0.1  # between two answers: threads of the process before stop waiting for work meanwhile
IDLE_SECONDS: Final = 3.0  # over which waiting workers' use of the cores is taken
IDLE_SHARE: Final = 0.02  # of a core; a worker above it while waiting disturbs the others
ANSWER_SECONDS: Final = 300.0
LOAD_SECONDS: Final = 900.0
LONG_PROMPTS: Final = 10  # of --long-prompt tokens, timed to the first token


# What there is to run


@dataclass(frozen=True)
class Build:
    """A conversion: its name, and the command that fills the folder {out} from the weights {weights}."""

    name: str
    command: tuple[str, ...]


@dataclass(frozen=True)
class Peer:
    """A runtime: builds, and variants as (build, draft). Its requirements and its worker go by its name.

    ``unwanted`` packages are removed again after the installation.
    """

    name: str
    title: str
    builds: tuple[Build, ...]
    variants: tuple[tuple[str, str], ...]
    unwanted: tuple[str, ...] = ()


def _openvino(bits: str, *more: str) -> Build:
    task = ("--task", "text-generation-with-past")
    return Build(bits, ("{bin}/optimum-cli", "export", "openvino", "--model", "{weights}", *task, "--weight-format", bits, *more, "{out}"))


def _gguf(kind: str) -> Build:
    return Build(kind, ("{python}", str(HERE / "gguf_export.py"), "{weights}", "{out}/model.gguf", "--type", kind))


PEERS: Final = (
    Peer(
        "ortgenai",
        "onnxruntime-genai",
        (
            Build(
                "int4",
                (
                    "{bin}/python",
                    "-m",
                    "onnxruntime_genai.models.builder",
                    "-i",
                    "{weights}",
                    "-o",
                    "{out}",
                    "-p",
                    "int4",
                    "-e",
                    "cpu",
                    "-c",
                    "{cache}",
                ),
            ),
        ),
        (("int4", "none"), ("int4", "lookup")),
    ),
    Peer(
        "llamacpp",
        "llama.cpp (llama-cpp-python)",
        (_gguf("q4_0"), _gguf("q8_0")),
        (("q4_0", "none"), ("q8_0", "none"), ("q4_0", "lookup")),
    ),
    Peer(
        "openvino",
        "OpenVINO GenAI",
        (_openvino("int8"), _openvino("int4", "--group-size", "64", "--ratio", "1.0")),
        (("int8", "none"), ("int4", "none"), ("int8", "lookup")),
        # Text models do not need it, and where its build is not PyTorch's (one with CUDA, one without) nothing can be imported.
        unwanted=("torchvision",),
    ),
    Peer(
        "optimum",
        "optimum ORTModelForCausalLM",
        (Build("fp32", ("{bin}/optimum-cli", "export", "onnx", "--model", "{weights}", "--task", "text-generation-with-past", "{out}")),),
        (("fp32", "none"),),
    ),
)


# Environments and conversions


class NotThere(Exception):
    """A peer's environment or conversion could not be made; the message goes into the table."""


@dataclass(frozen=True)
class Workplace:
    """The folder ``--work``: environments, the merged weights, conversions. Everything is made once and then used again."""

    folder: Path
    torch_index: str | None
    say: Callable[[str], None]

    def weights(self, model: str, adapter: str) -> Path:
        """The merged weights as a Hugging Face folder."""
        key = _key(model, *_fine_tune(resolve_adapter(adapter)), (HERE / "weights.py").read_bytes())
        out = self.folder / "weights" / key
        return self._make(out, [sys.executable, str(HERE / "weights.py"), model, adapter, "{out}"], "merging the weights")

    def environment(self, peer: Peer) -> Path:
        """The peer's own virtual environment; returns its folder of programs.

        Raises:
            NotThere: it cannot be installed.
        """
        requirements = HERE / "requirements" / f"{peer.name}.txt"
        venv = self.folder / peer.name / "venv"
        programs = venv / ("Scripts" if os.name == "nt" else "bin")
        stamp = venv / ".installed"
        key = _key(requirements.read_bytes(), platform.python_version(), *peer.unwanted)
        if stamp.is_file() and stamp.read_text(encoding="utf-8") == key:
            return programs
        self.say(f"installing {peer.title}")
        log = self.folder / peer.name / "install.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        pip = [str(programs / "python"), "-m", "pip", "install", "--disable-pip-version-check"]
        commands = [[sys.executable, "-m", "venv", str(venv)]]
        if self.torch_index is not None and "torch==" in requirements.read_text(encoding="utf-8"):
            torch = next(line for line in requirements.read_text(encoding="utf-8").splitlines() if line.startswith("torch=="))
            commands.append([*pip, "--index-url", self.torch_index, torch.strip()])
        commands.append([*pip, "-r", str(requirements)])
        commands += [[*pip[:-2], "uninstall", "--yes", name] for name in peer.unwanted]
        for command in commands:
            _call(command, log, "not installed")
        stamp.write_text(key, encoding="utf-8")
        return programs

    def build(self, peer: Peer, build: Build, weights: Path, programs: Path) -> Path:
        """The folder of a conversion.

        Raises:
            NotThere: it fails.
        """
        requirements = (HERE / "requirements" / f"{peer.name}.txt").read_bytes()
        out = self.folder / peer.name / f"{build.name}-{_key(weights.name, ' '.join(build.command), requirements, *_sources(build))}"
        places = {"bin": str(programs), "python": sys.executable, "weights": str(weights), "cache": str(self.folder / "cache")}
        command = [part if part == "{out}" or part.startswith("{out}/") else part.format(**places) for part in build.command]
        return self._make(out, command, f"converting for {peer.title}: {build.name}")

    def _make(self, out: Path, command: Sequence[str], saying: str) -> Path:
        if out.is_dir():
            return out
        self.say(saying)
        partial = out.with_name(f".{out.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _call([part.replace("{out}", str(partial)) for part in command], out.with_name(f"{out.name}.log"), f"{saying} failed")
        partial.replace(out)
        return out


def _key(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part)
        digest.update(b"\0")
    return digest.hexdigest()[:12]


def _fine_tune(adapter: Path) -> list[str | bytes]:
    """What of an adapter goes into the merged weights: its streams may be trained again without a new conversion."""
    from safetensors.numpy import load_file

    config = json.loads((adapter / "config.json").read_text(encoding="utf-8"))
    tensors = load_file(adapter / "adapter.safetensors")
    named = [(name, tensors[name].tobytes()) for name in sorted(tensors) if name.startswith("main.")]
    return [f"{config['main_rank']} {config['main_alpha']}", *(part for pair in named for part in pair)]


def _sources(build: Build) -> list[bytes]:
    """Our own scripts that a conversion runs."""
    return [Path(part).read_bytes() for part in build.command if part.startswith(str(HERE))]


def _call(command: Sequence[str], log: Path, failed: str) -> None:
    """Run a command, its output at the end of ``log``.

    Raises:
        NotThere: it fails; with the last line that it wrote.
    """
    with log.open("a", encoding="utf-8") as stream:
        stream.write(f"$ {' '.join(command)}\n")
        stream.flush()
        try:
            code = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, check=False).returncode
        except OSError as error:
            raise NotThere(f"{failed}: {command[0]}: {error.strerror}") from error
    if code:
        lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        raise NotThere(f"{failed}: {lines[-1][:160]} (all of it in {log})")


# Workers


@dataclass(eq=False)
class Variant:
    """One line of the table: a process that answers prompts, or the reason why there is none."""

    system: str
    weights: str
    draft: str
    ours: bool
    command: list[str] = field(default_factory=list)
    reason: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    answers: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    long_prompt_seconds: list[float] = field(default_factory=list)
    idle_share: float | None = None
    peak_rss_bytes: int | None = None
    process: subprocess.Popen[str] | None = None

    def start(self, log: Path) -> None:
        self._log = log
        with log.open("w", encoding="utf-8") as errors:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, encoding="utf-8", cwd=HERE
            )
        message = self._read(LOAD_SECONDS)
        if message is not None:
            self.versions = message["versions"]

    def ask(self, prompt_ids: Sequence[int], max_new_tokens: int, stop_ids: Sequence[int]) -> dict[str, Any] | None:
        """The answer; None once the worker is gone, and ``reason`` says why."""
        if self.reason is not None:
            return None
        assert self.process is not None
        assert self.process.stdin is not None
        request = {"prompt_ids": list(prompt_ids), "max_new_tokens": max_new_tokens, "stop_ids": list(stop_ids)}
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except OSError:
            self._fail("the worker has ended")
            return None
        return self._read(ANSWER_SECONDS)

    def _read(self, seconds: float) -> dict[str, Any] | None:
        assert self.process is not None
        assert self.process.stdout is not None
        timer = threading.Timer(seconds, self.process.kill)
        timer.start()
        line = self.process.stdout.readline()
        late = not timer.is_alive()
        timer.cancel()
        message: dict[str, Any] = json.loads(line) if line else {"error": f"no answer in {seconds:.0f} s" if late else "the worker ended"}
        if "error" in message:
            self._fail(message["error"])
            return None
        return message

    def _fail(self, reason: str) -> None:
        self.reason = f"{reason[:160]} (more in {self._log})"

    def cpu_seconds(self) -> float | None:
        """CPU time that the process has used, all threads; None where the system has no /proc."""
        assert self.process is not None
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:
            return None
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def note_memory(self) -> None:
        assert self.process is not None
        try:
            status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
        except OSError:
            return
        self.peak_rss_bytes = next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")), None)

    def stop(self) -> None:
        if self.process is None:
            return
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(OSError):  # what was not read yet by a worker that has ended
            self.process.stdin.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


def race(
    variants: Sequence[Variant],
    tasks: Sequence[tuple[str, list[list[int]]]],
    long_prompts: Sequence[list[int]],
    max_new_tokens: int,
    stop_ids: Sequence[int],
    say: Callable[[str], None],
) -> None:
    """Give every prompt to all variants in turn; the order rotates, so that a drift of the machine meets all alike."""
    for variant in variants:
        say(f"warming up {variant.system}, {variant.weights}, drafts {variant.draft}")
        for ids in tasks[0][1][:2]:
            variant.ask(ids, max_new_tokens, stop_ids)
    _note_idle([variant for variant in variants if variant.reason is None])
    for number, ids in enumerate(long_prompts):
        for turn in range(len(variants)):
            variant = variants[(number + turn) % len(variants)]
            time.sleep(SETTLE_SECONDS)
            answer = variant.ask(ids, 1, stop_ids)
            if answer is not None:
                variant.long_prompt_seconds.append(answer["first_token_seconds"])
    for name, prompts in tasks:
        for number, ids in enumerate(prompts):
            if number % 10 == 0:
                say(f"{name}: prompt {number + 1} of {len(prompts)}")
            for turn in range(len(variants)):
                variant = variants[(number + turn) % len(variants)]
                time.sleep(SETTLE_SECONDS)
                answer = variant.ask(ids, max_new_tokens, stop_ids)
                if answer is not None:
                    variant.answers.setdefault(name, []).append(answer)
    for variant in variants:
        if variant.reason is None:
            variant.note_memory()


def _note_idle(variants: Sequence[Variant]) -> None:
    """How much of a core each worker takes while it waits."""
    time.sleep(1.0)
    before = [variant.cpu_seconds() for variant in variants]
    time.sleep(IDLE_SECONDS)
    for variant, start in zip(variants, before, strict=True):
        end = variant.cpu_seconds()
        variant.idle_share = None if start is None or end is None else (end - start) / IDLE_SECONDS


# Figures


@dataclass(frozen=True)
class Line:
    """A variant on a task. Medians are over prompts with two tokens or more; ratios are of medians, ``_per_prompt`` medians of ratios.

    Attributes:
        reason: why there are no figures; None when there are.
        same_text: share of texts that are the reference's, token by token.
        ours_over_this: tokens/s of the fastest of our variants over this one's.
    """

    task: str
    system: str
    weights: str
    draft: str
    ours: bool
    reason: str | None
    prompts: int = 0
    tokens: int = 0
    tokens_per_second: float | None = None
    tokens_per_call: float | None = None
    first_token_seconds: float | None = None
    long_prompt_first_token_seconds: float | None = None
    same_text: float | None = None
    exact_match: float | None = None
    rouge_l: float | None = None
    peak_rss_bytes: int | None = None
    idle_share: float | None = None
    ours_over_this: float | None = None
    ours_over_this_per_prompt: float | None = None
    each_tokens_per_second: tuple[float | None, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)


def summarise(task: Task, variants: Sequence[Variant], reference: Variant, decode: Callable[[Sequence[int]], str]) -> list[Line]:
    """The table of a task."""
    speeds = {id(variant): _speeds(variant.answers.get(task.name, [])) for variant in variants if variant.reason is None}
    medians = {key: _median(found) for key, found in speeds.items()}
    ours = [variant for variant in variants if variant.ours and variant.reason is None]
    best = max(ours, key=lambda variant: medians[id(variant)] or 0.0)
    expected = [answer["token_ids"] for answer in reference.answers[task.name]]
    lines = []
    for variant in variants:
        if variant.reason is not None:
            lines.append(Line(task.name, variant.system, variant.weights, variant.draft, variant.ours, variant.reason))
            continue
        answers, each = variant.answers[task.name], speeds[id(variant)]
        quality = rate([decode(answer["token_ids"]) for answer in answers], task.references)
        calls = [answer["calls"] for answer in answers]
        tokens = sum(len(answer["token_ids"]) for answer in answers)
        ratios = [a / b if a and b else None for a, b in zip(speeds[id(best)], each, strict=True)]
        mine, top = medians[id(variant)], medians[id(best)]
        lines.append(
            Line(
                task=task.name,
                system=variant.system,
                weights=variant.weights,
                draft=variant.draft,
                ours=variant.ours,
                reason=None,
                prompts=len(answers),
                tokens=tokens,
                tokens_per_second=mine,
                tokens_per_call=(tokens - len(answers)) / sum(calls) if None not in calls and sum(calls) else None,
                first_token_seconds=statistics.median(answer["first_token_seconds"] for answer in answers),
                long_prompt_first_token_seconds=_median(variant.long_prompt_seconds),
                same_text=statistics.fmean(a["token_ids"] == b for a, b in zip(answers, expected, strict=True)),
                exact_match=quality.exact_match if quality else None,
                rouge_l=quality.rouge_l if quality else None,
                peak_rss_bytes=variant.peak_rss_bytes,
                idle_share=variant.idle_share,
                ours_over_this=top / mine if top and mine else None,
                ours_over_this_per_prompt=_median(ratios),
                each_tokens_per_second=tuple(each),
                versions=variant.versions,
            )
        )
    return lines


def _speeds(answers: Sequence[dict[str, Any]]) -> list[float | None]:
    return [(len(a["token_ids"]) - 1) / a["decode_seconds"] if len(a["token_ids"]) > 1 and a["decode_seconds"] else None for a in answers]


def _median(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return statistics.median(there) if there else None


def markdown(lines: Sequence[Line], threads: int, reference: str, long_prompt: int) -> str:
    """The tables as Markdown, one a task."""
    out = []
    for task in dict.fromkeys(line.task for line in lines):
        shown = [line for line in lines if line.task == task]
        rated = any(line.exact_match is not None for line in shown)
        count = max(line.prompts for line in shown)
        out.append(f"{task}: {count} prompts, {threads} threads, greedy; medians over prompts. Same text: as {reference}.\n")
        head = ["system", "weights", "drafts", "tokens/s", "ours is", "first token ms"]
        head += [f"of {long_prompt} tokens"] if long_prompt else []
        head += ["tokens/call", "same text"]
        head += ["exact match", "ROUGE-L"] if rated else []
        head += ["MB"]
        out.append("| " + " | ".join(head) + " |")
        out.append("| --- | --- | --- |" + " ---: |" * (len(head) - 3))
        for line in shown:
            cells = [line.system, line.weights, line.draft]
            if line.reason is not None:
                cells += [line.reason.replace("|", "/")] + [""] * (len(head) - 4)
            else:
                cells += [
                    _show(line.tokens_per_second, "{:.1f}"),
                    _show(line.ours_over_this, "{:.2f}x"),
                    _show(line.first_token_seconds, "{:.0f}", 1e3),
                    *([_show(line.long_prompt_first_token_seconds, "{:.0f}", 1e3)] if long_prompt else []),
                    _show(line.tokens_per_call, "{:.2f}"),
                    _show(line.same_text, "{:.0%}"),
                    *([_show(line.exact_match, "{:.1%}"), _show(line.rouge_l, "{:.3f}")] if rated else []),
                    _show(line.peak_rss_bytes, "{:.0f}", 1e-6),
                ]
            out.append("| " + " | ".join(cells) + " |")
        out.append("")
    return "\n".join(out)


def _show(value: float | None, form: str, factor: float = 1.0) -> str:
    return "" if value is None else form.format(value * factor)


# The command


@click.command()
@click.option(
    "--bundle", "bundles", type=click.Path(path_type=Path), multiple=True, required=True, help="Ours; may be given several times."
)
@click.option("--model", default="smollm2-135m", show_default=True, help="Base weights of the bundles.")
@click.option("--adapter", required=True, help="The adapter of the bundles: a name of the zoo, or a folder.")
@click.option("--data", "data_files", type=click.Path(path_type=Path), multiple=True, required=True, help='JSON lines with "prompt".')
@click.option("--limit", type=click.IntRange(min=1), default=100, show_default=True, help="Prompts of each file.")
@click.option("--drafts", default="none,auto", show_default=True, help="Of our bundles, with commas.")
@click.option("--threads", type=click.IntRange(min=1), help="Of everyone. [default: all usable cores]")
@click.option("--peers", default=",".join(peer.name for peer in PEERS), show_default=True, help="Names with commas; none for ours only.")
@click.option("--max-new-tokens", type=click.IntRange(min=2), default=128, show_default=True)
@click.option(
    "--long-prompt", type=click.IntRange(min=0), default=512, show_default=True, help="Tokens of prompts timed to the first token; 0: none."
)
@click.option(
    "--work", type=click.Path(path_type=Path), default=Path("build/peers"), show_default=True, help="Environments and conversions."
)
@click.option("--torch-index", metavar="URL", help="Where to get PyTorch from, as for the Makefile.")
@click.option("--prepare-only", is_flag=True, help="Install, convert, start every worker once, and stop.")
@click.option("--markdown", "markdown_file", type=click.Path(path_type=Path), metavar="FILE", help="Write the tables as Markdown.")
@json_option
def peers(
    bundles: tuple[Path, ...],
    model: str,
    adapter: str,
    data_files: tuple[Path, ...],
    limit: int,
    drafts: str,
    threads: int | None,
    peers: str,
    max_new_tokens: int,
    long_prompt: int,
    work: Path,
    torch_index: str | None,
    prepare_only: bool,
    markdown_file: Path | None,
    json_file: Path | None,
) -> None:
    """Measure our bundles and other runtimes on the same prompts, weights and threads, in turn.

    \b
    Example:
      python benchmarks/peers/run.py --bundle sql-int4 --adapter smollm2-135m-sql --data benchmarks/data/sql.jsonl
    """
    wanted = [name for name in peers.split(",") if name != "none"]
    unknown = [name for name in wanted if name not in {peer.name for peer in PEERS}]
    if unknown:
        raise UserError(f"--peers {unknown[0]}: one of {', '.join(peer.name for peer in PEERS)} was expected")
    tasks = [read_task(file, limit) for file in data_files]
    manifests = [Bundle.load(path, check=False).manifest for path in bundles]
    codec = TextCodec.from_bundle(Bundle.load(bundles[0], check=False))
    weights_file = resolve_adapter(adapter) / "adapter.safetensors"
    for path, manifest in zip(bundles, manifests, strict=True):
        if manifest.streams is None or manifest.streams.adapter_sha256 != sha256_of(weights_file):
            raise UserError(f"{path}: not made with the adapter {adapter}, so peers would run other weights")
        if manifest.model.fingerprint != manifests[0].model.fingerprint or set(manifest.tokenizer.stop_ids) != set(codec.stop_ids):
            raise UserError(f"{path}: other base weights or stop tokens than {bundles[0]}")
    if markdown_file is not None and not markdown_file.absolute().parent.is_dir():
        raise UserError(f"--markdown {markdown_file}: there is no folder {markdown_file.absolute().parent}")
    count = threads or usable_cores()

    def say(text: str) -> None:
        click.echo(text, err=True)

    work = work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    place = Workplace(work, torch_index, say)
    variants = [
        Variant(
            "specstream",
            f"{manifest.quantization.scheme} ({path.absolute().name})",
            draft,
            True,
            _worker(sys.executable, "ours", path.absolute(), count, draft),
        )
        for path, manifest in zip(bundles, manifests, strict=True)
        for draft in drafts.split(",")
    ]
    try:
        weights = place.weights(model, adapter) if wanted else None
    except NotThere as error:
        raise CheckFailed(str(error)) from error
    for peer in PEERS:
        if peer.name in wanted:
            assert weights is not None
            variants += _variants_of(peer, place, weights, count)
    prompt_ids = [(task.name, [codec.encode(prompt) for prompt in task.prompts]) for task in tasks]
    try:
        (work / "logs").mkdir(exist_ok=True)
        for number, variant in enumerate(variants):
            if variant.reason is None:
                say(f"starting {variant.system}, {variant.weights}, drafts {variant.draft}")
                variant.start(work / "logs" / f"worker-{number}.log")
        gone = [variant for variant in variants if variant.ours and variant.reason is not None]
        if gone:
            raise CheckFailed(f"{gone[0].weights}, drafts {gone[0].draft}: {gone[0].reason}")
        if prepare_only:
            for variant in variants:
                say(f"{variant.system}, {variant.weights}, drafts {variant.draft}: {variant.reason or 'ready'}")
            return
        race(variants, prompt_ids, _long_prompts(prompt_ids[0][1], long_prompt), max_new_tokens, sorted(codec.stop_ids), say)
    finally:
        for variant in variants:
            variant.stop()
    gone = [variant for variant in variants if variant.ours and variant.reason is not None]
    if gone:
        raise CheckFailed(f"{gone[0].weights}, drafts {gone[0].draft}: {gone[0].reason}")
    reference = _reference(variants, manifests, drafts)
    named = f"specstream {reference.weights}, drafts {reference.draft}"
    lines = [line for task in tasks for line in summarise(task, variants, reference, codec.decode)]
    text = markdown(lines, count, named, long_prompt)
    click.echo(text)
    for variant in variants:
        if variant.idle_share is not None and variant.idle_share > IDLE_SHARE:
            say(f"{variant.system}, {variant.weights}: takes {variant.idle_share:.0%} of a core while it waits, which disturbs the others")
    if markdown_file is not None:
        markdown_file.write_text(text, encoding="utf-8")
    made_by = {
        "model": model,
        "adapter": adapter,
        "threads": count,
        "max_new_tokens": max_new_tokens,
        "machine": machine(),
        "reference": named,
    }
    write_report(json_file, "peers", made_by | {"long_prompt": long_prompt, "runs": [asdict(line) for line in lines]})


def _worker(python: str | Path, name: str, model: Path, threads: int, draft: str) -> list[str]:
    return [str(python), str(HERE / f"worker_{name}.py"), str(model), "--threads", str(threads), "--draft", draft]


def _variants_of(peer: Peer, place: Workplace, weights: Path, threads: int) -> list[Variant]:
    """A peer's variants, those that cannot run with the reason."""
    made: dict[str, Path] = {}
    reasons: dict[str, str] = {}
    try:
        programs = place.environment(peer)
        for build in peer.builds:
            try:
                made[build.name] = place.build(peer, build, weights, programs)
            except NotThere as error:
                reasons[build.name] = str(error)
    except NotThere as error:
        reasons = {build.name: str(error) for build in peer.builds}
    return [
        Variant(peer.title, build, draft, False, reason=reasons[build])
        if build in reasons
        else Variant(peer.title, build, draft, False, _worker(programs / "python", peer.name, made[build], threads, draft))
        for build, draft in peer.variants
    ]


def _reference(variants: Sequence[Variant], manifests: Sequence[Any], drafts: str) -> Variant:
    """Whose texts the others are compared with: our plain decoding, of fp32 weights where such a bundle is among ours."""
    each = len(drafts.split(","))
    fp32 = [i for i, manifest in enumerate(manifests) if manifest.quantization.scheme == "fp32"]
    of_bundle = variants[(fp32[0] if fp32 else 0) * each :][:each]
    return next((variant for variant in of_bundle if variant.draft == "none"), of_bundle[0])


def _long_prompts(prompts: Sequence[list[int]], length: int) -> list[list[int]]:
    """Prompts of one length, cut from all of them one after another. They share no beginning that a cache could keep."""
    if not length:
        return []
    joined = [token for ids in prompts for token in ids]
    while len(joined) < length * LONG_PROMPTS:
        joined += joined
    return [joined[i * length : (i + 1) * length] for i in range(LONG_PROMPTS)]


def machine() -> dict[str, Any]:
    """The processor, as far as the system names it."""
    try:
        cpu = next(
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            if "model name" in line
        )
    except (OSError, StopIteration):
        cpu = platform.processor()
    return {"cpu": cpu, "cores": usable_cores(), "platform": versions()["platform"]}


if __name__ == "__main__":
    sys.exit(run_command(sys.argv[1:], peers, "run.py"))
