"""One table over several runs, and a figure: how the old classes fade step by step,
and what the networks see at the end.

python -m scripts.compare runs/ft runs/mib runs/mib-altersgd --picture comparison.png

Scores in another evaluation setting are rows of their own: "mib [flip]". What else differs than method,
phase, lambda and seed is said above the table: data, evaluation, backbone or recipe. Below it, runs that
differ in the seed alone become mean and standard deviation; of others no mean is made.
"""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from engine.results import metrics_by_step, steps_done
from engine.terminal import command, exit_with
from metrics.continual import METRICS, group_names
from study.beside import COMPARED, differences, over_seeds, rows
from study.cells import KEYS, show
from study.collection import RecordedRun
from study.panels import examples
from study.spreads import spread
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
    folders = [run for run in options.runs if not is_log(run)]
    if not folders:
        parser.error("only logs of runs are named; name their folders")
    runs = rows(folders)
    unlike = differences(runs)
    if unlike:
        print(
            f"note: not only {COMPARED} differ, so not all rows may be compared. From "
            f"{printable(next(iter(runs)))} differ"
        )
        print("".join(f"- {printable(line)}\n" for line in unlike))
    layout = markdown_table if options.markdown else format_table
    print(layout(*comparison(runs)))
    means, refused = over_seeds(runs)
    if means:
        print("\nMean ± standard deviation over seeds\n")
        print(layout(*comparison_of_means(means)))
    for line in refused:
        print(f"\nnote: {printable(line)}")
    for name, run in runs.items():
        if run.is_cut:
            last = run.config["train"]["last_step"]
            print(f"\nnote: {printable(name)} was cut by train.last_step={last}: these are not final metrics")
    if len({steps_done(run.results["steps"]) for run in runs.values()}) > 1:
        finished = all(run.is_finished for run in runs.values())
        print(
            f"\nnote: the runs {'have' if finished else 'stand after'} different numbers of steps "
            "(see `steps`), so their metrics cannot be compared"
        )
    if options.picture:
        draw(options.picture, runs, options.examples)
    return 0


def is_log(path: Path) -> bool:
    """Return whether it is the log of a run, which scripts.reproduce leaves beside the run's folder:
    a pattern such as runs/mib_seed* brings it along.
    """
    return path.suffix == ".log" and path.is_file()


def comparison(runs: Mapping[str, RecordedRun]) -> tuple[list[str], list[list[str]]]:
    """mIoU in percent after the last step, in both conventions, beside what step 0 had reached,
    and the background's own IoU.
    """
    further = further_metrics(runs.values())
    table = [
        [
            name,
            *map(percent, metrics_of(run, further)),
            f"{steps_done(run.results['steps'])}/{len(run.steps)}",
        ]
        for name, run in runs.items()
    ]
    return ["run", *columns(list(runs.values()), further), "steps"], table


def comparison_of_means(means: Mapping[str, Sequence[RecordedRun]]) -> tuple[list[str], list[list[str]]]:
    """Return the same columns, with the mean of each over seeds and its spread."""
    every = [run for group in means.values() for run in group]
    further = further_metrics(every)
    table = []
    for name, group in means.items():
        values = zip(*(metrics_of(run, further) for run in group), strict=True)
        spreads = [spread(100 * v for v in of_seeds if v is not None) for of_seeds in values]
        table.append([name, *(show(s) if s.n else "-" for s in spreads), str(len(group))])
    return ["method", *columns(every, further), "seeds"], table


def further_metrics(runs: Iterable[RecordedRun]) -> list[str]:
    return list(dict.fromkeys([*METRICS, *metrics_in(run.results["steps"][-1] for run in runs)]))


def columns(runs: Sequence[RecordedRun], further: Sequence[str]) -> list[str]:
    """Return what `metrics_of` a run are called."""
    groups = groups_of(runs)
    header = [f"step 0: {groups['old']}", groups["old"], groups["new"], "all"]
    return [*header, "| bg", "| with bg: old", "new", "all", "| forgetting", *metric_columns(further)]


def metrics_of(run: RecordedRun, further: Iterable[str]) -> list[float | None]:
    first, last = metrics_by_step(run.results["steps"]).get(0), run.results["steps"][-1]
    cells: list[float | None] = [first["miou"]["old"] if first else None]
    cells += [last["miou"][group] for group in KEYS] + [background_iou(last)]
    cells += [last["miou_with_background"][group] for group in KEYS]
    return [*cells, last["mean_forgetting"], *map(run.metric, further)]


def groups_of(runs: Sequence[RecordedRun]) -> dict[str, str]:
    """Return what the groups of classes are called; by class ids only where these
    are the same in all rows.
    """
    first, *others = [group_names(run.steps) for run in runs]
    return first if all(names == first for names in others) else {"old": "old", "new": "new"}


def draw(path: Path, runs: Mapping[str, RecordedRun], num_examples: int) -> None:
    from tracking.examples import draw_examples, size_of
    from tracking.plotting import look, pyplot, save, unclipped, without_formulas

    own = {name: run for name, run in runs.items() if run.evaluation is None}  # a model sees but once
    last_steps = [steps_done(run.results["steps"]) - 1 for run in own.values()]
    shown = examples([run.folder for run in own.values()], last_steps, num_examples)
    titles = ["image", "truth", *own]
    width, height = size_of(shown, len(titles))
    figure = pyplot.figure(figsize=(3.8 + width, max(height, 3.8)), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=[3.8, width])
    axis = left.subplots()
    for number, (name, run) in enumerate(runs.items()):
        metrics = metrics_by_step(run.results["steps"])
        old = [100 * (result["miou"]["old"] or 0) for result in metrics.values()]
        axis.plot(list(metrics), old, label=drawn(name), **look(number))
    groups = groups_of(list(runs.values()))
    axis.set(xlabel="step", ylabel=f"mIoU of the old classes ({groups['old']}), %", ylim=(0, None))
    axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axis.grid(alpha=0.3)
    left.legend(loc="outside lower center", ncols=1 if len(runs) < 4 else 2, fontsize=8, handlelength=3)
    draw_examples(right, shown, titles, width)
    save(unclipped(without_formulas(figure)), path, dpi=110)


if __name__ == "__main__":
    exit_with(main)
