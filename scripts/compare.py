"""One table over several runs, and a picture: how the old classes fade step by step, and what the networks see at the end.

python -m scripts.compare runs/ft runs/mib runs/mib-altersgd --picture comparison.png
"""

import argparse
from pathlib import Path

from data.protocols import Step, steps_from_lists
from engine.results import figures_by_step, steps_done
from engine.run_folder import RunError, read_results
from engine.terminal import command, exit_with
from metrics.continual import group_names
from study.panels import example_panels
from tracking.tables import format_table, markdown_table, percent


@command
def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="run folders (each holds a results.json)")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--picture", type=Path, help="write the picture here (.png)")
    parser.add_argument("--examples", type=int, default=6, help="test pictures shown in it")
    options = parser.parse_args(arguments)
    if options.examples < 1:
        parser.error("--examples: at least one test picture is shown")
    results = [load_results(run) for run in options.runs]
    steps = steps_from_lists(results[0]["protocol"])
    layout = markdown_table if options.markdown else format_table
    figures = [result["steps"] for result in results]
    print(layout(*comparison(options.runs, figures, steps)))
    if len(set(map(steps_done, figures))) > 1:
        print(
            "\nnote: the runs stand after different numbers of steps (see `steps`), so their figures cannot be compared"
        )
    if options.picture:
        draw(options.picture, options.runs, figures, steps, options.examples)
    return 0


def load_results(run: Path) -> dict:
    results = read_results(run / "results.json")
    if not results or not results["steps"]:
        raise RunError(
            f"{run}: no results yet; train it with train.py run.folder={run.parent} run.name={run.name}"
        )
    return results


def comparison(
    runs: list[Path], results: list[list[dict]], steps: list[Step]
) -> tuple[list[str], list[list[str]]]:
    """mIoU in percent after the last step, in both conventions, beside what step 0 had reached."""
    groups = group_names(steps)
    header = ["run", f"step 0: {groups['old']}", groups["old"], groups["new"], "all"]
    header += ["| with bg: old", "new", "all", "| forgetting", "steps"]
    rows = []
    for run, result in zip(runs, results, strict=True):
        last = result[-1]
        figures = figures_by_step(result)
        # absent where a run started after a later step
        cells: list[float | None] = [figures[0]["miou"]["old"] if 0 in figures else None]
        cells += [
            last[key][group] for key in ("miou", "miou_with_background") for group in ("old", "new", "all")
        ]
        cells += [last["mean_forgetting"]]
        rows.append([run.name, *map(percent, cells), f"{steps_done(result)}/{len(steps)}"])
    return header, rows


def draw(
    path: Path, runs: list[Path], results: list[list[dict]], steps: list[Step], num_examples: int
) -> None:
    from tracking.plotting import pyplot, save

    groups = group_names(steps)
    panels = example_panels(runs, [steps_done(r) - 1 for r in results], num_examples)
    figure = pyplot.figure(figsize=(3.6 + 1.1 * len(panels[0]), 1.25 * len(panels)), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=[3.6, 1.1 * len(panels[0])])
    axis = left.subplots()
    for run, result in zip(runs, results, strict=True):
        axis.plot(
            list(figures_by_step(result)),
            [100 * (r["miou"]["old"] or 0) for r in result],
            marker="o",
            label=run.name,
        )
    axis.set(xlabel="step", ylabel=f"mIoU of the old classes ({groups['old']}), %", ylim=(0, None))
    axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axis.legend()
    axis.grid(alpha=0.3)
    titles = ["picture", "truth", *(run.name for run in runs)]
    for row, cells in zip(right.subplots(len(panels), len(titles), squeeze=False), panels, strict=True):
        for cell, title, image in zip(row, titles, cells, strict=True):
            cell.imshow(image, interpolation="nearest")
            cell.axis("off")
            if cells is panels[0]:
                cell.set_title(title, fontsize=9)
    save(figure, path, dpi=110)


if __name__ == "__main__":
    exit_with(main)
