"""The small VOC of the CPU recipe, made from a user's own."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from test_data import make_voc, write_image

import train
from data import load_dataset
from data.images import read_image, read_mask
from data.voc import CLASS_NAMES
from scripts import pack_data
from scripts.shrink_data import main, small_size


def test_an_official_image_becomes_the_file_of_the_small_set(shared, tmp_path):
    full, small = shared / "voc2012_fullres", shared / "voc2012_192"
    assert main([str(full), str(tmp_path / "small"), "--side", "192"]) == 0
    made = load_dataset("voc", tmp_path / "small", "train_aug").train
    assert len(made) == 60
    for sample in made:
        image, mask = (
            small / f"JPEGImages/{sample.name}.jpg",
            small / f"SegmentationClassAug/{sample.name}.png",
        )
        assert np.array_equal(read_image(sample.image), read_image(image)), sample.name
        assert np.array_equal(read_mask(sample.mask), read_mask(mask)), sample.name


@pytest.mark.slow
def test_a_row_from_ones_own_voc_is_the_row_to_the_last_digit(shared, tmp_path):
    """The CPU recipe in two steps of those classes that the 60 originals show."""
    full, given, made = shared / "voc2012_fullres", tmp_path / "given", tmp_path / "made"
    shutil.copytree(full / "ImageSets", given / "ImageSets")
    for sample in load_dataset("voc", full, "train_aug").train:
        for file in (f"JPEGImages/{sample.name}.jpg", f"SegmentationClassAug/{sample.name}.png"):
            (given / file).parent.mkdir(exist_ok=True)
            shutil.copyfile(shared / "voc2012_192" / file, given / file)
    assert main([str(full), str(made), "--side", "192"]) == 0
    overlays = [f"configs/{name}.yaml" for name in ("voc/15-1", "recipes/cpu", "methods/mib")]
    steps = [CLASS_NAMES[1:16], CLASS_NAMES[16:20]]
    settings = [f"data.steps={json.dumps(steps)}", "model.pretrained=null", "train.batch_size=4"]
    settings += ["train.epochs=1", "train.epochs_later=1"]
    rows = []
    for root in (given, made):
        place = [f"data.root={root}", f"data.cache={tmp_path}", f"run.folder={tmp_path}/runs"]
        assert train.main([*overlays, *settings, *place, f"run.name={root.name}", "run.tracker=[]"]) == 0
        rows.append(json.loads((tmp_path / f"runs/{root.name}/results.json").read_text()))
    assert [step["iou"] for step in rows[0]["steps"]] == [step["iou"] for step in rows[1]["steps"]]
    assert rows[0]["data"] == rows[1]["data"]
    assert max(iou or 0 for iou in rows[0]["steps"][-1]["iou"].values()) > 0.1, "nothing was learnt"


@pytest.mark.parametrize("is_packed", [False, True])
def test_the_small_set_has_the_lists_names_and_classes_of_the_large_one(is_packed, tmp_path):
    root = make_voc(tmp_path / "voc")
    write_image(root / "JPEGImages/a.jpg", root / "SegmentationClassAug/a.png", [0, 7], size=(40, 90))
    if is_packed:
        assert pack_data.main([str(root), str(tmp_path / "packed")]) == 0
    assert (
        main([str(tmp_path / "packed" if is_packed else root), str(tmp_path / "small"), "--side", "5"]) == 0
    )
    for train_list in ("train", "train_aug"):
        large, small = (load_dataset("voc", place, train_list) for place in (root, tmp_path / "small"))
        assert [p.name for p in small.train] == [p.name for p in large.train]
        assert [p.name for p in small.test] == [p.name for p in large.test]
    tall = small.train[0]
    assert read_image(tall.image).shape == (11, 5, 3)
    assert read_mask(tall.mask).shape == (11, 5) and set(np.unique(read_mask(tall.mask))) == {0, 7}


@pytest.mark.parametrize(
    ("size", "expected"),
    [((500, 375), (256, 192)), ((366, 500), (192, 262)), ((100, 50), (384, 192)), ((192, 192), (192, 192))],
)
def test_the_shorter_side_is_as_asked(size, expected):
    assert small_size(size, 192) == expected


def test_nothing_is_left_of_a_small_set_that_cannot_be_whole(tmp_path, capsys):
    root, out = make_voc(tmp_path / "voc"), tmp_path / "small"
    for name in "ab":
        (root / f"JPEGImages/{name}.jpg").write_bytes(b"no image")
    assert main([str(root), str(out)]) == 2
    said = capsys.readouterr().err
    assert "a.jpg" in said and "b.jpg" in said and [p.name for p in tmp_path.iterdir()] == ["voc"]
    out.mkdir()
    assert main([str(root), str(out)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert main([str(tmp_path / "nowhere"), str(Path(tmp_path, "x"))]) == 2
    assert "does not exist" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([str(root), str(out), "--side", "0"])


def test_palettes_stay(tmp_path):
    root = make_voc(tmp_path / "voc")
    mask = Image.fromarray(np.full((6, 8), 3, np.uint8))
    mask.putpalette([1, 2, 3] * 256)
    mask.save(root / "SegmentationClassAug/c.png")
    assert main([str(root), str(tmp_path / "small"), "--side", "5"]) == 0
    with Image.open(tmp_path / "small/SegmentationClassAug/c.png") as small:
        assert small.mode == "P" and small.getpalette()[9:12] == [1, 2, 3]
