"""The picture of a device profile: call cost over rows, tokens per second over budgets."""

from __future__ import annotations

from pathlib import Path

from specstream.runtimes.profile import DeviceProfile


def plot(profile: DeviceProfile, out: Path) -> None:
    """Draw a profile to a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (cost, speed) = plt.subplots(1, 2, figsize=(11, 4))
    for threads, context in dict.fromkeys((call.threads, call.context) for call in profile.call_cost):
        calls = [c for c in profile.call_cost if (c.threads, c.context, c.stream_rows) == (threads, context, 0)]
        cost.plot([c.rows for c in calls], [c.ms for c in calls], marker="o", label=f"{threads} threads, {context} tokens before")
    cost.set(title=f"{profile.model}, {profile.scheme}", xlabel="rows of a call", ylabel="ms", ylim=(0, None))
    for draft, stream_rows in dict.fromkeys((s.draft, s.stream_rows) for s in profile.speeds if s.draft != "none"):
        found = [s for s in profile.speeds if (s.draft, s.stream_rows) == (draft, stream_rows)]
        name = draft if profile.placement != "fused" or not stream_rows else f"{draft}, {stream_rows} rows with streams"
        speed.plot([s.budget for s in found], [s.tokens_per_second for s in found], marker="o", label=name)
    speed.axhline(profile.plain_tokens_per_second, color="black", linestyle="--", label="plain decoding")
    speed.set(title=f"{profile.prompts} sample prompts", xlabel="rows of a call at most", ylabel="tokens/s", ylim=(0, None))
    for axis in (cost, speed):
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(out, dpi=90)
    plt.close(figure)
