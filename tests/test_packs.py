"""A data set in one file trains, resumes and fails as its folder does."""

import json
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import mostly_slow, write_voc
from PIL import Image
from test_data import make_folder, make_voc, write_image
from torch.utils.data import DataLoader

import train
from data import DataError, load_dataset
from data.images import read_image, read_mask
from data.index import content_digest, read_index
from data.loaders import StepDataset
from data.packs import VERSION
from data.transforms import train_transform
from scripts import check_data, pack_data

TABLE = np.arange(256, dtype=np.uint8)
KEEPS = ("decoded", "original")


def make_ade(base: Path) -> Path:
    for split, names in {"training": "ab", "validation": "v"}.items():
        for name in names:
            image, mask = (base / kind / split / name for kind in ("images", "annotations"))
            write_image(image.with_suffix(".jpg"), mask.with_suffix(".png"), [0, 1, 150])
    return base


MAKERS = {"voc": make_voc, "ade": make_ade, "folder": make_folder}


def pack(root: Path, out: Path, keep: str = "decoded") -> Path:
    assert pack_data.main([str(root), str(out), "--bytes", keep]) == 0
    return out


@pytest.fixture
def packed(tmp_path) -> Path:
    return pack(make_voc(tmp_path / "voc"), tmp_path / "voc.pack")


def examples(samples) -> list:
    data = StepDataset(samples, TABLE, train_transform(6))
    return [data[epoch, position] for epoch in range(2) for position in range(len(data))]


# --- the same data ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("kind", MAKERS)
def test_a_packed_set_is_the_set_of_its_folder(kind, keep, tmp_path):
    root = MAKERS[kind](tmp_path / "data")
    folder, packed = (load_dataset(kind, place) for place in (root, pack(root, tmp_path / "packed", keep)))
    assert packed.class_names == folder.class_names and packed.void_labels == folder.void_labels
    assert packed.train_list == folder.train_list
    for ours, theirs in ((packed.train, folder.train), (packed.test, folder.test)):
        assert [sample.name for sample in ours] == [sample.name for sample in theirs]
        for a, b in zip(examples(ours), examples(theirs), strict=True):
            assert all(map(torch.equal, a, b))
        one, other = (read_index(kind, p, folder.num_classes, tmp_path) for p in (ours, theirs))
        assert one.classes == other.classes and one.content == other.content
        assert content_digest(ours, one.classes) == content_digest(theirs, other.classes)


@pytest.mark.parametrize("keep", KEEPS)
def test_a_packed_image_is_shown_turned_and_the_note_stays(keep, tmp_path):
    root = make_folder(tmp_path / "data")
    exif = Image.Exif()
    exif[0x0112] = 6
    image = np.random.default_rng(0).integers(0, 256, (8, 6, 3), dtype=np.uint8)  # stored lying
    Image.fromarray(image).save(root / "images/1.png", exif=exif)
    folder, packed = (load_dataset("folder", p) for p in (root, pack(root, tmp_path / "packed", keep)))
    ours, theirs = (data.train[0].image for data in (packed, folder))
    assert np.array_equal(read_image(ours), read_image(theirs)) and read_image(ours).shape == (6, 8, 3)
    notes = read_index("folder", packed.train, 3, tmp_path).notes
    assert notes == [f"1 images are read turned as their EXIF data say: {ours} for example"]


def test_a_packed_voc_holds_all_of_its_lists(packed, tmp_path):
    assert len(load_dataset("voc", packed).train) == 3
    assert [sample.name for sample in load_dataset("voc", packed, "train").train] == ["a"]
    write_voc(tmp_path / "own", [[1], [2]], [[1]])
    with pytest.raises(DataError, match="holds train_aug and val; pack a folder that has train too"):
        load_dataset("voc", pack(tmp_path / "own", tmp_path / "own.pack"), "train")


def test_a_packed_voc_without_train_aug_says_so(tmp_path):
    root = make_voc(tmp_path / "voc", masks="SegmentationClass")
    dataset = load_dataset("voc", pack(root, tmp_path / "packed"))
    assert dataset.train_list == "train" and dataset.notices == load_dataset("voc", root).notices != []


@pytest.mark.parametrize("keep", mostly_slow(KEEPS, fast=["decoded"]))
def test_a_run_begun_on_the_folder_ends_on_the_packed_set_as_on_the_folder(
    keep, toy_run, toy_arguments, toy_voc, tmp_path
):
    whole = toy_run(name="whole")
    packed = pack(toy_voc, tmp_path / "packed", keep)
    assert train.main(toy_arguments("method.name=mib", "train.last_step=0")) == 0
    assert train.main(toy_arguments("method.name=mib", f"data.root={packed}")) == 0
    ends = [torch.load(run / "step_1.pt")["model"] for run in (whole, tmp_path / "runs/run")]
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])


def test_a_run_begun_on_the_packed_set_goes_on_with_the_folder(toy_arguments, toy_voc, tmp_path):
    packed = pack(toy_voc, tmp_path / "packed")
    assert train.main(toy_arguments("train.last_step=0", f"data.root={packed}")) == 0
    assert train.main(toy_arguments()) == 0
    assert len(json.loads((tmp_path / "runs/run/results.json").read_text())["steps"]) == 2


def test_check_data_counts_a_packed_set_as_its_folder(tmp_path, capsys):
    root = make_voc(tmp_path / "voc")
    pack(root, tmp_path / "packed")
    capsys.readouterr()
    said = []
    for place in (root, tmp_path / "packed"):
        assert check_data.main([str(place), "--full"]) == check_data.DIFFERENT
        said.append(capsys.readouterr().out.replace(f"{place}: voc", "voc"))
    assert said[0] == said[1] and "train_aug    10,582       3        0       0" in said[0]


# --- one file, many processes -------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_read_a_packed_set(start, packed):
    samples = load_dataset("voc", packed).train
    data = StepDataset(samples, TABLE)
    here = [data[0, position] for position in range(3)]  # opens the file before the workers are there
    batches = [[(0, position)] for position in range(3)] * 4
    loader = DataLoader(data, batch_sampler=batches, num_workers=2, multiprocessing_context=start)
    for number, (images, labels) in enumerate(loader):
        assert torch.equal(images[0], here[number % 3][0]) and torch.equal(labels[0], here[number % 3][1])


def test_a_process_that_is_handed_a_packed_set_opens_it_anew(packed):
    samples = load_dataset("voc", packed).train
    before = read_image(samples[0].image)
    handed = pickle.loads(pickle.dumps(samples))
    del samples  # and with it its open file
    assert np.array_equal(read_image(handed[0].image), before)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="shows no open files")
def test_a_packed_set_is_one_open_file(packed):
    count = len(os.listdir("/proc/self/fd"))
    dataset = load_dataset("voc", packed)
    for sample in dataset.train + dataset.test:
        read_image(sample.image), read_mask(sample.mask)
    assert len(os.listdir("/proc/self/fd")) == count + 1
    del dataset, sample
    assert len(os.listdir("/proc/self/fd")) == count


# --- what can be wrong --------------------------------------------------------------------------------------


def overwrite(file: Path, place: int, content: bytes) -> None:
    with file.open("r+b") as opened:
        opened.seek(place)
        opened.write(content)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda file: os.truncate(file, file.stat().st_size - 1), "is cut off or has grown: it has"),
        (lambda file: os.truncate(file, 20), "is cut off in its header"),
        (lambda file: file.write_bytes(file.read_bytes() + b"x"), "is cut off or has grown: it has"),
        (
            lambda file: overwrite(file, 16, struct.pack("<I", VERSION + 1)),
            "packed in version 2, but this code reads",
        ),
        (lambda file: overwrite(file, file.stat().st_size - 9, b"?"), "its index is damaged"),
        (
            lambda file: file.write_bytes(b"PK\3\4 a zip"),
            "is not a folder, and no file of python -m scripts.pack_data",
        ),
        (lambda file: file.write_bytes(b""), "is not a folder, and no file of python -m scripts.pack_data"),
    ],
)
def test_a_file_that_is_no_whole_pack_is_refused(damage, said, packed, capsys):
    damage(packed)
    with pytest.raises(DataError, match=said):
        load_dataset("voc", packed)
    assert check_data.main([str(packed)]) == check_data.UNUSABLE
    assert capsys.readouterr().out.count(said) == 1


@pytest.mark.parametrize("keep", KEEPS)
def test_a_damaged_record_is_named(keep, tmp_path):
    packed = pack(make_voc(tmp_path / "voc"), tmp_path / "packed", keep)
    samples = load_dataset("voc", packed).train
    read_index("voc", samples, 21, tmp_path)
    overwrite(packed, samples[1].mask.start + 40, b"\x07\x09")
    with pytest.raises(
        DataError, match=r"SegmentationClassAug/b\.png in .*packed: is damaged; make it again"
    ):
        read_index("voc", samples, 21, tmp_path)


def test_a_pack_that_shrinks_under_a_run_gives_a_message(packed):
    sample = load_dataset("voc", packed).train[-1]
    os.truncate(packed, sample.mask.start)
    with pytest.raises(DataError, match="ends before its last record"):
        read_mask(sample.mask)


def test_a_pack_that_is_written_anew_under_a_run_gives_a_message(packed, tmp_path):
    samples = load_dataset("voc", packed).train
    write_image(tmp_path / "voc/JPEGImages/a.jpg", tmp_path / "voc/SegmentationClassAug/a.png", [1], (30, 20))
    pack(tmp_path / "voc", packed)
    with pytest.raises(DataError, match="was packed anew since this run began"):
        read_image(samples[0].image)


def test_a_pack_of_another_kind_is_refused(packed):
    with pytest.raises(DataError, match=r"holds voc, not ade; set data\.dataset=voc"):
        load_dataset("ade", packed)


def test_what_cannot_be_trained_on_is_not_packed(packed, tmp_path, capsys):
    before = packed.read_bytes()
    (tmp_path / "voc/JPEGImages/b.jpg").write_bytes(b"no image")
    Image.new("L", (3, 3)).save(tmp_path / "voc/SegmentationClassAug/c.png")
    assert pack_data.main([str(tmp_path / "voc"), str(packed)]) == 2
    said = capsys.readouterr().err
    assert "b.jpg" in said and "c.png" in said and "(2 in all)" in said
    (tmp_path / "voc/JPEGImages/b.jpg").unlink()
    assert pack_data.main([str(tmp_path / "voc"), str(packed)]) == 2
    assert "b lacks its image" in capsys.readouterr().err
    assert packed.read_bytes() == before and sorted(p.name for p in tmp_path.iterdir()) == ["voc", "voc.pack"]


def test_a_pack_has_to_be_made_from_a_folder_into_a_file(packed, tmp_path, capsys):
    for arguments, said in (
        ([packed, tmp_path / "x"], "give the folder of the data set"),
        ([tmp_path / "voc", tmp_path], "name the file to write"),
        ([tmp_path / "voc", tmp_path / "no/x"], "cannot be written"),
    ):
        assert pack_data.main([str(argument) for argument in arguments]) == 2
        assert said in capsys.readouterr().err
