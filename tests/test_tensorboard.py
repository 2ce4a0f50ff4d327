"""What TensorBoard shows, read back from the event files."""

import io
import re
import sys

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_accumulator import (
    EventAccumulator as FastEventAccumulator,
)
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

import train
from configs.schema import load_config
from data.palette import voc_palette
from data.protocols import Step
from engine.run_folder import read_results
from tracking import drawing
from tracking.drawing import COLUMNS, GAP, TILE_HEIGHT, TITLE_HEIGHT, Logged
from tracking.progress import Progress
from tracking.shown import FINAL_METRICS, hyperparameters, images_to_show, layout
from tracking.tensorboard import Board
from tracking.tracker import TRACKERS, make_trackers

EVERYTHING = {"scalars": 0, "images": 0, "tensors": 0}
STEPS = (Step(0, (), (7,)), Step(1, (7,), (15,)))

pytestmark = pytest.mark.figures


def read(folder) -> EventAccumulator:
    return EventAccumulator(str(folder), size_guidance=EVERYTHING).Reload()


def image_of(event) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(event.encoded_image_string)).convert("RGB"))


def tile(sheet: np.ndarray, place: int) -> np.ndarray:
    """One of the square images of a sheet."""
    left = place % COLUMNS * (TILE_HEIGHT + GAP)
    top = place // COLUMNS * (TILE_HEIGHT + TITLE_HEIGHT) + TITLE_HEIGHT
    return sheet[top : top + TILE_HEIGHT, left : left + TILE_HEIGHT]


def text_of(event) -> str:
    return event.tensor_proto.string_val[0].decode()


def points(events: EventAccumulator, tag: str) -> list[int]:
    return [event.step for event in events.Scalars(tag)]


def num_files(folder) -> int:
    return len(list(folder.rglob("events.*")))


@pytest.fixture
def without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)


@pytest.fixture
def figures(monkeypatch) -> list:
    """The figures that matplotlib is asked to draw."""
    drawn, draw = [], drawing._rendered
    monkeypatch.setattr(drawing, "_rendered", lambda figure: drawn.append(figure) or draw(figure))
    return drawn


@pytest.fixture
def board(tmp_path):
    board = Board(tmp_path)
    board.open(at=1)
    yield board
    board.close()


# ---- the board by itself -----------------------------------------------------------------------------------


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


@pytest.mark.parametrize("accumulator", [EventAccumulator, FastEventAccumulator])
def test_reopening_discards_what_an_interrupted_run_wrote_beyond(accumulator, board, tmp_path):
    for iteration in range(1, 7):
        board.scalars({"a": iteration}, iteration)
    board.close()
    board = Board(tmp_path)
    board.open()  # scoring discards nothing
    board.scalars({"b": 3.0}, 5)
    board.open(at=4)
    board.scalars({"a": 40.0, "b": 5.0}, 4)
    board.open(at=5)
    board.close()
    assert num_files(tmp_path) == 2
    events = accumulator(str(tmp_path), size_guidance=EVERYTHING).Reload()
    items = events.Scalars if accumulator is EventAccumulator else events.Tensors
    assert [event.step for event in items("a")] == [1, 2, 3, 4]
    assert [event.step for event in items("b")] == [4]


def test_config_and_layout_are_written_once_per_folder(tmp_path):
    for _ in range(2):
        board = Board(tmp_path, about="a: 1", old=["background", "bus"], new=["c++"])
        for at in (1, 2):
            board.open(at)
        board.close()
    events = read(tmp_path)
    assert [text_of(event) for event in events.Tensors("config/text_summary")] == ["```yaml\na: 1\n```"]
    assert len(events.Tensors("custom_scalars__config__")) == 1


def test_metrics_stand_against_iterations_and_against_steps(board, tmp_path):
    result = {
        "step": 3,
        "miou": {"old": 0.5, "new": None, "all": 0.25},
        "miou_with_background": {"old": 0.5, "new": None, "all": 0.125},
        "iou": {"bus": 0.75},
        "forgetting": {"bus": 0.0625},
        "mean_forgetting": 0.0625,
        "backward_transfer": -0.5,
    }
    board.results(result, at=700)
    board.close()
    events = read(tmp_path)
    tags = set(events.Tags()["scalars"])
    plain = {tag for tag in tags if not tag.startswith("by_step/")}
    first = {f"1 mIoU after each step/{name}" for name in ("1 old", "3 all")}
    plain -= first
    assert tags == plain | {f"by_step/{tag}" for tag in plain} | first
    assert {"miou/old", "miou_with_background/all", "iou/bus", "forgetting/bus", "forgetting_mean"} < plain
    for tag in plain:
        assert points(events, tag) == [700] and points(events, f"by_step/{tag}") == [3]
        assert events.Scalars(tag)[0].value == events.Scalars(f"by_step/{tag}")[0].value
    for tag in first:
        (event,) = events.Scalars(tag)
        assert (event.step, event.value) == (3, result["miou"][tag.split()[-1]])


def test_image_shows_input_truth_and_prediction_in_the_colours_of_the_data_set(tmp_path):
    board = Board(tmp_path, old=["background", "bus"], new=["person"])
    board.open(at=1)
    image = np.arange(TILE_HEIGHT**2 * 3, dtype=np.uint32).astype(np.uint8).reshape(TILE_HEIGHT, -1, 3)
    label, guess = np.zeros(image.shape[:2], np.uint8), np.ones(image.shape[:2], np.int64)
    label[0, 0], label[1, 1], guess[2, 2] = 255, 2, 2
    board.image(3, image, label, guess, STEPS[1], at=9)
    board.close()
    (event,) = read(tmp_path).Images("2 losses and images/3 image 3")
    sheet, palette = image_of(event), voc_palette()
    assert event.step == 9
    assert (tile(sheet, 0) == image).all()
    truth, before, now = (tile(sheet, place) for place in (1, 2, 3))
    assert (truth[0, 0] == palette[255]).all() and (truth[1, 1] == palette[15]).all()
    assert (truth[3, 9] == palette[0]).all()
    assert (now[0, 0] == palette[7]).all() and (now[2, 2] == palette[15]).all()
    assert (before == 255).all()  # step 0 was scored elsewhere: its place stays free
    legend = {tuple(colour) for colour in sheet[TITLE_HEIGHT + TILE_HEIGHT :].reshape(-1, 3)}
    assert {tuple(palette[i]) for i in (0, 7, 15)} <= legend


def test_predictions_of_earlier_steps_stay_in_view_when_a_run_goes_on(tmp_path):
    image, label = np.zeros((2, 2, 3), np.uint8), np.zeros((2, 2), np.uint8)
    for step in STEPS:
        board = Board(tmp_path)
        board.open(at=step.index + 1)
        board.image(0, image, label, np.full((2, 2), step.num_classes - 1), step, at=step.index + 1)
        board.image(1, image, label, np.full((2, 2), step.num_classes - 1), step, at=step.index + 1)
        board.close()
        (tmp_path / "pictures/1_step_0.png").write_bytes(b"torn")
    events = read(tmp_path)
    whole, torn = (image_of(events.Images(f"2 losses and images/3 image {number}")[1]) for number in (0, 1))
    assert (tile(whole, 2) == voc_palette()[7]).all() and (tile(whole, 3) == voc_palette()[15]).all()
    assert (tile(torn, 2) == 255).all() and (tile(torn, 3) == voc_palette()[15]).all()


def test_images_are_the_same_ones_after_every_step_and_show_old_and_new_classes():
    steps = [Step(0, (), (1, 2)), Step(1, (1, 2), (3,)), Step(2, (1, 2, 3), (4,))]
    images = [frozenset(classes) for classes in ([4], [3], [1], [4, 2], [0], [2], [3, 4], [1])]
    assert images_to_show(images, steps, 0) == []
    assert images_to_show(images, steps, 4) == [2, 1, 3, 0]
    assert images_to_show(images, steps, 5) == [2, 1, 3, 0, 5]
    assert sorted(images_to_show(images, steps, 100)) == [0, 1, 2, 3, 5, 6, 7]
    assert images_to_show(images, steps[:1], 3) == [2, 3, 5]


@pytest.mark.parametrize("num_classes", [2, 21, 151])
@pytest.mark.slow
def test_confusion_has_rows_of_truth_and_names_on_its_axes(num_classes, board, figures, tmp_path):
    counts = np.zeros((num_classes, num_classes), int)
    counts[0, 0], counts[0, 1] = 30, 10  # a quarter of class 0 is taken for class 1; class 1 never occurs
    names = [f"c{i}" for i in range(num_classes)]
    board.confusion(counts, names, at=4)
    board.close()
    events = read(tmp_path)
    (event,) = events.Images("confusion")
    assert event.step == 4 and max(image_of(event).shape) < 2500
    (axes,) = figures[0].axes
    shown = axes.images[0].get_array()
    assert shown[0, 0] == 0.75 and shown[0, 1] == 0.25 and shown[1:].max() == 0
    for axis in (axes.xaxis, axes.yaxis):
        assert [label.get_text() for label in axis.get_ticklabels()] == names
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("predicted", "truth")
    assert [text.get_text() for text in axes.texts] == (["75", "25"] if num_classes < 30 else [])
    (order,) = events.Tensors("confusion/order/text_summary")
    assert text_of(order).split(", ") == names


def test_confusion_without_matplotlib_is_grey(without_matplotlib, board, tmp_path):
    board.confusion(np.array([[30, 10], [0, 0]]), ["a", "b"], at=4)
    board.close()
    (event,) = read(tmp_path).Images("confusion")
    shown = image_of(event)
    middle = len(shown) // 4
    assert abs(int(shown[middle, middle, 0]) - 0.25 * 255) <= 1
    assert abs(int(shown[middle, 3 * middle, 0]) - 0.75 * 255) <= 1
    assert shown[3 * middle, middle, 0] == 255


def test_layout_has_a_chart_for_each_group_and_matches_names_exactly():
    charts = {
        title: tags
        for group in layout(["bus", "c++"], ["car"]).values()
        for title, (_, tags) in group.items()
    }
    (old,), (new,) = charts["classes of step 0"], charts["classes of later steps"]
    assert re.match(old, "by_step/forgetting/bus") and re.match(old, "by_step/forgetting/c++")
    for tag in ("by_step/forgetting/busy", "by_step/forgetting/car", "by_step/forgetting/ccc"):
        assert not re.match(old, tag)
    assert re.match(new, "by_step/forgetting/car") and not re.match(new, "by_step/forgetting/cart")
    assert "classes of later steps" not in layout(["bus"], [])["IoU after each step"]


@pytest.mark.parametrize("phase", ["descent", "altersgd", "consolidate"])
def test_hyperparameters_are_always_complete(phase):
    """HParams takes its columns from one run and leaves out what has no value there."""
    config = load_config([], [f"phase.name={phase}", "phase.p=0.5", "phase.lambda_b=3", "method.strength=10"])
    found = hyperparameters(config.model_dump(mode="json"))
    assert None not in found.values()
    assert (found["p"], found["lambda_a"], found["lambda_b"]) == (
        (1.0, 10, 10) if phase == "descent" else (0.5, 10, 3)
    )


def test_no_tracker_writes_on_other_ranks_than_the_first(tmp_path):
    board = make_trackers(TRACKERS, enabled=False, folder=tmp_path)
    board.open(at=1)
    board.scalars({"a": 1.0}, 1)
    board.image(0, np.zeros((2, 2, 3)), np.zeros((2, 2), int), np.zeros((2, 2), int), STEPS[0], 1)
    board.confusion(np.eye(2), ["a", "b"], 1)
    board.losses(drawing.Curves("", 2, 1, [Logged(1, 1.0, 0.0, 1.0)]), 1)
    board.finish({})
    board.flush()
    board.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("seconds", [0, 30])
def test_in_a_log_file_progress_is_a_line_now_and_then(seconds, board, monkeypatch, capsys):
    monkeypatch.setattr("tracking.progress.SECONDS_BETWEEN_LINES", seconds)
    progress = Progress(board, title="step 1/5", total=3, done=0, offset=0, batch_size=8, quiet=False)
    for iteration in (1, 2, 3):
        progress(iteration, {"seg": np.float32(iteration)}, learn=1.0, keep=5.0, lr=0.25)
    progress.close()
    lines = capsys.readouterr().err.split("\n")
    assert all(line.startswith("step 1/5: ") for line in lines[:-1]) and lines[-1] == ""
    assert "3/3" in lines[-2] and "seg=3.000" in lines[-2]
    assert sum("seg=2.000" in line for line in lines) == (seconds == 0)


def test_progress_names_the_terms_and_counts_on_from_earlier_steps(board, tmp_path):
    progress = Progress(board, title="", total=20, done=0, offset=100, batch_size=8, quiet=True, boundary=15)
    terms = {"seg": np.float32(1.5), "distill": np.float32(0.25), "features": np.float32(0.5)}
    progress(15, terms, learn=1.0, keep=5.0, lr=0.25)
    progress(20, terms, learn=-1.0, keep=4.0, lr=0.125)
    progress.close()
    board.close()
    events = read(tmp_path)
    shown = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
    assert {tuple(event.step for event in both) for both in shown.values()} == {(115, 120)}
    assert all(event.value > 0 for event in shown.pop("speed/images_per_second"))
    assert {tag: tuple(event.value for event in both) for tag, both in shown.items()} == {
        "loss/seg": (1.5, 1.5),
        "2 losses and images/1 l_seg": (1.5, 1.5),
        "loss/keep/distill": (0.25, 0.25),
        "loss/keep/features": (0.5, 0.5),
        "loss/weighted_keep": (3.75, 3.0),
        "phase/sign": (1.0, -1.0),
        "phase/keep": (5.0, 4.0),
        "phase/on": (0.0, 1.0),
        "phase/fill": (1.5, 0.0),
        "lr": (0.25, 0.125),
    }
    assert points_of_images(events, "2 losses and images/2 losses, the phase shaded") == [120]


def points_of_images(events: EventAccumulator, tag: str) -> list[int]:
    return [event.step for event in events.Images(tag)]


def test_losses_are_drawn_with_the_phase_shaded_and_ascents_marked(figures):
    curves = drawing.Curves("step 1", total=6, boundary=4)
    for iteration, sign in enumerate((1, 1, 1, 1, 1, -1), start=1):
        curves.entries.append(Logged(iteration, learn=10.0 * iteration, keep=0.5, sign=sign))
    assert drawing.losses(curves).ndim == 3
    left, right = figures[0].axes
    (shade,) = left.patches
    assert (shade.get_x(), shade.get_x() + shade.get_width()) == (4.5, 6.5)
    curve, ascents = left.lines
    assert (
        list(curve.get_ydata()) == [10, 20, 30, 40, 50, 60] and list(right.lines[0].get_ydata()) == [0.5] * 6
    )
    assert (list(ascents.get_xdata()), list(ascents.get_ydata())) == ([6], [60])
    drawing.losses(drawing.Curves("step 0", 6, 6, [Logged(1, 1.0, 0.0, 1.0)]))
    (only,) = figures[1].axes  # no phase, nothing to keep
    assert not only.patches and len(only.lines) == 1


def test_losses_are_not_drawn_without_matplotlib(without_matplotlib, board, tmp_path):
    board.losses(drawing.Curves("", 1, 1, [Logged(1, 1.0, 0.0, 1.0)]), 1)
    board.close()
    assert read(tmp_path).Tags()["images"] == []


# ---- a run -------------------------------------------------------------------------------------------------

CLASSES = ("background", "aeroplane", "bicycle", "bird")
FIRST, TOTAL = 4, 8  # iterations of step 0 and of both steps


@pytest.fixture
def finished(toy_arguments, tmp_path):
    """The arguments of a finished run, and its folder."""
    arguments = toy_arguments("method.name=mib", "phase.name=altersgd", "phase.p=0.5", "run.pictures=3")
    assert train.main(arguments) == 0
    return arguments, tmp_path / "runs/run"


@pytest.mark.slow
def test_a_run_writes_every_documented_name(finished):
    folder = finished[1]
    events = read(folder)
    every = (
        "loss/seg",
        "phase/sign",
        "phase/keep",
        "phase/on",
        "phase/fill",
        "lr",
        "speed/images_per_second",
    )
    for tag in every:
        assert points(events, tag) == list(range(1, TOTAL + 1)), tag
    assert [event.value for event in events.Scalars("phase/on")] == [0.0] * (FIRST + 2) + [1.0] * 2
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
    assert points(events, "forgetting/aeroplane") == points(events, "transfer/backward") == [TOTAL]

    results = read_results(folder / "results.json")["steps"][1]
    assert events.Scalars("miou/all")[1].value == pytest.approx(results["miou"]["all"])
    assert events.Scalars("iou/bird")[0].value == pytest.approx(results["iou"]["bird"])


@pytest.mark.slow
def test_a_run_shows_images_confusion_and_its_config(finished, tmp_path, toy_voc):
    events = read(finished[1])
    images = [f"2 losses and images/3 image {number}" for number in range(3)]
    assert set(events.Tags()["images"]) == {
        *images,
        "confusion",
        "2 losses and images/2 losses, the phase shaded",
    }
    for tag in events.Tags()["images"]:
        # Image 1 shows nothing but the class of step 1.
        assert points_of_images(events, tag) == (
            [TOTAL] if tag == "2 losses and images/3 image 1" else [FIRST, TOTAL]
        ), tag
    for number in range(3):
        with Image.open(toy_voc / f"JPEGImages/val_{number:03d}.jpg") as file:
            expected = np.asarray(file.resize((TILE_HEIGHT, TILE_HEIGHT), Image.Resampling.NEAREST))
        for event in events.Images(f"2 losses and images/3 image {number}"):
            assert (tile(image_of(event), 0) == expected).all(), number
    first, last = map(image_of, events.Images("2 losses and images/3 image 0"))
    assert (tile(first, 2) == tile(last, 2)).all()  # what was predicted after step 0
    known = {tuple(colour) for colour in voc_palette()[[0, 1, 2, 3, 255]]}
    assert {tuple(colour) for colour in tile(last, 1).reshape(-1, 3)} <= known
    assert (tile(last, 1)[0] == voc_palette()[255]).all()  # the void row of the toy masks
    assert not (tile(last, 3) == voc_palette()[255]).all(axis=2).any()
    orders = [text_of(event) for event in events.Tensors("confusion/order/text_summary")]
    assert orders == [", ".join(CLASSES[:3]), ", ".join(CLASSES)]

    (config,) = events.Tensors("config/text_summary")
    text = text_of(config).removeprefix("```yaml\n").removesuffix("\n```")
    (tmp_path / "shown.yaml").write_text(text)
    assert load_config([tmp_path / "shown.yaml"]) == load_config([finished[1] / "config.yaml"])


def test_a_run_lays_out_charts_of_names_that_it_writes(finished):
    events = read(finished[1])
    (config,) = events.Tensors("custom_scalars__config__")
    charts = [
        chart
        for group in Layout.FromString(config.tensor_proto.string_val[0]).category
        for chart in group.chart
    ]
    tags = events.Tags()["scalars"]
    for chart in charts:
        series = [tag for margin in chart.margin.series for tag in (margin.value, margin.lower, margin.upper)]
        assert set(series) <= set(tags)
        for pattern in chart.multiline.tag:
            # In two steps there is no forgetting of a class of step 1.
            found = [tag for tag in tags if re.match(pattern, tag)]
            # Flatness needs run.flatness: tests/test_flatness_logging.py.
            asked_for = not pattern.startswith("flatness/")
            assert found or pattern == "by_step/forgetting/(bird)$" or not asked_for, pattern
        assert series or chart.multiline.tag
    assert sum("by_step/iou/" in tag for chart in charts for tag in chart.multiline.tag) == 2


@pytest.mark.slow
def test_a_finished_run_is_a_row_among_the_hyperparameters(finished):
    events = read(finished[1])

    def content(tag: str) -> HParamsPluginData:
        return HParamsPluginData.FromString(events.SummaryMetadata(f"_hparams_/{tag}").plugin_data.content)

    values = content("session_start_info").session_start_info.hparams
    assert values["method"].string_value == "mib" and values["phase"].string_value == "altersgd"
    assert values["p"].number_value == 0.5 and values["lambda_b"].number_value == 10
    assert values["protocol"].string_value == "own steps"
    assert content("session_end_info").session_end_info.status == 1  # STATUS_SUCCESS
    experiment = content("experiment").experiment
    assert {column.name for column in experiment.hparam_infos} == set(values)
    metrics = [metric.name.tag for metric in experiment.metric_infos]
    assert metrics == list(FINAL_METRICS) and set(metrics) <= set(events.Tags()["scalars"])


def test_an_unfinished_run_is_none(toy_arguments, tmp_path):
    assert train.main(toy_arguments("train.last_step=0")) == 0
    assert not [tag for tag in read(tmp_path / "runs/run").Tags()["tensors"] if "hparams" in tag]


@pytest.mark.slow
def test_each_start_that_has_something_to_do_writes_one_file(finished):
    arguments, folder = finished
    assert num_files(folder) == 1
    assert train.main(arguments) == 0
    assert num_files(folder) == 1
    assert train.main([*arguments, "train.evaluate_only=true"]) == 0
    assert num_files(folder) == 2


@pytest.mark.slow
def test_a_run_from_a_shared_step_shows_the_metrics_of_that_step(finished, toy_arguments, tmp_path):
    shared = finished[1] / "step_0.pt"
    assert train.main(toy_arguments("method.name=mib", f"train.start_from={shared}", name="other")) == 0
    events, before = read(tmp_path / "runs/other"), read(finished[1])
    for tag in ("by_step/miou/old", "miou/old", "by_step/iou/aeroplane"):
        assert points(events, tag) == points(before, tag) and len(points(events, tag)) == 2
        assert events.Scalars(tag)[0].value == before.Scalars(tag)[0].value


@pytest.mark.slow
def test_scoring_again_keeps_the_curves(finished):
    arguments, folder = finished
    assert train.main([*arguments, "train.evaluate_only=true"]) == 0
    events = read(folder)
    for tag in ("loss/seg", "lr"):
        assert points(events, tag) == list(range(1, TOTAL + 1)), tag
    assert set(points(events, "miou/all")) == {FIRST, TOTAL}
