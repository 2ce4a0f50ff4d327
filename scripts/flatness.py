"""How flat the loss is at a model of a run, and whether a step crossed a barrier for what was learned before it.

    python -m scripts.flatness runs/mib-altersgd --step 5 --norm-mode both --json flatness.json --picture flatness.png
    python -m scripts.flatness runs/mib --on old --pictures 64 --top 5 --probes 30
    python -m scripts.flatness runs/mib_seed1 runs/mib_seed2 --beside          # for the table of scripts.report

Gradient norm, largest eigenvalues and trace of the Hessian, sharpness, the loss along random directions and along the line
from the model before the step to the one after it. docs/flatness.md says what each is and what it can tell.
Exit codes: 0 finished, 2 what was asked for cannot be measured.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from configs.schema import Config, ConfigError, load_config
from data import DataError, Dataset, load_dataset
from data.files import write_atomically
from data.incremental import StepDataset, select_test, select_train, test_table, train_table
from data.index import build_index
from data.protocols import Step, configured_steps
from data.transforms import normalise, test_transform, train_transform
from engine import checkpoint
from engine.ranks import be_deterministic
from engine.run_folder import RunError, RunFolder
from engine.step import load_method_state
from methods import Method, make_method, make_phase
from methods.importance import ImportanceMethod
from metrics import flatness, landscape
from models.segmenter import Output, Segmenter
from study.collection import FLATNESS_FILE
from tracking.tables import format_table

PLACES = [i / 20 for i in range(21)]  # along the line from the model before the step to the one after it
SPAN = 0.5  # how far to go along a random direction, in lengths of the filters
AROUND = [SPAN * (i - 10) / 10 for i in range(21)]
PLANE = [SPAN * (i - 6) / 6 for i in range(13)]
TITLES = {"seg": "l_seg", "objective": "l_seg + lambda R"}


def main(arguments: list[str]) -> int:
    parser = make_parser()
    options = parser.parse_args(arguments)
    check(parser, options)
    failed = False
    for folder in options.runs:
        try:
            report(folder, options)
        except (ConfigError, RunError, DataError, checkpoint.CheckpointError) as error:
            failed = True
            print(f"error: {folder}: {error}", file=sys.stderr)
    return 2 if failed else 0


def report(folder: Path, options: argparse.Namespace) -> None:
    result = measure(folder, options)
    print(describe(result))
    for path in (options.json, folder / FLATNESS_FILE if options.beside else None):
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, (json.dumps(result, indent=1) + "\n").encode())
    if options.picture:
        from scripts.landscape_picture import draw  # matplotlib takes a while to load

        draw(options.picture, result)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="run", help="run folder (holds config.yaml and step_<i>.pt)")
    add("--step", type=int, help="the model after this step (the last one saved)")
    add("--pictures", type=int, default=16, help="how many are averaged over (16)")
    add("--batch", type=int, default=4, help="pictures at a time; part of the figure in train mode (4)")
    add(
        "--on", choices=("train", "old", "test"), default="train", help="pictures of the step | of all before"
    )
    add("--norm-mode", choices=("eval", "train", "both"), default="eval", help="running | batch statistics")
    add("--of", choices=("seg", "objective", "both"), default="both", help="l_seg | l_seg + lambda R")
    add("--top", type=int, default=3, help="eigenvalues; 0 leaves them out (3)")
    add("--probes", type=int, default=10, help="for the trace, at least 2; 0 leaves it out (10)")
    add("--epsilon", type=float, default=1e-3, help="half the side of the box of the sharpness (0.001)")
    add("--json", type=Path, metavar="FILE", help="write every figure here")
    add("--beside", action="store_true", help=f"write every figure to {FLATNESS_FILE} in the run's folder")
    add("--picture", type=Path, metavar="FILE", help="draw the landscape here (.png)")
    add("--seed", type=int, default=0, help="of pictures, crops, probes and directions (0)")
    return parser


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


# -------------------------------------------------------------------------------------------------- what is measured


@dataclass
class Batch:
    images: Tensor  # uint8
    labels: Tensor
    segmentation_loss: Callable[[Tensor, Tensor], Tensor]  # l_seg of the step that made the labels


@dataclass
class Subject:
    """The model after a step and its objective, as training had it."""

    config: Config
    steps: list[Step]
    step: Step
    model: Segmenter
    before: Segmenter | None  # the model the step began with
    method: Method
    trained_norm: str

    def __post_init__(self) -> None:
        method, phase = self.config.method, self.config.phase.model_dump()
        # An epoch of any length: the weights of normal training do not depend on it.
        self.keep = make_phase(step=self.step.index, strength=method.strength, epoch=1, **phase).lambda_a
        self.parameters: list[Tensor] = [p for p in self.model.parameters() if p.requires_grad]

    @property
    def terms(self) -> dict[str, flatness.Loss]:
        with_retention = self.before is not None and (self.method.needs_teacher or anchors(self.method))
        terms: dict[str, flatness.Loss] = {"seg": self.segmentation}
        return terms | {"objective": self.objective} if with_retention else terms

    def inputs(self, images: Tensor) -> Tensor:
        return normalise(images.to(self.parameters[0].device), self.parameters[0].dtype)

    def segmentation(self, batch: Batch) -> Tensor:
        return batch.segmentation_loss(self.model(self.inputs(batch.images)).logits, batch.labels)

    def objective(self, batch: Batch) -> Tensor:
        images = self.inputs(batch.images)
        output = self.model(images)
        retention = penalty(self.method, self.model)
        if self.method.needs_teacher and self.before is not None:
            with torch.no_grad():
                target = self.before(images)
            retention = retention + sum(self.method.retention_losses(output, target).values())
        return batch.segmentation_loss(output.logits, batch.labels) + self.keep * retention

    def segmentation_and_among_old(self, batch: Batch) -> Tensor:
        """l_seg, and l_seg as if the step's new classes were not there."""
        logits = self.model(self.inputs(batch.images)).logits
        choices = logits, logits[:, : self.step.num_old]
        return torch.stack([batch.segmentation_loss(scores, batch.labels) for scores in choices])


def anchors(method: Method) -> dict[str, Tensor]:
    return method.anchor if isinstance(method, ImportanceMethod) else {}


def penalty(method: Method, model: nn.Module) -> Tensor | float:
    """R of the importance methods, which in training add its gradient in closed form: sum omega (theta - anchor)^2."""
    if not isinstance(method, ImportanceMethod):
        return 0.0
    parameters = dict(model.named_parameters())
    return sum(
        (method.omega[name] * (parameters[name] - anchor) ** 2).sum()
        for name, anchor in method.anchor.items()
    )


def read_subject(folder: RunFolder, wanted: int | None, dataset: Dataset, config: Config) -> Subject:
    steps = configured_steps(
        config.data.dataset, config.data.protocol, config.data.steps, dataset.class_names
    )
    step = steps[choose_step(folder, wanted, len(steps))]
    device = torch.device("cuda" if config.train.device != "cpu" and torch.cuda.is_available() else "cpu")
    model, state = load_model(folder.step_checkpoint(step.index), step, device)
    method, before, start = make_plain_method(config), None, model
    if step.index > 0:  # as in train.begin_step
        earlier = steps[step.index - 1]
        start, left = load_model(folder.step_checkpoint(earlier.index), earlier, device)
        load_method_state(method, left["methods"], step)
        before = start.frozen_copy()
        before.returns_stages = model.returns_stages = method.needs_stages
    method.begin_step(start, step)
    return Subject(config, steps, step, model, before, method, state["network"]["arguments"]["norm"])


def choose_step(folder: RunFolder, wanted: int | None, count: int) -> int:
    saved = [i for i in range(count) if folder.step_checkpoint(i).exists()]
    if not saved:
        raise RunError(f"{folder.path}: no step checkpoint (step_<i>.pt); train a step first")
    if wanted is not None and wanted not in saved:
        there = ", ".join(map(str, saved))
        raise RunError(f"--step {wanted}: {folder.path} has no such checkpoint, only of the steps {there}")
    return saved[-1] if wanted is None else wanted


def load_model(path: Path, step: Step, device: torch.device) -> tuple[Segmenter, dict]:
    """The model with the norm that can be differentiated twice, whichever it was trained with: their states are equal."""
    model, state = checkpoint.load_segmenter(path, device, norm="abn")
    classes = tuple(state["class_ids"])
    if classes != step.seen:
        raise checkpoint.CheckpointError(
            f"{path}: knows the classes {list(classes)}, but the run's config.yaml wants {list(step.seen)}"
        )
    return model, state


def make_plain_method(config: Config) -> Method:
    return make_method(config.method.name, config.method.cross_entropy, config.method.options, "plain")


# ---------------------------------------------------------------------------------------------------------- pictures


class Pictures:
    """Batches of the same size, each from one step, chosen by the seed."""

    def __init__(self, subject: Subject, dataset: Dataset, options: argparse.Namespace):
        self.subject, self.dataset, self.options = subject, dataset, options
        self.data = subject.config.data
        self.train_classes = self._classes(dataset.train)

    def of(self, kind: str) -> list[Batch]:
        step = self.subject.step
        if kind == "test":
            return self._load([self._test()])
        return self._load([self._train(s) for s in ([step] if kind == "train" else self._earlier())])

    def _earlier(self) -> list[Step]:
        step = self.subject.step
        if step.index == 0:
            raise RunError("step 0 has no old pictures and no line: nothing was learned before it")
        return self.subject.steps[: step.index]

    def _train(self, step: Step) -> tuple[StepDataset, Method]:
        """The pictures of a step as it was trained on them, crops and labels and l_seg."""
        data, subject = self.data, self.subject
        chosen = select_train(self.train_classes, step, data.mode)
        pictures = [self.dataset.train[i] for i in chosen]
        transform = train_transform(data.crop, data.scale, data.flip)
        method = subject.method
        if step != subject.step:
            method = make_plain_method(subject.config)
            method.begin_step(subject.model, step)
        table = train_table(step, data.mode, data.void)
        dataset = StepDataset(pictures, table, transform, seed=self.options.seed)
        if method is subject.method and subject.before is not None and method.surveys:
            method.survey(self._teacher_outputs(dataset))
        return dataset, method

    def _teacher_outputs(self, dataset: StepDataset) -> Iterator[tuple[Tensor, Output]]:
        """As train.py hands them to a method that surveys."""
        assert self.subject.before is not None
        for part in torch.arange(len(dataset)).split(self.options.batch):
            images, labels = self._read(dataset, part.tolist())
            with torch.no_grad():
                yield labels, self.subject.before(self.subject.inputs(images))

    def _test(self) -> tuple[StepDataset, Method]:
        """Test pictures with all labels seen so far: a method that never began a step takes every label for what it says."""
        data, step = self.data, self.subject.step
        chosen = select_test(self._classes(self.dataset.test), step)
        table = test_table(step, data.unseen, self.dataset.void_labels)
        pictures = [self.dataset.test[i] for i in chosen]
        return StepDataset(pictures, table, test_transform(data.crop)), make_plain_method(self.subject.config)

    def _classes(self, pictures: Sequence) -> list[frozenset[int]]:
        return build_index(self.dataset.name, pictures, self.dataset.num_classes, cache=self.data.cache)

    def _load(self, groups: list[tuple[StepDataset, Method]]) -> list[Batch]:
        options = self.options
        size = min(options.batch, options.pictures, *(len(data) for data, _ in groups))
        if size == 0:
            raise DataError(f"--on {options.on}: no such picture shows a class of the step")
        if size == 1 and options.norm_mode != "eval":
            raise RunError("--norm-mode train: a batch of one picture has no statistics; raise --batch")
        generator = torch.Generator().manual_seed(options.seed)
        orders = [torch.randperm(len(data), generator=generator).split(size) for data, _ in groups]
        whole = [(g, part) for g, order in enumerate(orders) for part in order if len(part) == size]
        chosen = torch.randperm(len(whole), generator=generator)[: options.pictures // size]
        return [self._batch(groups[g], part.tolist()) for g, part in (whole[i] for i in chosen)]

    def _batch(self, group: tuple[StepDataset, Method], positions: list[int]) -> Batch:
        (data, method), before = group, self.subject.before
        images, labels = self._read(data, positions)
        if method is self.subject.method and before is not None and method.needs_teacher:
            with torch.no_grad():
                labels = method.targets(labels, before(self.subject.inputs(images)))
        return Batch(images, labels, method.segmentation_loss)

    def _read(self, data: StepDataset, positions: list[int]) -> tuple[Tensor, Tensor]:
        images, labels = zip(*(data[0, position] for position in positions), strict=True)
        return torch.stack(images), torch.stack(labels).long().to(self.subject.parameters[0].device)


# ---------------------------------------------------------------------------------------------------------- measures


def measure(folder: Path, options: argparse.Namespace) -> dict:
    be_deterministic()
    config = load_config([folder / "config.yaml"])
    dataset = load_dataset(config.data.dataset, config.data.root, config.data.train_list)
    subject = read_subject(RunFolder(folder), options.step, dataset, config)
    pictures = Pictures(subject, dataset, options)
    batches = pictures.of(options.on)
    old = pictures.of("old") if subject.before is not None else []
    modes = ("eval", "train") if options.norm_mode == "both" else (options.norm_mode,)
    if options.of not in (*subject.terms, "both"):
        raise RunError(
            f"--of objective: {config.method.name} has no retention term in step {subject.step.index}"
        )
    result: dict[str, Any] = {
        "run": str(folder),
        "step": subject.step.index,
        "method": config.method.name,
        "phase": config.phase.name,
        "lambda": subject.keep,
        "on": options.on,
        "pictures": sum(len(batch.images) for batch in batches),
        "old_pictures": sum(len(batch.images) for batch in old),
        "batch": len(batches[0].images),
        "seed": options.seed,
        "top": options.top,
        "epsilon": options.epsilon,
        "norm": {"trained": subject.trained_norm, "measured": "abn"},
        "parameters": sum(p.numel() for p in subject.parameters),
        "modes": {},
    }
    for mode in modes:
        with flatness.norm_mode(subject.model, mode):
            result["modes"][mode] = measure_in_mode(subject, batches, old, options)
    return result


def measure_in_mode(
    subject: Subject, batches: list[Batch], old: list[Batch], options: argparse.Namespace
) -> dict:
    figures = {
        name: measure_loss(loss, batches, subject.parameters, options)
        for name, loss in subject.terms.items()
        if options.of in (name, "both")
    }
    figures["around"] = around(subject, batches, options.seed)
    if options.picture:
        figures["plane"] = plane(subject, batches, options.seed)
    if old:
        figures["line"] = line(subject, old)
    return figures


def measure_loss(
    loss: flatness.Loss, batches: list[Batch], parameters: list[Tensor], options: argparse.Namespace
) -> dict:
    value = flatness.mean_loss(loss, batches).item()
    if not math.isfinite(value):
        raise RunError(f"the loss of this model is {value}: there is nothing to measure")
    whole, single = flatness.gradient_norms(loss, batches, parameters)
    figures: dict[str, Any] = {"loss": value, "gradient_norm2": whole, "gradient_norm2_of_a_batch": single}
    if options.top:
        figures["eigenvalues"] = flatness.top_eigenvalues(
            loss, batches, parameters, options.top, seed=options.seed
        )
    if options.probes:
        mean, error = flatness.hessian_trace(loss, batches, parameters, options.probes, seed=options.seed)
        figures["trace"] = {"mean": mean, "standard_error": error}
    return figures | {"sharpness": flatness.sharpness(loss, batches, parameters, options.epsilon)}


def directions(subject: Subject, seed: int, count: int) -> list[list[Tensor]]:
    # Seeds far apart: those of neighbouring runs must not share a direction.
    return [
        landscape.filter_normalised_direction(subject.parameters, seed + 1_000_003 * number)
        for number in range(count)
    ]


def around(subject: Subject, batches: list[Batch], seed: int) -> dict:
    """l_seg along one random direction."""
    places = [(a,) for a in AROUND]
    losses = landscape.loss_around(
        subject.segmentation, batches, subject.parameters, directions(subject, seed, 1), places
    )
    return {"places": AROUND, "seg": losses.tolist()}


def plane(subject: Subject, batches: list[Batch], seed: int) -> dict:
    """l_seg over the plane of two random directions, the first of them that of `around`."""
    places = [(a, b) for b in PLANE for a in PLANE]
    losses = landscape.loss_around(
        subject.segmentation, batches, subject.parameters, directions(subject, seed, 2), places
    )
    return {"places": PLANE, "seg": losses.view(len(PLANE), len(PLANE)).tolist()}


def line(subject: Subject, old: list[Batch]) -> dict:
    """l_seg of old pictures on the way from the model before the step to the one after it.

    What both models have is interpolated, running statistics too; the new classifier is that of the new model throughout.
    """
    assert subject.before is not None, "step 0 has no line"
    start, tensors = subject.before.state_dict(), subject.model.state_dict()
    shared = [tensors[name] for name in start]
    end = [tensor.clone() for tensor in shared]
    losses = landscape.loss_between(
        subject.segmentation_and_among_old, old, shared, list(start.values()), end, PLACES
    )
    figures: dict[str, Any] = {"places": PLACES}
    for name, values in zip(("seg", "among_old"), losses.T.tolist(), strict=True):
        figures[name] = {"losses": values, "barrier": landscape.barrier(values, PLACES)}
    return figures


# --------------------------------------------------------------------------------------------------------- reporting


def describe(result: dict) -> str:
    norm, modes = result["norm"], result["modes"]
    trained = "" if norm["trained"] == norm["measured"] else f" (trained with {norm['trained']})"
    texts = [
        f"{result['run']}: {result['method']} / {result['phase']} after step {result['step']}, "
        f"{result['parameters']:,} parameters, lambda {result['lambda']:g}\n"
        f"{result['pictures']} pictures ({result['on']}) in batches of {result['batch']}, seed {result['seed']}, "
        f"norm {norm['measured']}{trained}; eval = running statistics, train = those of the batch",
        figures_table(result),
    ]
    if all("line" in figures for figures in modes.values()):
        texts.append(line_table(result))
    else:
        texts.append("no line: nothing was learned before step 0")
    return "\n\n".join(texts)


def figures_table(result: dict) -> str:
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
    if all("trace" in figures for figures in columns.values()):
        rows["trace"] = lambda f: f"{number(f['trace']['mean'])} +- {f['trace']['standard_error']:.2g}"
    rows["sharpness, %"] = lambda f: number(f["sharpness"])
    cells = [[name, *(show(figures) for figures in columns.values())] for name, show in rows.items()]
    return format_table(["", *columns], cells)


def eigenvalue(index: int, figures: dict) -> str:
    return number(*figures["eigenvalues"][index : index + 1])


def line_table(result: dict) -> str:
    step = result["step"]
    header = [
        f"l_seg on {result['old_pictures']} old pictures",
        f"step {step - 1}",
        f"step {step}",
        "barrier",
    ]
    rows = [
        [f"{mode}: {name}", number(line["losses"][0]), number(line["losses"][-1]), number(line["barrier"])]
        for mode, figures in result["modes"].items()
        for name, line in (
            ("all classes", figures["line"]["seg"]),
            ("old classes only", figures["line"]["among_old"]),
        )
    ]
    return format_table(header, rows)


def number(value: float | None = None) -> str:
    return "-" if value is None else f"{value:.4g}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
