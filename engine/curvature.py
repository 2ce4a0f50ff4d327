"""How flat the loss is at a model of a run, and whether a step crossed a barrier for
what was learned before it.

Gradient norm, largest eigenvalues and trace of the Hessian, sharpness, the loss along random directions and
along the line from the model before the step to the one after it. docs/flatness.md says what each is and what
it can tell. Training itself can be measured by `engine.probe`.
"""

import math
from pathlib import Path
from typing import Any

from torch import Tensor

from configs.schema import load_config
from data import configured_dataset
from engine.curvature_data import Batches, CurvatureBatch, Options, Subject, read_subject
from engine.ranks import be_deterministic
from engine.run_folder import RunError, RunFolder
from metrics import flatness, landscape

PLACES = [i / 20 for i in range(21)]  # along the line from the model before the step to the one after it
SPAN = 0.5  # how far to go along a random direction, in lengths of the filters
AROUND = [SPAN * (i - 10) / 10 for i in range(21)]
PLANE = [SPAN * (i - 6) / 6 for i in range(13)]


def measure(folder: Path, options: Options) -> dict[str, Any]:
    """Return every metric of one model of the run in the folder."""
    be_deterministic()
    config = load_config([folder / "config.yaml"])
    dataset = configured_dataset(config.data)
    subject = read_subject(RunFolder(folder), options.step, dataset, config)
    images = Batches(subject, dataset, options)
    batches = images.of(options.on)
    old = images.of("old") if subject.before is not None else []
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
    subject: Subject, batches: list[CurvatureBatch], old: list[CurvatureBatch], options: Options
) -> dict[str, Any]:
    """Return every metric of the model with its norms as they are now."""
    metrics = {
        name: measure_loss(loss, batches, subject.parameters, options)
        for name, loss in subject.terms.items()
        if options.of in (name, "both")
    }
    metrics["around"] = around(subject, batches, options.seed)
    if options.plane:
        metrics["plane"] = plane(subject, batches, options.seed)
    if old:
        metrics["line"] = line(subject, old)
    return metrics


def measure_loss(
    loss: flatness.Loss, batches: list[CurvatureBatch], parameters: list[Tensor], options: Options
) -> dict[str, Any]:
    """Return value, gradient norms, curvature and sharpness of one loss."""
    value = flatness.mean_loss(loss, batches).item()
    if not math.isfinite(value):
        raise RunError(f"the loss of this model is {value}: there is nothing to measure")
    whole, single = flatness.gradient_norms(loss, batches, parameters)
    metrics: dict[str, Any] = {"loss": value, "gradient_norm2": whole, "gradient_norm2_of_a_batch": single}
    if options.top:
        metrics["eigenvalues"] = flatness.top_eigenvalues(
            loss, batches, parameters, options.top, seed=options.seed
        )
    if options.probes:
        mean, error = flatness.hessian_trace(loss, batches, parameters, options.probes, seed=options.seed)
        metrics["trace"] = {"mean": mean, "standard_error": error}
    return metrics | {"sharpness": flatness.sharpness(loss, batches, parameters, options.epsilon)}


def directions(subject: Subject, seed: int, count: int) -> list[list[Tensor]]:
    """Return random directions, each filter as long as the model's."""
    # Seeds far apart: those of neighbouring runs must not share a direction.
    return [
        landscape.filter_normalised_direction(subject.parameters, seed + 1_000_003 * number)
        for number in range(count)
    ]


def around(subject: Subject, batches: list[CurvatureBatch], seed: int) -> dict[str, Any]:
    """Return l_seg along one random direction."""
    places = [(a,) for a in AROUND]
    losses = landscape.loss_around(
        subject.segmentation, batches, subject.parameters, directions(subject, seed, 1), places
    )
    return {"places": AROUND, "seg": losses.tolist()}


def plane(subject: Subject, batches: list[CurvatureBatch], seed: int) -> dict[str, Any]:
    """Return l_seg over the plane of two random directions, the first of them that of `around`."""
    places = [(a, b) for b in PLANE for a in PLANE]
    losses = landscape.loss_around(
        subject.segmentation, batches, subject.parameters, directions(subject, seed, 2), places
    )
    return {"places": PLANE, "seg": losses.view(len(PLANE), len(PLANE)).tolist()}


def line(subject: Subject, old: list[CurvatureBatch]) -> dict[str, Any]:
    """Return l_seg of old images on the way from the model before the step to the one after it.

    What both models have is interpolated, running statistics too; the new classifier is that of the new model
    throughout.
    """
    assert subject.before is not None, "step 0 has no line"
    start, tensors = subject.before.state_dict(), subject.model.state_dict()
    shared = [tensors[name] for name in start]
    end = [tensor.clone() for tensor in shared]
    losses = landscape.loss_between(
        subject.segmentation_and_among_old, old, shared, list(start.values()), end, PLACES
    )
    metrics: dict[str, Any] = {"places": PLACES}
    for name, values in zip(("seg", "among_old"), losses.T.tolist(), strict=True):
        metrics[name] = {"losses": values, "barrier": landscape.barrier(values, PLACES)}
    return metrics
