"""Rules that tie several keys together. Each runs once all of its keys are valid by themselves."""

from collections.abc import Callable, Mapping, Sequence

from configs.messages import not_one_of, show

Rule = Callable[..., str | None]
RULES: list[tuple[tuple[str, ...], Rule]] = []


def rule(*keys: str) -> Callable[[Rule], Rule]:
    """The function gets the values of `keys` once each is valid by itself and returns what is wrong, or None.

    The problem is reported under the first key.
    """

    def add(function: Rule) -> Rule:
        RULES.append((keys, function))
        return function

    return add


@rule("data.scale")
def _scale_is_ordered(scale):
    if scale[0] > scale[1]:
        return f"{show(scale)} should be [smallest, largest]"


@rule("data.evaluate_scales", "data.evaluate")
def _scales_need_whole_images(scales, evaluate):
    if evaluate == "crop" and list(scales) != [1.0]:
        return f"{show(scales)} needs data.evaluate full or slide, not crop"


@rule("data.evaluate_flip", "data.evaluate")
def _flip_needs_whole_images(flip, evaluate):
    if evaluate == "crop" and flip:
        return "true needs data.evaluate full or slide, not crop"


@rule("data.background", "data.void")
def _no_background_to_train(background, void):
    if not background and void == "background":
        return (
            "false needs data.void ignore: void pixels would be trained as the background that is not there"
        )


@rule("optim.nesterov", "optim.momentum")
def _nesterov_needs_momentum(nesterov, momentum):
    if nesterov and momentum == 0:
        return "true needs optim.momentum above 0"


@rule("train.batch_size", "train.accumulate")
def _batch_is_divisible(batch_size, accumulate):
    if batch_size % accumulate:
        return f"{batch_size} cannot be divided by train.accumulate {accumulate}"


@rule("train.last_step", "train.first_step")
def _steps_are_ordered(last_step, first_step):
    if last_step is not None and last_step < first_step:
        return f"{last_step} is before train.first_step {first_step}"


@rule("data.protocol", "data.dataset", "data.steps")
def _protocol_exists(protocol, dataset, steps):
    names = list(_protocols(dataset))
    if steps is None and protocol is not None and names and protocol not in names:
        return f"{not_one_of(protocol, names)} for data.dataset {dataset}"


@rule("data.steps", "data.protocol", "data.dataset")
def _classes_are_given(steps, protocol, dataset):
    if steps is None and not _protocols(dataset):
        return (
            f"is required with data.dataset {dataset}, which has no protocols: list the classes of each step"
        )
    if steps is None and protocol is None:
        return "is null and so is data.protocol: give one of them"


@rule("data.order", "data.steps", "data.protocol", "data.dataset")
def _order_fits_the_protocol(order, steps, protocol, dataset):
    if order is not None and steps is not None:
        wrong = "cannot be given together with data.steps, which are an order: set one of them to null"
        return f"{show(order)} {wrong}"
    classes = {c for step in _protocols(dataset).get(protocol or "", ()) for c in step}
    if order is None or isinstance(order, int) or not classes:
        return None
    if len(order) != len(classes):
        sizes = f"{len(order)} classes, the protocol {protocol} has {len(classes)}"
        return f"{show(order)} has {sizes}: name each once"
    unknown = [c for c in order if isinstance(c, int) and c not in classes]
    return f"{show(order)} has a class {unknown[0]}; the ids are 1 to {len(classes)}" if unknown else None


@rule("train.first_step", "data.steps", "data.protocol", "data.dataset")
def _first_step_exists(first_step, steps, protocol, dataset):
    return _step_exists(first_step, steps, protocol, dataset)


@rule("train.last_step", "data.steps", "data.protocol", "data.dataset")
def _last_step_exists(last_step, steps, protocol, dataset):
    return _step_exists(last_step, steps, protocol, dataset)


def _protocols(dataset: str) -> Mapping[str, Sequence]:
    from data.protocols import PROTOCOLS  # not above: the schema itself needs no data set

    return PROTOCOLS.get(dataset, {})


def _step_exists(
    number: int | None, steps: Sequence | None, protocol: str | None, dataset: str
) -> str | None:
    steps = steps or _protocols(dataset).get(protocol or "")
    if steps and number is not None and number >= len(steps):
        return f"{number} does not exist: the steps are 0 to {len(steps) - 1}"
    return None
