"""Metrics against slow loops and examples worked out by hand."""

import json
import math

import numpy as np
import pytest
import torch

from data.protocols import IGNORE_INDEX, PROTOCOLS, Step, protocol_steps, steps_from_lists
from engine.results import step_result
from metrics import continual
from metrics.confusion import ConfusionMatrix
from metrics.health import FiniteGuard, NonFiniteLoss
from tracking.tables import class_table, format_table, markdown_table, percent, step_table

EVERY_PROTOCOL = [(dataset, protocol) for dataset in PROTOCOLS for protocol in PROTOCOLS[dataset]]

# ---- confusion matrix --------------------------------------------------------------------------------------


def random_pixels(seed: int, num_classes: int, shape=(2, 9, 7)) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(num_classes, shape, generator=generator).to(torch.uint8)
    labels[torch.rand(shape, generator=generator) < 0.2] = IGNORE_INDEX
    return labels, torch.randint(num_classes, shape, generator=generator)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_classes", [1, 2, 5, 21, 151])
def test_confusion_matrix_counts_pixel_by_pixel_over_several_batches(seed, num_classes):
    matrix, slow = ConfusionMatrix(num_classes), np.zeros((num_classes, num_classes), int)
    for batch in range(3):
        labels, guess = random_pixels(10 * seed + batch, num_classes)
        matrix.update(labels, guess)
        for truth, said in zip(labels.flatten().tolist(), guess.flatten().tolist(), strict=True):
            if truth != IGNORE_INDEX:
                slow[truth, said] += 1
    assert matrix.counts.tolist() == slow.tolist()
    for c, value in enumerate(matrix.iou().tolist()):
        union = slow[c].sum() + slow[:, c].sum() - slow[c, c]
        assert math.isnan(value) if union == 0 else value == slow[c, c] / union


def test_iou_by_hand():
    matrix = ConfusionMatrix(4)
    matrix.update(torch.tensor([0, 0, 0, 1, 1, 255, 255]), torch.tensor([0, 0, 1, 1, 2, 0, 2]))
    iou = matrix.iou().tolist()
    assert iou[:3] == [2 / 3, 1 / 3, 0.0]  # class 2 is only predicted: wrong, not unknown
    assert math.isnan(iou[3])


def test_void_alone_counts_nothing():
    matrix = ConfusionMatrix(3)
    matrix.update(torch.full((4, 4), IGNORE_INDEX), torch.zeros(4, 4, dtype=torch.long))
    assert matrix.counts.sum() == 0 and matrix.iou().isnan().all()


@pytest.mark.parametrize("num_classes", [21, 151])
def test_pixels_of_many_chunks_are_all_counted(num_classes):
    labels, guess = random_pixels(0, num_classes, shape=(1, 3, 100_001))  # no multiple of a chunk, nor even
    matrix = ConfusionMatrix(num_classes)
    matrix.update(labels, guess)
    valid = labels != IGNORE_INDEX
    expected = np.zeros((num_classes, num_classes), int)
    np.add.at(expected, (labels[valid].numpy(), guess[valid].numpy()), 1)
    assert matrix.counts.tolist() == expected.tolist()


def test_large_counts_stay_exact():
    matrix = ConfusionMatrix(2)
    matrix.counts[0, 0] = 2**40
    matrix.update(torch.tensor([0, 0]), torch.tensor([0, 1]))
    assert matrix.counts.tolist() == [[2**40 + 1, 1], [0, 0]]


# ---- mIoU in both conventions ------------------------------------------------------------------------------


@pytest.mark.parametrize(("dataset", "protocol"), EVERY_PROTOCOL)
def test_both_conventions_for_every_protocol_and_step(dataset, protocol):
    steps = protocol_steps(dataset, protocol)
    values = np.random.default_rng(0).random(151).tolist()
    for step in steps:
        iou = {c: values[c] for c in step.seen}
        old, new = steps[0].new, [c for c in step.seen[1:] if c not in steps[0].new]
        paper, plop = (continual.miou(iou, steps[0], with_background=b) for b in (False, True))
        assert paper["old"] == pytest.approx(np.mean([values[c] for c in old]))
        assert plop["old"] == pytest.approx(np.mean([values[c] for c in (0, *old)]))
        assert paper["all"] == pytest.approx(np.mean([values[c] for c in (*old, *new)]))
        assert plop["all"] == pytest.approx(np.mean([values[c] for c in (0, *old, *new)]))
        expected = pytest.approx(np.mean([values[c] for c in new])) if new else None
        assert paper["new"] == expected and plop["new"] == expected
    assert len(steps[-1].seen) == {"voc": 21, "ade": 151}[dataset]


def test_conventions_by_hand_on_voc_15_1():
    iou = {0: 0.9} | dict.fromkeys(range(1, 16), 0.6) | dict.fromkeys(range(16, 21), 0.2)
    first = protocol_steps("voc", "15-1")[0]
    paper = {"old": 0.6, "new": 0.2, "all": (15 * 0.6 + 5 * 0.2) / 20}
    plop = {"old": (0.9 + 15 * 0.6) / 16, "new": 0.2, "all": (0.9 + 15 * 0.6 + 5 * 0.2) / 21}
    assert continual.miou(iou, first, with_background=False) == pytest.approx(paper)
    assert continual.miou(iou, first, with_background=True) == pytest.approx(plop)


def test_a_class_that_occurs_nowhere_is_left_out_of_the_mean():
    first = Step(0, (), (1, 2))
    found = continual.miou({0: 0.8, 1: None, 2: 0.4, 3: None}, first, with_background=True)
    assert found == {"old": pytest.approx(0.6), "new": None, "all": pytest.approx(0.6)}


def test_mean_of_nothing_is_none():
    assert continual.mean([]) is None and continual.mean([None]) is None
    assert continual.mean([0.0, None, 1.0]) == 0.5


# ---- forgetting, transfer, average -------------------------------------------------------------------------

STEPS = steps_from_lists([[1, 2], [3], [4]])
HISTORY = [
    {0: 0.9, 1: 0.5, 2: 0.7},
    {0: 0.8, 1: 0.6, 2: 0.3, 3: 0.4},
    {0: 0.6, 1: 0.2, 2: 0.4, 3: 0.5, 4: 0.1},
]


def test_forgetting_is_the_best_earlier_minus_now():
    assert continual.forgetting(HISTORY) == pytest.approx({0: 0.3, 1: 0.4, 2: 0.3, 3: -0.1})
    assert continual.forgetting(HISTORY[:1]) == {}


def test_backward_transfer_compares_with_the_step_that_learned_the_class():
    changes = [0.2 - 0.5, 0.4 - 0.7, 0.5 - 0.4]  # no background, and class 4 has no past
    assert continual.backward_transfer(HISTORY) == pytest.approx(sum(changes) / 3)
    assert continual.backward_transfer(HISTORY[:1]) is None


def test_unknown_values_neither_forget_nor_transfer():
    history = [{0: 0.9, 1: None, 2: 0.7, 3: 0.5}, {0: 0.8, 1: 0.6, 2: None, 3: 0.4}]
    assert continual.forgetting(history) == pytest.approx({0: 0.1, 3: 0.1})
    assert continual.backward_transfer(history) == pytest.approx(-0.1)


def test_summary_by_hand():
    summary = continual.summary(HISTORY, STEPS)
    assert summary["miou"] == pytest.approx({"old": 0.3, "new": 0.3, "all": 0.3})
    assert summary["miou_with_background"] == pytest.approx({"old": 0.4, "new": 0.3, "all": 1.8 / 5})
    assert summary["mean_forgetting"] == pytest.approx((0.4 + 0.3 - 0.1) / 3)  # foreground only
    assert summary["average"]["miou"] == pytest.approx((1.2 / 2 + 1.3 / 3 + 1.2 / 4) / 3)
    assert summary["average"]["miou_with_background"] == pytest.approx((2.1 / 3 + 2.1 / 4 + 1.8 / 5) / 3)


def test_summary_of_the_only_step_has_nothing_to_forget():
    summary = continual.summary([{0: 0.9, 1: 0.5, 2: 0.7}], steps_from_lists([[1, 2]]))
    assert summary["forgetting"] == {}
    assert summary["mean_forgetting"] is None and summary["backward_transfer"] is None
    assert summary["miou"]["new"] is None and summary["average"]["miou"] == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("lists", "old", "new"),
    [
        (PROTOCOLS["voc"]["15-1"], "1-15", "16-20"),
        (PROTOCOLS["voc"]["19-1"], "1-19", "20"),
        (PROTOCOLS["voc"]["offline"], "1-20", "new"),
        (PROTOCOLS["ade"]["100-10"], "1-100", "101-150"),
        ([[3], [1, 2]], "3", "1-2"),
        ([[1, 3], [5, 4]], "old", "new"),
    ],
)
def test_group_names(lists, old, new):
    assert continual.group_names(steps_from_lists(lists)) == {"old": old, "new": new}


# ---- results and tables ------------------------------------------------------------------------------------

NAMES = ("background", "cat", "dog", "owl", "fox")


def toy_results() -> list[dict]:
    results = []
    for step, iou in zip(STEPS, HISTORY, strict=True):
        counts = np.eye(step.num_classes, dtype=np.int64)
        results.append(step_result(step, STEPS, NAMES, counts, list(iou.values()), results))
    return results


def test_step_results_build_on_each_other_and_survive_json():
    results = json.loads(json.dumps(toy_results()))
    assert [r["step"] for r in results] == [0, 1, 2]
    assert results[1]["classes"] == ["background", "cat", "dog", "owl"] == list(results[1]["iou"])
    assert results[2]["forgetting"] == pytest.approx({"background": 0.3, "cat": 0.4, "dog": 0.3, "owl": -0.1})
    assert results[0]["confusion"] == np.eye(3).tolist()


def test_a_class_without_pixels_is_null_in_the_results_and_a_dash_in_the_table():
    steps = steps_from_lists([[2], [1]])  # an order of one's own: labels are not ids
    first = step_result(steps[0], steps, NAMES, np.eye(2), [0.5, float("nan")], [])
    second = step_result(steps[1], steps, NAMES, np.eye(3), [0.4, 0.25, 0.75], [first])
    assert first["iou"] == {"background": 0.5, "dog": None}
    assert first["miou"] == {"old": None, "new": None, "all": None}
    assert "NaN" not in json.dumps([first, second])
    assert second["iou"] == {"background": 0.4, "dog": 0.25, "cat": 0.75}
    assert second["miou"] == {"old": 0.25, "new": 0.75, "all": 0.5}
    assert list(second["forgetting"]) == ["background"]
    rows = [line.split() for line in class_table([first, second]).splitlines()]
    assert rows[2:] == [
        ["background", "50.0", "40.0", "10.0"],
        ["dog", "-", "25.0", "-"],
        ["cat", "-", "75.0", "-"],
    ]


def test_step_table_shows_both_conventions():
    lines = step_table(toy_results(), continual.group_names(STEPS)).splitlines()
    assert lines[0].split()[:4] == ["step", "1-2", "3-4", "all"]
    first = ["0", "60.0", "-", "60.0", "90.0", "70.0", "-", "70.0", "-", "-", "60.0"]
    last = ["2", "30.0", "30.0", "30.0", "60.0", "40.0", "30.0", "36.0", "20.0", "-16.7", "44.4"]
    assert lines[2].split() == [*first, "-"] and lines[4].split() == [*last, "30.0"]  # and hiou
    older = [{key: value for key, value in step.items() if key != "metrics"} for step in toy_results()]
    shown = step_table(older, continual.group_names(STEPS)).splitlines()
    assert "hiou" not in shown[0] and shown[2].split() == first and shown[4].split() == last
    assert len(lines) == 5 and len({len(line) for line in lines}) == 1


def test_tables_align():
    table = format_table(["run", "x"], [["longer", "1.0"], ["s", "22.5"]])
    assert table.splitlines() == ["run        x", "------  ----", "longer   1.0", "s       22.5"]
    assert format_table(["run", "x"], []).splitlines() == ["run  x", "---  -"]
    assert [percent(v) for v in (None, 0.0, 0.12345, 1.0)] == ["-", "0.0", "12.3", "100.0"]
    assert [percent(v) for v in (-0.0, -0.0004, -0.0006)] == ["0.0", "0.0", "-0.1"]


def test_words_align_left_in_markdown():
    rows = [["a", "+1.0", "own step 0", "-"], ["b", "-", "-", "-"]]
    assert markdown_table(["run", "x", "uses", "y"], rows).splitlines()[1] == "| --- | --: | --- | --: |"
    assert markdown_table(["run", "x"], []).splitlines() == ["| run | x |", "| --- | --: |"]


# ---- the guard against non-finite losses -------------------------------------------------------------------


def watch(guard: FiniteGuard, iteration: int, **terms: float) -> None:
    guard.watch(iteration, {name: torch.tensor(value) for name, value in terms.items()})


def test_guard_is_silent_on_finite_terms():
    guard = FiniteGuard()
    guard.check()
    for iteration in range(1, 5):
        watch(guard, iteration, seg=1e30, distill=0.0)
        guard.check()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("term", ["seg", "distill"])
def test_guard_names_the_first_bad_iteration_and_all_its_terms(bad, term):
    guard = FiniteGuard()
    for iteration in range(1, 9):
        broken = {term: bad} if iteration == 5 else {"distill": float("nan")} if iteration > 5 else {}
        watch(guard, iteration, **({"seg": 0.5 * iteration, "distill": 7.0} | broken))
    with pytest.raises(NonFiniteLoss, match="at iteration 5: ") as caught:
        guard.check()
    assert caught.value.iteration == 5
    values = {"seg": "2.5", "distill": "7"} | {term: f"{bad:g}"}
    assert str(caught.value).endswith(f"seg = {values['seg']}, distill = {values['distill']}")


def test_guard_sees_updates_that_lack_the_terms_after_the_backward_pass():
    """A gradient scaler skips updates, the first one above all; a broken loss must not hide among them."""
    for first in ({"seg": 1.0}, {"seg": 1.0, "penalty": 2.0}):
        for broken in ({"seg": float("nan")}, {"seg": 1.0, "penalty": float("inf")}):
            guard = FiniteGuard()
            watch(guard, 1, **first)
            watch(guard, 2, **broken)
            with pytest.raises(NonFiniteLoss, match="iteration 2"):
                guard.check()


def test_guard_watches_without_touching_the_graph():
    guard, loss = FiniteGuard(), torch.ones((), requires_grad=True) * 2
    guard.watch(1, {"seg": loss})
    assert not guard.watched[0][2].requires_grad
