import json
import os
from itertools import chain
from pathlib import Path

import pytest

from data.dataset import DataError
from data.incremental import draw_class, images_of_steps, select_test, select_train
from data.protocols import PROTOCOLS, Step, configured_steps, protocol_steps, steps_from_lists
from data.voc import CLASS_NAMES as VOC

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
        ("voc", "5-5", [5] * 4),
        ("voc", "5-3", [5] + [3] * 5),
        ("voc", "5-1", [5] + [1] * 15),
        ("voc", "2-2", [2] * 10),
        ("voc", "2-1", [2] + [1] * 18),
        ("ade", "offline", [150]),
        ("ade", "100-50", [100, 50]),
        ("ade", "100-10", [100] + [10] * 5),
        ("ade", "100-5", [100] + [5] * 10),
        ("ade", "50-50", [50] * 3),
        ("ade", "50-20", [50] + [20] * 5),
        ("ade", "50-10", [50] + [10] * 10),
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
def test_published_images_per_class(classes):
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
def test_disjoint_steps_partition_the_images(classes, protocol):
    chosen = [
        select_train(classes["train_aug"], step, "disjoint") for step in protocol_steps("voc", protocol)
    ]
    assert sorted(chain(*chosen)) == list(range(10582))


# --- partitioned: each image in one step --------------------------------------------------------------------

SHOWN = [frozenset({1 + i % 4, 1 + i // 4 % 4, 5}) for i in range(64)]  # class 5 is in no step below
NAMES = [f"image{i}" for i in range(64)]
STEPS = steps_from_lists([[1, 2], [3], [4]])


def test_a_partitioned_image_is_in_one_step_which_learns_a_class_that_it_shows():
    chosen = images_of_steps(SHOWN, NAMES, STEPS, "partitioned")
    assert sorted(chain(*chosen)) == list(range(64))
    for step, positions in zip(STEPS, chosen, strict=True):
        overlapped = select_train(SHOWN, step, "overlapped")
        assert 0 < len(positions) < len(overlapped) and set(positions) <= set(overlapped)
    nothing = [frozenset(), frozenset({5})]
    assert images_of_steps(nothing, ["a", "b"], STEPS, "partitioned") == [[], [], []]


def test_another_split_seed_gives_another_partition():
    first, again, other = (images_of_steps(SHOWN, NAMES, STEPS, "partitioned", seed) for seed in (0, 0, 1))
    assert first == again != other


def test_a_partition_does_not_depend_on_the_order_of_images_or_classes():
    chosen = images_of_steps(SHOWN, NAMES, STEPS, "partitioned")
    backwards = images_of_steps(SHOWN[::-1], NAMES[::-1], STEPS, "partitioned")
    assert [sorted(63 - i for i in positions) for positions in backwards] == chosen
    turned = steps_from_lists([[4], [3], [2, 1]])
    assert images_of_steps(SHOWN, NAMES, turned, "partitioned") == chosen[::-1]


def test_each_class_of_an_image_is_drawn_as_often():
    drawn = [draw_class(frozenset({3, 7, 9}), f"image{i}", 0) for i in range(3000)]
    assert all(900 < drawn.count(c) < 1100 for c in (3, 7, 9))


def test_partitioned_needs_to_know_all_steps():
    with pytest.raises(ValueError, match="no mode 'partitioned'"):
        select_train(SHOWN, STEPS[0], "partitioned")


@needs_lists
@pytest.mark.parametrize("protocol", PROTOCOLS["voc"])
def test_partitioned_steps_of_voc_keep_every_class_and_every_image(classes, protocol):
    shown = classes["train_aug"]
    names = [f"image{i}" for i in range(len(shown))]
    steps = protocol_steps("voc", protocol)
    chosen = images_of_steps(shown, names, steps, "partitioned")
    assert sorted(chain(*chosen)) == list(range(10582))
    for step, positions in zip(steps, chosen, strict=True):
        assert set(step.new) <= frozenset().union(*(shown[i] for i in positions))


# --- other orders of the classes ----------------------------------------------------------------------------


ORDER_1 = (11, 3, 14, 20, 1, 10, 12, 4, 9, 18, 16, 17, 2, 8, 13, 19, 5, 7, 6, 15)


def test_a_seed_of_the_order_keeps_the_sizes_of_steps_and_every_class():
    plain, one, other = (configured_steps("voc", "15-1", None, VOC, order) for order in (None, 1, 2))
    assert plain == protocol_steps("voc", "15-1")
    assert [step.num_new for step in one] == [15, 1, 1, 1, 1, 1]
    assert sorted(one[-1].seen) == sorted(other[-1].seen) == list(range(21))
    assert len({plain[-1].seen, one[-1].seen, other[-1].seen}) == 3


def test_the_order_of_a_seed_is_the_same_for_ever():
    """Written down: runs of an order are compared across machines and versions."""
    assert configured_steps("voc", "15-1", None, VOC, 1)[-1].seen[1:] == ORDER_1


def test_an_order_may_be_a_list_of_names_and_ids():
    order = [*VOC[:0:-1][:19], 1]  # tvmonitor .. bicycle, then aeroplane
    steps = configured_steps("voc", "19-1", None, VOC, order)
    assert steps == [Step(0, (), tuple(range(20, 1, -1))), Step(1, tuple(range(20, 1, -1)), (1,))]


@pytest.mark.parametrize(
    ("order", "said"),
    [
        (["cta", *VOC[2:]], "no class is named 'cta'"),
        ([*VOC[1:20], 1], "learned twice"),
        ([1, 2], "has 2 classes"),
    ],
)
def test_an_order_that_is_none_is_refused(order, said):
    with pytest.raises(DataError, match=said):
        configured_steps("voc", "15-1", None, VOC, order)
