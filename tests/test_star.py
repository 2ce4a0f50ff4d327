"""STAR: statistics, drawn features and terms against slow references."""

import json

import pytest
import torch
import torch.nn.functional as F
from toys import STEPS, student_and_teacher

import train
from engine import checkpoint
from methods import METHODS, make_method
from methods.prototypes import at_features
from methods.star import SEEN
from models.segmenter import Output

QUICK = ("train.epochs=1", "train.epochs_later=2", "run.pictures=0", "run.tracker=none")


@pytest.fixture
def begun(double_precision):
    """The method in step 1 with the statistics of step 0, its networks, and a batch with rewritten labels."""
    method, student, teacher, batch = student_and_teacher("star")
    with torch.no_grad():
        target = teacher(batch.images)
    return method, student, target, batch._replace(labels=method.targets(batch.labels, target))


def outputs_of_step_0(seed: int = 0):
    """Three batches of labels (classes 1 and 2) and features, as `review` is given them."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(3):
        hidden = torch.randn(2, 5, 4, 4, generator=generator, dtype=torch.float64) + 1
        yield torch.randint(3, (2, 32, 32), generator=generator), Output(hidden, hidden, (), hidden)


def test_statistics_against_a_loop_over_pixels():
    method = make_method("star")
    method.begin_step(None, STEPS[0])
    method.review(outputs_of_step_0())
    for c in (1, 2):
        features = torch.stack(
            [
                output.hidden[b, :, row, column]
                for labels, output in outputs_of_step_0()
                for b in range(2)
                for row in range(4)
                for column in range(4)
                if labels[b, 8 * row + 4, 8 * column + 4] == c
            ]
        )
        directions = F.normalize(features, dim=1)
        mu = F.normalize(directions.sum(0), dim=0)
        sigma = (directions - mu).square().mean(0).sqrt()
        norms = features.norm(dim=1)
        place = c - 1
        torch.testing.assert_close(method.prototypes[place].double(), mu, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(method.noise[place].double(), sigma, atol=1e-6, rtol=1e-6)
        expected = torch.stack([norms.mean(), norms.std()])
        torch.testing.assert_close(method.norms[place].double(), expected, atol=1e-6, rtol=1e-6)
        assert method.numbers[c] == len(features)
    assert method.numbers.sum() == 3 * 2 * 16


def test_a_class_that_no_pixel_of_the_features_shows_has_finite_statistics():
    method = make_method("star")
    method.begin_step(None, STEPS[0])
    method.review((torch.zeros_like(labels), output) for labels, output in outputs_of_step_0())
    assert all(t.isfinite().all() for t in (method.prototypes, method.noise, method.norms))


@pytest.mark.parametrize("mode", ["disjoint", "overlapped"])
def test_how_many_features_are_drawn_and_how_often_the_background_counts(mode):
    method = make_method("star")
    method.mode, method.numbers = mode, torch.tensor([100.0, 40.0, 7.0])
    method.begin_step(None, STEPS[1])
    logits = torch.full((1, 2, 16, 16), -1.0)
    logits[:, 0, :8] = 0.6  # the teacher sees class 1 in the upper half: a logit above 1/2
    logits[:, 1, 8:] = 0.4  # and nothing in the lower: a sigmoid above 1/2 is not enough
    labels = torch.zeros(1, 16, 16, dtype=torch.long)
    hidden = torch.zeros(1, 3, 4, 4)
    method.survey([(labels, Output(logits, hidden, (), hidden))] * 2)
    # each batch has 8 places of class 1 and 8 of the background
    drawn = [int((method.drawn == c).sum()) for c in (0, 1)]
    if mode == "disjoint":
        assert drawn == [40 // 2, 7 // 2] and method.extra_background == pytest.approx(100 / 16)
        assert method.numbers.tolist() == [116, 56, 7]
    else:
        assert drawn == [(40 - 16) // 2, 7 // 2]
        assert method.extra_background == pytest.approx(99 / 16 - 0.5)
        assert method.numbers.tolist() == [99 + 8, 40, 7]


def test_labels_say_where_the_teacher_sees_an_object(begun):
    _, _, target, batch = begun
    raw = student_and_teacher("star")[3].labels
    for b, row, column in torch.randint(2, (50, 3)).tolist():
        sees = bool((target.logits[b, :, row, column] > 0.5).any())
        expected = SEEN if raw[b, row, column] == 0 and sees else raw[b, row, column].item()
        assert batch.labels[b, row, column].item() == expected


def test_the_terms_against_slow_references(begun):
    method, student, target, batch = begun
    method.extra_background = 0.7
    method.drawn = torch.tensor([0] * 5 + [1] * 4)
    output = student(batch.images)
    hidden, labels = output.hidden, batch.labels
    labels[0][labels[0] == SEEN] = 0  # a teacher that sees nothing in the first image

    fakes = method._draw(hidden)
    new = student.classifiers[-1]
    z = fakes @ new.weight[:, :, 0, 0].T + new.bias
    places = hidden[:, 0].numel()
    small = labels[:, 4::8, 4::8]
    background = [new(hidden)[b, :, r, c] for b, r, c in (small == 0).nonzero().tolist()]
    positive = (labels[:, None] == 3).double()
    image = F.binary_cross_entropy_with_logits(
        output.logits[:, 2:], positive, pos_weight=torch.tensor(4.0), reduction="none"
    )
    mean_background = F.softplus(torch.stack(background)).mean()
    w_fakes, w_background = 9 / places, 0.7 * len(background) / places
    expected = image.sum(1).mean() + w_fakes * F.softplus(z).mean() + w_background * mean_background
    expected = expected / (1 + w_fakes + w_background)
    torch.testing.assert_close(method.learn(output, batch), expected)

    size = hidden.shape[2:]
    seen = F.interpolate((labels == SEEN)[:, None].double(), size=size, mode="bilinear", align_corners=False)
    squares = (hidden - target.hidden) ** 2
    features = (squares * seen).sum() / (seen.sum() * hidden.shape[1])
    where = F.interpolate(positive, size=size, mode="bilinear", align_corners=False)
    centre = F.normalize((F.normalize(hidden, dim=1) * where).sum(dim=(0, 2, 3)), dim=0)
    apart = 1 / min((centre - mu).norm() for mu in method.prototypes.double())
    terms = method.keep(output, target, batch)
    torch.testing.assert_close(terms, {"features": features, "apart": 0.01 * apart}, rtol=1e-6, atol=1e-8)


def test_features_follow_from_the_number_of_updates_alone(begun):
    method, student, _, batch = begun
    method.drawn = torch.tensor([0, 1, 1])
    like = student(batch.images).hidden
    first = method._draw(like)
    torch.randn(7)
    assert torch.equal(method._draw(like), first)
    method.after_backward(student, None, 0.1)
    assert not torch.equal(method._draw(like), first)


def test_drawn_features_have_the_statistics_of_their_class(begun):
    method, student, _, batch = begun
    method.drawn = torch.zeros(20000, dtype=torch.long)
    fakes = method._draw(student(batch.images).hidden)
    m, s = method.norms[0].double()
    mu, sigma = method.prototypes[0].double(), method.noise[0].double()
    torch.testing.assert_close(fakes.mean(0), m * mu, atol=float(0.05 * m), rtol=0)
    expected = ((m**2 + s**2) * (mu**2 + sigma**2) - (m * mu) ** 2).sqrt()
    torch.testing.assert_close(fakes.std(0), expected, atol=float(0.05 * m), rtol=0.05)


def test_nothing_is_drawn_where_nothing_is_learned(begun):
    _, student, _, batch = begun
    with torch.no_grad():
        assert student(batch.images).extra == {}


def test_a_run_hands_statistics_of_all_classes_on_and_predicts_by_threshold(toy_arguments, tmp_path):
    assert train.main(toy_arguments("method.name=star", *QUICK)) == 0
    run = tmp_path / "runs" / "run"
    states = [checkpoint.load(run / f"step_{i}.pt") for i in (0, 1)]
    assert [len(state["methods"]["star"]["prototypes"]) for state in states] == [2, 3]
    assert [len(state["methods"]["star"]["numbers"]) for state in states] == [3, 4]
    assert states[1]["network"]["rule"] == "star" and METHODS["star"].rule(4) is not None
    before, after = (state["model"] for state in states)
    norms = [name for name in before if "bn" in name or "norm" in name]
    assert norms and all(torch.equal(before[name], after[name]) for name in norms)
    terms = json.loads((run / "results.json").read_text())["remarks"]
    assert terms == ["own step 0"]


def test_labels_are_read_in_the_middle_of_each_place():
    labels = torch.arange(64).view(1, 8, 8)
    assert at_features(labels, torch.zeros(1, 3, 2, 2)).tolist() == [[[18, 22], [50, 54]]]


@pytest.mark.parametrize(("side", "places"), [(512, 32), (513, 33), (500, 32), (97, 7)])
def test_every_place_has_a_label_whatever_the_size_of_the_image(side, places):
    labels = torch.arange(side).expand(1, side, side)
    found = at_features(labels, torch.zeros(1, 3, places, places))
    assert found.shape == (1, places, places)
    middles = (torch.arange(places) + 0.5) * side / places
    assert (found[0, 0] - middles).abs().max() <= 1
