"""The figure of scripts.flatness: the loss around a model and on the way to it."""

from pathlib import Path

import numpy as np

from tracking.plotting import STYLE, Axes, Figure, pyplot, save


def draw(path: Path, result: dict) -> None:
    with pyplot.rc_context(STYLE):
        save(draw_landscape(result), path)


def draw_landscape(result: dict) -> Figure:
    """l_seg along a random direction, over a plane of two, and along the step."""
    modes = result["modes"]
    has_line = all("line" in metrics for metrics in modes.values())
    panels = 1 + len(modes) + has_line
    figure, axes = pyplot.subplots(1, panels, figsize=(3.4 * panels, 3.4), layout="constrained")
    for mode, metrics in modes.items():
        draw_curve(axes[0], metrics["around"]["places"], metrics["around"]["seg"], mode)
    axes[0].set(xlabel="lengths of a filter", ylabel="l_seg", title="along a random direction")
    for axis, (mode, metrics) in zip(axes[1:], modes.items(), strict=False):
        draw_plane(figure, axis, metrics["plane"])
        axis.set_title(f"over a random plane ({mode})")
    if has_line:
        for mode, line in ((mode, metrics["line"]) for mode, metrics in modes.items()):
            draw_curve(axes[-1], line["places"], line["seg"]["losses"], f"{mode}, all classes")
            draw_curve(
                axes[-1], line["places"], line["among_old"]["losses"], f"{mode}, old classes only", "--"
            )
        ends = f"from step {result['step'] - 1} (0) to step {result['step']} (1)"
        axes[-1].set(xlabel=ends, ylabel="l_seg on old images", title="along the step")
    for axis in axes:
        axis.set_box_aspect(1)
    named = axes[-1] if has_line else axes[0]
    figure.legend(*named.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return figure


def draw_curve(axis: Axes, places: list[float], losses: list[float], label: str, style: str = "-") -> None:
    colours = {"eval": "#0072B2", "train": "#D55E00"}  # distinct to the colour-blind
    axis.plot(places, losses, style, color=colours[label.split(",")[0]], label=label)
    if max(losses) > 10 * min(losses) > 0:
        axis.set_yscale("log")


def draw_plane(figure: Figure, axis: Axes, plane: dict) -> None:
    losses = np.nan_to_num(np.array(plane["seg"]), nan=1e6).clip(1e-6, 1e6)
    levels = np.geomspace(losses.min(), losses.max() * 1.001, 13)
    filled = axis.contourf(plane["places"], plane["places"], losses, levels=levels, norm="log")
    axis.plot(0, 0, "+", color="white", markersize=9)
    axis.set(xlabel="first direction", ylabel="second direction")
    axis.grid(False)
    bar = figure.colorbar(filled, ax=axis, label="l_seg", shrink=0.8, ticks=levels[::3], format="%.3g")
    bar.minorticks_off()
