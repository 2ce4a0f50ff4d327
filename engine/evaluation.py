"""Score the model of a step, and record its metrics."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor
from tqdm import tqdm

from data.incremental import select_test, test_table
from data.loaders import StepDataset, test_loader
from data.protocols import Step
from data.transforms import test_transform
from engine.inference import predict
from engine.results import metrics_by_step, step_result
from engine.run import Run
from engine.scores import put, same_metrics
from engine.step import load_step
from metrics.confusion import ConfusionMatrix
from metrics.continual import group_names
from models.segmenter import Segmenter
from tracking.progress import bar_place
from tracking.shown import images_to_show
from tracking.tables import percent, step_table
from tracking.tracker import Recorded, recorded_in


def evaluate(run: Run, step: Step, model: Segmenter) -> ConfusionMatrix:
    """Return the confusion matrix over every test image that shows a class seen so far."""
    config, ranks = run.config.data, run.ranks
    data = test_dataset(run, step, select_test(run.test_classes, step))
    loader = test_loader(
        data,
        batch_size=run.config.train.evaluate_batch,
        rank=ranks.rank,
        world=ranks.world,
        workers=config.workers,
        pin=ranks.device.type == "cuda",
    )
    matrix = ConfusionMatrix(step.num_classes, ranks.device)
    model = run.place.arrange(model).eval()
    doing = f"scoring step {step.index}"
    for images, labels in run.until_stopped(
        tqdm(loader, doing, disable=not ranks.is_main, **bar_place()), f"{doing}, which is trained and saved"
    ):
        matrix.update(labels.to(ranks.device, non_blocking=True), guess(run, model, images))
    if ranks.is_main:
        show_images(run, step, model)
    matrix.sum_over_ranks()
    return matrix


def test_dataset(run: Run, step: Step, positions: Sequence[int]) -> StepDataset:
    """Return test images, by their positions in the data set, as a step is scored on them."""
    config = run.config.data
    return StepDataset(
        [run.dataset.test[i] for i in positions],
        test_table(step, config.unseen, run.dataset.void_labels, run.dataset.num_classes),
        test_transform(config.evaluate_size if config.evaluate == "crop" else None),
    )


def guess(run: Run, model: Segmenter, images: Tensor) -> Tensor:
    """Return the class that the network sees at every pixel, as the run evaluates."""
    config = run.config.data
    window = config.evaluate_size if config.evaluate == "slide" else None
    scales, flip = config.evaluate_scales, config.evaluate_flip
    return predict(model, run.place.images(images), window=window, scales=scales, flip=flip).argmax(dim=1)


def show_images(run: Run, step: Step, model: Segmenter) -> None:
    """Show trackers what the network sees in the test images that are looked at after every step."""
    chosen = images_to_show(run.test_classes, run.steps, run.config.run.pictures)
    known = set(select_test(run.test_classes, step))
    for number, position in enumerate(chosen):
        if position in known:
            image, labels = test_dataset(run, step, [position])[0, 0]
            seen = guess(run, model, image[None])[0].cpu().numpy()
            shown = image.permute(1, 2, 0).numpy(), labels.numpy(), seen
            run.board.image(number, *shown, step, run.iterations_until(step))


def catch_up(run: Run) -> None:
    """Tell trackers that are new of the steps before, which came with train.start_from
    or were trained without them: curves, metrics, confusion matrix and images.
    """
    if not run.scores or not run.board.open_new():
        return
    for at, values in earlier_curves(run):
        run.board.scalars(values, at)
    for result in run.scores:
        step = run.steps[result["step"]]
        at = run.iterations_until(step)
        run.board.results(result, at)
        if "confusion" in result:
            run.board.confusion(np.array(result["confusion"]), result["classes"], at)
        if run.config.run.pictures and run.folder.step_checkpoint(step.index).exists():
            show_images(run, step, run.place.arrange(load_step(run, step)[0]).eval())


def earlier_curves(run: Run) -> list[Recorded]:
    """Return what was logged in the steps before: by other trackers of the run, or beside the step that
    it started from, if it counts their iterations as they did.
    """
    if run.evaluation is not None:
        return []
    own = recorded_in(run.folder.path)
    if own or "started_from" not in run.results:
        return own
    if any(score.get("iterations") != run.iterations(run.steps[score["step"]]) for score in run.scores):
        return []
    until = run.iterations_until(run.steps[run.first])
    beside = recorded_in(Path(run.results["started_from"]["file"]).parent)
    return [(at, values) for at, values in beside if at <= until]


def record(run: Run, step: Step, matrix: ConfusionMatrix, costs: dict) -> None:
    """Put the metrics of a step into results.json, trackers and the terminal."""
    names = run.dataset.class_names
    counts, ious = matrix.counts.cpu().numpy(), matrix.iou().tolist()
    if not run.config.data.background:
        ious[0] = math.nan  # no pixel is truly background: what is said to be is another class's miss
    earlier = [score for score in run.scores if score["step"] < step.index]
    result = step_result(step, run.steps, names, counts, ious, earlier)
    if run.evaluation is None:
        result |= costs
    if run.config.train.evaluate_only and not is_news(run, result):
        return
    at = run.iterations_until(step)
    for changed in put(run.scores, result, run.steps, names):
        run.board.results(changed, run.iterations_until(run.steps[changed["step"]]))
    run.board.confusion(counts, [names[c] for c in step.seen], at)
    run.board.flush()
    if run.ranks.is_main:
        run.folder.write_results(run.results)
    run.say(step_table([*earlier, result], group_names(run.steps)))


def is_news(run: Run, result: dict) -> bool:
    """Return whether the scores of a step are to be recorded;
    other metrics replace recorded ones only by run.force.
    """
    recorded = next((score for score in run.scores if score["step"] == result["step"]), None)
    if recorded is None:
        return True
    if same_metrics(recorded, result):
        run.say(f"step {result['step']}: scored again, the same metrics as recorded")
        return False
    shown = " -> ".join(percent(score["miou"]["all"]) for score in (recorded, result))
    what = "they are replaced (run.force)" if run.config.run.force else "those recorded stay"
    run.say(
        f"warning: step {result['step']}: scored again, other metrics than recorded (mIoU of all {shown}): "
        f"{what}. Another machine or number of threads changes the last digits; more comes from another "
        "model, code or data"
    )
    return run.config.run.force


def score_again(run: Run) -> None:
    """Score the checkpoints asked for (train.evaluate_only),
    in the run's own setting also those without any metrics.
    """
    first = run.config.train.first_step
    if run.evaluation is None:
        scored = metrics_by_step(run.scores)
        first = min([first, *(step.index for step in run.steps if step.index not in scored)])
    wanted = run.steps[max(first, run.first) : run.last_step + 1]
    for step in wanted:
        if not run.folder.step_checkpoint(step.index).exists():
            raise run.folder.lacks(step.index)
    if run.evaluation is not None:
        run.say(f"scores of another setting than the run's own, kept beside them as {run.evaluation}")
    for step in wanted:
        model, state = load_step(run, step)
        run.board.open()  # scoring again must not discard the curves of later steps
        record(run, step, evaluate(run, step, model), state["costs"])
