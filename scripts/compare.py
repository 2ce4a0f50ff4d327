"""One table over several runs, and a figure: how the old classes fade step by step,
and what the networks see at the end.

python -m scripts.compare runs/ft runs/mib runs/mib-altersgd --picture comparison.png

Scores in another evaluation setting are rows of their own: "mib [flip]". What else differs than method,
phase, lambda and seed is said above the table.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path

from engine.results import metrics_by_step, steps_done
from engine.terminal import command, exit_with
from metrics.continual import METRICS, group_names
from study.beside import COMPARED, differences, rows
from study.cells import KEYS
from study.collection import RecordedRun
from study.panels import example_panels
from tracking.tables import (
    background_iou,
    format_table,
    markdown_table,
    metric_columns,
    metrics_in,
    percent,
)
from tracking.text import drawn, printable


@command
def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="run folders (each holds a results.json)")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--picture", type=Path, help="draw the figure here (.png)")
    parser.add_argument("--examples", type=int, default=6, help="test images shown in it")
    options = parser.parse_args(arguments)
    if options.examples < 1:
        parser.error("--examples: at least one test image is shown")
    runs = rows(options.runs)
    unlike = differences(runs)
    if unlike:
        print(
            f"note: not only {COMPARED} differ, so not all rows may be compared. From "
            f"{printable(next(iter(runs)))} differ"
        )
        print("".join(f"- {printable(line)}\n" for line in unlike))
    layout = markdown_table if options.markdown else format_table
    print(layout(*comparison(runs)))
    if len({steps_done(run.results["steps"]) for run in runs.values()}) > 1:
        print(
            "\n"
            "note: the runs stand after different numbers of steps (see `steps`), so their metrics cannot be "
            "compared"
        )
    if options.picture:
        draw(options.picture, runs, options.examples)
    return 0


def comparison(runs: Mapping[str, RecordedRun]) -> tuple[list[str], list[list[str]]]:
    """mIoU in percent after the last step, in both conventions, beside what step 0 had reached,
    and the background's own IoU.
    """
    groups = groups_of(runs)
    header = ["run", f"step 0: {groups['old']}", groups["old"], groups["new"], "all"]
    further = list(dict.fromkeys([*METRICS, *metrics_in(run.results["steps"][-1] for run in runs.values())]))
    header += ["| bg", "| with bg: old", "new", "all", "| forgetting", *metric_columns(further), "steps"]
    table = []
    for name, run in runs.items():
        first, last = metrics_by_step(run.results["steps"]).get(0), run.results["steps"][-1]
        cells: list[float | None] = [first["miou"]["old"] if first else None]
        cells += [last["miou"][group] for group in KEYS] + [background_iou(last)]
        cells += [last["miou_with_background"][group] for group in KEYS]
        cells += [last["mean_forgetting"], *map(run.metric, further)]
        table.append([name, *map(percent, cells), f"{steps_done(run.results['steps'])}/{len(run.steps)}"])
    return header, table


def groups_of(runs: Mapping[str, RecordedRun]) -> dict[str, str]:
    """Return what the groups of classes are called; by class ids only where these
    are the same in all rows.
    """
    first, *others = [group_names(run.steps) for run in runs.values()]
    return first if all(names == first for names in others) else {"old": "old", "new": "new"}


def draw(path: Path, runs: Mapping[str, RecordedRun], num_examples: int) -> None:
    from tracking.plotting import pyplot, save, without_formulas

    own = {name: run for name, run in runs.items() if run.evaluation is None}  # a model sees but once
    last_steps = [steps_done(run.results["steps"]) - 1 for run in own.values()]
    panels = example_panels([run.folder for run in own.values()], last_steps, num_examples)
    figure = pyplot.figure(figsize=(3.6 + 1.1 * len(panels[0]), 1.25 * len(panels)), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=[3.6, 1.1 * len(panels[0])])
    axis = left.subplots()
    for name, run in runs.items():
        metrics = metrics_by_step(run.results["steps"])
        old = [100 * (result["miou"]["old"] or 0) for result in metrics.values()]
        axis.plot(list(metrics), old, marker="o", label=drawn(name))
    axis.set(xlabel="step", ylabel=f"mIoU of the old classes ({groups_of(runs)['old']}), %", ylim=(0, None))
    axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axis.legend()
    axis.grid(alpha=0.3)
    titles = ["image", "truth", *map(drawn, own)]
    for row, cells in zip(right.subplots(len(panels), len(titles), squeeze=False), panels, strict=True):
        for cell, title, image in zip(row, titles, cells, strict=True):
            cell.imshow(image, interpolation="nearest")
            cell.axis("off")
            if cells is panels[0]:
                cell.set_title(title, fontsize=9)
    save(without_formulas(figure), path, dpi=110)


if __name__ == "__main__":
    exit_with(main)
