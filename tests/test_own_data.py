"""A data set of one's own, from the folder to the results, and what is said when
something is wrong with it.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import train
from configs import load_config
from engine.arguments import REGISTRIES

EXAMPLE = Path(train.__file__).parent / "configs/own-data-example.yaml"
CLASSES = ("road", "building", "tree", "car", "person")
STEPS = "[[tree, road, building], [car], [person]]"
TRAIN = [[1], [2], [3], [1, 2], [3, 1], [2], [4], [4, 1], [4], [4, 3], [5, 1], [5], [5, 4], [5, 2]]
VAL = [[1, 2], [3], [4], [5, 1]]


@pytest.fixture
def root(tmp_path) -> Path:
    """Five classes in 32-pixel images; JPEG and PNG files, some of them in a folder of their own."""
    root = tmp_path / "own"
    rng = np.random.default_rng(0)
    lists = {}
    for split, images in {"train": TRAIN, "val": VAL}.items():
        for number, classes in enumerate(images):
            name = f"{'street/' if number % 2 else ''}{split}{number}"
            for kind in ("images", "masks"):
                (root / kind / name).parent.mkdir(parents=True, exist_ok=True)
            image = rng.integers(0, 80, (32, 32, 3), dtype=np.uint8)
            mask = np.zeros((32, 32), np.uint8)
            for position, label in enumerate(classes):
                area = slice(4 + 12 * position, 14 + 12 * position), slice(4, 28)
                mask[area], image[area] = label, (50 * label, 250 - 40 * label, 20 * label)
            mask[:2] = 255
            Image.fromarray(image).save(root / f"images/{name}.{'png' if number % 3 else 'jpg'}")
            Image.fromarray(mask).save(root / f"masks/{name}.png")
            lists.setdefault(split, []).append(name)
    for split, names in lists.items():
        (root / f"{split}.txt").write_text("\n".join(names) + "\n")
    (root / "classes.txt").write_text("\n".join(CLASSES) + "\n")
    return root


@pytest.fixture
def run(root, toy_arguments):
    """train.py on the folder; what comes later wins over the arguments of the toy runs."""

    def run(*overrides: str, steps: str = STEPS) -> int:
        own = ("data.dataset=folder", f"data.root={root}", f"data.steps={steps}")
        return train.main(toy_arguments(*own, "train.epochs=1", "train.epochs_later=2", *overrides))

    return run


@pytest.mark.slow
def test_three_steps_by_name_with_mib_and_altersgd(run, tmp_path):
    assert run("method.name=mib", "phase.name=altersgd", "phase.p=0.5", "data.mode=overlapped") == 0
    results = json.loads((tmp_path / "runs/run/results.json").read_text())
    # classes in the order in which they are learned, not in that of classes.txt
    assert [step["classes"] for step in results["steps"]] == [
        ["background", "tree", "road", "building"],
        ["background", "tree", "road", "building", "car"],
        ["background", "tree", "road", "building", "car", "person"],
    ]
    # overlapped: five images serve two steps
    assert [step["images"] for step in results["steps"]] == [10, 5, 4]
    assert all(0 <= value <= 1 for value in results["steps"][2]["iou"].values() if value is not None)
    assert results["config"]["data"]["steps"] == [["tree", "road", "building"], ["car"], ["person"]]
    assert results["config"]["data"]["protocol"] is None


@pytest.mark.slow
def test_disjoint_shows_no_future_class(run, tmp_path):
    assert run() == 0
    results = json.loads((tmp_path / "runs/run/results.json").read_text())
    assert [step["images"] for step in results["steps"]] == [6, 4, 4]


def test_the_example_is_a_valid_config_of_known_names():
    config = load_config([EXAMPLE], ["data.root=/somewhere"], REGISTRIES)
    assert config.data.dataset == "folder" and config.data.protocol is None
    assert sorted(name for step in config.data.steps for name in step) == sorted(CLASSES)


def test_the_example_trains(root, toy_arguments, tmp_path):
    small = [argument for argument in toy_arguments() if not argument.startswith(("data.root", "data.steps"))]
    arguments = [str(EXAMPLE), *small, f"data.root={root}", "model.pretrained=null", "train.last_step=0"]
    assert train.main(arguments) == 0
    assert (tmp_path / "runs/run/step_0.pt").exists()


# --- what a user will hit -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ("[[road, biulding], [car]]", "no class is named 'biulding'; did you mean 'building'?"),
        ("[[road], [zebra]]", "no class is named 'zebra'; the classes are road, building, tree, car, person"),
        ("[[road], [9]]", "class id 9 is outside 1..5"),
        ("[[road], [1]]", "class 1 is learned twice"),  # by name and by id
        ("[[road], [background]]", "class 0 is the background"),
    ],
)
def test_wrong_steps(run, capsys, steps, said):
    assert run(steps=steps) == 2
    assert said in capsys.readouterr().err


def test_steps_are_required(run, capsys):
    assert run(steps="null") == 2
    assert "config error: data.steps: is required with data.dataset folder" in capsys.readouterr().err


def remove_mask(root):
    (root / "masks/train0.png").unlink()


def remove_several(root):
    (root / "masks/train0.png").unlink()
    (root / "images/street/val1.png").unlink()


def unknown_class(root):
    Image.fromarray(np.full((32, 32), 6, np.uint8)).save(root / "masks/train0.png")


def colour_mask(root):
    Image.new("RGB", (32, 32)).save(root / "masks/train0.png")


def other_size(root):
    Image.new("L", (30, 32)).save(root / "masks/train0.png")


def empty_list(root):
    (root / "val.txt").write_text("\n")


def no_list(root):
    (root / "val.txt").unlink()


def class_without_images(root):
    (root / "train.txt").write_text("\n".join(["train0", "street/train1", "train2", "train6"]))


def too_few_images(root):
    names = (root / "train.txt").read_text().split()
    (root / "train.txt").write_text("\n".join(names[:9] + names[10:]))


def class_named_twice(root):
    (root / "classes.txt").write_text("road\ncar\nroad\n")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (remove_mask, ["train.txt, line 1: train0 lacks its mask", "add the file or remove the line"]),
        (
            remove_several,
            ["2 in all", "train0 lacks its mask", "street/val1 lacks its image", "scripts.check_data"],
        ),
        (unknown_class, ["train0.png: holds the label 6, but classes go from 0 to 5", "the class names"]),
        (colour_mask, ["a colour mask (RGB)", "python -m scripts.convert_masks"]),
        (other_size, ["is 30 x 32 but its image 32 x 32"]),
        (empty_list, ["val.txt: the file is empty; write one entry per line"]),
        (no_list, ["a data set of your own is not complete", "lacks val.txt; add what is missing"]),
        (class_without_images, ["step 2 learns person (5), but none of its 0 training images"]),
        (too_few_images, ["step 1", "train.batch_size"]),
        (class_named_twice, ["'road' is named twice"]),
    ],
)
def test_wrong_data(run, root, capsys, damage, said):
    damage(root)
    assert run() == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert all(part in error for part in said), error
