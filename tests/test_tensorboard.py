"""What TensorBoard shows, read back from the event files."""

import io

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import train
from configs.schema import load_config
from metrics.progress import Progress
from metrics.tensorboard import Board, voc_palette

EVERYTHING = {"scalars": 0, "images": 0, "tensors": 0}


def read(folder) -> EventAccumulator:
    return EventAccumulator(str(folder), size_guidance=EVERYTHING).Reload()


def picture_of(event) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(event.encoded_image_string)).convert("RGB"))


def text_of(event) -> str:
    return event.tensor_proto.string_val[0].decode()


def points(events: EventAccumulator, tag: str) -> list[int]:
    return [event.step for event in events.Scalars(tag)]


@pytest.fixture
def board(tmp_path):
    board = Board(tmp_path)
    board.open(at=1)
    yield board
    board.close()


# ---- the board by itself ----------------------------------------------------------------------------------------------


def test_palette_is_that_of_voc():
    palette = voc_palette()
    assert palette.shape == (256, 3) and palette.dtype == np.uint8
    published = {0: (0, 0, 0), 1: (128, 0, 0), 2: (0, 128, 0), 3: (128, 128, 0), 4: (0, 0, 128)}
    published |= {8: (64, 0, 0), 15: (192, 128, 128), 16: (0, 64, 0), 20: (0, 64, 128), 255: (224, 224, 192)}
    for label, colour in published.items():
        assert tuple(palette[label]) == colour, label
    assert len(np.unique(palette, axis=0)) == 256


def test_scalars_leave_out_what_is_unknown(board, tmp_path):
    board.scalars({"a": 0.5, "b": None, "zero": 0.0}, at=7)
    board.close()
    events = read(tmp_path)
    assert set(events.Tags()["scalars"]) == {"a", "zero"}
    assert [(e.step, e.value) for e in events.Scalars("a")] == [(7, 0.5)]


def test_reopening_discards_what_an_interrupted_run_wrote_beyond(board, tmp_path):
    for iteration in range(1, 7):
        board.scalars({"a": 1.0}, iteration)
    board.open(at=4)
    board.scalars({"a": 2.0}, 4)
    board.open()
    board.scalars({"a": 3.0}, 5)
    board.close()
    found = [(event.step, event.value) for event in read(tmp_path).Scalars("a")]
    assert found == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 3.0)]


def test_picture_shows_input_truth_and_prediction_in_the_colours_of_the_data_set(board, tmp_path):
    image = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)
    label, guess = np.zeros((4, 5), np.uint8), np.ones((4, 5), np.int64)
    label[0, 0], label[1, 1], guess[2, 2] = 255, 2, 2
    board.picture(3, image, label, guess, classes=(0, 7, 15), at=9)
    board.close()
    (event,) = read(tmp_path).Images("pictures/3")
    shown, palette = picture_of(event), voc_palette()
    assert event.step == 9 and shown.shape == (4, 15, 3)
    assert (shown[:, :5] == image).all()
    assert (shown[0, 5] == palette[255]).all() and (shown[1, 6] == palette[15]).all()
    assert (shown[3, 9] == palette[0]).all()
    assert (shown[0, 10] == palette[7]).all() and (shown[2, 12] == palette[15]).all()


@pytest.mark.parametrize("num_classes", [2, 21, 151])
def test_confusion_has_rows_of_truth_and_names_beside_it(num_classes, board, tmp_path):
    counts = np.zeros((num_classes, num_classes), int)
    counts[0, 0], counts[0, 1] = 30, 10  # a quarter of class 0 is taken for class 1; class 1 never occurs
    board.confusion(counts, [f"c{i}" for i in range(num_classes)], at=4)
    board.close()
    events = read(tmp_path)
    (event,) = events.Images("confusion")
    shown = picture_of(event)
    side = shown.shape[0] // num_classes
    assert shown.shape[:2] == (side * num_classes, side * num_classes) and event.step == 4
    middle = side // 2
    assert abs(int(shown[middle, middle, 0]) - 0.25 * 255) <= 1
    assert abs(int(shown[middle, middle + side, 0]) - 0.75 * 255) <= 1
    assert shown[middle + side, middle, 0] == 255
    (names,) = events.Tensors("confusion/order/text_summary")
    assert text_of(names).split(", ") == [f"c{i}" for i in range(num_classes)]


def test_a_board_that_is_not_enabled_writes_nothing(tmp_path):
    board = Board(tmp_path, enabled=False)
    board.open(at=1)
    board.config("a: 1")
    board.scalars({"a": 1.0}, 1)
    board.picture(0, np.zeros((2, 2, 3)), np.zeros((2, 2), int), np.zeros((2, 2), int), (0,), 1)
    board.confusion(np.eye(2), ["a", "b"], 1)
    board.flush()
    board.close()
    assert list(tmp_path.iterdir()) == []


def test_progress_names_the_terms_and_counts_on_from_earlier_steps(board, tmp_path):
    progress = Progress(board, title="", total=20, done=0, offset=100, batch_size=8, quiet=True)
    terms = {"seg": np.float32(1.5), "distill": np.float32(0.25)}
    progress(10, terms, learn=-1.0, keep=5.0, lr=0.125)
    progress.close()
    board.close()
    events = read(tmp_path)
    shown = {tag: events.Scalars(tag)[0] for tag in events.Tags()["scalars"]}
    assert {event.step for event in shown.values()} == {110}
    assert shown.pop("speed/images_per_second").value > 0
    values = {"loss/seg": 1.5, "loss/keep/distill": 0.25, "phase/sign": -1.0, "phase/keep": 5.0, "lr": 0.125}
    assert {tag: event.value for tag, event in shown.items()} == values


# ---- a run ------------------------------------------------------------------------------------------------------------

CLASSES = ("background", "aeroplane", "bicycle", "bird")
FIRST, TOTAL = 4, 8  # iterations of step 0 and of both steps


@pytest.fixture
def finished(toy_arguments, tmp_path):
    """The arguments of a finished run, and its folder."""
    arguments = toy_arguments("method.name=mib", "phase.name=altersgd", "phase.p=0.5", "run.pictures=2")
    assert train.main(arguments) == 0
    return arguments, tmp_path / "runs/run"


def test_a_run_writes_every_documented_name(finished):
    folder = finished[1]
    events = read(folder)
    for tag in ("loss/seg", "phase/sign", "phase/keep", "lr", "speed/images_per_second"):
        assert points(events, tag) == list(range(1, TOTAL + 1)), tag
    kept = [tag for tag in events.Tags()["scalars"] if tag.startswith("loss/keep/")]
    assert len(kept) == 1 and points(events, kept[0]) == list(range(FIRST + 1, TOTAL + 1))
    signs = [event.value for event in events.Scalars("phase/sign")]
    assert signs[:FIRST] == [1.0] * FIRST
    assert signs[FIRST:] == [1.0, 1.0, *signs[-2:]] and sorted(signs[-2:]) == [-1.0, 1.0]
    for group in ("old", "all"):
        assert points(events, f"miou/{group}") == [FIRST, TOTAL]
        assert points(events, f"miou_with_background/{group}") == [FIRST, TOTAL]
    assert points(events, "miou/new") == [TOTAL]
    for name in CLASSES:
        assert points(events, f"iou/{name}") == ([TOTAL] if name == "bird" else [FIRST, TOTAL])
    assert points(events, "forgetting/aeroplane") == points(events, "backward_transfer") == [TOTAL]

    results = train.read_results(folder / "results.json")["steps"][1]
    assert events.Scalars("miou/all")[1].value == pytest.approx(results["miou"]["all"])
    assert events.Scalars("iou/bird")[0].value == pytest.approx(results["iou"]["bird"])


def test_a_run_shows_pictures_confusion_and_its_config(finished, tmp_path):
    events = read(finished[1])
    assert set(events.Tags()["images"]) == {"pictures/0", "pictures/1", "confusion"}
    for tag in events.Tags()["images"]:
        assert [event.step for event in events.Images(tag)] == [FIRST, TOTAL], tag
    strip = picture_of(events.Images("pictures/0")[1])
    assert strip.shape == (32, 96, 3)
    known = {tuple(colour) for colour in voc_palette()[[0, 1, 2, 3, 255]]}
    assert {tuple(colour) for colour in strip[:, 32:].reshape(-1, 3)} <= known
    assert (strip[0, 32:64] == voc_palette()[255]).all()  # the void row of the toy masks
    assert not (strip[:, 64:] == voc_palette()[255]).all(axis=2).any()
    orders = [text_of(event) for event in events.Tensors("confusion/order/text_summary")]
    assert orders == [", ".join(CLASSES[:3]), ", ".join(CLASSES)]

    (config,) = events.Tensors("config/text_summary")
    text = text_of(config).removeprefix("```yaml\n").removesuffix("\n```")
    (tmp_path / "shown.yaml").write_text(text)
    assert load_config([tmp_path / "shown.yaml"]) == load_config([finished[1] / "config.yaml"])


def test_scoring_again_keeps_the_curves(finished):
    arguments, folder = finished
    assert train.main([*arguments, "train.evaluate_only=true"]) == 0
    events = read(folder)
    for tag in ("loss/seg", "lr"):
        assert points(events, tag) == list(range(1, TOTAL + 1)), tag
    assert set(points(events, "miou/all")) == {FIRST, TOTAL}
