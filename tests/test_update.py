"""The update rules against slow references, CPR's term, and the pieces of Stable SGD."""

import copy
import json
import math
import warnings
from itertools import cycle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import walk_until
from processes import become_rank, free_port, run_ranks
from test_resume import stop_and_go
from torch import Tensor, nn
from toys import weighted_loss

import train
from configs import ConfigError, load_config, yaml_core
from data.protocols import Step
from engine import checkpoint
from engine import ranks as parallel
from engine.arguments import REGISTRIES, read_config
from engine.objective import AMP_DTYPES, Objective
from engine.optim import initial_learning_rate
from engine.run_folder import RunFolder
from methods import METHODS, UPDATES, AlterSGD, Method, Weights, make_update, register
from methods.cpr import confidence
from methods.updates.asam import ASAM
from methods.updates.c_flat import CFlat
from methods.updates.f_sam import FSAM, signs_of
from methods.updates.gradient_penalty import GradientPenalty
from methods.updates.sam import SAM
from scripts.benchmarks import training
from study.identity import label, setting_of
from study.plan import PRESETS, State, list_jobs, look_at

CONFIGS = Path(train.__file__).parent / "configs"
TINY = (*training.QUICK, "data.crop=32", "model.output_stride=8", "model.dilations=[1, 2, 3]")
SMOOTH = ("train.losses=plain", "optim.nesterov=false", "optim.momentum=0", "optim.weight_decay=0")
DESCENT, ASCENT = Weights(1.0, 10.0), Weights(-1.0, 10.0)
STANDSTILL = Weights(0.0, 0.0)
# Made anew for every test: F-SAM remembers.
MAKERS = {
    "sam": lambda: SAM(0.05),
    "gradient_penalty": lambda: GradientPenalty(0.1, 0.01),
    "asam": ASAM,
    "f_sam": FSAM,
    "c_flat": CFlat,
}
with_every_rule = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


@pytest.fixture
def begin(tmp_path):
    """A training at the start of its second step, with an image batch of noise."""

    def make(*overrides: str, method: str = "mib") -> training.Trainee:
        torch.manual_seed(0)
        memory = f"method.memory={4 if METHODS[method].memory else 0}"
        return training.begin(str(tmp_path), f"method.name={method}", memory, *TINY, *overrides)

    return make


def other_batch(batch: tuple[Tensor, Tensor], seed: int) -> tuple[Tensor, Tensor]:
    """Other noise of the same size, with the same classes."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(256, batch[0].shape, dtype=torch.uint8, generator=generator)
    return images, batch[1].max() * torch.randint(2, batch[1].shape, dtype=torch.uint8, generator=generator)


def apply(trainee: training.Trainee, rule, weights: Weights = DESCENT) -> dict[str, Tensor]:
    """The gradient that a rule leaves, and the model untouched but for what the rule does to it."""
    trainee.optimizer.zero_grad(set_to_none=True)
    t = trainee
    objective = Objective(
        t.run.config, t.run.ranks, t.student, t.teacher, t.method, rule, t.scaler, iter(t.batches)
    )
    evaluate = objective.on_next_batch()
    rule(t.model, evaluate, weights, t.scaler.get_scale())
    return {name: p.grad.clone() for name, p in t.model.named_parameters()}


def slow_loss(trainee, model, batches, weights: Weights) -> Tensor:
    """learn * l_seg + keep * R, the mean over the batches."""
    total = 0.0
    for images, labels in batches:
        placed = trainee.run.place.images(images)
        total = total + weighted_loss(trainee.method, weights, model, placed, labels.long(), trainee.teacher)
    return total / len(batches)


def slow_gradient(trainee, batches, weights: Weights, shift=None) -> list[Tensor]:
    """By autograd alone, on a copy, with the weights moved by `shift`."""
    model = copy.deepcopy(trainee.model)
    parameters = list(model.parameters())
    with torch.no_grad():
        for p, s in zip(parameters, shift or [0.0] * len(parameters), strict=True):
            p.add_(s)
    return list(torch.autograd.grad(slow_loss(trainee, model, batches, weights), parameters))


def length(vectors) -> float:
    return math.sqrt(sum((v * v).sum().item() for v in vectors))


def difference(one, other) -> float:
    return length([a - b for a, b in zip(one, other, strict=True)])


def fitted_slope(x: list[float], y: list[float]) -> float:
    x, y = [math.log(v) for v in x], [math.log(v) for v in y]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return covariance / sum((a - mean_x) ** 2 for a in x)


# -------------------------------------------------------------------------------------------------------- SAM


def slow_sam(trainee, batches, weights: Weights, rho: float) -> list[Tensor]:
    here = slow_gradient(trainee, batches, weights)
    return slow_gradient(trainee, batches, weights, [rho / length(here) * g for g in here])


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("weights", [DESCENT, ASCENT], ids=["descent", "ascent"])
def test_sam_takes_the_gradient_of_the_worse_neighbour(parts, weights, begin, double_precision):
    trainee = begin(f"train.accumulate={parts}")
    batches = [trainee.batch, other_batch(trainee.batch, 1)][:parts]
    trainee.batches = cycle(batches)
    expected = slow_sam(trainee, batches, weights, 0.1)
    plain = slow_gradient(trainee, batches, weights)
    found = list(apply(trainee, SAM(0.1), weights).values())
    assert difference(found, expected) < 1e-9 * length(expected)
    assert difference(expected, plain) > 1e-3 * length(plain)  # the place matters


def test_sam_without_a_distance_is_plain(begin, double_precision):
    trainee = begin()
    plain = apply(trainee, make_update("plain", step=1, from_step=1)).values()
    near, nearer = (difference(apply(trainee, SAM(rho)).values(), plain) for rho in (1e-5, 1e-6))
    assert near < 1e-3 * length(plain)
    assert near / nearer == pytest.approx(10, rel=0.1)


@with_every_rule
@pytest.mark.parametrize("norm", ["abn", "abn_lean", "iabn"])
def test_a_rule_leaves_the_weights_and_counts_every_image_once(make, norm, begin):
    if norm == "iabn":
        pytest.importorskip("inplace_abn")
    trainee = begin(f"model.norm={norm}")
    twin = copy.deepcopy(trainee.model.state_dict())
    apply(trainee, make())
    after = copy.deepcopy(trainee.model.state_dict())
    parameters = dict(trainee.model.named_parameters())
    assert all(torch.equal(after[name], twin[name]) for name in parameters)
    trainee.model.load_state_dict(twin)
    apply(trainee, make_update("plain", step=1, from_step=1))
    for name, value in trainee.model.state_dict().items():
        assert torch.equal(after[name], value), name
        assert name in parameters or not torch.equal(after[name], twin[name])  # the statistics did move


@with_every_rule
def test_no_gradient_is_no_nan(make, begin):
    trainee, rule = begin(), make()
    assert all(g.isfinite().all() for g in apply(trainee, rule, STANDSTILL).values())
    trainee.batches = cycle([(trainee.batch[0], torch.full_like(trainee.batch[1], 255))])  # l_seg = 0
    gradients = apply(trainee, rule, Weights(1.0, 0.0)).values()
    assert all((g == 0).all() for g in gradients)


@pytest.mark.parametrize("update", UPDATES)
def test_an_overflow_skips_the_update_and_training_goes_on(update, toy_arguments, tmp_path, monkeypatch):
    """The losses of the first two updates overflow: nothing of that may reach the weights, nor the
    momentum."""
    scales = []

    class OverflowingScaler(torch.amp.GradScaler):
        def scale(self, outputs: Tensor) -> Tensor:
            return super().scale(outputs) * (math.inf if len(scales) < 2 else 1.0)

        def update(self) -> None:
            super().update()
            scales.append(self.get_scale())

    monkeypatch.setattr(torch.amp, "GradScaler", OverflowingScaler)
    monkeypatch.setitem(AMP_DTYPES, "fp16", None)  # float32 with a scaler: a CPU is slow in fp16
    monkeypatch.setattr(torch, "empty_like", lambda t, **k: torch.full_like(t, math.nan, **k))
    options = ("train.amp=fp16", f"update.name={update}", "update.from_step=0", "train.last_step=0")
    assert train.main(toy_arguments(*options)) == 0
    assert scales == [2.0**15, 2.0**14, 2.0**14, 2.0**14]
    model = checkpoint.load(tmp_path / "runs/run/step_0.pt")["model"]
    assert all(tensor.isfinite().all() for tensor in model.values())


@with_every_rule
def test_a_scale_changes_nothing_but_the_scale(make, begin, double_precision):
    """Twice, for what a rule remembers must not be scaled either."""
    trainee, rule, scaled_rule = begin(), make(), make()
    trainee.batches = cycle([trainee.batch, other_batch(trainee.batch, 1)])
    expected = [apply(trainee, rule).values() for _ in range(2)]
    for scale, gradients in zip((2.0**10, 2.0**9), expected, strict=True):
        trainee.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        scaled = [g / scale for g in apply(trainee, scaled_rule).values()]
        assert difference(scaled, gradients) < 1e-9 * length(gradients)


# ------------------------------------------------------------------------------------- ASAM, F-SAM and C-Flat


def along(direction: list[Tensor], distance: float) -> list[Tensor]:
    return [distance / length(direction) * d for d in direction]


def plus(one: list[Tensor], other: list[Tensor], factor: float = 1.0) -> list[Tensor]:
    return [a + factor * b for a, b in zip(one, other, strict=True)]


def slow_asam(trainee, batches, weights: Weights, rho: float, eta: float) -> list[Tensor]:
    here = slow_gradient(trainee, batches, weights)
    sizes = [
        p.detach().abs() + eta if "weight" in name else torch.ones_like(p)
        for name, p in trainee.model.named_parameters()
    ]
    norm = length([t * g for t, g in zip(sizes, here, strict=True)])
    shift = [rho * t * t * g / norm for t, g in zip(sizes, here, strict=True)]
    return slow_gradient(trainee, batches, weights, shift)


def slow_c_flat(trainee, batches, weights: Weights, rho: float, weight: float) -> list[Tensor]:
    g0 = slow_gradient(trainee, batches, weights)
    g1 = slow_gradient(trainee, batches, weights, along(g0, rho))
    d = along(plus(g1, g0, -1), rho)
    g2 = slow_gradient(trainee, batches, weights, d)
    g3 = slow_gradient(trainee, batches, weights, plus(d, along(g2, rho)))
    return [a + weight * (c - b) for a, b, c in zip(g1, g2, g3, strict=True)]


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("weights", [DESCENT, ASCENT], ids=["descent", "ascent"])
@pytest.mark.parametrize("name", ["asam", "c_flat"])
def test_a_rule_is_its_formula(name, weights, parts, begin, double_precision):
    trainee = begin(f"train.accumulate={parts}")
    batches = [trainee.batch, other_batch(trainee.batch, 1)][:parts]
    trainee.batches = cycle(batches)
    if name == "asam":
        rule, expected = ASAM(rho=0.3, eta=0.02), slow_asam(trainee, batches, weights, 0.3, 0.02)
    else:
        rule, expected = CFlat(rho=0.1, weight=0.3), slow_c_flat(trainee, batches, weights, 0.1, 0.3)
    found = list(apply(trainee, rule, weights).values())
    assert difference(found, expected) < 1e-9 * length(expected)
    sam = slow_sam(trainee, batches, weights, rule.options.rho)
    assert difference(expected, sam) > 1e-3 * length(sam)


def test_c_flat_without_its_second_part_is_sam(begin, double_precision):
    trainee = begin()
    sam = apply(trainee, SAM(0.1)).values()
    assert difference(apply(trainee, CFlat(rho=0.1, weight=0.0)).values(), sam) < 1e-12 * length(sam)


@pytest.mark.parametrize("sigma", [1.0, 0.5])
def test_f_sam_climbs_by_the_noise_around_an_average_for_each_objective(sigma, begin, double_precision):
    """Five updates of other images, of which two are ascents."""
    trainee, rule, averages = begin(), FSAM(rho=0.1, sigma=sigma, decay=0.8), {}
    trainee.batches = iter(batches := [other_batch(trainee.batch, i) for i in range(5)])
    for batch, weights in zip(batches, (DESCENT, DESCENT, ASCENT, DESCENT, ASCENT), strict=True):
        here = slow_gradient(trainee, [batch], weights)
        old = averages.get(weights)
        climb = here if old is None else plus(here, old, -sigma)
        averages[weights] = here if old is None else plus([0.8 * m for m in old], here, 0.2)
        expected = slow_gradient(trainee, [batch], weights, along(climb, 0.1))
        found = apply(trainee, rule, weights).values()
        assert difference(found, expected) < 1e-9 * length(expected)
    for weights, average in averages.items():
        assert difference(rule.averages[signs_of(weights)], average) < 1e-9 * length(average)


def test_f_sam_keeps_an_average_for_each_pair_of_signs():
    """So a weight that changes from iteration to iteration needs no more memory."""
    assert signs_of(DESCENT) == signs_of(Weights(0.5, 3.0)) == (1, 1)
    assert [signs_of(w) for w in (ASCENT, Weights(-1.0, -10.0), Weights(0.0, 10.0), Weights(1.0, 0.0))] == [
        *((-1, 1), (-1, -1), (0, 1), (1, 0))
    ]


def test_what_overflows_does_not_enter_the_average_of_f_sam(begin):
    trainee, rule = begin(), FSAM()
    apply(trainee, rule)
    before = [m.clone() for m in rule.averages[1, 1]]
    trainee.scaler = torch.amp.GradScaler("cpu", init_scale=math.inf)
    apply(trainee, rule)
    assert all(torch.equal(a, b) for a, b in zip(rule.averages[1, 1], before, strict=True))


def test_asam_does_not_see_rescaled_layers():
    """w1 * 3 and w2 / 3 are the same network: its neighbour has the same loss, SAM's has not."""

    def of_rescaled(rule, factor: float) -> tuple[list[Tensor], float]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 6, bias=False), nn.LeakyReLU(), nn.Linear(6, 4, bias=False)).double()
        with torch.no_grad():
            net[0].weight *= factor
            net[2].weight /= factor
        inputs, targets, losses = torch.randn(20, 3).double(), torch.randint(4, (20,)), []

        def evaluate(weights: Weights, *, local: bool = False) -> dict[str, Tensor]:
            loss = nn.functional.cross_entropy(net(inputs), targets)
            loss.backward()
            losses.append(loss.item())
            return {}

        rule(net, evaluate, DESCENT, 1.0)
        return [factor * net[0].weight.grad, net[2].weight.grad / factor], losses[-1]

    (plain, loss), (rescaled, other) = (of_rescaled(ASAM(rho=0.5, eta=0.0), factor) for factor in (1, 3))
    assert difference(plain, rescaled) < 1e-12 * length(plain)
    assert loss == pytest.approx(other, rel=1e-12)
    assert of_rescaled(SAM(0.5), 1)[1] != pytest.approx(of_rescaled(SAM(0.5), 3)[1], rel=0.05)


ALTERNATING = ("method.name=mib", "phase.name=altersgd", "phase.p=0.25", "run.tracker=none", "run.pictures=0")


def test_f_sam_resumes_with_the_same_bits(toy_arguments, tmp_path, monkeypatch):
    """And would not without its average."""
    options = ("update.name=f_sam", *ALTERNATING)
    walk_until(toy_arguments(*options, name="whole"))
    assert stop_and_go(toy_arguments(*options, name="pieces"), 2) > 2
    monkeypatch.setattr(FSAM, "load_state_dict", lambda self, state: None)
    stop_and_go(toy_arguments(*options, name="forgetful"), 2)
    whole, pieces, forgetful = (
        checkpoint.load(tmp_path / f"runs/{n}/step_1.pt")["model"] for n in ("whole", "pieces", "forgetful")
    )
    assert all(torch.equal(whole[name], pieces[name]) for name in whole)
    assert not all(torch.equal(whole[name], forgetful[name]) for name in whole)


@pytest.mark.parametrize("update", ["sam", "f_sam"])
def test_a_state_inside_a_step_from_before_rules_kept_one(update, toy_arguments, tmp_path, capsys):
    """It is read for rules that keep nothing, and refused for one that misses its own."""
    arguments = toy_arguments(f"update.name={update}", *ALTERNATING)
    with pytest.raises(parallel.StoppedBySignal):
        walk_until(arguments, 5)
    file = tmp_path / "runs/run/resume.pt"
    state = checkpoint.load(file)
    assert state["position"]["step"] == 1
    assert state["parts"].pop("average") == {} and (state["parts"].pop("update") == {}) == (update == "sam")
    assert state["parts"].keys() == {"model", "method", "optimizer", "scaler"}
    checkpoint.save(state, file)
    if update == "f_sam":
        assert train.main(arguments) == 2
        assert (
            "resume.pt: not a state inside a step of this run (KeyError: 'averages'"
            in capsys.readouterr().err
        )
        return
    assert train.main(arguments) == 0
    walk_until(toy_arguments(f"update.name={update}", *ALTERNATING, name="whole"))
    whole, pieces = (checkpoint.load(tmp_path / f"runs/{n}/step_1.pt")["model"] for n in ("whole", "run"))
    assert all(torch.equal(whole[name], pieces[name]) for name in whole)


@pytest.mark.parametrize(
    ("options", "called"),
    [
        (("configs/asam.yaml",), "ASAM 0.5"),
        (("update.name=asam", "update.options.rho=1.0", "update.options.eta=0.0"), "ASAM 1, eta 0.0"),
        (("configs/f_sam.yaml",), "F-SAM 0.05"),
        (
            ("update.name=f_sam", "update.options.decay=0.6", "update.from_step=2"),
            "F-SAM 0.05, decay 0.6 from step 2",
        ),
        (("configs/c_flat.yaml",), "C-Flat 0.2"),
        (("update.name=c_flat",), "C-Flat 0.2"),  # as the overlay says it
    ],
)
@pytest.mark.usefixtures("at_the_root")
def test_tables_call_the_rules_by_their_numbers(options, called):
    config = read_config(["configs/methods/mib.yaml", "data.root=x", *options]).model_dump()
    assert label(setting_of(config), "15-1") == f"MiB + {called}"


# ------------------------------------------------------------------------------------------- gradient penalty


def exact_penalty_gradient(trainee, weights: float = 1.0) -> list[Tensor]:
    """grad ||grad l_seg||^2 = 2 H g by differentiating twice."""
    model = copy.deepcopy(trainee.model)
    parameters = list(model.parameters())
    loss = slow_loss(trainee, model, [trainee.batch], Weights(1.0, 0.0))
    gradient = torch.autograd.grad(loss, parameters, create_graph=True)
    return list(torch.autograd.grad(sum((g * g).sum() for g in gradient), parameters))


def test_the_penalty_is_that_of_the_squared_gradient_norm(begin, double_precision):
    trainee, c = begin(*SMOOTH, "model.norm=abn"), 0.3
    expected = [c * g for g in exact_penalty_gradient(trainee)]
    assert length(expected) > 0.1
    for weights in (DESCENT, ASCENT):  # minimised in both
        plain = slow_gradient(trainee, [trainee.batch], weights)
        errors = []
        for radius in (1e-5, 1e-6, 1e-7):
            found = apply(trainee, GradientPenalty(c, radius), weights).values()
            added = [f - p for f, p in zip(found, plain, strict=True)]
            errors.append(difference(added, expected) / length(expected))
        assert errors[0] < 1e-3 and errors[1] < 0.2 * errors[0] and errors[2] < 0.2 * errors[1], errors


def test_no_penalty_is_plain_to_the_last_bit(begin):
    trainee = begin()
    plain = apply(trainee, make_update("plain", step=1, from_step=1))
    for name, gradient in apply(trainee, GradientPenalty(0.0, 0.01)).items():
        assert torch.equal(gradient, plain[name]), name


def test_two_penalised_updates_add_what_a_pair_of_altersgd_moves():
    """Theorem 1: with c = eta / 4 the two differ by O(eta^3)."""

    def moved(eta: float, rule, signs) -> Tensor:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        inputs, targets = torch.randn(16, 3, dtype=torch.float64), torch.randint(3, (16,))
        optimizer = torch.optim.SGD(net.parameters(), lr=eta)

        def evaluate(weights: Weights, *, local: bool = False) -> dict[str, Tensor]:
            loss = nn.functional.cross_entropy(net(inputs), targets)
            (weights.learn * loss).backward()
            return {"seg": loss.detach()}

        start = nn.utils.parameters_to_vector(net.parameters()).detach().clone()
        for sign in signs:
            optimizer.zero_grad()
            rule(net, evaluate, Weights(sign, 0.0), 1.0)
            optimizer.step()
        return nn.utils.parameters_to_vector(net.parameters()).detach() - start

    plain, etas, errors = make_update("plain", step=1, from_step=1), [0.02 * 2**-k for k in range(6)], []
    for eta in etas:
        phase = AlterSGD(0, 1.0, 1.0, batch="same")
        pair = moved(eta, plain, [phase(t, 2).learn for t in (1, 2)])
        added = moved(eta, GradientPenalty(eta / 4, 1e-6), [1, 1]) - moved(eta, plain, [1, 1])
        assert added.norm() > 0.5 * pair.norm() > 0
        errors.append((pair - added).norm().item())
    assert 2.9 <= fitted_slope(etas, errors) <= 3.1


# ------------------------------------------------------ with everything else there is: also test_product.py


def test_a_rule_begins_at_its_step_and_unknown_ones_are_refused():
    settings = {"rho": 0.1, "penalty": 0.1, "radius": 0.1, "from_step": 1}
    assert [type(make_update("sam", step=s, **settings)).__name__ for s in (0, 1, 2)] == [
        "Update",
        "SAM",
        "SAM",
    ]
    assert make_update("sam", step=1, **settings).rho == 0.1
    with pytest.raises(ValueError, match=r"update.name: 'samm' is not one of .*plain, sam"):
        make_update("samm", step=1, **settings)


@pytest.mark.parametrize(
    "rule",
    [SAM(1e-12), GradientPenalty(0.1, 1e-6), ASAM(rho=1e-12), FSAM(rho=1e-12), CFlat(rho=1e-12)],
    ids=lambda rule: type(rule).__name__,
)
def test_all_evaluations_of_an_update_drop_the_same(rule, begin, double_precision):
    trainee = begin("model.dropout=0.5", *SMOOTH)
    before = torch.get_rng_state()
    plain = apply(trainee, make_update("plain", step=1, from_step=1))
    after = torch.get_rng_state()
    assert not torch.equal(before, after)
    torch.set_rng_state(before)
    found = apply(trainee, rule)
    assert torch.equal(torch.get_rng_state(), after)
    # Another mask would change the gradient by its own length, and the difference of two by that over the
    # radius.
    allowed = 100 if isinstance(rule, GradientPenalty) else 1e-6
    assert difference(found.values(), plain.values()) < allowed * length(plain.values())


def test_the_help_lists_the_rules(capsys):
    assert train.main(["--help"]) == 0
    assert "Update rules (update.name): " + ", ".join(UPDATES) in capsys.readouterr().out


@pytest.mark.slow
def test_the_rule_is_part_of_the_name_and_its_cost_of_the_results(toy_arguments, tmp_path):
    arguments = [a for a in toy_arguments("update.name=sam", "method.name=mib") if "run.name" not in a]
    assert train.main(arguments) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert "_mib-sam_" in folder.name
    steps = json.loads((folder / "results.json").read_text())["steps"]
    assert [s["gradient_evaluations"] / s["iterations"] for s in steps] == [1, 2]


# ---------------------------------------------------------------------------------------------- several ranks

RULES = {
    "sam": {"rho": 0.1},
    "gradient_penalty": {"penalty": 0.3, "radius": 1e-3},
    "asam": {"options.rho": 0.3, "options.eta": 0.01},
    "c_flat": {"options.rho": 0.1, "options.weight": 0.3},
    "f_sam": {"options.rho": 0.1},
}


def rank_of_rules(rank: int, world: int, port: int, folder: Path) -> None:
    """Leaves the gradients of both rules at the same weights, then trains a little with each, norms apart and
    in step."""
    become_rank(rank, world, port)
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("error")
    ranks, found = parallel.start_ranks("cpu"), {}
    for sync in (False, True):
        for update, settings in RULES.items():
            for parts in (1, 2):
                torch.manual_seed(0)
                keys = [f"update.{key}={value}" for key, value in settings.items()]
                run = training.make_run(
                    folder / f"{sync}-{update}-{parts}",
                    training.STEPS,
                    *("method.name=mib", *TINY, *keys, "train.batch_size=8", "optim.lr_later=0.01"),
                    *(f"update.name={update}", f"model.sync={sync}".lower(), f"train.accumulate={parts}"),
                    ranks=ranks,
                )
                trainee = training.Trainee(run, *training.begin_last_step(run))
                trainee.batches = cycle(rank_batches(trainee.batch, rank, parts))
                if not sync:
                    found[update, parts] = apply(trainee, trainee.update)
                    if update == "f_sam":  # from the second update on it climbs by the noise
                        found[update, parts] = apply(trainee, trainee.update)
                        (shared,) = trainee.update.averages.values()
                        assert all(same_on_both_ranks(average) for average in shared)  # one is saved
                if sync and rank == 1:  # a rank with nothing to learn must not leave the others waiting
                    trainee.batches = cycle([(trainee.batch[0], torch.full_like(trainee.batch[1], 255))])
                for _ in range(2):
                    trainee.iterate()
                parallel.agree(trainee.model, ranks)
    del trainee  # before its process group
    torch.save(found, folder / f"{rank}.pt")
    parallel.stop_ranks()


def same_on_both_ranks(tensor: Tensor) -> bool:
    other = tensor.clone().contiguous()
    dist.broadcast(other, src=0)
    return torch.equal(tensor, other)


def rank_batches(batch: tuple[Tensor, Tensor], rank: int, parts: int) -> list[tuple[Tensor, Tensor]]:
    return [other_batch(batch, 10 * rank + part) for part in range(parts)]


@pytest.mark.slow
def test_ranks_climb_apart_and_agree(tmp_path, begin, double_precision):
    """The gradient is the mean over the ranks of what each finds on its own images."""
    run_ranks(rank_of_rules, (2, free_port(), tmp_path))
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    trainee = begin("train.batch_size=4")
    for (update, parts), gradients in found[0].items():
        alone, settings = [], RULES[update]
        batches_of = [rank_batches(trainee.batch, rank, parts) for rank in range(2)]
        for batches in batches_of:
            if update == "sam":
                alone.append(slow_sam(trainee, batches, DESCENT, settings["rho"]))
            elif update == "asam":
                alone.append(slow_asam(trainee, batches, DESCENT, *settings.values()))
            elif update == "c_flat":
                alone.append(slow_c_flat(trainee, batches, DESCENT, *settings.values()))
            elif update == "f_sam":
                here = slow_gradient(trainee, batches, DESCENT)
                both = zip(*(slow_gradient(trainee, theirs, DESCENT) for theirs in batches_of), strict=True)
                noise = [g - (a + b) / 2 for g, (a, b) in zip(here, both, strict=True)]
                alone.append(slow_gradient(trainee, batches, DESCENT, along(noise, 0.1)))
            else:
                c, radius = RULES["gradient_penalty"].values()
                here = slow_gradient(trainee, batches, Weights(1.0, 0.0))
                shift = [radius / length(here) * g for g in here]
                there = slow_gradient(trainee, batches, Weights(1.0, 0.0), shift)
                factor = 2 * c * length(here) / radius
                plain = slow_gradient(trainee, batches, DESCENT)
                alone.append([g + factor * (t - h) for g, t, h in zip(plain, there, here, strict=True)])
        expected = [(a + b) / 2 for a, b in zip(*alone, strict=True)]
        assert difference(gradients.values(), expected) < 1e-8 * length(expected), (update, parts)
        for name, gradient in gradients.items():
            assert torch.equal(gradient, found[1][update, parts][name])


# -------------------------------------------------------------------------------------------------------- CPR


def test_confidence_is_the_divergence_from_uniform():
    torch.manual_seed(0)
    logits = 3 * torch.randn(2, 5, 3, 4, dtype=torch.float64)
    expected = 0.0
    for image in logits:
        for y in range(3):
            for x in range(4):
                p = [math.exp(z) for z in image[:, y, x].tolist()]
                p = [value / sum(p) for value in p]
                expected += sum(value * math.log(value / (1 / 5)) for value in p) / (2 * 3 * 4)
    assert confidence(logits).item() == pytest.approx(expected, rel=1e-12)
    assert torch.autograd.gradcheck(confidence, logits.requires_grad_())


@pytest.mark.parametrize("level", [0.0, 300.0])
def test_confidence_of_uniform_logits_is_zero_and_of_certain_ones_log_c(level):
    logits = torch.full((1, 7, 2, 2), level, dtype=torch.float64)
    assert confidence(logits).item() == pytest.approx(0, abs=1e-12)
    logits[:, 0] += 1000
    assert confidence(logits).item() == pytest.approx(math.log(7))


@pytest.mark.parametrize("losses", ["plain", "fused"])
@pytest.mark.parametrize("name", ["ft", "lwf_mc", "mib", "ewc"])
def test_any_method_may_be_penalised_for_its_confidence(name, losses, begin, double_precision):
    values = []
    for beta in (0.0, 0.25):
        trainee = begin(f"method.entropy={beta}", f"train.losses={losses}", method=name)
        t, rule = trainee, make_update("plain", step=1, from_step=1)
        objective = Objective(
            t.run.config, t.run.ranks, t.student, t.teacher, t.method, rule, t.scaler, iter(t.batches)
        )
        values.append(objective.on_next_batch()(DESCENT)["seg"].item())
    with torch.no_grad():
        expected = confidence(trainee.model(trainee.run.place.images(trainee.batch[0])).logits).item()
    assert expected > 0 and values[1] - values[0] == pytest.approx(0.25 * expected, rel=1e-6)


def test_an_ascent_flips_the_confidence_too(begin, double_precision):
    trainee = begin("method.entropy=0.5", "train.losses=plain", "method.strength=0")
    gradients = {}
    for name, weights in {"descent": DESCENT, "ascent": ASCENT}.items():
        gradients[name] = apply(trainee, make_update("plain", step=1, from_step=1), weights)
    without = slow_gradient(begin("train.losses=plain"), [trainee.batch], Weights(1.0, 0.0))
    kept = slow_gradient(begin("train.losses=plain"), [trainee.batch], Weights(0.0, DESCENT.keep))
    term = [g - w - k for g, w, k in zip(gradients["descent"].values(), without, kept, strict=True)]
    flipped = [g + w - k for g, w, k in zip(gradients["ascent"].values(), without, kept, strict=True)]
    assert length(term) > 1e-3
    assert difference(flipped, [-t for t in term]) < 1e-9 * length(term)


@pytest.mark.slow
def test_the_penalty_on_confidence_lowers_it(toy_arguments, tmp_path):
    values = {}
    for beta in (0, 3):
        assert train.main(toy_arguments(f"method.entropy={beta}", name=f"beta{beta}")) == 0
        model, _ = checkpoint.load_segmenter(tmp_path / f"runs/beta{beta}/step_1.pt")
        with torch.no_grad():
            values[beta] = confidence(model.eval()(torch.randn(2, 3, 32, 32)).logits).item()
    assert values[3] < 0.7 * values[0]


# ------------------------------------------------------------------------------------------------- Stable SGD


def test_only_the_student_drops_and_only_in_training(begin):
    trainee = begin("model.dropout=0.5")
    images = trainee.run.place.images(trainee.batch[0])
    with torch.no_grad():
        assert trainee.teacher.dropout == 0 and trainee.model.dropout == 0.5
        once, again = (trainee.model(images) for _ in range(2))
        assert not torch.equal(once.logits, again.logits)
        trainee.model.eval()
        evaluated = trainee.model(images).logits
        trainee.model.dropout = 0.0
        assert torch.equal(evaluated, trainee.model(images).logits)


@pytest.mark.slow
def test_dropout_goes_on_after_a_stop_with_the_same_bits(toy_arguments, tmp_path):
    options = ("method.name=mib", "model.dropout=0.3", "update.name=sam")
    walk_until(toy_arguments(*options, name="whole"))
    assert stop_and_go(toy_arguments(*options, name="pieces"), 1) > 2
    walk_until(toy_arguments("method.name=mib", "update.name=sam", name="without"))
    whole, pieces, without = (
        checkpoint.load(tmp_path / f"runs/{n}/step_1.pt")["model"] for n in ("whole", "pieces", "without")
    )
    assert all(torch.equal(whole[name], pieces[name]) for name in whole)
    assert not all(torch.equal(whole[name], without[name]) for name in whole)


def test_learning_rates_decay_from_step_to_step():
    config = load_config([], ["optim.lr=0.1", "optim.lr_later=0.02", "optim.lr_decay=0.5"])
    steps = [Step(index, (), (1,)) for index in range(4)]
    assert [initial_learning_rate(config.optim, step.index) for step in steps] == [0.1, 0.02, 0.01, 0.005]
    assert {initial_learning_rate(load_config([]).optim, step.index) for step in steps[1:]} == {0.001}


@pytest.mark.parametrize(
    "wrong",
    [
        *("model.dropout=1", "model.dropout=-0.1", "optim.lr_decay=0", "optim.lr_decay=1.1"),
        *("method.entropy=-1", "update.name=adam", "update.rho=0", "update.radius=0", "update.penalty=-1"),
        *("update.from_step=-1", "run.flatness=-1"),
    ],
)
def test_impossible_values_are_refused(wrong):
    with pytest.raises(ConfigError, match=wrong.partition("=")[0]):
        load_config([], [wrong], REGISTRIES)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *(("update.name=asam", f"update.options.{wrong}") for wrong in ("rho=0", "eta=-1", "sigma=1")),
        *(("update.name=f_sam", f"update.options.{wrong}") for wrong in ("rho=0", "sigma=-1", "decay=1")),
        *(("update.name=c_flat", f"update.options.{wrong}") for wrong in ("rho=0", "weight=-1")),
        *(("average.name=ema", f"average.options.{wrong}") for wrong in ("decay=1", "from_step=-1")),
        *(
            ("average.name=swa", f"average.options.{wrong}")
            for wrong in ("share=0", "every=0", "statistics=no")
        ),
    ],
)
def test_impossible_options_are_refused(name, wrong):
    with pytest.raises(ConfigError, match=wrong.partition("=")[0]):
        load_config([], [name, wrong], REGISTRIES)


# --------------------------------------------------------------------------------------------------- overlays


@pytest.mark.parametrize(
    ("overlay", "changed"),
    [
        ("sam", {"update"}),
        ("gradient_penalty", {"update"}),
        *((rule, {"update"}) for rule in ("asam", "f_sam", "c_flat")),
        *((average, {"average"}) for average in ("ewf", "ema", "swa")),
        ("cpr", {"method"}),
        ("stable_sgd", {"model", "optim", "train"}),
    ],
)
def test_an_overlay_changes_its_own_and_combines_with_the_phases(overlay, changed):
    mib = [CONFIGS / "quickstart.yaml", CONFIGS / "methods/mib.yaml"]
    plain, ours = load_config(mib), load_config([*mib, CONFIGS / f"{overlay}.yaml"])
    assert {section for section, value in plain if value != getattr(ours, section)} == changed
    both = load_config([*mib, CONFIGS / f"{overlay}.yaml", CONFIGS / "altersgd.yaml"])
    assert both.phase.name == "altersgd" and both.update == ours.update


# --------------------------------------------------------------------- runs from before there were these keys

NEW_KEYS = (
    *("update", "model.dropout", "optim.lr_decay", "method.entropy", "run.flatness"),
    *("optim.name", "optim.schedule"),
)


def without_new_keys(tree: dict) -> dict:
    tree = copy.deepcopy(tree)
    for key in NEW_KEYS:
        section, _, name = key.partition(".")
        if name:
            del tree[section][name]
        else:
            del tree[section]
    return tree


def age(run: Path) -> None:
    """Make a run look as it would have been left by a version without the keys."""
    config = yaml_core.parse((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml_core.dump(without_new_keys(config)))
    results = json.loads((run / "results.json").read_text())
    results["config"] = without_new_keys(results["config"])
    for step in results["steps"]:
        step.pop("gradient_evaluations", None)
    (run / "results.json").write_text(json.dumps(results))


@pytest.mark.slow
def test_an_older_run_goes_on_and_serves_as_a_start(toy_arguments, tmp_path, capsys):
    assert train.main(toy_arguments("train.last_step=0", name="old")) == 0
    old = tmp_path / "runs/old"
    age(old)
    before = (old / "step_0.pt").stat().st_mtime_ns
    assert train.main(toy_arguments(name="old")) == 0
    assert (old / "step_0.pt").stat().st_mtime_ns == before
    age(old)
    start = f"train.start_from={old}/step_0.pt"
    capsys.readouterr()
    assert train.main(toy_arguments("update.name=sam", start, name="new")) == 0
    assert "scoring step 0" not in capsys.readouterr().err  # its metrics were adopted
    assert train.main(toy_arguments("update.name=sam", name="old")) == 2
    assert "update.name: 'plain' -> 'sam'" in capsys.readouterr().err


def test_a_plan_knows_older_runs_that_are_finished(tmp_path, monkeypatch):
    monkeypatch.chdir(CONFIGS.parent)
    arguments = (["table1"], PRESETS["shapes"], [1], tmp_path, {"data.root": tmp_path})
    jobs = list_jobs(*arguments, [])
    for job, config in jobs.items():
        folder = RunFolder(tmp_path / job.name)
        folder.path.mkdir()
        folder.write_config(yaml_core.dump(without_new_keys(config.model_dump(mode="json"))))
        folder.write_results({"config": without_new_keys(config.model_dump(mode="json")), "steps": [{}] * 6})
        folder.step_checkpoint(0).touch()
    assert {run.state for run in look_at(jobs, PRESETS["shapes"], count=False)} == {State.DONE}
    changed = list_jobs(*arguments, ["optim.lr_decay=0.9"])
    (differences,) = {tuple(run.differences) for run in look_at(changed, PRESETS["shapes"], count=False)}
    assert differences == ("optim.lr_decay: 1.0 -> 0.9",)


# ---- what a method has to say ------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", ["retention_losses", "targets", "survey"])
def test_a_hook_that_would_never_be_called_is_refused(hook):
    careless = type("Careless", (Method,), {hook: lambda self, *arguments: {}})
    with pytest.raises(ValueError, match=f"Careless has {hook}.*needs_teacher = True"):
        register("careless")(careless)
    assert "careless" not in METHODS
    type("Careful", (careless,), {"needs_teacher": True})
