"""The picture of a benchmark: tokens/s of every variant on every task, call cost over rows."""

from __future__ import annotations

from pathlib import Path

from specstream.toolchain.bench_pipeline import BenchReport


def plot(report: BenchReport, out: Path) -> None:
    """Draw a report to a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    tasks = list(dict.fromkeys(run.task for run in report.runs))
    figure, axes = plt.subplots(1, len(tasks) + bool(report.call_cost), figsize=(5.5 * (len(tasks) + bool(report.call_cost)), 4.5))
    panels = list(axes) if len(tasks) + bool(report.call_cost) > 1 else [axes]
    for axis, task in zip(panels, tasks, strict=False):
        runs = [run for run in report.runs if run.task == task]
        labels = [f"{run.bundle}, {'plain' if run.drafter == 'none' else run.drafter}" for run in runs]
        colors = ["tab:gray" if run.drafter == "none" else "tab:blue" for run in runs]
        bars = axis.barh(range(len(runs)), [run.tokens_per_second or 0.0 for run in runs], color=colors)
        axis.bar_label(bars, fmt="%.0f", padding=3)
        axis.set_yticks(range(len(runs)), labels)
        axis.invert_yaxis()
        axis.margins(x=0.15)
        axis.set(title=f"{task}, {runs[0].prompts} prompts, {report.threads} threads", xlabel="tokens/s, median over prompts")
    if report.call_cost:
        axis = panels[-1]
        for bundle, context in dict.fromkeys((call.bundle, call.context) for call in report.call_cost):
            calls = [c for c in report.call_cost if (c.bundle, c.context, c.stream_rows) == (bundle, context, 0)]
            axis.plot([c.rows for c in calls], [c.ms for c in calls], marker="o", label=f"{bundle}, {context} tokens before")
        axis.set(title="a call", xlabel="rows", ylabel="ms", ylim=(0, None))
        axis.legend(fontsize="small")
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(out, dpi=90)
    plt.close(figure)
