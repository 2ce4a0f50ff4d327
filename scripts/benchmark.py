"""What the project says about its speed and memory, measured: every measurement is a ratio within one run,
or seconds.

python -m scripts.benchmark                                              # all parts, the paper's sizes
python -m scripts.benchmark losses labels --quick                        # tiny sizes: does it work?
python -m scripts.benchmark loading index --fullres DIR --voc192 DIR     # parts that need images
python -m scripts.benchmark memory --json results/benchmark.json         # replaces this part in the file
python -m scripts.benchmark updates --json runs/voc-cpu/benchmark.json   # for the report of runs/voc-cpu
python -m scripts.benchmark methods --recipe configs/voc/15-1_cpu.yaml   # every method / FT, by the image
python -m scripts.benchmark --show results/benchmark.json                # the file as Markdown

The variants of a comparison take turns (A B C, B C A, ...) after a warm-up. Shown is the median of the
repeats and, in brackets, their range; the file holds every sample. Leave the machine alone meanwhile.
"""

import argparse
import json
import platform
import shlex
import sys
import time
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from data import DataError
from data.files import write_atomically
from engine.ranks import be_deterministic, keep_freed_memory
from engine.results import environment
from scripts.benchmarks import PARTS
from scripts.benchmarks.measure import CPU_RECIPE, Measurement, Options, Skipped, say
from tracking.tables import format_table, markdown_table


def main(arguments: list[str]) -> int:
    parser = make_parser()
    given = parser.parse_args(arguments)
    check(parser, given)
    if given.show:
        print(markdown(read(given.show)))
        return 0
    options = Options(given.quick, given.repeats, given.recipe, given.voc192, given.fullres)
    if given.threads:
        torch.set_num_threads(given.threads)
    behave_as_in_training()
    measurements: dict[str, list[Measurement]] = {}
    exit_code = 0
    for part in given.parts or PARTS:
        say(f"{part} ...")
        started = time.monotonic()
        try:
            measurements[part] = PARTS[part](options)
        except (Skipped, DataError) as reason:
            measurements[part] = [Measurement("", note=str(reason).splitlines()[0])]
            say(f"  skipped: {reason}")
            exit_code = 2 if isinstance(reason, DataError) else exit_code
            continue
        say(f"  {time.monotonic() - started:.0f} s")
        if given.json:
            write(given.json, part, measurements[part], arguments, given.quick)
    print(table(measurements))
    return exit_code


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.benchmark",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="part", help=f"all without any: {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="tiny sizes; the measurements mean nothing")
    parser.add_argument("--repeats", type=int, help="samples of every variant (default: each part's own)")
    parser.add_argument(
        "--recipe", default=CPU_RECIPE, metavar="FILE", help="for updates, methods: its sizes (%(default)s)"
    )
    parser.add_argument("--voc192", type=Path, metavar="FOLDER", help="for index: many images")
    parser.add_argument("--fullres", type=Path, metavar="FOLDER", help="for loading: images of full size")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="keep measurements and samples here, by part"
    )
    parser.add_argument("--show", type=Path, metavar="FILE", help="print what --json kept, as Markdown")
    parser.add_argument("--threads", type=int, help="of torch (default: its own choice)")
    return parser


def check(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """Whatever can be wrong is said before anything is measured."""
    for part in given.parts:
        if part not in PARTS:
            parser.error(f"no part {part!r}; choose from {', '.join(PARTS)}")
    for option in ("repeats", "threads"):
        value = getattr(given, option)
        if value is not None and value < 1:
            parser.error(f"--{option}: {value} is less than 1")
    for option in ("voc192", "fullres"):
        folder = getattr(given, option)
        if folder is not None and not folder.is_dir():
            parser.error(f"--{option}: {folder} is not a folder")
    if not Path(given.recipe).is_file():
        parser.error(f"--recipe: {given.recipe} is not a file; name a YAML overlay of configs/")
    if given.show and not (given.show.exists() and isinstance(read(given.show), dict)):
        parser.error(f"--show: {given.show} holds no measurements; make them with --json {given.show}")
    if given.json and not isinstance(read(given.json), dict):
        parser.error(f"--json: {given.json} holds something else; name another file")


def behave_as_in_training() -> None:
    """The settings of a run with the default config, for all variants alike."""
    keep_freed_memory()
    be_deterministic()


def table(measurements: dict[str, list[Measurement]]) -> str:
    width = max(len(part) for part in measurements)
    header = [f"{'part':{width}}  what", "measured", "target", "met?"]
    rows = [
        [
            f"{part:{width}}  {measurement.what}",
            measurement.measured,
            str(measurement.target or "-"),
            measurement.met,
        ]
        for part in measurements
        for measurement in measurements[part]
    ]
    return format_table(header, rows)


def markdown(content: dict) -> str:
    """Return the table of the documents."""
    rows = [
        [
            part,
            measurement["what"],
            measured(measurement),
            measurement["target"] or "",
            measurement["met"].strip("-"),
        ]
        for part in PARTS
        for measurement in content.get(part, {"figures": []})["figures"]
    ]
    return markdown_table(["part", "what", "measured", "target", "met"], rows)


def measured(measurement: dict) -> str:
    names = {field.name for field in fields(Measurement)} - {"target"}
    return Measurement(**{name: measurement[name] for name in names}).measured


def read(path: Path) -> Any:
    """Return what the file holds; nothing yet is an empty dict."""
    if not path.exists():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def write(path: Path, part: str, measurements: list[Measurement], arguments: list[str], quick: bool) -> None:
    """Put the measurements of a part into the file, in place of older ones."""
    entry = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "command": shlex.join(["python", "-m", "scripts.benchmark", *arguments]),
        "quick": quick,
        "cpu": cpu_model(),
        **environment(torch.device("cpu"), 1),
        "figures": [row(measurement) for measurement in measurements],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {**read(path), part: entry}
    write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())


def row(measurement: Measurement) -> dict:
    return asdict(measurement) | {
        "target": str(measurement.target) if measurement.target else None,
        "met": measurement.met,
    }


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
