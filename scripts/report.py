"""The paper's tables and figures from finished runs, beside the paper's own numbers,
with everything that is missing named.

    python -m scripts.report runs/voc --out report                       # report.md, report.tex, report.html
    python -m scripts.report runs/voc runs/joint --out report --formats html --tables table1 differences
    python -m scripts.report runs/voc --out report --pictures 6          # with what MiB and AlterSGD see
    python -m scripts.report --readme README.md                          # renew the tables of a Markdown file
    python -m scripts.report --readme README.md --check                  # are they up to date?

Every results.json below the folders is read. A run is classified by its config, never by the name of its
folder; runs that differ in more than method, phase, lambda and seed are never put into one table. The paper's
numbers stand beside VOC 15-1 disjoint (and the embedded data, which take its place) alone, seconds only where
all runs were made alike. What has not run has no row: it is listed as missing. The HTML page can hide rows by
method and seed, and its address says what is chosen: report.html#method=MiB&method=AlterSGD&seed=1. In a
Markdown file the lines between

    <!-- results:table1 results/voc -->
    <!-- /results -->

are replaced; the folder is relative to the file, and any name that --tables takes may stand for table1, and
missing and ladder-in-brief.

Exit codes: 0 written or up to date, 1 the Markdown file is not up to date, 2 bad arguments, folders or
results.
"""

import argparse
import sys
from pathlib import Path

from configs.schema import ConfigError
from data import DataError
from engine.checkpoint import CheckpointError
from engine.run_folder import RunError
from study.experiments import current_name
from study.report import FORMATS, assemble, read_runs, renew, write
from study.tables import SECTIONS
from tracking.text import printable


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    try:
        if options.readme:
            return renew(options.readme, options.check)
        runs = read_runs(options.folders)
        report = assemble(runs, options.tables, options.pictures, with_figures=options.formats != ["latex"])
        for path in write(report, options.out, options.formats):
            print(path)
        for warning in report.warnings:
            print(f"WARNING: {printable(warning)}", file=sys.stderr)
        counts = {"missing": len(report.lists["Missing"])}
        counts |= {"unfinished": sum(not run.is_cut for run in runs.unfinished)}
        counts |= {"done as far as asked": sum(run.is_cut for run in runs.unfinished)}
        print(", ".join(f"{what}: {count}" for what, count in counts.items()), file=sys.stderr)
    except (RunError, DataError, ConfigError, CheckpointError, OSError, UnicodeDecodeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        package = str(error.name).split(".")[0]
        print(
            f"error: {package} is missing; install it: {sys.executable} -m pip install {package}",
            file=sys.stderr,
        )
        return 2
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folders", nargs="*", type=Path, help="folders with runs somewhere below them")
    parser.add_argument("--out", type=Path, help="folder to write the report to")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS), help="default: all")
    parser.add_argument(
        "--tables",
        nargs="+",
        type=current_name,
        choices=SECTIONS,
        default=list(SECTIONS),
        metavar="T",
        help=", ".join(SECTIONS),
    )
    parser.add_argument(
        "--pictures",
        type=int,
        default=0,
        metavar="N",
        help="show N test images in the HTML; needs the checkpoints and the data. Not every data set may be "
        "published",
    )
    parser.add_argument(
        "--readme", type=Path, metavar="FILE", help="renew the tables in this Markdown file instead"
    )
    parser.add_argument(
        "--check", action="store_true", help="with --readme: change nothing, exit 1 if it would"
    )
    options = parser.parse_args(arguments)
    if options.readme and (options.folders or options.out):
        parser.error("--readme takes its folders from the file's markers: leave out folders and --out")
    if options.check and not options.readme:
        parser.error("--check goes with --readme FILE")
    if not options.readme and not (options.folders and options.out):
        parser.error("name folders of runs and --out FOLDER (or --readme FILE)")
    if options.pictures < 0:
        parser.error("--pictures: a number of images is wanted")
    if options.pictures and "html" not in options.formats:
        parser.error("--pictures are shown in the HTML alone: add html to --formats")
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
