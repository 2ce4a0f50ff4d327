"""The runs behind each table and figure of the paper, as arguments of train.py. Nothing here
reads data or starts a run.

Step 0 is the same for all that train it with plain cross-entropy, and for all variants of a method whose step
0 is its own: one run per seed trains it, and the others start from its checkpoint. What several tables need
has one name, which says what differs from the published setting.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import product
from pathlib import Path

from configs.layers import FOLDER
from configs.messages import not_one_of
from configs.schema import Config, ConfigError, DataConfig
from methods import METHODS, make_method, published_strength
from study.paper import LAMBDAS
from study.readings import CONTROLLED_P, CORNERS, PUBLISHED_P, READINGS, SIXTHS, Reading
from study.rungs import LADDER, own_recipe

THIRTIETHS = (5, 10, 15, 20, 25, 30)  # p
DEFAULT_THIRTIETHS, PLAIN_THIRTIETHS = 25, 30  # configs/altersgd.yaml; no iteration is left to alternate
OBSERVERS = ("ewc", "pi", "rw")  # keep statistics of step 0
RELATED_METHODS = (
    *("altersgd", "consolidate", "sam", "asam", "f_sam", "c_flat", "gradient_penalty"),
    *("ema", "swa", "cpr", "stable_sgd"),
)
ON_TOP = (*RELATED_METHODS, "ewf")  # overlays that go with any method
NAMED = "methods="  # how a table of methods by name begins
# What the paper leaves open, each choice alone, and then what its theorem supposes.
THEOREM = ("phase.momentum=off", "phase.batch=same", "phase.lr=hold")
VARIANTS = (
    ("phase.momentum=reset",),
    ("phase.momentum=off",),
    ("phase.batch=same",),
    ("phase.lr=hold",),
    ("phase.weight_decay=signed",),
    THEOREM,
)
# Where alternating might do something that distilling does not: learning rates that are not yet small, a
# longer phase, weaker R.
PAIRED = (
    (),
    ("phase.p=15/30",),
    ("phase.lr=hold",),
    THEOREM,
    ("phase.lambda_a=100", "phase.lambda_b=10"),
)
SHARED = "ft"  # the method that trains the step 0 of all that have plain cross-entropy there
WEAK = 10  # a lambda at which R holds the ascents back less


@dataclass(frozen=True)
class Experiment:
    """A run without its seed and place."""

    name: str
    overlays: tuple[str, ...]
    settings: tuple[str, ...] = ()  # key.sub=value
    method: str = SHARED
    step_0: str | None = SHARED  # the method whose step 0 it starts from; None: one of its own
    recipe: tuple[str, ...] = ()  # what its method has otherwise than others, from step 0 on


@dataclass(frozen=True)
class Job:
    """A run: its folder's name, the arguments of train.py, and the job whose step 0 it starts from."""

    name: str
    arguments: tuple[str, ...]
    needs: str | None = None


# ------------------------------------------------------------------------------------------------ experiments


def method(name: str, *settings: str, plus: str | None = None) -> Experiment:
    """A method, plain or with another overlay on top: a phase, an average, or a related method."""
    called = "_".join([f"{name}-{plus}" if plus else name, *map(_label, settings)])
    overlays = (_chosen(name), *([f"configs/{plus}.yaml"] if plus else []))
    step_0 = SHARED if METHODS[name].shares_first_step else name
    return Experiment(called, overlays, settings, name, step_0)


mib = partial(method, "mib")


def _chosen(method: str) -> str:
    """Return the argument of train.py that chooses a method: its overlay, if it has one."""
    overlay = f"methods/{method}.yaml"
    return f"configs/{overlay}" if (FOLDER / overlay).exists() else f"method.name={method}"


def _label(setting: str) -> str:
    """phase.p=5/30 -> p=5-30"""
    return setting.split(".", 1)[1].replace("strength=", "lambda=").replace("/", "-")


def joint(data: DataConfig) -> Experiment:
    """Return all classes at once."""
    classes = [name for step in data.steps or () for name in step]
    setting = f"data.steps=[{classes}]" if classes else "data.protocol=offline"
    return Experiment("joint", ("configs/methods/ft.yaml",), (setting,), step_0=None)


def table1(config: Config) -> list[Experiment]:
    """Also table 2, which has the same rows class by class."""
    singles = [method(name) for name in ("ft", "pi", "ewc", "rw", "lwf", "lwf_mc", "ilt")]
    return [*singles, mib(), mib(plus="altersgd"), joint(config.data)]


def table3(config: Config) -> list[Experiment]:
    return [
        mib(*_strength(weight, config.data), plus=phase) for weight in LAMBDAS for phase in (None, "altersgd")
    ]


def table4(config: Config) -> list[Experiment]:
    """The diagonal is table 3's."""
    return [
        mib(*_strength(a, config.data), plus="altersgd")
        if a == b
        else mib(f"phase.lambda_a={a}", f"phase.lambda_b={b}", plus="altersgd")
        for b in LAMBDAS
        for a in LAMBDAS
    ]


def _strength(weight: float, data: DataConfig) -> tuple[str, ...]:
    return () if weight == published_strength("mib", data.protocol) else (f"method.strength={weight}",)


def figure_p(config: Config) -> list[Experiment]:
    shared = {DEFAULT_THIRTIETHS: mib(plus="altersgd"), PLAIN_THIRTIETHS: mib()}
    return [shared.get(p) or mib(f"phase.p={p}/30", plus="altersgd") for p in THIRTIETHS]


def ablations(config: Config) -> list[Experiment]:
    variants = [mib(*settings, plus="altersgd") for settings in ((), *VARIANTS)]
    return [*variants, mib(plus="consolidate")]


def alternation(config: Config) -> list[Experiment]:
    """AlterSGD and the control in pairs that differ in the flipped loss alone."""
    weak = _strength(WEAK, config.data)
    pairs = [*PAIRED, weak, *((*weak, setting) for setting in ("phase.momentum=off", "phase.lr=hold"))]
    return [mib(*settings, plus=phase) for settings in pairs for phase in ("altersgd", "consolidate")]


def related_methods(config: Config) -> list[Experiment]:
    """Other roads to flat minima, and PLOP."""
    return [mib(), *(mib(plus=overlay) for overlay in RELATED_METHODS), method("plop")]


def ladder(config: Config) -> list[Experiment]:
    """The field's methods, with a memory, and with what goes with any of them."""
    rungs = []
    for rung in LADDER:
        # What an overlay already says is no part of the name.
        memory = [f"method.memory={rung.memory}"] if rung.memory and rung.method != "mib_augm" else []
        rungs.append(_with_own_recipe(method(rung.method, *memory, plus=rung.plus), config))
    return rungs


def named_methods(names: str, config: Config) -> list[Experiment]:
    """Return the methods of "mine,mine+altersgd,mib": any that are registered, each alone or with something
    on top. What the ladder has too is the ladder's run.
    """
    problems, chosen = [], []
    for name in names.split(","):
        base, plus, top = name.strip().partition("+")
        if base not in METHODS:
            problems.append(f"{NAMED}{name}: {METHODS.unknown(base)}")
        elif plus and top not in ON_TOP:
            problems.append(f"{NAMED}{name}: {not_one_of(top, ON_TOP)}")
        else:
            chosen.append(_with_own_recipe(method(base, plus=top or None), config))
    if problems:
        raise ConfigError(problems)
    return chosen


def _with_own_recipe(experiment: Experiment, config: Config) -> Experiment:
    recipe = own_recipe(experiment.method, config.model_dump())
    return replace(experiment, recipe=tuple(f"{part.key}={value}" for part, value in recipe.items()))


def readings(config: Config) -> list[Experiment]:
    """Return every reading of the paper over p, its controls,
    and over lambda what table 3 and the corners of table 4 need.

    Stopping at p is the one control that is run over all of p: it costs less than any other run.
    """
    epochs, data = config.train.epochs_later, config.data
    over_p = [_reading(reading, reading.share(p, epochs)) for p in SIXTHS for reading in READINGS]
    controls = [
        mib(*_share(share), plus=phase)
        for p in CONTROLLED_P
        for reading in READINGS
        for phase, share in reading.controls(p, epochs)
    ]
    controls += [mib(*_share(p), plus="stop") for p in SIXTHS]
    lambdas = [_strength(weight, data) for weight in LAMBDAS]
    lambdas += [(f"phase.lambda_a={a}", f"phase.lambda_b={b}") for a, b in CORNERS]
    over_lambda = [
        _reading(reading, reading.share(PUBLISHED_P, epochs), settings)
        for settings in lambdas
        for reading in READINGS
    ]
    plain = [mib(*_strength(weight, data)) for weight in LAMBDAS]
    return list(dict.fromkeys([mib(), *over_p, *controls, *plain, *over_lambda]))


def core(config: Config) -> list[Experiment]:
    """The question of the paper in seven or eight runs: AlterSGD by its Eq. 6 and by the reading that has the
    shape of its figure over p (all of L by epoch), each at the published p with its controls."""
    epochs, whole = config.train.epochs_later, READINGS[-1]
    published = _reading(whole, whole.share(PUBLISHED_P, epochs))
    controls = [mib(*_share(share), plus=phase) for phase, share in whole.controls(PUBLISHED_P, epochs)]
    return [mib(), mib(plus="altersgd"), mib(plus="consolidate"), published, *controls]


def _reading(reading: Reading, p: Fraction, settings: tuple[str, ...] = ()) -> Experiment:
    changes = [f"phase.{key}={value}" for key, value in reading.changes]
    return mib(*settings, *_share(p), *changes, plus="altersgd")


def _share(p: Fraction) -> tuple[str, ...]:
    """In thirtieths where that is exact, so that figure-p has the same runs;
    nothing for the overlays' own.
    """
    if p == Fraction(DEFAULT_THIRTIETHS, 30):
        return ()
    exact = (p * 30).denominator == 1
    return (f"phase.p={p * 30}/30" if exact else f"phase.p={p.numerator}/{p.denominator}",)


TABLES: dict[str, Callable[[Config], list[Experiment]]] = {
    "table1": table1,
    "table3": table3,
    "table4": table4,
    "figure-p": figure_p,
    "ablations": ablations,
    "alternation": alternation,
    "readings": readings,
    "core": core,
    "related": related_methods,
    "ladder": ladder,
}
OLD_NAMES = {"neighbours": "related"}  # of tables, in commands and documents of older versions


def current_name(table: str) -> str:
    """Return the name that a table has today."""
    return OLD_NAMES.get(table, table)


def experiments_of(tables: Iterable[str], config: Config) -> list[Experiment]:
    """Each once, in the order of the tables; a table may also be "methods=mine,mib"."""
    found = [
        named_methods(table.removeprefix(NAMED), config) if table.startswith(NAMED) else TABLES[table](config)
        for table in tables
    ]
    return list(dict.fromkeys(experiment for experiments in found for experiment in experiments))


# ------------------------------------------------------------------------------------------------------- jobs


def jobs_of(
    experiments: Sequence[Experiment],
    seeds: Iterable[int],
    runs: Path,
    recipe: Sequence[str],
    overrides: Sequence[str] = (),
) -> list[Job]:
    """Return every experiment with every seed, and before them all the steps 0 that they share.

    `recipe` are the overlays that all of them share. A step 0 from which only one would start is trained by
    that one itself.
    """

    def job(
        name: str, overlays: Sequence[str], settings: Sequence[str], seed: int, needs: str | None = None
    ) -> Job:
        place = (f"train.seed={seed}", f"run.folder={runs}", f"run.name={name}_seed{seed}")
        start = () if needs is None else (f"train.start_from={runs / needs / 'step_0.pt'}",)
        arguments = (*recipe, *overlays, *overrides, *settings, *place, *start)
        return Job(f"{name}_seed{seed}", arguments, needs)

    seeds, users = list(seeds), Counter(e.step_0 for e in experiments)
    recipes = {
        e.step_0: e.recipe
        for e in experiments
        if e.step_0 == SHARED or (e.step_0 is not None and users[e.step_0] > 1)
    }
    names = {trainer: "step0" if trainer == SHARED else f"step0-{trainer}" for trainer in recipes}
    observe = f"method.also_observe=[{', '.join(_observers(experiments))}]"
    jobs = []
    for trainer, own in recipes.items():
        first = tuple(part for part in own if not part.startswith("method.strength="))  # no R in step 0
        also = (observe,) if trainer == SHARED else first
        overlays, settings = (_chosen(trainer),), ("train.last_step=0", *also)
        jobs += [job(names[trainer], overlays, settings, seed) for seed in seeds]
    for seed, e in product(seeds, experiments):
        needs = f"{names[e.step_0]}_seed{seed}" if e.step_0 in names else None
        jobs.append(job(e.name, e.overlays, (*e.recipe, *e.settings), seed, needs))
    return jobs


def _observers(experiments: Sequence[Experiment]) -> list[str]:
    """Return the methods that keep statistics while another one trains the step 0 that they share."""
    sharing = dict.fromkeys(e.method for e in experiments if e.step_0 == SHARED)
    own = [name for name in sharing if name not in OBSERVERS and make_method(name).state_dict()]
    return [*OBSERVERS, *own]


# The jobs set these themselves.
PLANNED_KEYS = frozenset(
    (
        *("data.root", "method.name", "method.also_observe", "phase.name", "phase.from_step"),
        *("train.seed", "train.first_step", "train.last_step", "train.start_from", "train.evaluate_only"),
        *("run.folder", "run.name"),
    )
)


def planned_keys(experiments: Iterable[Experiment]) -> frozenset[str]:
    """Return what an override may not touch. Protocol and steps it may: the joint run follows them."""
    settings = {setting.partition("=")[0] for experiment in experiments for setting in experiment.settings}
    return PLANNED_KEYS | (settings - {"data.protocol", "data.steps"})
