"""Score the model of a step, and record its figures."""

from torch import Tensor
from tqdm import tqdm

from data.incremental import StepDataset, select_test, test_table
from data.loaders import test_loader
from data.protocols import Step
from data.transforms import test_transform
from engine.inference import predict
from engine.results import step_result
from engine.run import Run
from metrics.confusion import ConfusionMatrix
from metrics.continual import group_names
from models.segmenter import Segmenter
from tracking.progress import bar_place
from tracking.shown import pictures_to_show
from tracking.tables import step_table


def evaluate(run: Run, step: Step, model: Segmenter) -> ConfusionMatrix:
    """The confusion matrix over every test image that shows a class seen so far."""
    config, ranks = run.config.data, run.ranks
    positions = select_test(run.test_classes, step)
    data = StepDataset(
        [run.dataset.test[i] for i in positions],
        test_table(step, config.unseen, run.dataset.void_labels),
        test_transform(config.evaluate_size if config.evaluate == "crop" else None),
    )
    loader = test_loader(
        data,
        batch_size=run.config.train.evaluate_batch,
        rank=ranks.rank,
        world=ranks.world,
        workers=config.workers,
        pin=ranks.device.type == "cuda",
    )
    window = config.evaluate_size if config.evaluate == "slide" else None
    matrix = ConfusionMatrix(step.num_classes, ranks.device)
    model = run.place.arrange(model).eval()

    def guess(images: Tensor) -> Tensor:
        scales, flip = config.evaluate_scales, config.evaluate_flip
        return predict(model, run.place.images(images), window=window, scales=scales, flip=flip).argmax(dim=1)

    for images, labels in tqdm(
        loader, f"scoring step {step.index}", disable=not ranks.is_main, **bar_place()
    ):
        matrix.update(labels.to(ranks.device, non_blocking=True), guess(images))
    for number, position in enumerate(pictures_to_show(run.test_classes, run.steps, run.config.run.pictures)):
        if ranks.is_main and position in positions:
            image, labels = data[0, positions.index(position)]
            picture = image.permute(1, 2, 0).numpy(), labels.numpy(), guess(image[None])[0].cpu().numpy()
            run.board.picture(number, *picture, step, run.iterations_until(step))
    matrix.sum_over_ranks()
    return matrix


def record(run: Run, step: Step, matrix: ConfusionMatrix, costs: dict) -> None:
    """Put the figures of a step into results.json, TensorBoard and the terminal."""
    names, steps = run.dataset.class_names, run.results["steps"]
    counts = matrix.counts.cpu().numpy()
    result = step_result(step, run.steps, names, counts, matrix.iou().tolist(), steps[: step.index]) | costs
    steps[step.index : step.index + 1] = [result]
    at = run.iterations_until(step)
    run.board.results(result, at)
    run.board.confusion(counts, [names[c] for c in step.seen], at)
    run.board.flush()
    if run.ranks.is_main:
        run.folder.write_results(run.results)
    run.say(step_table(steps[: step.index + 1], group_names(run.steps)))
