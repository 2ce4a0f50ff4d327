"""Is a data set complete? Images per list, mask values with their names and shares, missing and broken files,
steps.

    python -m scripts.check_data /data/VOC2012
    python -m scripts.check_data /data/VOC2012 --full --protocols 15-1 10-1 --problems problems.txt
    python -m scripts.check_data street configs/own-data-example.yaml

With a config (overlays and key.sub=value, as train.py takes them) masks are read as it says, and its own
steps are counted.

Exit codes: 0 complete; 1 usable, but something is missing, broken or other than the official data set; 2 not
usable.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from configs.schema import Config, ConfigError
from data import DATASETS, DataError, Dataset, Sample, find_dataset, find_lists, with_meanings
from data.dataset import SHOWN_PROBLEMS, IncompleteError
from data.incremental import check_steps, images_of_steps, select_test, select_train
from data.index import notes_on, scan
from data.loaders import iterations_per_epoch
from data.meanings import unnamed_values
from data.official import IMAGES_PER_CLASS, LISTS, STEP_SIZES, is_official
from data.protocols import IGNORE_INDEX, Step, configured_steps, protocol_steps
from data.values import ValueUse, shift_warning, uses_of_values
from engine.arguments import read_config
from engine.terminal import exit_with
from tracking.tables import format_table

COMPLETE, DIFFERENT, UNUSABLE = 0, 1, 2
DEFAULT_PROTOCOLS = {"voc": ("15-1", "15-5", "19-1"), "ade": ("100-50", "100-10", "50-50"), "folder": ()}
SCREEN_WIDTH = 100


@dataclass
class CheckedList:
    """A list of images after its files were looked at."""

    name: str
    official: int | None
    is_official: bool
    missing: list[str]  # problems of lines without a pair of files
    broken: list[str]  # problems of files that cannot be used
    classes: list[frozenset[int]]  # of each image that can
    values: dict[int, ValueUse]  # of all masks that can be read
    samples: list[Sample]  # those that can be used
    notes: list[str]  # what is not read as it is stored

    @property
    def listed(self) -> int:
        return len(self.missing) + len(self.broken) + len(self.classes)


class StepSizes(NamedTuple):
    protocol: str
    mode: str  # or "test"
    here: tuple[int, ...]
    published: tuple[int, ...] | None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.check_data",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("root", type=Path, help="folder of the data set or packed file, as in data.root")
    parser.add_argument(
        "config", nargs="*", help="overlays and key.sub=value of the run that is to train on it"
    )
    parser.add_argument("--dataset", choices=DATASETS, help="what it is (default: what it looks like)")
    parser.add_argument("--protocols", nargs="+", metavar="P", help="whose steps to count, such as 15-1")
    parser.add_argument(
        "--full", action="store_true", help="decode every image, not just its first and last bytes"
    )
    parser.add_argument(
        "--problems", type=Path, metavar="FILE", help="write every problem to a file, one per line"
    )
    options = parser.parse_args(arguments)
    try:
        config = read_config(options.config) if options.config else None
    except ConfigError as error:
        parser.error("\n" + error.report())
    if config and options.dataset not in (None, config.data.dataset):
        parser.error(f"--dataset {options.dataset}: the config says data.dataset={config.data.dataset}")
    try:
        if config is None:
            dataset = recognise(options.root, options.dataset)
        else:
            dataset = find_dataset(config.data.dataset, options.root, config.data.train_list)
            dataset = with_meanings(dataset, config.data.labels, config.data.background)
    except DataError as error:
        print(f"not usable: {error}")
        return UNUSABLE
    protocols = options.protocols or DEFAULT_PROTOCOLS.get(dataset.name, ()) * (config is None)
    try:  # before the scan, which takes its time
        steps = {protocol: protocol_steps(dataset.name, protocol) for protocol in protocols}
        own_steps = steps_of(config, dataset) if config else []
    except DataError as error:
        parser.error(str(error))
    lists = check_lists(dataset, options.root, options.full, config.data.unnamed if config else "refuse")
    sizes = count_steps(dataset, lists, steps)
    if config:
        sizes += count_own_steps(config, dataset, lists, own_steps)
    problems = [problem for checked in lists.values() for problem in checked.missing + checked.broken]
    if options.problems:
        try:
            options.problems.write_text("".join(f"{problem}\n" for problem in problems), encoding="utf-8")
        except OSError as error:
            parser.error(f"--problems: {error}")
    print("\n\n".join(screen(dataset, options.root, lists, sizes, problems)) + "\n")
    empty = [name for name in (dataset.train_list, "val") if not lists[name].classes]
    if empty:
        reasons = [f"{' and '.join(empty)}: no image can be used", *value_warnings(dataset, lists, config)]
        print("not usable: " + "\n        and ".join(reasons))
        return UNUSABLE
    differences = list(find_differences(dataset, lists, sizes, config, own_steps))
    if differences:
        print("usable, but " + "\n        and ".join(differences))
        return DIFFERENT
    print("complete")
    return COMPLETE


def recognise(root: Path, name: str | None) -> Dataset:
    """Return the data set below `root`; without a name, the first kind whose folders are there."""
    if not root.expanduser().exists():
        raise DataError(f"{root} is not a folder; give the one that holds the data set")
    errors = []
    for candidate in [name] if name else DATASETS:
        try:
            return find_dataset(candidate, root)
        except DataError as error:
            errors.append(error)
    nearly = [error for error in errors if isinstance(error, IncompleteError)]
    raise DataError("\n  ".join(dict.fromkeys(map(str, nearly or errors))))


def steps_of(config: Config, dataset: Dataset) -> list[Step]:
    data = config.data
    return configured_steps(data.dataset, data.protocol, data.steps, dataset.class_names, data.order)


def check_lists(dataset: Dataset, root: Path, full: bool, unnamed: str = "refuse") -> dict[str, CheckedList]:
    """Return every list of the data set, by name; each file is looked at once, however many lists name it."""
    meanings = meanings_of(dataset)
    found = {
        name: ([sample._replace(meanings=meanings) for sample in group], problems)
        for name, (group, problems) in find_lists(dataset, root).items()
    }
    samples = list(dict.fromkeys(sample for group, _ in found.values() for sample in group))
    looked_at = scan(dataset.name, samples, dataset.num_classes, decode=full, unnamed=unnamed)
    findings = dict(zip(samples, looked_at, strict=True))

    def check(name: str, group: Sequence[Sample], missing: list[str]) -> CheckedList:
        sound = [sample for sample in group if not findings[sample].problem]
        return CheckedList(
            name,
            LISTS.get(dataset.name, {}).get(name),
            is_official(dataset.name, name, (sample.name for sample in sound)),
            missing,
            [findings[sample].problem for sample in group if findings[sample].problem],
            [findings[sample].classes for sample in sound],
            uses_of_values((sample.mask, findings[sample].pixels) for sample in group),
            sound,
            list(notes_on(sound, [findings[sample] for sample in sound], dataset.num_classes)),
        )

    return {name: check(name, *found[name]) for name in found}


def count_steps(
    dataset: Dataset, lists: dict[str, CheckedList], protocols: dict[str, list[Step]]
) -> list[StepSizes]:
    """Images of each step; with the published numbers if the list is the one they were counted on."""
    counted = []
    for protocol, steps in protocols.items():
        for mode in ("disjoint", "overlapped", "test"):
            checked = lists["val" if mode == "test" else dataset.train_list]
            choose = select_test if mode == "test" else partial(select_train, mode=mode)
            here = tuple(len(choose(checked.classes, step)) for step in steps)
            published = STEP_SIZES.get((dataset.name, checked.name, protocol, mode))
            counted.append(StepSizes(protocol, mode, here, published if checked.is_official else None))
    return counted


def meanings_of(dataset: Dataset) -> bytes | None:
    """Return what mask values mean, which all samples of a data set agree on."""
    return next((sample.meanings for sample in [*dataset.train, *dataset.test]), None)


def count_own_steps(
    config: Config, dataset: Dataset, lists: dict[str, CheckedList], steps: Sequence[Step]
) -> list[StepSizes]:
    """Images of each step as the config would train and test it."""
    name = config.data.protocol or "own"
    train = tuple(map(len, images_of_own_steps(config, lists[dataset.train_list], steps)))
    test = tuple(len(select_test(lists["val"].classes, step)) for step in steps)
    return [StepSizes(name, config.data.mode, train, None), StepSizes(name, "test", test, None)]


def images_of_own_steps(config: Config, train: CheckedList, steps: Sequence[Step]) -> list[list[int]]:
    names = [sample.name for sample in train.samples]
    return images_of_steps(train.classes, names, steps, config.data.mode, config.data.split_seed)


def step_problems(
    config: Config, dataset: Dataset, train: CheckedList, steps: Sequence[Step]
) -> Iterator[str]:
    """Why train.py would refuse the config's steps, in its own words."""
    chosen = images_of_own_steps(config, train, steps)
    try:
        check_steps(dataset.class_names, train.classes, steps, chosen, config.data.mode)
        for step, images in zip(steps, chosen, strict=True):
            iterations_per_epoch(len(images), config.train.batch_size, step.index)
    except DataError as error:
        yield str(error)


def find_differences(
    dataset: Dataset,
    lists: dict[str, CheckedList],
    sizes: list[StepSizes],
    config: Config | None = None,
    own_steps: Sequence[Step] = (),
) -> Iterator[str]:
    """Why this is not the complete data set, in words."""
    for checked in lists.values():
        if checked.missing or checked.broken:
            yield (
                f"{checked.name} has {len(checked.missing):,} missing and {len(checked.broken):,} broken; "
                "training refuses: mend the files or remove their lines"
            )
        elif checked.official and checked.listed != checked.official:
            yield f"{checked.name} has {checked.listed:,} images, the official one {checked.official:,}"
        elif checked.official and not checked.is_official:
            yield f"{checked.name} has as many images as the official one, but others"
    if dataset.name == "voc" and dataset.train_list == "train":
        yield "train_aug is not there, on which published numbers were trained"
    others = [f"{row.protocol} {row.mode}" for row in sizes if row.published not in (None, row.here)]
    if others:
        yield f"masks differ from the official ones: steps of {', '.join(others)} are not as published"
    both = {sample.image for sample in dataset.train} & {sample.image for sample in dataset.test}
    if both:
        example = min(map(str, both))
        yield f"{len(both):,} images are in {dataset.train_list} and in val, {example} for example"
    for name in (dataset.train_list, "val"):
        shown = frozenset().union(*lists[name].classes)
        absent = [dataset.class_names[c] for c in range(1, dataset.num_classes) if c not in shown]
        if absent:
            more = f" and {len(absent) - 5} more" if len(absent) > 5 else ""
            yield f"no image of {name} shows {', '.join(absent[:5])}{more}"
    yield from value_warnings(dataset, lists, config)
    if config:
        yield from step_problems(config, dataset, lists[dataset.train_list], own_steps)


def value_warnings(
    dataset: Dataset, lists: dict[str, CheckedList], config: Config | None = None
) -> Iterator[str]:
    """Mask values without a name, and signs that all of them are shifted."""
    meanings = meanings_of(dataset)
    is_void = config is not None and config.data.unnamed == "void"  # said in the notes
    for name in (dataset.train_list, "val"):
        values = lists[name].values
        for value in unnamed_values(values, dataset.num_classes, meanings)[:5] if not is_void else ():
            yield (
                f"value {value} has no name, in {values[value].masks:,} masks of {name} "
                f"({values[value].example} for example): name it (classes.txt, or "
                "data.labels), correct the masks, or train with data.unnamed=void"
            )
    train = lists[dataset.train_list]
    if config is not None and config.data.labels is not None:
        return  # somebody has said what they mean
    shift = shift_warning(dataset.class_names, train.values, [sample.mask for sample in train.samples])
    if shift:
        yield shift


# ------------------------------------------------------------------------------------------------- the screen


def screen(
    dataset: Dataset,
    root: Path,
    lists: dict[str, CheckedList],
    sizes: list[StepSizes],
    problems: list[str],
) -> Iterator[str]:
    """Yield the parts of the report, one after the other."""
    yield f"{root}: {dataset.name}, {dataset.num_classes - 1} classes, trains on {dataset.train_list}"
    yield list_table(lists)
    train = lists[dataset.train_list]
    yield value_table(dataset, train) if dataset.name == "folder" else value_columns(dataset, train)
    if sizes:
        yield step_table(sizes)
    notes = [f"{checked.name}: {note}" for checked in lists.values() for note in checked.notes]
    if notes:
        yield "\n".join(notes)
    if problems:
        shown = problems[:SHOWN_PROBLEMS]
        if len(problems) > len(shown):
            shown.append(f"... and {len(problems) - len(shown):,} more; --problems FILE writes them all")
        yield "\n".join(shown)


def list_table(lists: dict[str, CheckedList]) -> str:
    rows = [
        [
            checked.name,
            "-" if checked.official is None else f"{checked.official:,}",
            *(f"{number:,}" for number in (checked.listed, len(checked.missing), len(checked.broken))),
        ]
        for checked in lists.values()
    ]
    return format_table(["list", "official", "listed", "missing", "broken"], rows)


def value_names(dataset: Dataset, train: CheckedList) -> dict[int, str]:
    """Return every mask value that means or holds something, and what it is read as."""
    meanings = meanings_of(dataset) or bytes(range(256))
    known = {**dict(enumerate(dataset.class_names)), IGNORE_INDEX: "(void)"}
    listed = {value for value, c in enumerate(meanings) if c < dataset.num_classes}
    return {v: known.get(meanings[v], "(no name)") for v in sorted(listed | train.values.keys())}


def share_of(value: int, train: CheckedList) -> str:
    """Of all pixels."""
    total = sum(use.pixels for use in train.values.values())
    return f"{100 * train.values[value].pixels / total:.2f}%" if value in train.values else "-"


def value_table(dataset: Dataset, train: CheckedList) -> str:
    """Return what each mask value is read as, how much of it there is, and a file to look at."""
    rows = []
    for value, name in value_names(dataset, train).items():
        use = train.values.get(value)
        where = [f"{use.masks:,}", str(use.example)] if use else ["0", "-"]
        rows.append([f"{value:>3}  {name}", share_of(value, train), *where])
    title = f"mask values of {train.name} and what they are read as"
    return f"{title}\n{format_table(['value', 'pixels', 'images', 'for example'], rows)}"


def value_columns(dataset: Dataset, train: CheckedList) -> str:
    """Return the same without files for data sets that have many classes,
    in as many columns as fit the screen, read downwards.
    """
    title = f"mask values of {train.name}: share of the pixels, images"
    official = IMAGES_PER_CLASS.get((dataset.name, train.name))
    if official:
        title += " / in the official one"
    names = value_names(dataset, train)
    width = max(map(len, names.values()))
    cells = []
    for value, name in names.items():
        count = train.values[value].masks if value in train.values else 0
        cell = f"{value:>3} {name:{width}} {share_of(value, train):>7} {count:>6,}"
        if official:
            is_class = 0 < value < dataset.num_classes
            cell += f" / {official[value - 1]:>5,}" if is_class else " " * 8
        cells.append(cell)
    columns = min(len(cells), max(1, (SCREEN_WIDTH + 3) // (len(cells[0]) + 3)))
    height = -(-len(cells) // columns)
    return "\n".join([title, *("   ".join(cells[row::height]).rstrip() for row in range(height))])


def step_table(sizes: list[StepSizes]) -> str:
    lines = ["images per step"]
    for protocol, mode, here, published in sizes:
        line = f"{protocol:7} {mode:10} {_row(here)}"
        if published:
            line += "   as published" if here == published else f"   published: {_row(published)}"
        lines.append(line)
    return "\n".join(lines)


def _row(sizes: Sequence[int]) -> str:
    return " ".join(f"{size:>6,}" for size in sizes)


if __name__ == "__main__":
    exit_with(main)
