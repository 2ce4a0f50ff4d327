import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data import load_dataset
from data.dataset import DataError
from data.incremental import select_train
from data.palette import voc_palette
from data.protocols import protocol_steps
from data.shapes import (
    MANIFEST,
    MAX_OBJECTS,
    NEW,
    NUM_CLASSES,
    SHAPES,
    TEXTURES,
    choose_classes,
    class_parts,
    draw,
    generate,
)

SMALL = {"train": 40, "val": 20, "size": 32, "progress": False}
OLD = set(range(1, 16))


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("shapes") / "small"
    assert generate(root, workers=1, **SMALL)
    return root


@pytest.fixture(scope="module")
def chosen() -> list[set[int]]:
    """The classes of as many images as a full data set has."""
    return [set(choose_classes(i % NUM_CLASSES + 1, np.random.default_rng([0, 0, i]))) for i in range(3000)]


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def share(images: list[set[int]], classes: set[int]) -> float:
    return sum(bool(image & classes) for image in images) / len(images)


def test_classes_are_all_pairs_and_new_ones_share_parts_with_old_ones():
    parts = {k: class_parts(k) for k in range(1, NUM_CLASSES + 1)}
    assert len(set(parts.values())) == NUM_CLASSES == len(SHAPES) * len(TEXTURES)
    for k in NEW:
        for part in (0, 1):
            assert parts[k][part] in {parts[old][part] for old in OLD}


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_same_seed_same_bytes(small, tmp_path, workers):
    generate(tmp_path / "again", workers=workers, **SMALL)
    assert contents(tmp_path / "again") == contents(small)


def test_other_seeds_and_splits_give_other_images(small, tmp_path):
    generate(tmp_path / "other", seed=1, workers=1, **SMALL)
    one, other = contents(small), contents(tmp_path / "other")
    images = [name for name in one if name.startswith("JPEGImages")]
    assert all(one[name] != other[name] for name in images)
    assert len({one[name] for name in images}) == len(images)


def test_more_images_keep_the_first_ones(small, tmp_path):
    generate(tmp_path / "more", workers=1, **SMALL | {"train": 60})
    more = contents(tmp_path / "more")
    assert all(more[name] == data for name, data in contents(small).items() if name.startswith("JPEG"))


def test_the_voc_reader_reads_it_and_lists_agree_with_files(small):
    dataset = load_dataset("voc", small, "train_aug")
    assert (len(dataset.train), len(dataset.test)) == (SMALL["train"], SMALL["val"])
    listed = {image.name for image in [*dataset.train, *dataset.test]}
    for folder in ("JPEGImages", "SegmentationClassAug"):
        assert {path.stem for path in (small / folder).iterdir()} == listed
    short = (small / "ImageSets/Segmentation/train.txt").read_text().split()
    assert 0 < len(short) < SMALL["train"]
    assert set(short) <= {image.name for image in dataset.train}


def test_masks_are_palette_images_of_known_labels(small):
    seen = set()
    for path in (small / "SegmentationClassAug").iterdir():
        with Image.open(path) as mask, Image.open(small / "JPEGImages" / f"{path.stem}.jpg") as image:
            assert mask.mode == "P" and image.mode == "RGB"
            assert mask.size == image.size == (SMALL["size"], SMALL["size"])
            assert mask.getpalette() == voc_palette().ravel().tolist()
            labels = set(np.unique(np.asarray(mask)).tolist())
        assert 255 in labels
        assert 1 <= len(labels - {0, 255}) <= MAX_OBJECTS
        seen |= labels
    assert seen == {*range(NUM_CLASSES + 1), 255}


@pytest.mark.parametrize("main", range(1, NUM_CLASSES + 1))
def test_mask_shows_the_chosen_classes_inside_a_border(main):
    for i in range(10):
        image, labels = draw(main, 64, np.random.default_rng([7, i]))
        assert image.shape == (64, 64, 3) and image.dtype == labels.dtype == np.uint8
        assert (labels == main).any()
        # An object touches background, or another object, only across the border.
        for a, b in ((labels[1:], labels[:-1]), (labels[:, 1:], labels[:, :-1])):
            assert not ((a != b) & (a != 255) & (b != 255)).any()


def test_number_of_objects():
    counts = [len(choose_classes(i % NUM_CLASSES + 1, np.random.default_rng(i))) for i in range(1000)]
    assert set(counts) == {1, 2, 3}


def test_classes_meet_as_often_as_on_voc(chosen):
    new = [classes for classes in chosen if classes & set(NEW)]
    # train_aug of VOC 2012: 0.53, 0.30, 0.34, 0.08 (val: 0.41, 0.23, 0.30, 0.10)
    assert 0.45 < share(new, OLD) < 0.60
    assert 0.25 < share(new, {15}) < 0.35
    assert 0.28 < share(new, OLD - {15}) < 0.39
    assert 0.05 < sum(len(classes & set(NEW)) > 1 for classes in new) / len(new) < 0.11
    assert 0.30 < share(chosen, {15}) < 0.42  # 0.37


def test_old_objects_beside_new_ones_as_often_as_asked(small, tmp_path):
    rng = np.random.default_rng(0)
    crowded = [set(choose_classes(main, rng, old_beside_new=0.9)) for main in NEW for _ in range(200)]
    assert 0.87 < share(crowded, OLD - {15}) < 0.93
    generate(tmp_path / "crowded", old_beside_new=0.9, workers=1, **SMALL)
    one, other = contents(small), contents(tmp_path / "crowded")
    differ = {
        int(Path(name).stem[-6:]) % NUM_CLASSES + 1
        for name in one
        if name.startswith("JPEG") and one[name] != other[name]
    }
    assert differ and differ <= set(NEW)  # step 0 sees what it always saw


def test_a_set_from_before_the_crowd_was_a_choice_is_recognised(small, tmp_path):
    old = tmp_path / "old"
    shutil.copytree(small, old)
    manifest = json.loads((old / MANIFEST).read_text())
    del manifest["old_beside_new"]
    (old / MANIFEST).write_text(json.dumps(manifest))
    assert not generate(old, workers=1, **SMALL)
    with pytest.raises(DataError, match=r"old_beside_new 0\.34 there, 0\.9 asked"):
        generate(old, old_beside_new=0.9, workers=1, **SMALL)


def test_disjoint_steps_of_15_1_have_enough_images(chosen):
    sizes = [len(select_train(chosen, step, "disjoint")) for step in protocol_steps("voc", "15-1")]
    assert 1500 <= sizes[0] <= 2500
    assert min(sizes[1:]) >= 120
    assert sum(sizes) == len(chosen)


def test_second_call_returns_at_once_and_other_arguments_are_refused(small):
    before = contents(small)
    assert not generate(small, workers=1, **SMALL)
    with pytest.raises(DataError, match="seed 0 there, 3 asked"):
        generate(small, seed=3, workers=1, **SMALL)
    assert contents(small) == before
    assert json.loads(before[MANIFEST])["train"] == SMALL["train"]


def test_a_folder_with_other_things_is_left_alone(tmp_path):
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(DataError, match="not empty"):
        generate(tmp_path, workers=1, **SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]


def test_a_failure_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("data.shapes.json.dumps", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generate(tmp_path / "root", workers=1, **SMALL)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "wrong", [{"train": 3}, {"val": 0}, {"size": 8}, {"seed": -1}, {"workers": 0}, {"old_beside_new": 1.5}]
)
def test_impossible_arguments(tmp_path, wrong):
    with pytest.raises(DataError, match=next(iter(wrong))):
        generate(tmp_path / "root", **{"workers": 1, **SMALL, **wrong})
    assert not list(tmp_path.iterdir())
