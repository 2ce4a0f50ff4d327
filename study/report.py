"""A report from finished runs: reading them, assembling tables and figures, and writing them,
into Markdown files too.
"""

import difflib
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from configs.identity import order_name, recipe_of
from configs.messages import not_one_of
from data.files import write_atomically
from engine.results import steps_done
from engine.run_folder import RunError, read_results
from study import layouts, page
from study.cells import name
from study.collection import Collection, RecordedRun, collect, order_of, scored_otherwise, share_step_0
from study.experiments import current_name
from study.identity import by_kind, family
from study.layouts import Report, Row, Section, Table
from study.settings import found
from study.tables import IN_DOCUMENTS, SECTIONS
from tracking import text

FORMATS: dict[str, tuple[str, Callable[[Report], str]]] = {
    "markdown": ("report.md", layouts.markdown),
    "latex": ("report.tex", layouts.latex),
    "html": ("report.html", page.page),
}
WANTED_KEYS = ("config", "protocol", "steps")
MARKER = re.compile(
    r"^<!-- results:(?P<name>\S+) (?P<folder>.+?) -->\n(?P<body>.*?)^<!-- /results -->$",
    re.MULTILINE | re.DOTALL,
)
OPENING = re.compile(r"^<!-- results:.*$", re.MULTILINE)


# ----------------------------------------------------------------------------------------------- reading runs


def read_runs(folders: Sequence[Path], base: Path | None = None) -> Collection:
    """Return every run below the folders, sorted; texts call them by their places relative to `base`,
    if given.
    """
    for folder in folders:
        if not folder.is_dir():
            raise RunError(f"{folder}: no such folder; name one that holds runs of train.py")
    files = {path.resolve(): path for folder in folders for path in sorted(folder.rglob("results.json"))}
    places = ", ".join(map(str, folders))
    if not files:
        raise RunError(f"{places}: no results.json below; train.py writes one into <run.folder>/<run.name>")
    runs = [read_run(path, base) for path in files.values()]
    collection = collect(runs)
    if collection is None:
        cut = sum(run.is_cut for run in runs)
        so_far = f" ({cut} as far as train.last_step asks: without it they continue)" if cut else ""
        raise RunError(
            f"{places}: none of {len(files)} runs is finished{so_far}; the command that started one resumes "
            "it"
        )
    return collection


def read_run(path: Path, base: Path | None) -> RecordedRun:
    """Return a run whose metrics can be used; RunError for anything that train.py would not have written."""
    results = read_results(path) or {}
    lacking = [key for key in WANTED_KEYS if key not in results]
    if lacking:
        raise RunError(f"{path}: holds no {', '.join(lacking)}, so it is not of train.py; move it away")
    place = str(path.parent) if base is None else os.path.relpath(path.parent, base)
    run = RecordedRun(path.parent, results, place)
    try:
        for view in (run, *scored_otherwise(run)):
            _ = (
                view.setting,
                view.seed,
                view.steps,
                view.results["steps"] and (view.class_names, view.history),
            )
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise RunError(
            f"{path}: not as train.py writes it ({type(error).__name__}: {error}); score the run again or "
            "move it away"
        ) from error
    return run


# ------------------------------------------------------------------------------------------------- assembling


def assemble(
    runs: Collection, tables: Iterable[str], num_images: int = 0, with_figures: bool = True
) -> Report:
    """Return the report with the tables of these names, and so many test images
    with what the networks see in them.
    """
    made = [SECTIONS[table](runs) for table in tables]
    sections = [section for section in made if section.tables or section.notes]
    if with_figures:
        from study import figures  # matplotlib takes a second to import

        for section in sections:
            section.images = figures.images(section.name, runs)
    if num_images:
        sections.append(
            Section("pictures", "What the networks see", [], images=[figures.predictions(runs, num_images)])
        )
    lists = {
        "Missing": missing(made),
        "Unfinished": [unfinished_line(run) for run in runs.unfinished if not run.is_cut],
        "Done as far as asked": [unfinished_line(run) for run in runs.unfinished if run.is_cut],
    }
    facts = describe(runs)
    without = [section.title for section in made if section not in sections and section.missing]
    if without:
        facts.append(f"Left out, for nothing of them has run: {'; '.join(without)}.")
    if not num_images:
        facts.append("Images of what the networks see were not asked for (--pictures N).")
    return Report(
        facts,
        warnings(runs),
        sections,
        {title: lines for title, lines in lists.items() if lines or title == "Missing"},
        table_of_runs(runs),
    )


def table_of_runs(runs: Collection) -> Table:
    """Return a row for each run that is in a table, and the order of its classes where there are several."""
    listed = [run for setting in found(runs) for _, run in sorted(runs.cells[setting].items())]
    listed += [run for others in runs.orders.values() for run in others.runs]
    rows = []
    for run in listed:
        order = [order_of(run)] if runs.orders else []
        cells = [name(runs, run.setting), str(run.seed), *order, run.place]
        rows.append(Row(cells, family(run.setting), run.seed))
    header = ["setting", "seed", *(["order"] if runs.orders else []), "folder"]
    return Table("Every run of the tables", header, rows)


def describe(runs: Collection) -> list[str]:
    """Return what all runs of a report have in common, as sentences."""
    config = runs.reference.config
    data, train = config["data"], config["train"]
    protocol = data["protocol"] or f"own steps ({len(runs.steps)})"
    protocol += "" if data["order"] is None else f", order {order_name(data['order'])}"
    facts = [
        f"{data['dataset']} {protocol} {data['mode']}, {config['model']['body']}, crop {data['crop']}, "
        f"recipe {recipe_of(config) or 'of its own'}, "
        f"{train['epochs']} + {train['epochs_later']} epochs, batch {train['batch_size']}: "
        f"{len(runs.runs)} finished runs, seeds: {', '.join(map(str, runs.seeds(runs.cells)))}."
    ]
    for key, word in {"commit": "Commits", "device": "Devices", "torch": "PyTorch"}.items():
        values = sorted({str(run.results.get("environment", {}).get(key)) for run in runs.runs})
        facts[0] += f" {word}: {', '.join(values)}."
    if share_step_0([run for run in runs.runs if run.setting.method != "joint"]):
        facts.append("All seeds go out from one step 0: the deviations are those of the later steps alone.")
    return facts


def warnings(runs: Collection) -> list[str]:
    """Return which runs are left out of every table, and why."""
    lines = [
        f"{run.place} is left out of every table: it differs from {runs.reference.place} in "
        f"{by_kind(differences)}. Report on it by itself."
        for run, differences in runs.foreign
    ]
    return lines + [
        f"{run.place} is left out of every table: {kept.place} has the same setting and seed "
        f"({name(runs, run.setting)}, seed {run.seed})."
        for run, kept in runs.repeated
    ]


def missing(sections: Iterable[Section]) -> list[str]:
    """Return what tables want and no finished run provides, each once, with the tables that want it."""
    wanted_by: dict[str, list[str]] = {}
    for section in sections:
        for line in section.missing:
            wanted_by.setdefault(line, []).append(section.title.split(":")[0])
    return [f"{line} ({', '.join(titles)})" for line, titles in wanted_by.items()]


def unfinished_line(run: RecordedRun) -> str:
    """Return how far a run is that no table counts."""
    last = run.config["train"]["last_step"]
    why = f", all that train.last_step={last} asks for" if run.is_cut else ""
    return f"{run.place}: {steps_done(run.results['steps'])} of {len(run.steps)} steps{why}"


def write(report: Report, folder: Path, formats: Iterable[str]) -> list[Path]:
    """Write the report in these formats, with the figures that Markdown links to, and return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {FORMATS[f][0]: FORMATS[f][1](report).encode() for f in formats}
    if "markdown" in formats:
        images = [image for section in report.sections for image in section.images if image.kind == "svg+xml"]
        files |= {f"figures/{image.name}.svg": image.content for image in images}
    for place, content in files.items():
        (folder / place).parent.mkdir(exist_ok=True)
        write_atomically(folder / place, content)
    return [folder / place for place in files]


# -------------------------------------------------------------------------------------- Markdown with markers


def renew(path: Path, check: bool) -> int:
    """Write the tables between the markers of a Markdown file anew; with `check` only compare,
    and show the difference.

    Returns the exit code: 1 if the file is not up to date and stays so.
    """
    text = path.read_text(encoding="utf-8")
    if len(OPENING.findall(text)) != len(MARKER.findall(text)):
        raise RunError(
            f"{path}: a marker is not complete; it is a line <!-- results:<name> <folder> --> and a line "
            "<!-- /results -->"
        )
    if not MARKER.search(text):
        raise RunError(
            f"{path}: nothing to renew; put the lines <!-- results:table1 <folder> --> and <!-- /results --> "
            "into it"
        )
    fresh = MARKER.sub(lambda match: renewed(match, path), text)
    if fresh == text:
        print(f"{path}: up to date")
        return 0
    if not check:
        write_atomically(path, fresh.encode())
        print(f"{path}: renewed")
        return 0
    lines = difflib.unified_diff(
        text.splitlines(), fresh.splitlines(), str(path), "from the results", lineterm="", n=1
    )
    print("\n".join(lines))
    print(f"{path}: not up to date; run python -m scripts.report --readme {path}", file=sys.stderr)
    return 1


def renewed(match: re.Match, path: Path) -> str:
    """Return the marker, the table that it names as it is today, and the marker that ends it."""
    table, folder = current_name(match["name"]), match["folder"]
    sections = SECTIONS | IN_DOCUMENTS
    known = [*sections, "missing"]
    if table not in known:
        raise RunError(f"{path}: results:{not_one_of(table, known)}")
    runs = read_runs([path.parent / folder], base=path.parent)
    if table == "missing":
        lines = missing(make(runs) for make in SECTIONS.values()) + [
            unfinished_line(run) for run in runs.unfinished
        ]
        body = "\n".join(f"- {text.markdown(line)}" for line in lines or ["nothing"])
    else:
        body = layouts.markdown_section(sections[table](runs)) or "Nothing of this has run."
    loud = [f"> **Warning.** {text.markdown(line)}" for line in warnings(runs)]
    return "\n\n".join([f"<!-- results:{match['name']} {folder} -->", *loud, body, "<!-- /results -->"])
