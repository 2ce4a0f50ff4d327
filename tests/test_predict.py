"""scripts.predict: odd images, odd arguments, and what is written."""

import os
import struct
import zlib

import numpy as np
import pytest
import torch
from conftest import TINY_NETWORK
from PIL import Image

from data.images import ANY_FORMATS, open_image
from data.palette import palette_image, voc_palette
from engine import checkpoint
from engine.prediction import shown_size
from models import build_segmenter
from scripts import predict
from tracking import overlays

STEPS = [[0, 7, 3], [12], [5, 9]]  # class ids of the data set, in learning order
CLASS_IDS = [c for new in STEPS for c in new]
NAMES = [f"class{i}" for i in range(13)]
RED, GREEN = (250, 10, 10), (10, 250, 10)
ORIENTATION = 0x0112


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of three steps with random networks."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    torch.manual_seed(0)
    model = build_segmenter(**TINY_NETWORK)
    torch.manual_seed(4)  # of classifiers that see more than one class in speckles
    seen = []
    for step, new in enumerate(STEPS):
        model.add_classes(len(new))
        seen += new
        state = checkpoint.step_state(
            model,
            TINY_NETWORK,
            step=step,
            class_ids=seen,
            class_names=NAMES,
            methods={},
            costs={},
            config="",
        )
        checkpoint.save(state, folder / f"step_{step}.pt")
    return folder


def speckled(width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def with_corner(width: int = 40, height: int = 24) -> Image.Image:
    """Green, with red in the upper left corner."""
    image = Image.new("RGB", (width, height), GREEN)
    image.paste(RED, (0, 0, 8, 8))
    return image


def seen_by(path) -> np.ndarray:
    return np.asarray(open_image(path, ANY_FORMATS)[0])


def mask_of(folder, name: str) -> Image.Image:
    with Image.open(folder / f"{name}_mask.png") as mask:
        mask.load()
        return mask


def call(run, *arguments) -> int:
    return predict.main([str(run), *map(str, arguments)])


# ---- any image ---------------------------------------------------------------------------------------------


def write_odd_images(folder) -> dict[str, tuple[int, int]]:
    """Every kind of image; returns name -> size as seen."""
    folder.mkdir()
    plain = speckled(37, 23)
    plain.save(folder / "plain.jpg")
    plain.convert("L").save(folder / "grey.png")
    plain.convert("1").save(folder / "bits.png")
    plain.convert("P").save(folder / "palette.gif")
    plain.convert("CMYK").save(folder / "ink.jpg")
    plain.convert("YCbCr").save(folder / "video.tiff")
    plain.convert("LA").save(folder / "grey_alpha.png")
    plain.save(folder / "webp.WEBP")
    glass = plain.convert("RGBA")
    glass.putalpha(100)
    glass.save(folder / "glass.png")
    Image.fromarray(np.arange(37 * 23, dtype=np.uint16).reshape(23, 37) * 70).save(folder / "deep.png")
    Image.fromarray(np.linspace(-1, 1, 37 * 23, dtype=np.float32).reshape(23, 37)).save(folder / "float.tif")
    frames = [speckled(37, 23, seed) for seed in range(3)]
    for name in ("moving.gif", "moving_net.webp", "moving_png.png", "pages.tif"):
        frames[0].save(folder / name, save_all=True, append_images=frames[1:])
    plain.save(folder / "progressive.jpg", progressive=True)
    plain.quantize(7).save(folder / "seven.png", transparency=2)
    plain.save(folder / "raw.bmp")
    turned = Image.Exif()
    turned[ORIENTATION] = 6
    plain.save(folder / "turned.jpg", exif=turned)
    others = {"dot.png": (1, 1), "line.png": (1, 60), "beam.png": (300, 1)}
    for name, size in others.items():
        speckled(*size).save(folder / name)
    sizes = {path.stem: (37, 23) for path in folder.iterdir()}
    return sizes | {name[:-4]: size for name, size in others.items()} | {"turned": (23, 37)}


@pytest.mark.slow
def test_any_image_gets_a_mask_of_its_size_and_a_valid_overlay(run, tmp_path, capsys):
    sizes = write_odd_images(tmp_path / "in")
    assert call(run, tmp_path / "in", "--out", tmp_path / "out") == 0
    assert len(sizes) == 22
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        f"{name}_{kind}.png" for name in sizes for kind in ("mask", "overlay")
    }
    for name, size in sizes.items():
        mask = mask_of(tmp_path / "out", name)
        assert mask.size == size and mask.mode == "P", name
        assert mask.getpalette() == voc_palette().ravel().tolist()
        assert set(np.unique(mask)) <= set(CLASS_IDS)
        with Image.open(tmp_path / "out" / f"{name}_overlay.png") as overlay:
            overlay.load()
            assert overlay.mode == "RGB" and max(overlay.size) > overlays.LEAST_OVERLAY
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 22
    animated = [line for line in lines if "the first of 3 frames" in line]
    assert animated == [line for line in lines if "moving" in line or "pages" in line] and len(animated) == 4


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_as_exif_says(orientation, tmp_path):
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    with_corner().save(tmp_path / "p.png", exif=exif)
    seen = seen_by(tmp_path / "p.png")
    assert seen.shape == ((24, 40, 3) if orientation < 5 else (40, 24, 3))
    corners = [("top", "left"), ("top", "right"), ("bottom", "right"), ("bottom", "left")] * 2
    vertical, horizontal = corners[orientation - 1]
    corner = seen[0 if vertical == "top" else -1, 0 if horizontal == "left" else -1]
    assert tuple(corner) == RED
    assert (seen == RED).all(axis=2).sum() == 64


def test_the_mask_lies_as_the_image_is_seen(run, tmp_path):
    """A turned file and the same image stored upright get the same mask."""
    exif = Image.Exif()
    exif[ORIENTATION] = 8
    image = speckled(48, 32)
    image.save(tmp_path / "turned.png", exif=exif)
    image.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "upright.png")
    assert call(run, tmp_path / "turned.png", tmp_path / "upright.png", "--out", tmp_path / "out") == 0
    turned, upright = (np.asarray(mask_of(tmp_path / "out", name)) for name in ("turned", "upright"))
    assert turned.shape == (48, 32) and np.array_equal(turned, upright)
    assert len(np.unique(turned)) > 1


def test_transparency_lies_on_white_and_deep_greys_keep_their_order(tmp_path):
    glass = with_corner().convert("RGBA")
    glass.putalpha(Image.new("L", glass.size, 0))
    glass.save(tmp_path / "glass.png")
    assert (seen_by(tmp_path / "glass.png") == 255).all()
    keyed = Image.new("P", (4, 4), 3)
    keyed.putpalette([0, 0, 0] * 4)
    keyed.save(tmp_path / "keyed.png", transparency=3)
    assert (seen_by(tmp_path / "keyed.png") == 255).all()
    deep = np.array([[0, 257 * 100, 65535]], np.uint16)
    Image.fromarray(deep).save(tmp_path / "deep.png")
    assert seen_by(tmp_path / "deep.png")[0, :, 0].tolist() == [0, 100, 255]
    Image.fromarray(np.array([[-2, 0, 2]], np.float32)).save(tmp_path / "float.tif")
    assert seen_by(tmp_path / "float.tif")[0, :, 1].tolist() == [0, 128, 255]
    Image.fromarray(np.full((2, 2), np.nan, np.float32)).save(tmp_path / "nothing.tif")
    assert not seen_by(tmp_path / "nothing.tif").any()


def test_the_first_frame_of_an_animation_is_taken(tmp_path):
    frames = [Image.new("RGB", (9, 9), colour) for colour in (RED, GREEN)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    image, num_frames = open_image(tmp_path / "a.gif", ANY_FORMATS)
    assert num_frames == 2 and image.getpixel((4, 4)) == RED


def test_large_images_are_shown_reduced_and_masks_enlarged(run, tmp_path, capsys):
    speckled(3000, 2000).save(tmp_path / "large.jpg")
    image = tmp_path / "large.jpg"
    assert call(run, image, "--out", tmp_path, "--megapixels", "0.06", "--probabilities") == 0
    assert "3000 x 2000, shown to the network at 300 x 200" in capsys.readouterr().out
    mask = np.asarray(mask_of(tmp_path, "large"))
    assert mask.shape == (2000, 3000)
    blocks = mask.reshape(200, 10, 300, 10)
    assert (blocks == blocks[:, :1, :, :1]).all()
    with np.load(tmp_path / "large_probabilities.npz") as file:
        assert file["probabilities"].shape == (6, 200, 300)
    with Image.open(tmp_path / "large_overlay.png") as overlay:
        assert overlay.width < 1000


@pytest.mark.parametrize(
    ("size", "shorter", "megapixels", "expected"),
    [
        ((500, 375), None, 2, (500, 375)),
        ((4000, 3000), None, 2, (1633, 1225)),
        ((500, 250), 512, 2, (1024, 512)),
        ((500, 250), 100, 2, (200, 100)),
        ((1, 4000), 512, 2, (22, 89443)),
        ((1, 1), None, 2, (1, 1)),
        ((100000, 1), None, 0.01, (10000, 1)),
    ],
)
def test_size_for_the_network(size, shorter, megapixels, expected):
    assert shown_size(size, shorter, megapixels) == expected


@pytest.mark.slow
def test_an_image_of_twelve_megapixels_at_the_default_limit(run, tmp_path, capsys):
    speckled(4000, 3000).save(tmp_path / "large.jpg")
    assert call(run, tmp_path / "large.jpg", "--out", tmp_path) == 0
    assert "shown to the network at 1633 x 1225" in capsys.readouterr().out
    assert mask_of(tmp_path, "large").size == (4000, 3000)


# ---- what cannot be read -----------------------------------------------------------------------------------


def test_broken_files_are_named_and_the_rest_is_done(run, tmp_path, capsys):
    folder = tmp_path / "in"
    folder.mkdir()
    speckled(64, 64).save(folder / "whole.jpg")
    whole = (folder / "whole.jpg").read_bytes()
    (folder / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (folder / "text.jpg").write_text("this is no image")
    (folder / "empty.png").touch()
    (folder / "notes.txt").write_text("not looked at")
    missing = tmp_path / "missing.jpg"
    (tmp_path / "hollow").mkdir()
    assert call(run, missing, folder, tmp_path / "hollow", "--out", tmp_path / "out") == 1
    said = capsys.readouterr()
    skipped = [line for line in said.err.splitlines() if line.startswith("skipped ")]
    reasons = {
        missing: "no such file",
        tmp_path / "hollow": "no image in this folder",
        folder / "cut.jpg": "truncated",
        folder / "text.jpg": "its first bytes are not those of",
        folder / "empty.png": "the file is empty",
    }
    assert len(skipped) == len(reasons)
    for path, why in reasons.items():
        assert any(line.startswith(f"skipped {path}: ") and why in line for line in skipped), path
    assert "5 skipped, 1 done" in said.err and len(said.out.splitlines()) == 1
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["whole_mask.png", "whole_overlay.png"]


def test_what_only_looks_like_an_image_stops_nothing(run, tmp_path, capsys):
    folder = tmp_path / "in"
    (folder / "folder.jpg").mkdir(parents=True)
    speckled(20, 10).save(folder / "folder.jpg" / "inside.png")
    os.mkfifo(folder / "pipe.jpg")  # opening it would wait for somebody who writes
    (folder / "link.jpg").symlink_to(tmp_path / "nowhere.jpg")
    header = struct.pack(">IIBBBBB", 200_000, 200_000, 8, 2, 0, 0, 0)  # of an image of 120 GB
    (folder / "bomb.png").write_bytes(b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + png_chunk(b"IEND"))
    assert call(run, folder, tmp_path / ("n" * 300), "--out", tmp_path / "out") == 1
    said = capsys.readouterr()
    reasons = {
        "pipe.jpg": "neither a file nor a folder",
        "link.jpg": "no such file",
        "bomb.png": "exceeds limit",
        "nnn": "name too long",
    }
    for name, why in reasons.items():
        assert any(name in line and why in line for line in said.err.splitlines()), name
    assert "4 skipped, 1 done" in said.err and "inside.png" in said.out


def png_chunk(kind: bytes, content: bytes = b"") -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def test_broken_files_are_named_once_over_all_steps(run, tmp_path, capsys):
    (tmp_path / "text.jpg").write_text("this is no image")
    (tmp_path / "empty.jpg").touch()
    files = tmp_path / "text.jpg", tmp_path / "empty.jpg"
    assert call(run, *files, "--out", tmp_path / "out", "--all-steps") == 1
    said = capsys.readouterr().err
    assert (
        said.count("skipped ") == 2 and "empty.jpg: the file is empty" in said and "2 skipped, 0 done" in said
    )


# ---- names -------------------------------------------------------------------------------------------------


def test_images_of_the_same_name_do_not_overwrite_each_other(run, tmp_path):
    for place in ("rome/1.png", "oslo/1.png", "oslo/1.bmp", "x/oslo/1.png", "rome/2.png"):
        (tmp_path / "in" / place).parent.mkdir(parents=True, exist_ok=True)
        speckled(20, 20, seed=len(place)).save(tmp_path / "in" / place)
    again = tmp_path / "in/rome/2.png"
    assert call(run, tmp_path / "in", again, "--out", tmp_path / "out") == 0
    masks = sorted(path.name.removesuffix("_mask.png") for path in (tmp_path / "out").glob("*_mask.png"))
    assert masks == ["2", "oslo-1", "oslo-1-2", "oslo-1-3", "rome-1"]


def test_any_name_of_a_file_will_do(run, tmp_path, capsys):
    folder, latin = tmp_path / "in", os.fsdecode(b"caf\xe9.png")  # bytes that are no UTF-8
    folder.mkdir()
    long = ["a" * 240 + ending for ending in ("1.png", "2.png")]  # alike as far as a result can keep
    names = ["жираф 写真 🐎.png", "ж" * 120 + ".png", " blank.png", "two\nlines.png", latin, *long]
    for name in names:
        speckled(12, 9).save(folder / name)
    assert call(run, folder, "--out", tmp_path / "out") == 0
    assert len(list((tmp_path / "out").glob("*_mask.png"))) == len(names)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(names) and "".join(lines).isprintable()
    assert (tmp_path / "out" / "two\nlines_mask.png").exists()


def test_results_do_not_become_images(run, tmp_path):
    speckled(20, 20).save(tmp_path / "a.png")
    for _ in range(2):
        assert call(run, tmp_path, "--out", tmp_path / "out") == 0
    assert len(list((tmp_path / "out").iterdir())) == 2


def test_images_are_never_written_to(run, tmp_path, capsys):
    for name in ("a.png", "a_mask.png"):
        speckled(20, 20).save(tmp_path / name)
    before = (tmp_path / "a_mask.png").read_bytes()
    files = tmp_path / "a.png", tmp_path / "a_mask.png"
    assert call(run, *files, "--out", tmp_path) == 2
    assert "a_mask.png would be replaced" in capsys.readouterr().err
    assert call(run, tmp_path, "--out", tmp_path) == 2
    assert "choose another" in capsys.readouterr().err
    assert (tmp_path / "a_mask.png").read_bytes() == before and len(list(tmp_path.iterdir())) == 2


# ---- steps, probabilities, options -------------------------------------------------------------------------


def test_step_and_checkpoint_file_choose_the_network(run, tmp_path):
    speckled(48, 40).save(tmp_path / "p.png")
    masks = []
    for arguments in ([run, "--step", "0"], [run / "step_0.pt"], [run]):
        assert call(arguments[0], tmp_path / "p.png", "--out", tmp_path / "out", *arguments[1:]) == 0
        masks.append(np.asarray(mask_of(tmp_path / "out", "p")))
    assert set(np.unique(masks[0])) <= set(STEPS[0])
    assert np.array_equal(masks[0], masks[1]) and not np.array_equal(masks[0], masks[2])


def test_the_mask_is_what_the_network_says(run, tmp_path):
    image = speckled(32, 48)
    image.save(tmp_path / "p.png")
    assert call(run, tmp_path / "p.png", "--out", tmp_path, "--device", "cpu") == 0
    model, state = checkpoint.load_segmenter(run / "step_2.pt")
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None] / 255
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    with torch.no_grad():
        labels = model.eval()((pixels - mean) / std).logits.argmax(dim=1)[0]
    expected = np.array(state["class_ids"])[labels]
    assert (np.asarray(mask_of(tmp_path, "p")) == expected).mean() > 0.999


@pytest.mark.parametrize("more", [(), ("--flip",), ("--size", "20")])
def test_probabilities_sum_to_one_and_agree_with_the_mask(more, run, tmp_path):
    speckled(40, 30).save(tmp_path / "p.png")
    assert call(run, tmp_path / "p.png", "--out", tmp_path, "--probabilities", *more) == 0
    with np.load(tmp_path / "p_probabilities.npz") as file:
        probabilities, ids, names = (file[key] for key in ("probabilities", "class_ids", "class_names"))
    assert probabilities.dtype == np.float16
    assert probabilities.shape == ((6, 20, 27) if "--size" in more else (6, 30, 40))
    assert np.abs(probabilities.astype(float).sum(axis=0) - 1).max() < 5e-3
    assert ids.tolist() == CLASS_IDS and names.tolist() == [NAMES[c] for c in ids]
    if "--size" not in more:
        best = np.take_along_axis(probabilities, probabilities.argmax(axis=0)[None], 0)
        mask = np.asarray(mask_of(tmp_path, "p"))
        channel = np.searchsorted(ids, mask, sorter=np.argsort(ids))
        said = np.take_along_axis(probabilities, np.argsort(ids)[channel][None], 0)
        assert np.allclose(best, said, atol=2e-3)


@pytest.mark.parametrize("size", [(60, 40), (1, 1), (2, 300), (400, 300)])
def test_a_strip_shows_every_step(size, run, tmp_path):
    speckled(*size).save(tmp_path / "p.png")
    assert call(run, tmp_path / "p.png", "--out", tmp_path, "--all-steps") == 0
    with Image.open(tmp_path / "p_steps.png") as strip:
        strip.load()
        assert strip.width > 4 * overlays.PANEL // 2 and strip.height >= round(
            size[1] * overlays.PANEL / max(size)
        )
    assert mask_of(tmp_path, "p").size == size


@pytest.mark.parametrize("colour", ["yellow", "red", "blue", "white", "black", "grey"])
def test_an_overlay_has_no_colours_but_those_of_classes(colour):
    classes = np.arange(64, dtype=np.uint8)
    seen = np.asarray(
        overlays.tint(Image.new("RGB", (192, 3), colour), palette_image(np.tile(classes.repeat(3), (3, 1))))
    )
    middle = seen[2, 2::3].astype(int)  # beside the lines between classes
    distances = np.abs(middle[1:, None] - voc_palette()[None, :64].astype(int)).sum(axis=2)
    assert (distances.argmin(axis=1) == classes[1:]).all()
    assert len(set(middle[0])) == 1  # the background is grey


def test_light_and_shade_remain_in_an_overlay():
    image, mask = speckled(9, 9), palette_image(np.full((9, 9), 15, np.uint8))
    assert len(np.unique(np.asarray(overlays.tint(image, mask)))) > 20


def test_legends_hold_many_classes_and_long_names():
    entries = [(c, f"class {c} " + "of a long name " * (c % 3)) for c in range(150)]
    drawn = overlays.legend(entries, voc_palette(), height=200, text_size=14)
    assert drawn.height <= 220 and drawn.width > 1000
    assert overlays.shortened("short", 120, 14) == "short"
    cut = overlays.shortened("a name that is much too long for a panel", 120, 14)
    assert cut.endswith("…") and overlays.font(14).getlength(cut) <= 120


# ---- bad arguments -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("{tmp}/nowhere", "{tmp}/p.png"), "no such run folder or checkpoint"),
        (("{tmp}", "{tmp}/p.png"), "no step_<i>.pt in this folder"),
        (("{tmp}/p.png", "{tmp}/p.png"), "not a whole checkpoint"),
        (("{run}", "{tmp}/p.png", "--step", "7"), "no step 7; it has 0, 1, 2"),
        (("{run}/step_1.pt", "{tmp}/p.png", "--all-steps"), "is one step"),
        (("{run}/step_1.pt", "{tmp}/p.png", "--step", "1"), "is one step"),
    ],
)
def test_bad_runs_are_refused(arguments, words, run, tmp_path, capsys):
    speckled(8, 8).save(tmp_path / "p.png")
    arguments = [argument.format(run=run, tmp=tmp_path) for argument in arguments]
    assert call(*arguments, "--out", tmp_path / "out") == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "more",
    [
        ("--size", "0"),
        ("--megapixels", "0"),
        ("--megapixels", "nan"),
        ("--device", "tpu"),
        ("--step", "1", "--all-steps"),
    ],
)
def test_bad_options_are_refused(more, run, tmp_path):
    with pytest.raises(SystemExit) as stopped:
        call(run, tmp_path, "--out", tmp_path / "out", *more)
    assert stopped.value.code == 2


def test_places_that_cannot_be_written_are_an_error(run, tmp_path, capsys):
    speckled(8, 8).save(tmp_path / "p.png")
    assert call(run, tmp_path / "p.png", "--out", tmp_path / "p.png") == 2
    assert "p.png" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_an_error(run, tmp_path, capsys):
    assert call(run, tmp_path, "--out", tmp_path / "out", "--device", "cuda") == 2
    assert "torch sees no GPU" in capsys.readouterr().err
