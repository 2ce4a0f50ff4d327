"""The parts of the benchmark, by name; each gives the measurements of one claim about speed or memory."""

from collections.abc import Callable

from scripts.benchmarks import evaluation, head, inputs, losses, memory, scaling, start_up, training
from scripts.benchmarks.measure import Measurement, Options

PARTS: dict[str, Callable[[Options], list[Measurement]]] = {
    "iteration": training.iteration,
    "alternation": training.alternation,
    "updates": training.updates,
    "methods": training.methods,
    "losses": losses.losses,
    "head": head.head,
    "threads": head.threads,
    "labels": inputs.labels,
    "loading": inputs.loading,
    "index": inputs.index,
    "importance": training.importance,
    "evaluation": evaluation.evaluation,
    "memory": memory.memory,
    "start-up": start_up.start_up,
    "scaling": scaling.scaling,
}
