"""How flat the loss is at a model of a run, and whether a step crossed a barrier for
what was learned before it.

    python -m scripts.flatness runs/mib-altersgd --step 5 --norm-mode both --json flatness.json
    python -m scripts.flatness runs/mib-altersgd --picture flatness.png
    python -m scripts.flatness runs/mib --on old --pictures 64 --top 5 --probes 30
    python -m scripts.flatness runs/mib_seed1 runs/mib_seed2 --beside     # for the table of scripts.report

Gradient norm, largest eigenvalues and trace of the Hessian, sharpness, the loss along random directions and
along the line from the model before the step to the one after it. docs/flatness.md says what each is and what
it can tell. Exit codes: 0 finished, 2 what was asked for cannot be measured.
"""

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from configs.schema import ConfigError
from data import DataError
from data.files import write_atomically
from engine.checkpoint import CheckpointError
from engine.curvature import measure
from engine.curvature_data import Options
from engine.run_folder import RunError
from study.collection import FLATNESS_FILE
from tracking.tables import format_table

TITLES = {"seg": "l_seg", "objective": "l_seg + lambda R"}


def main(arguments: list[str]) -> int:
    parser = make_parser()
    options = parser.parse_args(arguments)
    check(parser, options)
    failed = False
    for folder in options.runs:
        try:
            report(folder, options)
        except (ConfigError, RunError, DataError, CheckpointError) as error:
            failed = True
            print(f"error: {folder}: {error}", file=sys.stderr)
    return 2 if failed else 0


def report(folder: Path, options: argparse.Namespace) -> None:
    result = measure(folder, chosen(options))
    print(describe(result))
    for path in (options.json, folder / FLATNESS_FILE if options.beside else None):
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, (json.dumps(result, indent=1) + "\n").encode())
    if options.picture:
        from tracking.landscape_picture import draw  # matplotlib takes a while to load

        draw(options.picture, result)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="run", help="run folder (holds config.yaml and step_<i>.pt)")
    add("--step", type=int, help="the model after this step (the last one saved)")
    add("--pictures", type=int, default=16, help="how many are averaged over (16)")
    add("--batch", type=int, default=4, help="images at a time; part of the result in train mode (4)")
    add("--on", choices=("train", "old", "test"), default="train", help="images of the step | of all before")
    add("--norm-mode", choices=("eval", "train", "both"), default="eval", help="running | batch statistics")
    add("--of", choices=("seg", "objective", "both"), default="both", help="l_seg | l_seg + lambda R")
    add("--top", type=int, default=3, help="eigenvalues; 0 leaves them out (3)")
    add("--probes", type=int, default=10, help="for the trace, at least 2; 0 leaves it out (10)")
    add("--epsilon", type=float, default=1e-3, help="half the side of the box of the sharpness (0.001)")
    add("--json", type=Path, metavar="FILE", help="write every metric here")
    add("--beside", action="store_true", help=f"write every metric to {FLATNESS_FILE} in the run's folder")
    add("--picture", type=Path, metavar="FILE", help="draw the landscape here (.png)")
    add("--seed", type=int, default=0, help="of images, crops, probes and directions (0)")
    return parser


def chosen(options: argparse.Namespace) -> Options:
    """Return the part of the command line that says what is measured."""
    return Options(
        step=options.step,
        num_images=options.pictures,
        batch_size=options.batch,
        on=options.on,
        norm_mode=options.norm_mode,
        of=options.of,
        top=options.top,
        probes=options.probes,
        epsilon=options.epsilon,
        plane=options.picture is not None,
        seed=options.seed,
    )


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if min(options.pictures, options.batch) < 1:
        parser.error("--pictures and --batch: at least one")
    if options.top < 0:
        parser.error("--top: no fewer than 0")
    if options.probes < 0 or options.probes == 1:
        parser.error("--probes: 0, or at least 2 for a standard error")
    if options.epsilon <= 0:
        parser.error("--epsilon: more than 0")
    if len(options.runs) > 1 and (options.json or options.picture):
        parser.error("--json and --picture are for one run; --beside writes a file into every run's folder")


# -------------------------------------------------------------------------------------------------- reporting


def describe(result: dict) -> str:
    norm, modes = result["norm"], result["modes"]
    trained = "" if norm["trained"] == norm["measured"] else f" (trained with {norm['trained']})"
    texts = [
        f"{result['run']}: {result['method']} / {result['phase']} after step {result['step']}, "
        f"{result['parameters']:,} parameters, lambda {result['lambda']:g}\n"
        f"{result['pictures']} images ({result['on']}) in batches of {result['batch']}, seed "
        f"{result['seed']}, norm {norm['measured']}{trained}; eval = running statistics, train = those of "
        "the batch",
        metrics_table(result),
    ]
    if all("line" in metrics for metrics in modes.values()):
        texts.append(line_table(result))
    else:
        texts.append("no line: nothing was learned before step 0")
    return "\n\n".join(texts)


def metrics_table(result: dict) -> str:
    modes = result["modes"]
    columns = {
        f"{mode}: {TITLES[term]}": modes[mode][term]
        for mode in modes
        for term in TITLES
        if term in modes[mode]
    }
    rows: dict[str, Callable[[dict], str]] = {
        "loss": lambda f: number(f["loss"]),
        "||gradient||^2": lambda f: number(f["gradient_norm2"]),
        "||gradient||^2 of a batch": lambda f: number(f["gradient_norm2_of_a_batch"]),
    }
    for i in range(result["top"]):
        rows[f"eigenvalue {i + 1}"] = partial(eigenvalue, i)
    if all("trace" in metrics for metrics in columns.values()):
        rows["trace"] = lambda f: f"{number(f['trace']['mean'])} +- {f['trace']['standard_error']:.2g}"
    rows["sharpness, %"] = lambda f: number(f["sharpness"])
    cells = [[name, *(show(metrics) for metrics in columns.values())] for name, show in rows.items()]
    return format_table(["", *columns], cells)


def eigenvalue(index: int, metrics: dict) -> str:
    return number(*metrics["eigenvalues"][index : index + 1])


def line_table(result: dict) -> str:
    step = result["step"]
    header = [
        f"l_seg on {result['old_pictures']} old images",
        f"step {step - 1}",
        f"step {step}",
        "barrier",
    ]
    rows = [
        [f"{mode}: {name}", number(line["losses"][0]), number(line["losses"][-1]), number(line["barrier"])]
        for mode, metrics in result["modes"].items()
        for name, line in (
            ("all classes", metrics["line"]["seg"]),
            ("old classes only", metrics["line"]["among_old"]),
        )
    ]
    return format_table(header, rows)


def number(value: float | None = None) -> str:
    return "-" if value is None else f"{value:.4g}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
