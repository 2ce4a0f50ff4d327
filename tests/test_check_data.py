import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from conftest import write_voc
from PIL import Image

from data import official
from data.incremental import select_test, select_train
from data.protocols import protocol_steps
from scripts.check_data import COMPLETE, DIFFERENT, UNUSABLE, main

TRAIN = [[1, 2], [3], [15, 16], [20]]
VAL = [[1], [20, 15]]


@pytest.fixture
def voc(tmp_path) -> Path:
    return write_voc(tmp_path / "voc", TRAIN, VAL, size=16)


def make_folder(root: Path, classes: str = "cat\ndog\n") -> Path:
    for name, label in {"a": 1, "b": 2, "c": 1, "d": 2}.items():
        for kind in ("images", "masks"):
            (root / kind).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (90, 80, 70)).save(root / f"images/{name}.jpg")
        Image.fromarray(np.full((8, 8), label, np.uint8)).save(root / f"masks/{name}.png")
    (root / "classes.txt").write_text(classes)
    (root / "train.txt").write_text("a\nb\n")
    (root / "val.txt").write_text("c\nd\n")
    return root


def rows(text: str) -> dict[str, list[str]]:
    """The lines of the report by their first word."""
    return {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.strip()}


def test_a_small_copy_is_usable_but_differs(voc, capsys):
    assert main([str(voc)]) == DIFFERENT
    out = capsys.readouterr().out
    assert rows(out)["train_aug"] == ["10,582", "4", "0", "0"]
    assert rows(out)["val"] == ["1,449", "2", "0", "0"]
    assert "train_aug has 4 images, the official one 10,582" in out
    assert "no image of val shows bicycle, bird, boat" in out
    assert " 16 pottedplant   6.25%      1 /   487" in out
    assert (
        "15-1    disjoint        2      1      0      0      0      1\n" in out
    )  # nothing published beside it
    assert len(out.splitlines()) < 50


@pytest.fixture
def whole_voc(tmp_path, monkeypatch) -> Path:
    """One image per class in each list, declared to be the official data set."""
    root = write_voc(tmp_path / "whole", *([[c] for c in range(1, 21)] for _ in range(2)), size=8)
    monkeypatch.setitem(official.LISTS, "voc", {"train_aug": 20, "val": 20})
    for name in ("train_aug", "val"):
        names = (root / f"ImageSets/Segmentation/{name}.txt").read_text().split()
        monkeypatch.setitem(official.NAMES_SHA256, ("voc", name), official.names_digest(names))
    for mode in ("disjoint", "overlapped"):
        monkeypatch.setitem(official.STEP_SIZES, ("voc", "train_aug", "15-1", mode), (15, 1, 1, 1, 1, 1))
    monkeypatch.setitem(official.STEP_SIZES, ("voc", "val", "15-1", "test"), (15, 16, 17, 18, 19, 20))
    return root


def test_the_official_data_set_is_complete(whole_voc, capsys):
    assert main([str(whole_voc), "--protocols", "15-1", "10-1", "--full"]) == COMPLETE
    out = capsys.readouterr().out
    assert out.count("as published") == 3 and out.endswith("\ncomplete\n")
    assert "10-1    test           10     11" in out


def test_official_names_with_other_masks(whole_voc, capsys):
    mask = whole_voc / "SegmentationClassAug/train_aug_015.png"
    Image.fromarray(np.full((8, 8), 15, np.uint8)).save(mask)  # it had class 16
    assert main([str(whole_voc), "--protocols", "15-1"]) == DIFFERENT
    out = capsys.readouterr().out
    assert "    16      0      1      1      1      1   published:     15      1" in out
    assert "steps of 15-1 disjoint, 15-1 overlapped are not as published" in out
    mask.write_bytes(b"")  # nothing is said about steps of a list that is not whole
    assert main([str(whole_voc), "--protocols", "15-1"]) == DIFFERENT
    assert "published:" not in capsys.readouterr().out


def test_as_many_images_but_others(whole_voc, capsys):
    names = [f"val_{i:03d}" for i in range(19)] + ["train_aug_019"]
    (whole_voc / "ImageSets/Segmentation/val.txt").write_text("\n".join(names))
    assert main([str(whole_voc)]) == DIFFERENT
    out = capsys.readouterr().out
    assert "val has as many images as the official one, but others" in out
    assert "1 images are in train_aug and in val" in out


def test_all_that_is_missing_or_broken_is_reported(voc, tmp_path, capsys):
    (voc / "JPEGImages/train_aug_000.jpg").unlink()
    (voc / "SegmentationClassAug/train_aug_001.png").write_bytes(b"\x89PNG")
    (voc / "SegmentationClassAug/val_001.png").unlink()
    assert main([str(voc), "--problems", str(tmp_path / "problems.txt")]) == DIFFERENT
    out = capsys.readouterr().out
    assert rows(out)["train_aug"] == ["10,582", "4", "1", "1"]
    assert rows(out)["val"] == ["1,449", "2", "1", "0"]
    problems = (tmp_path / "problems.txt").read_text().splitlines()
    assert len(problems) == 3 and all(problem in out for problem in problems)
    assert "train_aug_000 lacks its image" in problems[0] and "cannot be read" in problems[1]
    assert "training refuses" in out


def test_many_problems_fit_the_screen(voc, tmp_path, capsys):
    with (voc / "ImageSets/Segmentation/train_aug.txt").open("a") as file:
        file.writelines(f"gone_{i}\n" for i in range(100))
    assert main([str(voc), "--problems", str(tmp_path / "all.txt")]) == DIFFERENT
    out = capsys.readouterr().out
    assert "... and 90 more; --problems FILE writes them all" in out and len(out.splitlines()) < 60
    assert len((tmp_path / "all.txt").read_text().splitlines()) == 100


def test_only_full_finds_damage_in_the_middle_of_an_image(tmp_path, capsys):
    root = make_folder(tmp_path)
    path = root / "images/a.png"
    noise = np.random.default_rng(0).integers(0, 255, (8, 8, 3), dtype=np.uint8)
    (root / "images/a.jpg").unlink()
    Image.fromarray(noise).save(path)
    content = bytearray(path.read_bytes())
    content[60:70] = bytes(10)
    path.write_bytes(content)
    assert main([str(root)]) == COMPLETE
    assert main([str(root), "--full"]) == DIFFERENT
    assert "a.png: cannot be read" in capsys.readouterr().out


def test_without_train_aug(tmp_path, capsys):
    voc = write_voc(tmp_path, TRAIN, VAL, size=16)
    (voc / "SegmentationClassAug").rename(voc / "SegmentationClass")
    (voc / "ImageSets/Segmentation/train_aug.txt").rename(voc / "ImageSets/Segmentation/train.txt")
    assert main([str(voc)]) == DIFFERENT
    out = capsys.readouterr().out
    assert rows(out)["train"][:2] == ["1,464", "4"] and "train_aug is not there" in out


def test_own_data(tmp_path, capsys):
    root = make_folder(tmp_path)
    assert main([str(root)]) == COMPLETE
    out = capsys.readouterr().out
    assert "folder, 2 classes, trains on train" in out and out.endswith("complete\n")
    (root / "classes.txt").write_text("cat\ndog\nhen\n")
    assert main([str(root), "--dataset", "folder"]) == DIFFERENT
    assert "no image of train shows hen" in capsys.readouterr().out
    (root / "classes.txt").write_text("cat\n")  # the label 2 is no class any more
    assert main([str(root)]) == DIFFERENT
    assert "holds the label 2" in capsys.readouterr().out


def test_ade(tmp_path, capsys):
    for split, names in {"training": ("x1", "x2"), "validation": ("x1",)}.items():
        for name in names:
            for kind in ("images", "annotations"):
                (tmp_path / kind / split).mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8)).save(tmp_path / f"images/{split}/{name}.jpg")
            Image.fromarray(np.full((8, 8), 101, np.uint8)).save(tmp_path / f"annotations/{split}/{name}.png")
    (tmp_path / "annotations/training/x2.png").unlink()
    assert main([str(tmp_path)]) == DIFFERENT
    out = capsys.readouterr().out
    assert rows(out)["train"] == ["20,210", "2", "1", "0"] and rows(out)["val"] == ["2,000", "1", "0", "0"]
    assert "x2.jpg: has no mask" in out and "101 poster" in out and "100.00%      1" in out
    assert "100-50  disjoint        0      1\n" in out and "images are in train and in val" not in out


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda root: (root / "val.txt").write_text(""), "val.txt: the file is empty"),
        (lambda root: (root / "train.txt").write_text("x\ny\n"), "y lacks its image"),
        (lambda root: (root / "classes.txt").write_text("cat\ncat\n"), "'cat' is named twice"),
        (lambda root: (root / "train.txt").unlink(), "lacks train.txt"),
        (
            lambda root: [path.write_bytes(b"") for path in (root / "masks").iterdir()],
            "train and val: no image",
        ),
    ],
)
def test_not_usable(tmp_path, capsys, damage, said):
    root = make_folder(tmp_path)
    damage(root)
    assert main([str(root), "--dataset", "folder"]) == UNUSABLE
    out = capsys.readouterr().out
    assert said in out and "not usable" in out


def test_what_is_nearly_complete_is_told_what_it_lacks_alone(tmp_path, capsys):
    root = make_folder(tmp_path)
    (root / "classes.txt").unlink()
    assert main([str(root)]) == UNUSABLE
    out = capsys.readouterr().out
    assert f"{root} lacks classes.txt; add what is missing" in out
    assert "VOC" not in out and "ADE20K" not in out


def test_voc_without_a_list_is_not_usable(voc, capsys):
    (voc / "ImageSets/Segmentation/val.txt").unlink()
    assert main([str(voc)]) == UNUSABLE
    assert "the list val.txt is missing" in capsys.readouterr().out


def test_nothing_there(tmp_path, capsys):
    assert main([str(tmp_path / "nothing")]) == UNUSABLE
    assert "is not a folder" in capsys.readouterr().out
    assert main([str(tmp_path)]) == UNUSABLE
    out = capsys.readouterr().out
    assert all(kind in out for kind in ("PASCAL VOC 2012", "ADE20K", "a data set of your own"))


def test_wrong_protocols_are_refused_before_the_scan(voc, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("scripts.check_data.scan", lambda *_, **__: pytest.fail("scanned"))
    for root, said in (
        (voc, "choose from offline, 19-1"),
        (make_folder(tmp_path / "own"), "no named protocols"),
    ):
        with pytest.raises(SystemExit):
            main([str(root), "--protocols", "15-2"])
        assert said in capsys.readouterr().err


# --- real data ----------------------------------------------------------------------------------------------


def test_official_numbers_are_those_of_the_official_lists(shared):
    """data/official.py, counted again."""
    lists = json.loads((shared / "voc2012_lists/classes_per_image.json").read_text())
    for name, content in lists.items():
        assert official.is_official("voc", name, content) and official.LISTS["voc"][name] == len(content)
    classes = {name: [frozenset(row) for row in content.values()] for name, content in lists.items()}
    counts = Counter(class_id for row in classes["train_aug"] for class_id in row)
    assert official.IMAGES_PER_CLASS["voc", "train_aug"] == tuple(counts[i] for i in range(1, 21))
    for (dataset, name, protocol, mode), sizes in official.STEP_SIZES.items():
        steps = protocol_steps(dataset, protocol)
        if mode == "test":
            counted = [len(select_test(classes[name], step)) for step in steps]
        else:
            counted = [len(select_train(classes[name], step, mode)) for step in steps]
        assert tuple(counted) == sizes, (protocol, mode)


@pytest.mark.slow
def test_the_small_voc(shared, capsys):
    assert main([str(shared / "voc2012_192")]) == DIFFERENT
    out = capsys.readouterr().out
    assert rows(out)["train"] == ["1,464", "1,464", "0", "0"]
    assert rows(out)["train_aug"] == ["10,582", "10,582", "0", "0"]
    assert rows(out)["val"] == ["1,449", "1,449", "0", "0"]
    sizes = {
        tuple(line.split()[:2]): line.split()[2:] for line in out.splitlines() if line.startswith("15-1")
    }
    assert " ".join(sizes["15-1", "disjoint"]) == "8,437 378 299 420 500 548 as published"
    # one person was lost when 2008_004770 was made small: 9,568 at full size
    assert sizes["15-1", "overlapped"][:6] == ["9,567", "487", "299", "491", "500", "548"]
    assert " ".join(sizes["15-1", "test"]) == "1,240 1,277 1,329 1,353 1,421 1,449 as published"
