"""EWC, PI and RW against plain Python over single floats, iteration by iteration and step by step."""

import copy

import pytest
import torch
from toys import STEPS, ToySegmenter, toy_batch, weighted_loss

from methods.base import Weights, make_method, published_strength
from methods.phases.altersgd import AlterSGD, Consolidate
from methods.phases.descent import Descent

NAMES = ("ewc", "pi", "rw")
ALPHA = 0.9

# A tensor as its list of floats: the reference below knows nothing else.
Floats = dict[str, list[float]]


def floats(tensors) -> Floats:
    return {name: t.detach().flatten().tolist() for name, t in tensors.items()}


def min_max(values: list[float]) -> list[float]:
    low, high = min(values), max(values)
    return [(v - low) / (high - low + 1e-8) for v in values]


class SlowImportance:
    """The statistics of one kind over the steps, from the recorded (theta, gradient of l_seg) of each
    iteration."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.fisher: Floats = {}
        self.score: Floats = {}

    def finish(self, start: Floats, end: Floats, observed: list[tuple[Floats, Floats]]) -> Floats:
        """omega after a step that began at `start`, was observed so, and ended at `end`."""
        return {name: self._one(name, start[name], end[name], observed) for name in start}

    def _one(self, name, start, end, observed):
        fisher, path = list(self.fisher.get(name, [1.0] * len(start))), [0.0] * len(start)
        old_score = self.score.get(name)
        for i in range(len(start)):
            before = None
            for t, (theta, gradient) in enumerate(observed, start=1):
                now, g = theta[name][i], gradient[name][i]
                if self.kind == "pi":
                    if before is not None:
                        path[i] += g * (before - now)
                    before = now
                if self.kind == "rw" and t % 10 == 1:
                    if before is not None:
                        path[i] += g * (before - now) / (0.5 * fisher[i] * (now - before) ** 2 + 1e-8)
                    before = now
                fisher[i] = ALPHA * g * g + (1 - ALPHA) * fisher[i]
        if self.kind == "pi":
            path = [d / ((e - s) ** 2 + 1e-20) for d, s, e in zip(path, start, end, strict=True)]
        score = [max(0.0, v) for v in path]
        if old_score is not None and self.kind == "pi":
            score = [a + b for a, b in zip(score, old_score, strict=True)]
        if old_score is not None and self.kind == "rw":
            score = [0.5 * (a + b) for a, b in zip(score, old_score, strict=True)]
        self.fisher[name], self.score[name] = fisher, score
        if self.kind == "ewc":
            return min_max(fisher)
        if self.kind == "pi":
            return min_max(score)
        return [f + s for f, s in zip(min_max(fisher), min_max(score), strict=True)]


def slow_pull(theta: Floats, anchor: Floats, omega: Floats, keep: float, learning_rate: float) -> Floats:
    """The gradient of keep * R, held back where an update would go beyond the anchor, or as far away from
    it."""
    limit = 1 / (2 * abs(keep) * learning_rate)
    return {
        name: [
            2 * keep * min(o, limit) * (now - old)
            for o, now, old in zip(omega[name], theta[name], anchor[name], strict=True)
        ]
        for name in anchor
    }


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3)


def iterate(method, model, phase, optimizer, iterations, total) -> list[tuple[Floats, Floats]]:
    """Train; the (theta, gradient of l_seg) of the iterations that have such a gradient."""
    observed = []
    for t in iterations:
        weights = phase(t, total)
        images, labels = toy_batch(t, model.num_classes)
        optimizer.zero_grad()
        weighted_loss(method, weights, model, images, labels).backward()
        if weights.learn:
            seen = dict(model.named_parameters())
            observed.append(
                (floats(seen), floats({name: p.grad / weights.learn for name, p in seen.items()}))
            )
        method.after_backward(model, weights, optimizer.param_groups[0]["lr"])
        optimizer.step()
    return observed


def grow(model, step) -> None:
    model.add_classes(step.num_new if step.index else step.num_classes)


def train_step(method, model, step, phase, total) -> tuple[Floats, Floats, list]:
    grow(model, step)
    method.init_classifier(model)
    method.begin_step(model, step)
    start = floats(dict(model.named_parameters()))
    observed = iterate(method, model, phase, make_optimizer(model), range(1, total + 1), total)
    end = floats(dict(model.named_parameters()))
    method.end_step(model)
    return start, end, observed


def after_one_step(name: str, total: int = 12):
    """A method and a model at the very start of step 1."""
    torch.manual_seed(0)
    method, model = make_method(name), ToySegmenter()
    train_step(method, model, STEPS[0], Descent(), total)
    grow(model, STEPS[1])
    method.begin_step(model, STEPS[1])
    return method, model


def assert_omega(method, expected: Floats, tolerance: float = 1e-10) -> None:
    assert set(method.omega) == set(expected)
    for name, values in expected.items():
        actual = method.omega[name].flatten()
        torch.testing.assert_close(
            actual,
            torch.tensor(values, dtype=torch.float64),
            rtol=tolerance,
            atol=tolerance,
            msg=lambda m, n=name: f"{n}: {m}",
        )


PHASES = {
    "descent": Descent(2.0),
    "altersgd": AlterSGD(0.3, 2.0, 0.5),
    "always-alternating": AlterSGD(0, 2.0, 2.0),
    "seg-by-two": AlterSGD(0.3, 2.0, 0.5, every=2),
    "all": AlterSGD(0.3, 2.0, 0.5, flip="all"),
    "all-by-two": AlterSGD(0.3, 2.0, 2.0, flip="all", every=2),
    "consolidate": Consolidate(0.6, 2.0),
}


@pytest.mark.parametrize("total", [10, 24])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", NAMES)
def test_importance_over_three_steps_is_the_slow_reference(name, phase, total):
    torch.manual_seed(1)
    method, model, slow = make_method(name), ToySegmenter(), SlowImportance(name)
    for step in STEPS:
        start, end, observed = train_step(method, model, step, PHASES[phase], total)
        assert_omega(method, slow.finish(start, end, observed))
    assert method.omega["body.weight"].max() > 0.9  # the comparison above was not one of zeros


@pytest.mark.parametrize("name", NAMES)
def test_importance_lies_between_its_bounds(name):
    method, _ = after_one_step(name)
    for omega in method.omega.values():
        assert omega.min() >= 0
        assert omega.max() <= (2 if name == "rw" else 1)
        assert not omega.requires_grad


@pytest.mark.parametrize("name", ["ewc", "rw"])
def test_the_fisher_starts_at_one_and_carries_over_unnormalised(name):
    # Read directly: min-max takes a common start out again, and ten iterations shrink it to 1e-10.
    torch.manual_seed(1)
    method, model, slow = make_method(name), ToySegmenter(), SlowImportance(name)
    for step in STEPS:
        grow(model, step)
        method.begin_step(model, step)
        new = f"classifiers.{step.index}.weight"
        assert torch.equal(method.fisher[new], torch.ones_like(method.fisher[new]))
        start = floats(dict(model.named_parameters()))
        observed = iterate(method, model, Descent(2.0), make_optimizer(model), (1, 2), 2)
        slow.finish(start, start, observed)
        for key, values in floats(method.fisher).items():
            assert values == pytest.approx(slow.fisher[key], rel=1e-10)
        method.end_step(model)


def test_a_step_without_a_data_gradient_leaves_the_fisher_alone():
    for name in ("ewc", "rw"):
        method, model = after_one_step(name)
        before = floats(method.fisher)
        iterate(method, model, Consolidate(0, 3.0), make_optimizer(model), range(1, 6), 5)
        assert floats(method.fisher) == before
        iterate(method, model, Descent(3.0), make_optimizer(model), range(1, 2), 1)
        assert floats(method.fisher) != before


@pytest.mark.parametrize("name", NAMES)
def test_a_step_that_observes_nothing_still_ends(name):
    # Consolidate with p = 0 never learns: old parameters keep their statistics and new ones have not
    # mattered.
    method, model = after_one_step(name)
    old = {key: value.clone() for key, value in method.omega.items()}
    iterate(method, model, Consolidate(0, 3.0), make_optimizer(model), range(1, 6), 5)
    method.end_step(model)
    assert set(method.omega) == set(dict(model.named_parameters()))
    for key, value in old.items():
        if (
            name != "rw"
        ):  # RW averages its score with a step's zero gain, which min-max takes out again up to 1e-8
            assert torch.equal(method.omega[key], value)
        else:
            torch.testing.assert_close(method.omega[key], value, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("keep", [1.0, -1.0])  # of the ascent: flip seg, flip all
@pytest.mark.parametrize("step", [0, 1])  # without and with a pull
@pytest.mark.parametrize("name", NAMES)
def test_an_ascent_observes_the_same_as_a_descent(name, step, keep):
    # The same walk seen twice: with the gradients of l_seg, and with those of -l_seg under learn = -1.
    walk = torch.Generator().manual_seed(5)
    method, model = after_one_step(name)
    if step == 0:
        torch.manual_seed(0)
        method, model = make_method(name), ToySegmenter(3)
        method.begin_step(model, STEPS[0])
    methods = {1.0: method, -1.0: make_method(name)}
    methods[-1.0].begin_step(model, STEPS[step])
    methods[-1.0].load_state_dict(copy.deepcopy(method.state_dict()))
    for _ in range(21):
        with torch.no_grad():
            for p in model.parameters():
                p += 0.1 * torch.randn(p.shape, dtype=p.dtype, generator=walk)
        gradients = [torch.randn(p.shape, dtype=p.dtype, generator=walk) for p in model.parameters()]
        for learn, method in methods.items():
            for p, g in zip(model.parameters(), gradients, strict=True):
                p.grad = learn * g
            method.after_backward(model, Weights(learn, 1.0 if learn > 0 else keep), learning_rate=0.001)
    for statistic in methods[1.0].statistics:
        for key, value in getattr(methods[1.0], statistic).items():
            other = getattr(methods[-1.0], statistic)[key]
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other)), (statistic, key)
    for method in methods.values():
        method.end_step(model)
    assert_omega(methods[-1.0], floats(methods[1.0].omega), tolerance=0)
    assert any(omega.any() for omega in methods[1.0].omega.values())


# The penalty ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_no_penalty_in_step_0(name):
    torch.manual_seed(0)
    method, model = make_method(name), ToySegmenter(3)
    method.begin_step(model, STEPS[0])
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    method.after_backward(model, Weights(1.0, 500.0), learning_rate=0.001)
    assert method.penalty(model) == 0
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_the_penalty_is_zero_at_the_anchor_and_positive_after_moving_one_weight(name):
    method, model = after_one_step(name)
    assert method.penalty(model) == 0
    weight = model.body.weight
    index = int(method.omega["body.weight"].argmax())
    with torch.no_grad():
        weight.view(-1)[index] += 0.5
    expected = method.omega["body.weight"].flatten()[index] * 0.25
    assert expected > 0.2
    torch.testing.assert_close(method.penalty(model), expected, rtol=1e-12, atol=0)


def moved(model, seed: int = 2) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p += torch.randn(p.shape, dtype=p.dtype, generator=generator)


@pytest.mark.parametrize("name", NAMES)
def test_the_penalty_is_the_formula(name):
    method, model = after_one_step(name, total=24)
    anchor = floats(dict(model.named_parameters()))
    moved(model)
    now, omega = floats(dict(model.named_parameters())), floats(method.omega)
    assert (
        "classifiers.1.weight" in now and "classifiers.1.weight" not in omega
    )  # new classes have no old self
    expected = sum(
        o * (theta - old) ** 2
        for key in omega
        for o, theta, old in zip(omega[key], now[key], anchor[key], strict=True)
    )
    assert method.penalty(model).item() == pytest.approx(expected, rel=1e-12)


def pulled(method, model, keep: float, learning_rate: float) -> dict:
    """The gradient where l_seg has none, and the terms."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    terms = method.after_backward(model, Weights(1.0, keep), learning_rate)
    return {key: p.grad.clone() for key, p in model.named_parameters() if key in method.omega} | terms


@pytest.mark.parametrize("name", NAMES)
def test_a_pull_beyond_the_anchor_is_cut_back_to_it(name):
    method, model = after_one_step(name, total=24)
    anchor = {key: p.detach().clone() for key, p in model.named_parameters()}
    moved(model)
    keep, learning_rate = 1000.0, 0.01  # so that all with omega > 1 / 20 would go too far
    gradients = pulled(method, model, keep, learning_rate)
    assert gradients.pop("penalty") == method.penalty(model)
    for key, gradient in gradients.items():
        distance = dict(model.named_parameters())[key].detach() - anchor[key]
        left = (1 - 20 * method.omega[key]).clamp(min=0) * distance
        torch.testing.assert_close(distance - learning_rate * gradient, left, rtol=1e-9, atol=1e-12)
    assert any((omega > 1 / 20).any() and (omega < 1 / 20).any() for omega in method.omega.values())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("flip", ["seg", "all"])
def test_pulls_over_a_step_are_those_of_the_slow_reference(flip, name):
    """In a descent towards the anchor; in an ascent too with flip seg, and with flip all away from it by the
    same rule."""
    method, model = after_one_step(name, total=24)
    phase, total, learning_rate = AlterSGD(0.25, 40.0, 30.0, flip=flip, every=2), 8, 0.05
    optimizer = make_optimizer(model)
    anchor = floats({key: p for key, p in model.named_parameters() if key in method.omega})
    omega, signs, cut = floats(method.omega), [], 0
    for t in range(1, total + 1):
        weights = phase(t, total)
        optimizer.zero_grad()
        weighted_loss(method, weights, model, *toy_batch(t, model.num_classes)).backward()
        theta = floats(dict(model.named_parameters()))
        data = floats({key: p.grad for key, p in model.named_parameters()})
        method.after_backward(model, weights, learning_rate)
        pull = slow_pull(theta, anchor, omega, weights.keep, learning_rate)
        for key, p in model.named_parameters():
            expected = [a + b for a, b in zip(data[key], pull.get(key, [0.0] * p.numel()), strict=True)]
            assert p.grad.flatten().tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)
        weight = torch.tensor(theta["body.weight"]) - torch.tensor(anchor["body.weight"])
        signs.append(torch.sign(torch.dot(torch.tensor(pull["body.weight"]), weight)).item())
        cut += sum(
            o > 1 / (2 * abs(weights.keep) * learning_rate) for values in omega.values() for o in values
        )
        optimizer.step()
    ascent = -1.0 if flip == "all" else 1.0
    assert signs == [0.0, 1.0, 1.0, 1.0, ascent, ascent, 1.0, 1.0]  # it begins at the anchor
    assert cut > 0


@pytest.mark.parametrize("keep", [3.0, 1000.0])
@pytest.mark.parametrize("name", NAMES)
def test_an_ascent_of_r_pushes_away_by_as_much_as_a_descent_pulls(name, keep):
    method, model = after_one_step(name, total=24)
    anchor = {key: p.detach().clone() for key, p in model.named_parameters()}
    moved(model)
    down, up = (pulled(method, model, sign * keep, learning_rate=0.01) for sign in (1, -1))
    assert down.pop("penalty") == up.pop("penalty") == method.penalty(model) > 0
    assert any(gradient.any() for gradient in down.values())
    for key, gradient in down.items():
        assert torch.equal(up[key], -gradient)
        distance = dict(model.named_parameters())[key].detach() - anchor[key]
        after = distance - 0.01 * up[key]
        assert (after.abs() >= distance.abs()).all() and (after.abs() <= 2.000001 * distance.abs()).all()


@pytest.mark.parametrize("name", NAMES)
def test_no_pull_of_the_published_recipe_is_cut(name):
    method, model = after_one_step(name, total=24)
    moved(model)
    keep = published_strength(name, "15-1")
    cut, free = (pulled(method, model, keep, learning_rate) for learning_rate in (0.001, 0.0))
    assert all(torch.equal(cut[key], free[key]) for key in free)
    assert method.largest >= max(omega.max() for omega in method.omega.values())


@pytest.mark.parametrize("knows_the_learning_rate", [True, False])
def test_without_the_cut_momentum_swings_ever_further(knows_the_learning_rate):
    method, model = after_one_step("ewc", total=24)
    moved(model)
    before, learning_rate = method.penalty(model), 0.002
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9, nesterov=True)
    for _ in range(300):
        pulled(method, model, keep=500.0, learning_rate=learning_rate if knows_the_learning_rate else 0.0)
        optimizer.step()
    assert (method.penalty(model) < 0.1 * before) == knows_the_learning_rate
    assert (method.penalty(model) > 1e10 * before) != knows_the_learning_rate


@pytest.mark.parametrize(
    "weights",
    [
        Weights(1.0, 500.0),
        Weights(-1.0, 3.0),
        Weights(-1.0, -3.0),
        Weights(-1.0, -500.0),
        Weights(0.0, 2.0),
        Weights(1.0, 0.0),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_the_closed_form_gradient_is_autograds(name, weights):
    method, model = after_one_step(name, total=24)
    anchor = {key: p.detach().clone() for key, p in model.named_parameters()}
    omega = {key: value.clone() for key, value in method.omega.items()}
    moved(model)
    images, labels = toy_batch(0, model.num_classes)
    weighted_loss(method, weights, model, images, labels).backward()
    data = {key: p.grad.clone() for key, p in model.named_parameters()}
    terms = method.after_backward(model, weights, learning_rate=0.0005)

    parameters = dict(model.named_parameters())
    penalty = sum((omega[key] * (parameters[key] - anchor[key]) ** 2).sum() for key in omega)
    names = list(parameters)
    pull = torch.autograd.grad(weights.keep * penalty, [parameters[key] for key in names], allow_unused=True)
    for key, g in zip(names, pull, strict=True):
        expected = data[key] if g is None else data[key] + g  # by the sign of keep, whatever that of learn
        torch.testing.assert_close(parameters[key].grad, expected, rtol=1e-12, atol=1e-12)
    assert [value.item() for value in terms.values()] == pytest.approx(
        [penalty.item()], rel=1e-12
    )  # unweighted
    assert method.omega.keys() == omega.keys() and all(
        torch.equal(method.omega[key], omega[key]) for key in omega
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_strong_penalty_holds_the_old_weights(name):
    def distance(keep):
        method, model = after_one_step(name)
        iterate(method, model, Descent(keep), make_optimizer(model), range(1, 11), 10)
        return method.penalty(model).item()

    assert 0 < distance(5.0) < distance(0.0)


# State ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [0, 7, 14])
@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_step_ends_as_the_uninterrupted_one(name, cut):
    phase, total = AlterSGD(0.5, 2.0, 1.0), 24
    method, model = after_one_step(name)
    optimizer = make_optimizer(model)
    iterate(method, model, phase, optimizer, range(1, cut + 1), total)
    saved = copy.deepcopy((model, optimizer.state_dict(), method.state_dict()))
    iterate(method, model, phase, optimizer, range(cut + 1, total + 1), total)
    method.end_step(model)

    again, optimizer_state, state = saved
    resumed, optimizer = make_method(name), make_optimizer(again)
    resumed.begin_step(again, STEPS[1])
    resumed.load_state_dict(state)
    optimizer.load_state_dict(optimizer_state)
    iterate(resumed, again, phase, optimizer, range(cut + 1, total + 1), total)
    resumed.end_step(again)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    assert_omega(resumed, floats(method.omega), tolerance=0)


@pytest.mark.parametrize("name", NAMES)
def test_the_state_of_a_finished_step_starts_the_next(name):
    torch.manual_seed(0)
    method, model = make_method(name), ToySegmenter()
    train_step(method, model, STEPS[0], Descent(), 12)
    again, state = copy.deepcopy((model, method.state_dict()))
    resumed = make_method(name)
    resumed.load_state_dict(state)
    for m, net in ((method, model), (resumed, again)):
        torch.manual_seed(4)
        train_step(m, net, STEPS[1], Descent(2.0), 12)
    assert_omega(resumed, floats(method.omega), tolerance=0)


@pytest.mark.parametrize("name", NAMES)
def test_the_state_survives_a_file_read_without_code(name, tmp_path):
    method, _ = after_one_step(name)
    torch.save(method.state_dict(), tmp_path / "state.pt")
    resumed = make_method(name)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert_omega(resumed, floats(method.omega), tolerance=0)
    assert set(resumed.anchor) == set(method.anchor) and method.anchor


def test_statistics_of_another_method_are_refused():
    method, _ = after_one_step("ewc")
    with pytest.raises(ValueError, match="pi"):
        make_method("pi").load_state_dict(method.state_dict())
