"""One reader for every purpose: what is read, how, and what is refused."""

import io
import os
import re
import signal
import struct
import subprocess
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image

from data import DataError, Sample
from data.images import ANY_FORMATS, image_size, open_image, read_image, read_mask
from data.incremental import test_table, train_table
from data.index import build_index, content_digest, read_index
from data.loaders import StepDataset, test_loader
from data.protocols import Step
from scripts.check_data import main as check_data
from scripts.convert_masks import main as convert_masks

ORIENTATION = 0x0112
STEP = Step(0, (), (1,))
AS_IT_IS = np.arange(256, dtype=np.uint8)


def speckled(width: int = 12, height: int = 8) -> Image.Image:
    return Image.fromarray(
        np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8), "RGB"
    )


def turned_by(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return exif


def write_mask(path: Path, labels) -> Path:
    Image.fromarray(np.array(labels, np.uint8)).save(path)
    return path


def pair(folder: Path, image: Path, shape=(8, 12), value: int = 1) -> Sample:
    return Sample(image.stem, image, write_mask(folder / f"{image.stem}_mask.png", np.full(shape, value)))


def make_folder(root: Path, masks: dict[str, np.ndarray], classes: str) -> Path:
    """A data set of one's own; its last mask is the test's."""
    for kind in ("images", "masks"):
        (root / kind).mkdir(parents=True)
    for name, labels in masks.items():
        speckled(*labels.shape[::-1]).save(root / f"images/{name}.png")
        write_mask(root / f"masks/{name}.png", labels)
    (root / "classes.txt").write_text(classes)
    *train, test = masks
    (root / "train.txt").write_text("\n".join(train))
    (root / "val.txt").write_text(test)
    return root


# --- one reader ---------------------------------------------------------------------------------------------


def write_odd(kind: str, folder: Path) -> tuple[Path, int]:
    """An image, and a value that its first pixel must have."""
    path = folder / ("odd.jpg" if kind == "ink" else "odd.png")
    if kind == "16 bits":
        Image.fromarray(np.full((8, 12), 100 * 257, np.uint16)).save(path)
        return path, 100
    if kind == "alpha":
        glass = speckled().convert("RGBA")
        glass.putalpha(0)
        glass.save(path)
    elif kind == "grey alpha":
        Image.new("LA", (12, 8), (7, 0)).save(path)
    elif kind == "transparent colour":
        Image.new("RGB", (12, 8), (7, 8, 9)).save(path, transparency=(7, 8, 9))
    elif kind == "palette":
        keyed = Image.new("P", (12, 8), 3)
        keyed.putpalette([0, 0, 0] * 4)
        keyed.save(path, transparency=3)
    elif kind == "ink":
        Image.new("CMYK", (12, 8), (0, 0, 0, 0)).save(path)
    return path, 255


@pytest.mark.parametrize("kind", ["16 bits", "alpha", "grey alpha", "transparent colour", "palette", "ink"])
def test_training_reads_what_prediction_reads(kind, tmp_path):
    path, value = write_odd(kind, tmp_path)
    image, _ = StepDataset([pair(tmp_path, path)], AS_IT_IS)[0, 0]
    seen = np.asarray(open_image(path, ANY_FORMATS)[0])
    assert np.array_equal(image.permute(1, 2, 0), seen)
    assert (seen == value).all()


def moved_behind_the_pixels(png: bytes) -> bytes:
    """The same file with its eXIf chunk where some programs write it."""
    start = png.index(b"eXIf") - 4
    end = start + 12 + struct.unpack(">I", png[start : start + 4])[0]
    return png[:start] + png[end:-12] + png[start:end] + png[-12:]


@pytest.mark.parametrize("kind", ["jpg", "png", "late png"])
@pytest.mark.parametrize("orientation", [3, 6])
def test_training_turns_images_as_exif_says(kind, orientation, tmp_path):
    path = tmp_path / f"p.{kind[-3:]}"
    speckled().save(path, exif=turned_by(orientation))
    if kind == "late png":
        path.write_bytes(moved_behind_the_pixels(path.read_bytes()))
    width, height = (12, 8) if orientation == 3 else (8, 12)
    sample = pair(tmp_path, path, (height, width))
    with Image.open(path) as stored:
        expected = np.rot90(np.asarray(stored), 2 if orientation == 3 else -1)
    data = StepDataset([sample], AS_IT_IS)
    ((images, _),) = test_loader(data, batch_size=1)
    assert np.array_equal(images[0].permute(1, 2, 0), expected)
    assert np.array_equal(open_image(path, ANY_FORMATS)[0], expected)
    assert image_size(path) == (width, height)
    index = read_index("x", [sample], 2, cache=tmp_path / "cache")
    assert index.notes == [f"1 images are read turned as their EXIF data say: {path} for example"]


def test_a_mask_drawn_on_an_image_that_exif_turns_is_refused(tmp_path):
    path = tmp_path / "p.jpg"
    speckled().save(path, exif=turned_by(6))
    sample = pair(tmp_path, path, (8, 12))  # as the pixels are stored
    with pytest.raises(DataError, match=r"12 x 8 as its image is stored, .* turned by its EXIF data, 8 x 12"):
        build_index("x", [sample], 2, cache=tmp_path / "cache")
    with pytest.raises(DataError, match="is of another size"):
        StepDataset([sample], AS_IT_IS)[0, 0]


def test_check_data_names_images_that_are_not_read_as_stored(tmp_path, capsys):
    root = make_folder(tmp_path / "own", {name: np.full((8, 12), 1) for name in "ab"}, "cat\n")
    speckled().convert("RGBA").save(root / "images/a.png")
    check_data([str(root)])
    assert "train: 1 images are read on white, having an alpha channel" in capsys.readouterr().out


def grey_png(bits: int, rows: list[bytes], width: int) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        )

    header = struct.pack(">IIBBBBB", width, len(rows), bits, 0, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


@pytest.mark.parametrize("bits", [2, 4])
def test_a_mask_in_few_bits_of_grey_is_refused(bits, tmp_path):
    """Read as shades, class 1 would be 85 or 17."""
    (tmp_path / "m.png").write_bytes(grey_png(bits, [b"\x12\x21"], 16 // bits))
    with pytest.raises(DataError, match="2 or 4 bits of grey"):
        read_mask(tmp_path / "m.png")


# --- what may be opened -------------------------------------------------------------------------------------

POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 12 8\n%%EndComments\nshowpage\n%%EOF\n"


def test_no_image_starts_ghostscript(tmp_path, monkeypatch, capsys):
    started = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_: started.append("Ghostscript"))
    monkeypatch.setattr(EpsImagePlugin, "has_ghostscript", lambda: True)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: started.append("a process"))
    root = make_folder(tmp_path / "own", {name: np.full((8, 12), 1) for name in "abcd"}, "cat\n")
    for path in (root / "images/a.png", root / "masks/b.png"):
        path.write_bytes(POSTSCRIPT)
    image, mask = root / "images/a.png", root / "masks/b.png"
    for read in (
        lambda: read_image(image),
        lambda: image_size(image),
        lambda: open_image(image, ANY_FORMATS),
        lambda: read_mask(mask),
        lambda: build_index("x", [Sample("a", image, root / "masks/a.png")], 2, cache=tmp_path / "cache"),
    ):
        with pytest.raises(DataError, match="its first bytes are not those of"):
            read()
    assert check_data([str(root), "--full"]) == 1
    assert convert_masks([str(root / "masks")]) == 1
    assert not started


def test_every_image_is_opened_with_its_formats():
    root = Path(__file__).parent.parent
    folders = ("configs", "data", "engine", "methods", "metrics", "models", "scripts", "study", "tracking")
    opened = {
        path.name: text.count("Image.open(") - len(re.findall(r"\bformats=", text))
        for folder in folders
        for path in (root / folder).rglob("*.py")
        if "Image.open(" in (text := path.read_text())
    }
    assert "images.py" in opened and not any(opened.values())


def test_a_data_set_holds_jpeg_and_png_alone(tmp_path):
    speckled().save(tmp_path / "a.jpg", "TIFF")
    speckled().save(tmp_path / "b.jpg", "PNG")
    with pytest.raises(DataError, match="not those of JPEG or PNG"):
        read_image(tmp_path / "a.jpg")
    assert np.array_equal(read_image(tmp_path / "b.jpg"), speckled())
    assert open_image(tmp_path / "a.jpg", ANY_FORMATS)[0].size == (12, 8)


@pytest.fixture
def five_seconds():
    def give_up(*_):
        raise TimeoutError("still waiting for the pipe")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(5)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", ["images", "masks"])
def test_a_pipe_as_an_image_is_refused(kind, tmp_path, capsys, five_seconds):
    root = make_folder(tmp_path / "own", {name: np.full((8, 12), 1) for name in "abc"}, "cat\n")
    (root / kind / "a.png").unlink()
    os.mkfifo(root / kind / "a.png")
    assert check_data([str(root)]) == 1
    assert f"{root / kind}/a.png: cannot be read: it is a pipe or device" in capsys.readouterr().out


def test_a_pipe_as_a_list_of_classes_is_refused(tmp_path, capsys, five_seconds):
    root = make_folder(tmp_path / "own", {name: np.full((8, 12), 1) for name in "abc"}, "cat\n")
    (root / "classes.txt").unlink()
    os.mkfifo(root / "classes.txt")
    assert check_data([str(root)]) != 0
    told = capsys.readouterr()
    assert "classes.txt: cannot be read as text (it is no file)" in told.out + told.err


# --- content ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["image", "mask"])
def test_other_content_of_equal_size_is_noticed(kind, tmp_path):
    path = tmp_path / "p.png"
    speckled().save(path, compress_level=0)
    sample = pair(tmp_path, path)
    changed = getattr(sample, kind)
    Image.open(changed).save(changed, compress_level=0)
    before = read_index("x", [sample], 2, cache=tmp_path / "cache")
    status, size_digest = changed.stat(), content_digest([sample], before.classes)
    with Image.open(changed) as file:
        pixels = np.array(file)
    flipped = np.flip(pixels, axis=1).copy()
    if kind == "mask":
        flipped[0, 0] = 0
    content = io.BytesIO()
    Image.fromarray(flipped).save(content, "PNG", compress_level=0)
    changed.write_bytes(content.getvalue())
    os.utime(changed, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert changed.stat().st_size == status.st_size
    now = read_index("x", [sample], 2, cache=tmp_path / "cache")
    assert content_digest([sample], now.classes) == size_digest
    assert now.content != before.content


def test_content_is_the_same_elsewhere_and_comes_from_the_cache(tmp_path, monkeypatch):
    digests = set()
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        speckled().save(tmp_path / name / "p.png")
        sample = pair(tmp_path / name, tmp_path / name / "p.png")
        digests.add(read_index("x", [sample], 2, cache=tmp_path / "cache").content)
    monkeypatch.setattr("data.index.scan", lambda *_, **__: pytest.fail("scanned again"))
    digests.add(read_index("x", [sample], 2, cache=tmp_path / "cache").content)
    assert len(digests) == 1


# --- values without a name ----------------------------------------------------------------------------------


def test_a_mask_value_without_a_name_is_refused_unless_it_is_void(tmp_path):
    speckled().save(tmp_path / "p.png")
    sample = pair(tmp_path, tmp_path / "p.png", value=7)
    options = {"num_classes": 2, "cache": tmp_path / "cache"}
    index = read_index("x", [sample], unnamed="void", **options)
    assert index.classes == [frozenset()]
    assert index.notes == [
        f"1 masks hold the value 7, which has no name and is void: {sample.mask} for example"
    ]
    with pytest.raises(DataError, match=r"holds the label 7, .* or set data\.unnamed=void"):
        read_index("x", [sample], **options)  # not what the cache holds


def test_values_without_a_name_are_void_in_training_and_testing():
    assert set(train_table(STEP, "disjoint", "ignore", num_classes=2)[2:]) == {255}
    assert set(train_table(STEP, "disjoint", "background", num_classes=2)[2:]) == {0}
    table = test_table(STEP, "background", num_classes=3)
    assert table[:3].tolist() == [0, 1, 0] and set(table[3:]) == {255}


# --- check_data on mask values ------------------------------------------------------------------------------


def scene(sky: int, road: int, void: int | None, others=()) -> np.ndarray:
    """Sky above road, perhaps a thin line of void between them, and a small square of each other value."""
    labels = np.full((24, 24), sky, np.uint8)
    labels[10:] = road
    if void is not None:
        labels[10] = void
    for number, value in enumerate(others):
        labels[16:19, 4 * number : 4 * number + 3] = value
    return labels


def checked(tmp_path: Path, classes: str, *masks: np.ndarray) -> list[str]:
    root = make_folder(tmp_path / "own", {f"i{number}": mask for number, mask in enumerate(masks)}, classes)
    check_data([str(root)])
    return [str(root), *classes.split()]


def test_check_data_shows_every_mask_value_with_name_share_and_example(tmp_path, capsys):
    checked(tmp_path, "sky\nroad\ncar\n", scene(1, 2, 255, [9]), scene(1, 2, 0), scene(1, 2, 3))
    rows = {
        line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines() if line.strip()
    }
    assert rows["0"][:3] == ["background", "2.08%", "1"] and rows["0"][3].endswith("masks/i1.png")
    assert rows["1"][:3] == ["sky", "41.67%", "2"]
    assert rows["3"] == ["car", "-", "0", "-"]
    assert rows["9"][:4] == ["(no", "name)", "0.78%", "1"] and rows["255"][:3] == ["(void)", "2.08%", "1"]


def test_check_data_warns_of_values_without_a_name(tmp_path, capsys):
    root, *_ = checked(tmp_path, "sky\nroad\n", scene(1, 2, 0), scene(1, 2, 9), scene(1, 2, 0))
    out = capsys.readouterr().out
    assert f"value 9 has no name, in 1 masks of train ({root}/masks/i1.png for example)" in out
    assert "data.unnamed=void" in out and not out.endswith("complete\n")


def test_check_data_warns_of_masks_that_count_from_zero_and_end_with_void(tmp_path, capsys):
    """CamVid as it comes: eleven names, values 0 to 11."""
    mask = scene(0, 1, 3, [2])
    checked(tmp_path, "sky\nroad\ncar\n", mask, mask, mask)
    out = capsys.readouterr().out
    assert "the masks may count from zero: 0, read as background, covers 42% of the pixels" in out
    assert "3, read as car, is scattered" in out and "If 0 means sky" in out


def test_check_data_warns_of_masks_that_count_from_zero(tmp_path, capsys):
    mask = scene(0, 1, 255, [2])
    checked(tmp_path, "sky\nroad\ncar\n", mask, mask, mask)
    assert (
        "the masks may count from zero" in (out := capsys.readouterr().out) and "3 (car) never occurs" in out
    )


def test_check_data_warns_of_masks_that_count_from_one(tmp_path, capsys):
    mask = scene(1, 2, None, [3])
    checked(tmp_path, "background\nroad\ncar\n", mask, mask, mask)
    assert "may count from one where the names count from zero" in capsys.readouterr().out


@pytest.mark.parametrize(
    "mask", [scene(1, 2, 0, [3]), scene(1, 2, 255, [0, 3]), scene(0, 0, None, [1, 2, 3])]
)
def test_masks_that_count_as_the_names_do_are_complete(mask, tmp_path, capsys):
    checked(tmp_path, "sky\nroad\ncar\n", mask, mask, mask)
    assert capsys.readouterr().out.endswith("\ncomplete\n")


# --- convert_masks ------------------------------------------------------------------------------------------


def colours_file(folder: Path, text: str) -> list[str]:
    (folder / "colours.txt").write_text(text)
    return ["--colours", str(folder / "colours.txt")]


def test_convert_masks_takes_grey_masks_by_the_colours_it_is_given(tmp_path):
    """Also how masks that count from zero are mended; a second call changes nothing."""
    (tmp_path / "masks").mkdir()
    mask = write_mask(tmp_path / "masks/a.png", [[0, 1, 2]])
    options = [str(mask.parent), "--in-place", *colours_file(tmp_path, "1: 0 0 0\n2: 1 1 1\n255: 2 2 2\n")]
    for _ in range(2):
        assert convert_masks(options) == 0
        assert read_mask(mask).tolist() == [[1, 2, 255]]


@pytest.mark.parametrize("mode", ["L", "P"])
def test_convert_masks_refuses_class_numbers_where_colours_are_given(mode, tmp_path, capsys):
    (tmp_path / "masks").mkdir()
    numbers = Image.fromarray(np.array([[0, 1, 2]], np.uint8))
    if mode == "P":
        numbers.putpalette([0, 0, 0, 9, 9, 9, 8, 8, 8])
    numbers.save(tmp_path / "masks/a.png")
    options = [str(tmp_path / "masks"), *colours_file(tmp_path, "0 0 0\n128 0 0\n0 128 0\n")]
    assert convert_masks(options) == 1
    assert "colours of no class" in (said := capsys.readouterr().err)
    assert "or leave that out if the masks hold class numbers already" in said


def test_convert_masks_says_when_there_is_nothing_to_convert(tmp_path, capsys):
    (tmp_path / "masks").mkdir()
    write_mask(tmp_path / "masks/a.png", [[0, 1, 2]])
    assert convert_masks([str(tmp_path / "masks")]) == 0
    assert "nothing was converted: all 1 masks hold class numbers already" in capsys.readouterr().out


def test_convert_masks_refuses_transparent_masks(tmp_path, capsys):
    (tmp_path / "masks").mkdir()
    Image.new("RGBA", (3, 2), (128, 0, 0, 255)).save(tmp_path / "masks/a.png")
    assert convert_masks([str(tmp_path / "masks")]) == 0
    assert read_mask(tmp_path / "masks-labels/a.png").tolist() == [[1] * 3] * 2
    Image.new("RGBA", (3, 2), (128, 0, 0, 0)).save(tmp_path / "masks/a.png")
    assert convert_masks([str(tmp_path / "masks"), "--in-place"]) == 1
    assert "is transparent in places" in capsys.readouterr().err
