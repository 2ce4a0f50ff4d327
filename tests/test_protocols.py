import json
import os
from itertools import chain
from pathlib import Path

import pytest

from data.incremental import select_test, select_train
from data.protocols import PROTOCOLS, Step, protocol_steps, steps_from_lists

SHARED = os.environ.get("ALTERSGD_SHARED")
needs_lists = pytest.mark.skipif(not SHARED, reason="ALTERSGD_SHARED does not say where voc2012_lists is")


@pytest.fixture(scope="module")
def classes():
    content = json.loads((Path(SHARED) / "voc2012_lists" / "classes_per_image.json").read_text())
    return {split: [frozenset(row) for row in content[split].values()] for split in ("train_aug", "val")}


@pytest.mark.parametrize(
    ("dataset", "protocol", "sizes"),
    [
        ("voc", "offline", [20]),
        ("voc", "19-1", [19, 1]),
        ("voc", "15-5", [15, 5]),
        ("voc", "15-1", [15, 1, 1, 1, 1, 1]),
        ("voc", "10-10", [10, 10]),
        ("voc", "10-5-5", [10, 5, 5]),
        ("voc", "10-1", [10] + [1] * 10),
        ("voc", "5-3", [5] + [3] * 5),
        ("voc", "2-2", [2] * 10),
        ("ade", "offline", [150]),
        ("ade", "100-50", [100, 50]),
        ("ade", "100-10", [100] + [10] * 5),
        ("ade", "100-5", [100] + [5] * 10),
        ("ade", "50-50", [50] * 3),
    ],
)
def test_sizes_of_steps(dataset, protocol, sizes):
    steps = protocol_steps(dataset, protocol)
    assert [step.num_new for step in steps] == sizes
    assert [step.index for step in steps] == list(range(len(sizes)))
    last = steps[-1]
    assert last.seen == tuple(range(1 + sum(sizes)))
    assert len(last.old) == sum(sizes[:-1])


def test_every_protocol_is_tested_above():
    marks = test_sizes_of_steps.pytestmark[0].args[1]
    assert {row[:2] for row in marks} == {(name, key) for name, group in PROTOCOLS.items() for key in group}


def test_step_counts():
    step = Step(2, old=(5, 1), new=(7,))
    assert step.seen == (0, 5, 1, 7)
    assert (step.num_old, step.num_new, step.num_classes) == (3, 1, 4)


def test_steps_from_names_and_ids():
    names = ("background", "cat", "dog", "hen")
    assert steps_from_lists([["hen", 1], ["dog"]], names) == [Step(0, (), (3, 1)), Step(1, (3, 1), (2,))]


@pytest.mark.parametrize(
    ("lists", "said"),
    [
        ([], "at least one step"),
        ([[1], []], "step 1 has no classes"),
        ([[0, 1]], "background"),
        ([["background"]], "background"),
        ([[1], [255]], "255 is outside"),
        ([[-1]], "-1 is outside"),
        ([[4]], "4 is outside 1..3"),
        ([[1], [2, 1]], "step 1: class 1 is learned twice"),
        ([[1, 1]], "learned twice"),
        ([["cat"], [1]], "class 1 is learned twice"),
        ([["cta"]], "did you mean 'cat'"),
        ([[True]], "True is no class id"),
        ([[1.0]], "1.0 is no class id"),
    ],
)
def test_steps_that_cannot_be_learned(lists, said):
    with pytest.raises(ValueError, match=said):
        steps_from_lists(lists, ("background", "cat", "dog", "hen"))


@pytest.mark.parametrize(
    ("dataset", "protocol", "said"), [("voc", "15-2", "15-1"), ("coco", "15-1", "voc, ade")]
)
def test_unknown_protocol_names_the_choices(dataset, protocol, said):
    with pytest.raises(ValueError, match=said):
        protocol_steps(dataset, protocol)


@needs_lists
@pytest.mark.parametrize(
    ("protocol", "mode", "counts"),
    [
        ("15-1", "disjoint", [8437, 378, 299, 420, 500, 548]),
        ("15-1", "sequential", [8437, 378, 299, 420, 500, 548]),
        ("15-1", "overlapped", [9568, 487, 299, 491, 500, 548]),
        ("15-5", "disjoint", [8437, 2145]),
        ("15-5", "overlapped", [9568, 2145]),
        ("19-1", "disjoint", [10034, 548]),
        ("19-1", "overlapped", [10410, 548]),
        ("offline", "disjoint", [10582]),
    ],
)
def test_published_counts(classes, protocol, mode, counts):
    steps = protocol_steps("voc", protocol)
    assert [len(select_train(classes["train_aug"], step, mode)) for step in steps] == counts


@needs_lists
def test_published_test_counts(classes):
    steps = protocol_steps("voc", "15-1")
    assert [len(select_test(classes["val"], step)) for step in steps] == [1240, 1277, 1329, 1353, 1421, 1449]


@needs_lists
def test_published_pictures_per_class(classes):
    counts = [
        586,
        486,
        698,
        461,
        654,
        385,
        1086,
        1000,
        1081,
        264,
        528,
        1177,
        444,
        482,
        3898,
        487,
        299,
        491,
        500,
        548,
    ]
    assert [sum(class_id in row for row in classes["train_aug"]) for class_id in range(1, 21)] == counts


@needs_lists
@pytest.mark.parametrize("protocol", PROTOCOLS["voc"])
def test_disjoint_steps_partition_the_pictures(classes, protocol):
    chosen = [
        select_train(classes["train_aug"], step, "disjoint") for step in protocol_steps("voc", protocol)
    ]
    assert sorted(chain(*chosen)) == list(range(10582))
