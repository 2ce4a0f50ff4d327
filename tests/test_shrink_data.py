"""The small VOC of the CPU recipe, made from a user's own."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from test_data import make_voc, write_image

from data import load_dataset
from data.images import read_image, read_mask
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
