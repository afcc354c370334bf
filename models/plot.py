"""The picture of a training run, from its log. Knows the log's lines; nothing of models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def plot_log(log: Path, out: Path) -> None:
    """Draw losses and stream agreement over steps of every stage in ``log`` (JSON lines) to a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    lines: list[dict[str, Any]] = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    stages = list(dict.fromkeys(line["stage"] for line in lines))
    figure, axes = plt.subplots(1, 1 + len(stages), figsize=(5 * (1 + len(stages)), 4), squeeze=False)
    agreement = axes[0][-1]
    for axis, stage in zip(axes[0], stages, strict=False):
        part = [line for line in lines if line["stage"] == stage]
        steps = [line["step"] for line in part]
        if "main_loss" in part[0]:
            axis.plot(steps, _smooth([line["main_loss"] for line in part]), color="black", label="next token")
        for j in range(len(part[0].get("stream_loss", []))):
            colour = plt.get_cmap("viridis")(j / max(1, len(part[0]["stream_loss"]) - 1))
            axis.plot(steps, _smooth([line["stream_loss"][j] for line in part]), color=colour, label=f"stream {j + 1}")
            agreement.plot(steps, _smooth([line["stream_accuracy"][j] for line in part]), color=colour, label=f"stream {j + 1}")
        axis.set(title=f"stage {stage}", xlabel="step", ylabel="loss (nats)")
        axis.legend(fontsize="small")
        axis.grid(alpha=0.3)
    agreement.set(title="streams' first choice = the model's", xlabel="step", ylabel="share", ylim=(0, 1))
    agreement.grid(alpha=0.3)
    if agreement.lines:
        agreement.legend(fontsize="small")
    else:
        agreement.set_axis_off()
    figure.tight_layout()
    figure.savefig(out, dpi=90)
    plt.close(figure)


def _smooth(values: list[float]) -> list[float]:
    """Exponential mean, so that a curve of single batches can be read."""
    smoothed: list[float] = []
    for value in values:
        smoothed.append(value if not smoothed else 0.8 * smoothed[-1] + 0.2 * value)
    return smoothed
