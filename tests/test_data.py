import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

import data
from data import DataError, Sample, load_dataset
from data.ade import CLASS_NAMES as ADE_NAMES
from data.dataset import read_list
from data.folder import read_classes
from data.images import read_image, read_mask
from data.incremental import check_steps, images_of_steps, select_test, select_train, test_table, train_table
from data.index import build_index
from data.palette import voc_palette
from data.protocols import Step, protocol_steps, steps_from_lists
from scripts.convert_masks import main as convert_masks

SHARED = os.environ.get("ALTERSGD_SHARED")


def write_image(image: Path, mask: Path, labels, size=(8, 6)) -> None:
    """A grey image, and a mask whose rows take the labels in turn."""
    for path in (image, mask):
        path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (120, 90, 60)).save(image, quality=90)
    values = np.resize(np.array(labels, np.uint8), size[1])
    Image.fromarray(np.repeat(values[:, None], size[0], axis=1)).save(mask)


def make_voc(base: Path, masks="SegmentationClassAug", lists="ImageSets/Segmentation", pairs=False) -> Path:
    """Training images a (1, void), b (1, 2), c (3); in val only v (2)."""
    contents = {"c": [0, 3], "a": [0, 1, 255], "b": [1, 2], "v": [0, 2]}
    for name, labels in contents.items():
        write_image(base / f"JPEGImages/{name}.jpg", base / f"{masks}/{name}.png", labels)
    (base / lists).mkdir(parents=True)
    for split, names in {"train_aug": "cab", "train": "a", "val": "v"}.items():
        lines = [f"/JPEGImages/{n}.jpg /{masks}/{n}.png" if pairs else n for n in names]
        (base / lists / f"{split}.txt").write_text("\n".join(lines) + "\n")
    return base


def make_folder(base: Path, classes="cat\ndog\n") -> Path:
    for name, labels in {"1": [0, 1], "sub/2": [2], "3": [1, 2]}.items():
        write_image(base / f"images/{name}.png", base / f"masks/{name}.png", labels)
    (base / "classes.txt").write_text(classes)
    (base / "train.txt").write_text("1\nsub/2.png\n")
    (base / "val.txt").write_text("3\n")
    return base


def names(samples):
    return [sample.name for sample in samples]


# --- layouts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "options"),
    [
        ("", {}),
        ("VOC2012", {}),
        ("VOCdevkit/VOC2012", {}),
        ("PascalVOC12", {"lists": "splits", "pairs": True}),
        ("PascalVOC12", {"lists": "splits"}),
    ],
)
def test_voc_layouts(tmp_path, place, options):
    base = make_voc(tmp_path / place, **options)
    dataset = load_dataset("voc", tmp_path)
    assert names(dataset.train) == ["a", "b", "c"]  # ascending, whatever the list's order
    assert dataset.train[0] == Sample("a", base / "JPEGImages/a.jpg", base / "SegmentationClassAug/a.png")
    assert names(dataset.test) == ["v"]
    assert dataset.class_names[15] == "person" and dataset.num_classes == 21
    assert not dataset.notices


def test_voc_without_augmented_masks_says_so(tmp_path):
    make_voc(tmp_path, masks="SegmentationClass")
    dataset = load_dataset("voc", tmp_path)
    assert names(dataset.train) == ["a"]
    assert "10,582" in dataset.notices[0] and "1 images of train" in dataset.notices[0]
    with pytest.raises(DataError, match=r"data\.train_list=train"):
        load_dataset("voc", tmp_path, "train_aug")


def test_voc_train_on_request(tmp_path):
    make_voc(tmp_path)
    dataset = load_dataset("voc", tmp_path, "train")
    assert names(dataset.train) == ["a"] and not dataset.notices


def test_voc_falls_back_to_the_official_mask(tmp_path):
    base = make_voc(tmp_path)
    (base / "SegmentationClass").mkdir()
    (base / "SegmentationClassAug/v.png").rename(base / "SegmentationClass/v.png")
    assert load_dataset("voc", tmp_path).test[0].mask == base / "SegmentationClass/v.png"


def test_ade(tmp_path):
    base = tmp_path / "ADEChallengeData2016"
    for split in ("training", "validation"):
        for name in ("x2", "x1"):
            write_image(
                base / f"images/{split}/{name}.jpg", base / f"annotations/{split}/{name}.png", [0, 150]
            )
    dataset = load_dataset("ade", tmp_path)
    assert names(dataset.train) == names(dataset.test) == ["x1", "x2"]
    assert dataset.void_labels == {0} and len(set(ADE_NAMES)) == 151
    assert build_index("ade", dataset.train, 151, cache=tmp_path / "cache") == [{150}, {150}]
    (base / "annotations/training/x1.png").unlink()
    (base / "images/validation/x2.jpg").unlink()
    with pytest.raises(DataError, match=r"x1\.jpg: has no mask"):
        load_dataset("ade", tmp_path)


def test_own_folder(tmp_path):
    base = make_folder(tmp_path)
    dataset = load_dataset("folder", tmp_path)
    assert dataset.class_names == ("background", "cat", "dog")
    assert dataset.train == [
        Sample("1", base / "images/1.png", base / "masks/1.png"),
        Sample("sub/2", base / "images/sub/2.png", base / "masks/sub/2.png"),
    ]
    assert build_index("folder", dataset.train, 3, cache=tmp_path / "cache") == [{1}, {2}]


def test_class_names_may_begin_with_background(tmp_path):
    path = tmp_path / "classes.txt"
    path.write_text("Background\ncat")
    assert read_classes(path)[0] == ("Background", "cat")
    path.write_text("\n".join(f"c{i}" for i in range(254)))
    assert len(read_classes(path)[0]) == 255


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty"),
        ("\n\n", "empty"),
        ("cat\n\ndog", "empty line between"),
        ("cat\ncat", "named twice"),
        ("background", "only the background"),
        ("\n".join(f"c{i}" for i in range(255)), "255 classes, but masks have room for 254"),
    ],
)
def test_class_names_refused(tmp_path, text, said):
    (tmp_path / "classes.txt").write_text(text)
    with pytest.raises(DataError, match=said):
        read_classes(tmp_path / "classes.txt")


# --- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", data.DATASETS)
@pytest.mark.parametrize(
    ("place", "said"),
    [(None, r"set data\.root"), ("no", "does not exist"), ("f", "is not a folder"), ("", "looked for")],
)
def test_bad_roots(tmp_path, name, place, said):
    (tmp_path / "f").write_text("")
    with pytest.raises(DataError, match=said):
        load_dataset(name, place if place is None else tmp_path / place)


def test_unknown_data_set(tmp_path):
    with pytest.raises(DataError, match="ade, folder, voc"):
        load_dataset("coco", tmp_path)


def test_missing_list(tmp_path):
    base = make_voc(tmp_path)
    (base / "ImageSets/Segmentation/val.txt").unlink()
    with pytest.raises(DataError, match=r"val\.txt is missing"):
        load_dataset("voc", tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "is empty"),
        (b"\r\n \n", "is empty"),
        (b"a\nb\na\n", r"line 3: a is listed twice"),
        (b"a\n./a\n", r"line 2: \./a is listed twice"),
        (b"a\n/JPEGImages/a.jpg /SegmentationClassAug/a.png", "line 2: a is listed twice"),
        (b"a\nzz\n", r"line 2: zz lacks its image .*JPEGImages\) and its mask .*SegmentationClassAug\)"),
        (b"../../etc/passwd", "leaves the data root"),
        (b"/JPEGImages/../../a.jpg /SegmentationClassAug/a.png", "leaves the data root"),
        (b"/etc/passwd /etc/passwd", "lacks its image"),
        (b"a b c", "line 1: write one name"),
        (b"a\n\nb", "line 2: write one name"),
        (b"\xff\xfe\x00", "cannot be read as text"),
        (b"a\x00", "leaves the data root"),
    ],
)
def test_bad_lists(tmp_path, text, said):
    base = make_voc(tmp_path)
    (base / "ImageSets/Segmentation/train_aug.txt").write_bytes(text)
    with pytest.raises(DataError, match=said):
        load_dataset("voc", tmp_path)


def test_lists_may_have_windows_line_ends_suffixes_and_absolute_paths_inside(tmp_path):
    base = make_voc(tmp_path)
    text = f"\ufeffa.jpg\r\nb\r\n{base}/JPEGImages/c.jpg {base}/SegmentationClassAug/c.png\r\n"
    (base / "ImageSets/Segmentation/train_aug.txt").write_bytes(text.encode())
    assert names(load_dataset("voc", tmp_path).train) == ["a", "b", "c"]


# --- the index ----------------------------------------------------------------------------------------------


@pytest.fixture
def voc(tmp_path):
    make_voc(tmp_path / "voc")
    return load_dataset("voc", tmp_path / "voc")


def test_index(voc, tmp_path):
    assert build_index("voc", voc.train, 21, cache=tmp_path / "cache") == [{1}, {1, 2}, {3}]


@pytest.mark.slow
def test_index_by_processes_is_the_same(tmp_path):
    for i in range(4):
        write_image(tmp_path / f"{i}.jpg", tmp_path / f"{i}.png", [0, i])
    samples = [Sample(str(i), tmp_path / f"{i % 4}.jpg", tmp_path / f"{i % 4}.png") for i in range(600)]
    here, there = (build_index("x", samples, 4, cache=tmp_path / f"cache{w}", workers=w) for w in (0, 2))
    assert here == there == [{i % 4} - {0} for i in range(600)]


def test_index_is_read_from_the_cache(voc, tmp_path, monkeypatch):
    first = build_index("voc", voc.train, 21, cache=tmp_path / "cache")
    monkeypatch.setattr("data.index.scan", lambda *_: pytest.fail("scanned again"))
    assert build_index("voc", voc.train, 21, cache=tmp_path / "cache") == first


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"null", b"\xff", b'{"version": 1}', b"[" * 100_000])
def test_damaged_cache_is_made_again(voc, tmp_path, damage):
    first = build_index("voc", voc.train, 21, cache=tmp_path / "cache")
    (file,) = (tmp_path / "cache").iterdir()
    file.write_bytes(damage)
    assert build_index("voc", voc.train, 21, cache=tmp_path / "cache") == first
    assert json.loads(file.read_bytes())["classes"] == [[1], [1, 2], [3]]


@pytest.mark.parametrize(
    "classes", [[[1], [1, 2]], [[1], [1, 2], [99]], [[1], [1, 2], ["3"]], [[1], [1, 2], 3]]
)
def test_cache_with_a_wrong_content_is_made_again(voc, tmp_path, classes):
    first = build_index("voc", voc.train, 21, cache=tmp_path / "cache")
    (file,) = (tmp_path / "cache").iterdir()
    file.write_text(json.dumps(json.loads(file.read_text()) | {"classes": classes}))
    assert build_index("voc", voc.train, 21, cache=tmp_path / "cache") == first


def test_changed_data_is_noticed(voc, tmp_path):
    build_index("voc", voc.train, 21, cache=tmp_path / "cache")
    write_image(voc.train[0].image, voc.train[0].mask, [7])
    os.utime(voc.train[0].mask, ns=(1, 1))
    assert build_index("voc", voc.train, 21, cache=tmp_path / "cache")[0] == {7}
    voc.train[0].image.unlink()
    with pytest.raises(DataError, match=r"a\.jpg: the file is missing"):
        build_index("voc", voc.train, 21, cache=tmp_path / "cache")


def test_cache_that_cannot_be_written_is_only_a_warning(voc, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match=r"set data\.cache"):
        assert build_index("voc", voc.train, 21, cache=tmp_path / "file")[0] == {1}


def cut(path: Path, keep: float = 0.5) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])


def test_every_problem_is_reported_at_once(voc, tmp_path):
    a, b, c = voc.train
    cut(a.mask)
    write_image(b.image, b.mask, [21, 30, 255])
    cut(c.image, 0.9)
    with pytest.raises(DataError) as caught:
        build_index("voc", voc.train, 21, cache=tmp_path / "cache")
    message = str(caught.value)
    assert "3 in all" in message
    assert f"{a.mask}: cannot be read" in message
    assert f"{b.mask}: holds the labels 21, 30," in message
    assert f"{c.image}: cannot be read" in message
    assert not (tmp_path / "cache").exists()


def test_ten_problems_are_shown(tmp_path):
    samples = []
    for i in range(13):
        samples.append(Sample(str(i), tmp_path / f"{i}.jpg", tmp_path / f"{i}.png"))
        write_image(samples[i].image, samples[i].mask, [9])
    with pytest.raises(DataError) as caught:
        build_index("x", samples, 9, cache=tmp_path / "cache")
    assert str(caught.value).count(".png: holds the label 9") == 10
    assert "... and 3 more" in str(caught.value)


def test_sizes_must_agree(voc, tmp_path):
    Image.new("RGB", (9, 6)).save(voc.train[0].image)
    with pytest.raises(DataError, match="is 8 x 6 but its image 9 x 6"):
        build_index("voc", voc.train, 21, cache=tmp_path / "cache")


def test_bytes_after_a_whole_jpeg_do_no_harm(voc, tmp_path):
    with voc.train[0].image.open("ab") as file:
        file.write(b"trailing")
    assert build_index("voc", voc.train, 21, cache=tmp_path / "cache")[0] == {1}


def test_masks_of_other_depths(tmp_path):
    values = np.array([[0, 1], [1, 0]])
    Image.fromarray(values.astype(bool)).save(tmp_path / "bit.png")
    Image.fromarray(values.astype(np.uint16)).save(tmp_path / "deep.png")
    Image.fromarray((values * 300).astype(np.uint16)).save(tmp_path / "deeper.png")
    for name in ("bit.png", "deep.png"):
        assert read_mask(tmp_path / name).dtype == np.uint8
        assert np.array_equal(read_mask(tmp_path / name), values)
    with pytest.raises(DataError, match="label 300"):
        read_mask(tmp_path / "deeper.png")


def test_images_of_every_kind_become_rgb(tmp_path):
    for mode in ("L", "RGBA", "P", "CMYK"):
        path = tmp_path / ("x.jpg" if mode == "CMYK" else "x.png")
        Image.new(mode, (4, 3)).save(path)
        assert read_image(path).shape == (3, 4, 3)


# --- damaged files ------------------------------------------------------------------------------------------

FUZZ = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
DAMAGE = st.tuples(
    st.floats(0.0, 1.0),
    st.lists(st.tuples(st.floats(0, 0.999), st.binary(min_size=1, max_size=4)), max_size=4),
)


@FUZZ
@given(damage=DAMAGE, kind=st.sampled_from(["image", "mask"]))
def test_damaged_files_are_read_or_refused(tmp_path, damage, kind):
    sample = Sample("p", tmp_path / "p.jpg", tmp_path / "p.png")
    write_image(sample.image, sample.mask, [0, 1, 2], size=(40, 30))
    path = getattr(sample, kind)
    keep, changes = damage
    content = bytearray(path.read_bytes())
    for position, replacement in changes:
        start = int(position * len(content))
        content[start : start + len(replacement)] = replacement
    path.write_bytes(content[: round(keep * len(content))])
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    for read in (
        lambda: build_index("x", [sample], 3, cache=tmp_path / "cache"),
        lambda: read_image(sample.image),
        lambda: read_mask(sample.mask),
    ):
        try:
            read()
        except DataError as error:
            assert str(path) in str(error)


@FUZZ
@given(text=st.binary(max_size=60) | st.text(alphabet="abcv ./\\\n\0é\t", max_size=40).map(str.encode))
def test_any_list_is_read_or_refused(tmp_path, text):
    base = tmp_path / "voc"
    if not base.exists():
        make_voc(base)
    (tmp_path / "list.txt").write_bytes(text)
    samples, problems = read_list(tmp_path / "list.txt", base, ["JPEGImages"], ["SegmentationClassAug"])
    assert samples or problems
    assert all(base in path.resolve().parents for p in samples for path in (p.image, p.mask))


# --- colour masks -------------------------------------------------------------------------------------------


def make_colour(path: Path, labels: np.ndarray) -> None:
    Image.fromarray(voc_palette()[labels]).save(path)


def test_voc_palette():
    colours = voc_palette()
    assert colours[[0, 1, 2, 15, 20, 255]].tolist() == [
        [0, 0, 0],
        [128, 0, 0],
        [0, 128, 0],
        [192, 128, 128],
        [0, 64, 128],
        [224, 224, 192],
    ]
    assert len(np.unique(colours, axis=0)) == 256


def test_colour_masks_are_refused_with_the_command(voc, tmp_path):
    make_colour(voc.train[0].mask, np.zeros((6, 8), int))
    with pytest.raises(DataError, match=r"python -m scripts\.convert_masks .*SegmentationClassAug"):
        build_index("voc", voc.train, 21, cache=tmp_path / "cache")


def test_convert_masks(tmp_path, capsys):
    labels = np.resize([0, 1, 15, 20, 255], (6, 8))
    folder = tmp_path / "masks"
    folder.mkdir()
    make_colour(folder / "a.png", labels)
    Image.fromarray(labels.astype(np.uint8)).save(folder / "b.png")
    before = (folder / "a.png").read_bytes()
    assert convert_masks([str(folder)]) == 0
    assert (folder / "a.png").read_bytes() == before
    for name in "ab":
        assert np.array_equal(read_mask(tmp_path / f"masks-labels/{name}.png"), labels)
    assert convert_masks([str(folder)]) == 1  # there already
    assert convert_masks([str(folder), "--output", str(folder)]) == 1
    assert "--in-place" in capsys.readouterr().err
    assert (folder / "a.png").read_bytes() == before
    assert convert_masks([str(folder), "--in-place"]) == 0
    assert np.array_equal(read_mask(folder / "a.png"), labels)
    assert sorted(path.name for path in folder.iterdir()) == ["a.png", "b.png"]


def test_convert_masks_with_own_colours(tmp_path, capsys):
    folder = tmp_path / "masks"
    folder.mkdir()
    pixels = np.array([[[0, 0, 0], [10, 20, 30], [255, 255, 255]]], np.uint8)
    Image.fromarray(pixels).save(folder / "a.png")
    assert convert_masks([str(folder)]) == 1
    assert "(10, 20, 30)" in capsys.readouterr().err
    (tmp_path / "colours.txt").write_text("0 0 0\n10 20 30\n255: 255 255 255\n")
    assert convert_masks([str(folder), "--in-place", "--colours", str(tmp_path / "colours.txt")]) == 0
    assert read_mask(folder / "a.png").tolist() == [[0, 1, 255]]


# --- steps --------------------------------------------------------------------------------------------------

CLASSES = [frozenset(row) for row in ([1], [1, 2], [2], [2, 3], [3, 4], [4], [])]
NAMES = [f"image{i}" for i in range(len(CLASSES))]


@pytest.mark.parametrize(
    ("mode", "chosen"),
    [
        ("overlapped", [[0, 1, 2, 3], [3, 4], [4, 5]]),
        ("disjoint", [[0, 1, 2], [3], [4, 5]]),
        ("sequential", [[0, 1, 2], [3], [4, 5]]),
    ],
)
def test_select_train(mode, chosen):
    steps = steps_from_lists([[1, 2], [3], [4]])
    assert [select_train(CLASSES, step, mode) for step in steps] == chosen


def test_select_test():
    steps = steps_from_lists([[1, 2], [3], [4]])
    assert [select_test(CLASSES, step) for step in steps] == [
        [0, 1, 2, 3],
        [0, 1, 2, 3, 4],
        [0, 1, 2, 3, 4, 5],
    ]


STEP = Step(1, old=(7, 3), new=(5, 4))  # labels: 0, 7 -> 1, 3 -> 2, 5 -> 3, 4 -> 4


@pytest.mark.parametrize("mode", ["disjoint", "overlapped", "sequential", "partitioned"])
@pytest.mark.parametrize(("void", "void_label"), [("ignore", 255), ("background", 0)])
def test_train_table(mode, void, void_label):
    expected = {5: 3, 4: 4, 255: void_label} | ({7: 1, 3: 2} if mode == "sequential" else {})
    assert train_table(STEP, mode, void).tolist() == [expected.get(value, 0) for value in range(256)]


@pytest.mark.parametrize(("unseen", "label"), [("ignore", 255), ("background", 0)])
def test_test_table(unseen, label):
    expected = {0: 0, 7: 1, 3: 2, 5: 3, 4: 4, 255: 255}
    assert test_table(STEP, unseen).tolist() == [expected.get(value, label) for value in range(256)]
    assert test_table(STEP, unseen, frozenset({0}))[0] == 255


def test_wrong_choices_are_named():
    for call in (
        lambda: select_train(CLASSES, STEP, "joint"),
        lambda: train_table(STEP, "joint", "ignore"),
        lambda: train_table(STEP, "disjoint", "keep"),
        lambda: test_table(STEP, "keep"),
    ):
        with pytest.raises(ValueError, match="choose from"):
            call()


def test_check_steps():
    def check(lists, mode):
        steps = steps_from_lists(lists)
        chosen = images_of_steps(CLASSES, NAMES, steps, mode)
        check_steps(("background", "ant", "bee", "cow", "dog"), CLASSES, steps, chosen, mode)

    check([[1, 2], [3], [4]], "disjoint")
    with pytest.raises(DataError, match=r"step 0 learns cow \(3\)"):  # class 3 comes only with 2 or 4
        check([[1, 3], [2], [4]], "disjoint")
    check([[1, 3], [2], [4]], "overlapped")
    with pytest.raises(DataError, match="step 1 learns class 5"):
        check([[1], [5]], "overlapped")


@pytest.mark.slow
@pytest.mark.skipif(not SHARED, reason="ALTERSGD_SHARED does not say where voc2012_192 is")
def test_real_masks(tmp_path):
    dataset = load_dataset("voc", Path(SHARED) / "voc2012_192")
    index = build_index("voc", dataset.train + dataset.test, 21, cache=tmp_path)
    train, test = index[: len(dataset.train)], index[len(dataset.train) :]
    steps = protocol_steps("voc", "15-1")
    assert [len(select_train(train, step, "disjoint")) for step in steps] == [8437, 378, 299, 420, 500, 548]
    # 9,568 images show a class of step 0 at full size; one person was lost when 2008_004770 was made small
    assert [len(select_train(train, step, "overlapped")) for step in steps] == [9567, 487, 299, 491, 500, 548]
    assert [len(select_test(test, step)) for step in steps] == [1240, 1277, 1329, 1353, 1421, 1449]
