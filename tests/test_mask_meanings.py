"""Masks whose values are no class ids (data.labels), data without a background (data.background), and colours
of one's own: alone, and in the walk through CamVid of docs/own-data.md.
"""

import json
import re
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

import train
from configs.schema import ConfigError, config_differences, load_config
from data import DataError, configured_dataset
from data.folder import read_classes
from data.incremental import test_table, train_table
from data.index import build_index, content_digest, read_index
from data.loaders import StepDataset, read_labels
from data.meanings import mask_meanings, unnamed_values
from data.protocols import Step
from engine.identity import recipe_of
from scripts import check_data, compare, pack_data, predict

ROOT = Path(train.__file__).parent
DOCUMENT = ROOT / "docs/own-data.md"
CLASSES = ("background", "sky", "road", "car")
CAMVID = ("sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian")
CAMVID += ("bicyclist",)
COLOURS = {"sky": (128, 128, 128), "car": (64, 0, 128)}


# --- what values mean ---------------------------------------------------------------------------------------


def test_meanings_by_name_id_and_word():
    table = mask_meanings(CLASSES, ("sky", 3, None, "background", "void"), True)
    assert len(table) == 256 and list(table[:6]) == [1, 3, 4, 0, 255, 4]
    assert set(table[5:255]) == {4} and table[255] == 255  # 4 is the first number that no class has
    assert unnamed_values(range(256), 4, table) == [2, *range(5, 255)]
    assert mask_meanings(CLASSES, None, True) is None
    assert list(mask_meanings(CLASSES, None, False)[:5]) == [4, 1, 2, 3, 4]
    assert len(mask_meanings(CLASSES, ["sky"] * 256, True)) == 256


@pytest.mark.parametrize(
    ("names", "labels", "background", "said"),
    [
        (CLASSES, ["skye"], True, "no class is named 'skye'; did you mean 'sky'"),
        (CLASSES, [4], True, "class id 4 is outside 0..3"),
        (CLASSES, ["sky", "background"], False, "value 1 is background, but data.background is false"),
        ((*CLASSES, "void"), ["sky", "void"], True, "'void' is both a class"),
        (tuple(map(str, range(255))), ["1"], True, "leave no number"),
    ],
)
def test_meanings_refused(names, labels, background, said):
    with pytest.raises(DataError, match=said):
        mask_meanings(names, labels, background)


@pytest.mark.parametrize(
    "value", ["[[sky]]", "[1.5]", "[256]", "[true]", "sky", "[]", str(list(range(9)) * 30)]
)
def test_labels_of_another_type_are_refused(value):
    with pytest.raises(ConfigError, match=r"data\.labels"):
        load_config([], [f"data.labels={value}"])


def test_without_a_background_void_is_not_trained_as_one():
    with pytest.raises(ConfigError, match=r"data\.background: false needs data\.void ignore"):
        load_config([], ["data.background=false"])
    assert not load_config([], ["data.background=false", "data.void=ignore"]).data.background


def write_folder(root: Path, shift: int) -> Path:
    """Masks of 0..2 and 3 = void, or (shift 1) rewritten to 1..3 and 255; the same images."""
    rng = np.random.default_rng(0)
    for kind in ("images", "masks"):
        (root / kind).mkdir(parents=True)
    for name in "abcd":
        values = rng.integers(0, 4, (6, 6), dtype=np.uint8)
        Image.fromarray(rng.integers(0, 255, (6, 6, 3), dtype=np.uint8)).save(root / f"images/{name}.png")
        Image.fromarray(np.where(values == 3, 255, values + 1).astype(np.uint8) if shift else values).save(
            root / f"masks/{name}.png"
        )
    (root / "classes.txt").write_text("sky\nroad\ncar\n")
    (root / "train.txt").write_text("a\nb\n")
    (root / "val.txt").write_text("c\nd\n")
    return root


def section(root: Path, labels=None, background: bool = True) -> SimpleNamespace:
    return SimpleNamespace(
        dataset="folder", root=root, train_list="auto", labels=labels, background=background
    )


ZERO_BASED = ("sky", "road", "car", "void")


def test_labels_read_as_rewritten_masks_would_be(tmp_path):
    """The reference is the data set whose files were rewritten."""
    as_it_comes, rewritten = (write_folder(tmp_path / str(shift), shift) for shift in (0, 1))
    assert pack_data.main([str(as_it_comes), str(tmp_path / "pack")]) == 0
    expected = configured_dataset(section(rewritten))
    for root in (as_it_comes, tmp_path / "pack"):
        ours = configured_dataset(section(root, ZERO_BASED))
        for group, other in ((ours.train, expected.train), (ours.test, expected.test)):
            indices = [build_index("folder", samples, 4, cache=tmp_path / "c") for samples in (group, other)]
            assert indices[0] == indices[1] == [{1, 2, 3}] * 2
            for step in (Step(0, (), (1, 2)), Step(1, (1, 2), (3,))):
                for table in (
                    train_table(step, "overlapped", "ignore", 4),
                    test_table(step, "ignore", num_classes=4),
                ):
                    one, two = (StepDataset(samples, table)[0, 1][1] for samples in (group, other))
                    assert (one == two).all()
            assert all((read_labels(s) == read_labels(o)).all() for s, o in zip(group, other, strict=True))


def test_the_index_depends_on_the_labels(tmp_path):
    root = write_folder(tmp_path / "data", 0)
    plain, zero_based, other = (
        configured_dataset(section(root, labels)).train
        for labels in (None, ZERO_BASED, ("sky", "road", "void", "void"))
    )
    found = [read_index("folder", samples, 4, cache=tmp_path / "c") for samples in (plain, zero_based, other)]
    assert [index.classes[0] for index in found] == [{1, 2, 3}, {1, 2, 3}, {1, 2}]
    assert len({index.content for index in found}) == 3
    assert len(list((tmp_path / "c").iterdir())) == 3
    # what older runs know of their data cannot tell the first two apart, so the content has to
    assert content_digest(plain, found[0].classes) == content_digest(zero_based, found[1].classes)
    again = [read_index("folder", samples, 4, cache=tmp_path / "c") for samples in (plain, zero_based, other)]
    assert again == found


def test_values_that_are_not_listed_are_refused_or_void(tmp_path):
    root = write_folder(tmp_path / "data", 0)
    samples = configured_dataset(section(root, ("sky", "road"))).train
    with pytest.raises(DataError, match="holds the values 2, 3, which"):
        build_index("folder", samples, 4, cache=tmp_path / "c")
    index = read_index("folder", samples, 4, cache=tmp_path / "c", unnamed="void")
    assert index.classes == [{1, 2}] * 2 and any("the value 3" in note for note in index.notes)
    assert set(
        np.unique(StepDataset(samples, train_table(Step(0, (), (1, 2)), "disjoint", "ignore", 4))[0, 0][1])
    ) == {1, 2, 255}


def test_without_a_background_a_zero_is_refused(tmp_path):
    zero_based = configured_dataset(section(write_folder(tmp_path / "data", 0), background=False))
    with pytest.raises(DataError, match="holds the value 0, which"):
        build_index("folder", zero_based.train, 4, cache=tmp_path / "c")
    sound = configured_dataset(section(write_folder(tmp_path / "sound", 1), background=False))
    assert build_index("folder", sound.train, 4, cache=tmp_path / "c") == [{1, 2, 3}] * 2


def test_another_mapping_is_another_recipe():
    """train.start_from compares it; a config from before the keys means their defaults."""
    configs = [
        load_config([], overrides).model_dump(mode="json")
        for overrides in ([], ["data.labels=[1, void]"], ["data.labels=[2, void]"])
    ]
    recipes = [recipe_of(config, 0) for config in configs]
    assert config_differences(recipes[1], recipes[2]) == ["data.labels: [1, 'void'] -> [2, 'void']"]
    assert recipes[0]["data"]["labels"] is None and recipes[0]["data"]["background"] is True


# --- colours ------------------------------------------------------------------------------------------------


def test_colours_in_classes_txt(tmp_path):
    path = tmp_path / "classes.txt"
    path.write_text("traffic light #804080\nroad 1 2 3\nclass 7\t4,5,6\n")
    names, colours = read_classes(path)
    assert names == ("background", "traffic light", "road", "class 7")
    assert colours == ((0, 0, 0), (128, 64, 128), (1, 2, 3), (4, 5, 6))
    path.write_text("background 9 9 9\ncar 1 2 3\n")
    assert read_classes(path) == (("background", "car"), ((9, 9, 9), (1, 2, 3)))
    path.write_text("class 1\nclass 2\n")
    assert read_classes(path) == (("background", "class 1", "class 2"), ())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("road 1 2 3\ntree\n", "the class 'tree' has no colour, but others do"),
        ("background 9 9 9\ncar\n", "the class 'car' has no colour, but others do"),
        ("road 1 2 3\ntree #010203\n", "'tree' has the colour of 'road'"),
        ("road 0 0 0\n", "'road' has the colour of 'background'.*black unless"),
        ("road 1 2 256\n", "from 0 to 255"),
        ("road 1 2 3\nroad 4 5 6\n", "named twice"),
    ],
)
def test_colours_refused(tmp_path, text, said):
    (tmp_path / "classes.txt").write_text(text)
    with pytest.raises(DataError, match=said):
        read_classes(tmp_path / "classes.txt")


# --- CamVid -------------------------------------------------------------------------------------------------


def write_camvid(root: Path) -> Path:
    """Its folders, lists and values 0..11: bands of all classes, the car and those on foot in every image."""
    rng = np.random.default_rng(1)
    for split, count in {"train": 8, "val": 4, "test": 2}.items():
        lines = []
        for number in range(count):
            name = f"0001TP_{number:06d}"
            order = rng.permutation(11)
            mask = np.repeat(order, 4).astype(np.uint8)[:, None].repeat(48, axis=1)
            mask[::4, 3:40] = 11  # thin lines between regions
            image = (mask[..., None] * (20, 7, 13) % 256).astype(np.uint8)
            for folder, pixels in ((split, image), (f"{split}annot", mask)):
                (root / folder).mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(root / folder / f"{name}.png")
            lines.append(f"/SegNet/CamVid/{split}/{name}.png /SegNet/CamVid/{split}annot/{name}.png\n")
        (root / f"{split}.txt").write_text("".join(lines))
    return root


def blocks(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", DOCUMENT.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [text for of, text in found if of == language]


@pytest.fixture
def camvid(tmp_path) -> Path:
    """The data set beside classes.txt as the document gives it."""
    root = write_camvid(tmp_path / "CamVid")
    (classes,) = [text for text in blocks("") if text.startswith("sky ")]
    (root / "classes.txt").write_text(classes)
    return root


@pytest.fixture
def walk(camvid) -> dict[str, list[str]]:
    """The commands of the document by their program; the first, which corrects the lists, is done."""
    (block,) = [text for text in blocks("bash") if "sed" in text]
    correct, *others = (shlex.split(line) for line in block.splitlines())
    assert subprocess.run(correct, cwd=camvid.parent).returncode == 0
    return {words[1 + (words[1] == "-m")]: words[2 + (words[1] == "-m") :] for words in others}


def test_camvid_without_its_labels_is_noticed(camvid, walk, capsys):
    assert check_data.main([str(camvid)]) == check_data.DIFFERENT
    out = capsys.readouterr().out
    assert f"say data.labels: [{', '.join(CAMVID)}, void]" in out.replace("\n", " ")


def test_check_data_reads_and_counts_as_the_config_says(camvid, walk, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    given = [str(camvid), *walk["scripts.check_data"][1:]]
    assert check_data.main([*given, "train.batch_size=4"]) == check_data.COMPLETE
    out = capsys.readouterr().out
    assert re.search(r"^ +0  sky +\d\.\d\d% +8 +\S+trainannot/0001TP_\d+\.png$", out, flags=re.MULTILINE)
    assert re.search(r"^ 11  \(void\) ", out, flags=re.MULTILINE) and "background" not in out
    assert "own     overlapped      8      8\n" in out and "own     test            4      4\n" in out
    for more, said in (
        (["data.mode=disjoint"], "step 0 learns sky (1), building (2)"),
        (["train.batch_size=9"], "step 0 has 8 training images, fewer than one batch of 9"),
        (["data.labels=null"], "value 0 has no name, in 8 masks of train"),
        (["data.labels=[sky]"], "value 1 has no name, in 8 masks of train"),
    ):
        assert check_data.main([*given, *more]) != check_data.COMPLETE
        assert said in capsys.readouterr().out
    with pytest.raises(SystemExit):
        check_data.main([*given, "data.labels=[[1]]"])
    assert "data.labels" in capsys.readouterr().err


def test_camvid_as_it_comes(camvid, walk, toy_arguments, tmp_path, capsys, monkeypatch):
    """The commands of docs/own-data.md, with a tiny network."""
    monkeypatch.chdir(ROOT)
    kept = ("data.root", "data.steps", "data.evaluate", "method.")
    small = [argument for argument in toy_arguments() if not argument.startswith(kept)]
    small += ["model.pretrained=null", "train.epochs=1", "train.epochs_later=1", "run.name=camvid"]
    *overlays, _ = walk["train.py"]
    arguments = [*overlays, *small, f"data.root={camvid}"]
    assert train.main(arguments) == 0
    table = capsys.readouterr().out
    run = tmp_path / "runs/camvid"
    results = json.loads((run / "results.json").read_text())
    assert [step["images"] for step in results["steps"]] == [8, 8]
    for step in results["steps"]:
        assert list(step["iou"])[1:9] == list(CAMVID[:8]) and step["iou"]["background"] is None
        assert None not in list(step["iou"].values())[1:]
        assert step["miou"] == step["miou_with_background"]
        assert sum(step["confusion"][0]) == 0  # no pixel is truly background
    header = next(line for line in table.splitlines() if "| bg" in line)
    last = next(line for line in reversed(table.splitlines()) if re.match(r"1 +\d", line))
    assert last[: header.index("| bg") + 4].endswith("   -")
    assert compare.main([str(run)]) == 0

    swapped = ", ".join(["road", *CAMVID[1:3], "sky", *CAMVID[4:], "void"])
    assert train.main([*arguments, f"data.labels=[{swapped}]"]) == 2
    assert "data.labels: ['sky'" in capsys.readouterr().err

    for path in sorted((run / "pictures").glob("*.png")):  # what TensorBoard shows
        with Image.open(path) as picture:
            assert tuple(picture.getpalette()[3:6]) == COLOURS["sky"]
    assert predict.main([str(run), str(camvid / "test"), "--out", str(tmp_path / "seen"), "--all-steps"]) == 0
    mask = Image.open(tmp_path / "seen/0001TP_000000_mask.png")
    palette = np.array(mask.getpalette()).reshape(-1, 3)
    assert tuple(palette[1]) == COLOURS["sky"] and tuple(palette[9]) == COLOURS["car"]
    (shown, *_) = sorted(set(np.asarray(mask).flat) - {0})
    for kind in ("overlay", "steps"):  # the legend holds the colour as it is
        pixels = np.asarray(Image.open(tmp_path / f"seen/0001TP_000000_{kind}.png"))
        assert (pixels == palette[shown]).all(axis=2).any()
