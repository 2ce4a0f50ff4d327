"""Run what the tables and figures of the paper consist of: all methods and settings, several seeds,
step 0 trained once.

    python -m scripts.reproduce table1 --preset shapes --seeds 1 2 3
    python -m scripts.reproduce all --preset voc --root /data/VOC2012 --pretrained imagenet --dry-run
    python -m scripts.reproduce table3 --preset voc-cpu --root /data/VOC2012 --jobs 2 train.epochs_later=5
    python -m scripts.reproduce all --preset voc --root /data/voc --launcher slurm --slurm slurm_partition=gpu
    python -m scripts.reproduce methods=mine,mine+altersgd,mib --seeds 1 2 3     # your own beside MiB

First comes the plan: every run, whether it is done, can be resumed or is missing, and what it costs.
--dry-run ends there. The same command, typed again, starts only what is not done. What fails does not stop
the rest. key.sub=value goes to every run.

Exit codes: 0 all done, 1 something failed, 2 bad arguments, config or data, 75 stopped by a signal with
everything saved.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from configs.messages import not_one_of
from data import DataError, shapes
from engine import terminal
from study.experiments import NAMED, ON_TOP, TABLES, current_name
from study.launch import carry_out
from study.launchers import LAUNCHERS, Resources
from study.plan import PRESETS, choose, describe, list_jobs, look_at


@terminal.command
def main(arguments: Sequence[str] | None = None, command: Sequence[str] | None = None) -> int:
    """`command` stands in for train.py."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    preset, root = PRESETS[options.preset], options.root
    generated = options.preset == "shapes" and root is None
    if generated:
        root = options.runs / "data"
    tables = TABLES if options.table == "all" else [options.table]
    settings = {"data.root": root, "model.pretrained": options.pretrained}
    jobs = list_jobs(tables, preset, options.seeds, options.runs, settings, options.overrides)
    if options.only:
        jobs = choose(jobs, options.only)
    if root is None and not options.dry_run:
        raise DataError("the place of the data set is not given; set --root <folder>")
    if generated and not options.dry_run:
        shapes.generate(root)
    here = not options.dry_run or (root is not None and root.exists())
    runs = look_at(jobs, preset, count=here)
    print(describe(runs, preset), flush=True)
    if not here:
        print("The data set is not here: the numbers of its images are those on record.")
    return 0 if options.dry_run else carry_out(runs, resources(options), command)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.reproduce",
        usage="%(prog)s TABLE|methods=NAME[+TOP],... --preset PRESET [options] [key.sub=value ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "table",
        type=_table,
        metavar="TABLE",
        help=f"what to reproduce: {', '.join(TABLES)}, all; table1 is table 2 as well. Or {NAMED}<names>, "
        f"any that are registered, with a comma between them, each perhaps with +{', +'.join(ON_TOP)}",
    )
    add("--preset", choices=PRESETS, help=f"data set, network and recipe ({NAMED}...: shapes, if not given)")
    add("--seeds", type=int, nargs="+", default=[1, 2, 3], help="default: 1 2 3")
    add(
        "--only",
        nargs="+",
        metavar="RUN",
        help="these rows or runs alone, in this order: joint 'ewc_seed[23]'",
    )
    add("--root", type=Path, help="place of the data set (shapes: generated in the folder of the runs)")
    add("--pretrained", help="weights to start from: imagenet or a file")
    add("--runs", type=Path, help="folder of all runs (default: runs/<preset>)")
    add("--dry-run", action="store_true", help="print the plan and start nothing")
    add("--launcher", default="local", metavar="NAME", help=f"{', '.join(LAUNCHERS)} (default: local)")
    add("--jobs", type=_count, default=1, help="local: runs at once (default: 1)")
    add("--threads", type=_count, help="of all runs together (default: all cores); slurm: of a run")
    add("--gpus", type=int, help="of a run (torchrun: all there are; slurm: 1, and 0 for CPUs alone)")
    add("--slurm", type=_parameter, action="append", default=[], metavar="KEY=VALUE", help="for submitit")
    # --seeds takes all that follows it, so the overrides are set apart first
    overrides = [a for a in arguments if re.match(r"\w+\.[\w.]+=", a)]
    options = parser.parse_args([a for a in arguments if a not in overrides])
    if not LAUNCHERS.find(options.launcher).several_at_once and options.jobs > 1:
        parser.error(
            "--jobs is for the local launcher: torchrun has one run at a time, Slurm limits of its own"
        )
    if options.preset is None:
        if not options.table.startswith(NAMED):
            parser.error("the following arguments are required: --preset")
        options.preset = "shapes"
    options.overrides = overrides
    options.seeds = list(dict.fromkeys(options.seeds))
    options.runs = options.runs or Path("runs") / options.preset
    return options


def resources(options: argparse.Namespace) -> Resources:
    """Return the part of the command line that says how runs are started."""
    return Resources(
        launcher=options.launcher,
        folder=options.runs,
        jobs=options.jobs,
        threads=options.threads,
        gpus=options.gpus,
        slurm=dict(options.slurm),
    )


def _table(text: str) -> str:
    name, known = current_name(text), [*TABLES, "all"]
    if name not in known and not text.startswith(NAMED):
        raise argparse.ArgumentTypeError(f"invalid choice: {not_one_of(text, [*known, f'{NAMED}<names>'])}")
    return name


def _count(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


def _parameter(text: str) -> tuple[str, str | int]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ValueError
    return key, int(value) if value.isdigit() else value


if __name__ == "__main__":
    terminal.exit_with(main)
