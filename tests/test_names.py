"""Names of classes and runs are text in every medium, whatever they hold: no markup, no formula,
no escape code, no path.
"""

import io
import json
import re
import xml.etree.ElementTree as xml
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_report import Page, write_run

import train
from data.folder import DataError, read_classes
from data.palette import palette_image
from data.protocols import Step
from engine.results import step_result
from scripts import compare, report
from study import paper
from tracking import drawing, overlays, text
from tracking.examples import Examples
from tracking.plotting import pyplot, without_formulas
from tracking.shown import layout
from tracking.tables import class_table, format_table, markdown_table
from tracking.tensorboard import Board

pytestmark = pytest.mark.figures

FORMULA = r"$\frac{1}{0$"  # with two dollar signs and no valid formula: matplotlib raises
LONG = "n" * 300
HOSTILE = (
    *(FORMULA, "<script>alert(1)</script>", "a|b", "\x1b[31mred", "../../x", "a_{b", "_x_", "&amp;", "100%"),
    *(
        "two\nlines",
        LONG,
        "\u202eright to left",
        "\u05e9\u05dc\u05d5\u05dd",
        "[link](http://x)",
        "`code`",
        "~~x~~",
    ),
    *(r"\input{x}", "# title", "a\x00b", "\ud800", "{", '"quoted"', "$x$", r"\$", "line\u2028break"),
)
STEPS = (Step(0, (), tuple(range(1, len(HOSTILE)))), Step(1, tuple(range(1, len(HOSTILE))), (len(HOSTILE),)))
NAMES = ("background", *HOSTILE)


def results() -> list[dict]:
    done: list[dict] = []
    for step in STEPS:
        counts = np.eye(step.num_classes, dtype=int)
        done.append(step_result(step, list(STEPS), NAMES, counts, np.full(step.num_classes, 0.5), done))
    return done


def named(*hostile: str) -> tuple[str, ...]:
    """The classes of VOC, of which some have other names."""
    return ("background", *hostile, *paper.CLASSES[len(hostile) :])


def write_own(root: Path, names: tuple[str, ...]) -> Path:
    """Four images of each class to train on and one to test."""
    for kind in ("images", "masks"):
        (root / kind).mkdir(parents=True)
    for split, count in {"train": 4, "val": 1}.items():
        images = [f"{split}{label}_{i}" for label in range(1, len(names) + 1) for i in range(count)]
        for number, name in enumerate(images):
            mask = np.zeros((32, 32), np.uint8)
            mask[8:24] = 1 + number // count
            Image.fromarray(40 * mask).convert("RGB").save(root / f"images/{name}.png")
            Image.fromarray(mask).save(root / f"masks/{name}.png")
        (root / f"{split}.txt").write_text("\n".join(images))
    (root / "classes.txt").write_text("\n".join(names))
    return root


# ---- while a run trains ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_with_hostile_class_names_finishes_and_stays_in_its_folder(toy_arguments, tmp_path, capsys):
    names = (FORMULA, "../../x", "<b>|&%_{")
    root = write_own(tmp_path / "data" / "own", names)
    steps = json.dumps([list(names[:2]), [names[2]]])
    before = set(tmp_path.rglob("*"))
    arguments = toy_arguments(f"data.root={root}", "data.dataset=folder", f"data.steps={steps}")
    assert train.main(arguments) == 0
    assert "cannot be drawn" not in capsys.readouterr().err
    made = set(tmp_path.rglob("*")) - before
    assert made and all(
        path.is_relative_to(tmp_path / "runs") or path.is_relative_to(tmp_path / "cache") for path in made
    )
    steps = json.loads((tmp_path / "runs/run/results.json").read_text())["steps"]
    assert steps[1]["classes"] == ["background", *names]


def test_tensorboard_shows_every_name_under_a_tag_of_its_own(tmp_path, capsys):
    board = Board(tmp_path, old=NAMES[:-1], new=NAMES[-1:])
    board.open()
    for result in results():
        board.results(result, result["step"])
        classes = len(result["classes"])
        board.confusion(np.eye(classes, dtype=int), result["classes"], result["step"])
    image, label = np.zeros((8, 16, 3), np.uint8), np.arange(128).reshape(8, 16) % len(NAMES)
    board.image(0, image, label, label, STEPS[1], 1)
    board.close()
    assert "cannot be drawn" not in capsys.readouterr().err
    events = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0}).Reload()
    tags = events.Tags()
    found = [tag for tag in tags["scalars"] if tag.startswith("by_step/iou/")]
    assert len(found) == len(NAMES) and all(tag.isprintable() for tag in found)
    assert {"confusion", "2 losses and images/3 image 0"} <= set(tags["images"])
    charts = layout(NAMES[:-1], NAMES[-1:])["IoU after each step"].values()
    patterns = [pattern for _, patterns in charts for pattern in patterns]
    assert all(sum(bool(re.match(pattern, tag)) for pattern in patterns) == 1 for tag in found)
    order = events.Tensors("confusion/order/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert "<script" not in order and "\n" not in order and "\x1b" not in order
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {
        "0_step_1.png",
        next(tmp_path.glob("events.*")).name,
    }


def test_a_figure_that_cannot_be_drawn_is_said_and_skipped(tmp_path, monkeypatch, capsys):
    def fails(*_):
        raise ValueError("\x1b[31mParseFatalException:\nno formula")

    monkeypatch.setattr(drawing, "confusion", fails)
    board = Board(tmp_path)
    board.open()
    board.confusion(np.eye(2, dtype=int), ["a", "b"], 1)
    board.scalars({"after": 1.0}, 1)
    board.close()
    said = capsys.readouterr().err
    assert "warning: the figure 'confusion' cannot be drawn and is left out (ValueError: " in said
    assert "\x1b" not in said and len(said.splitlines()) == 1
    assert EventAccumulator(str(tmp_path)).Reload().Tags()["scalars"] == ["after"]


def test_the_confusion_matrix_draws_a_name_as_it_reads():
    figures = {name: drawing.confusion(np.eye(2, dtype=int), [name, "b"]) for name in HOSTILE}
    assert all(pixels.shape[2] == 3 for pixels in figures.values())
    assert not np.array_equal(figures["$x$"], drawing.confusion(np.eye(2, dtype=int), ["x", "b"]))


# ---- drawn -------------------------------------------------------------------------------------------------


def test_overlays_and_strips_name_every_class_within_a_bounded_size():
    mask = palette_image((np.arange(64 * 64).reshape(64, 64) % len(NAMES)).astype(np.uint8))
    image, names = Image.new("RGB", mask.size), dict(enumerate(NAMES))
    shown = overlays.overlay(image, mask, names, image.size)
    small = overlays.resized(mask, overlays.panel_size(image))
    panels = [overlays.Panel(("step 1", f"+ {name}"), small) for name in HOSTILE]
    steps = overlays.strip(image, panels, names)
    assert shown.width < 3000 and steps.width < 400 * (len(panels) + 8)
    only_long = overlays.overlay(image, palette_image(np.zeros((9, 9), np.uint8)), {0: LONG}, (9, 9))
    assert only_long.width < 1500


def test_a_run_named_like_a_formula_is_compared(tmp_path, monkeypatch, capsys):
    image, labels = np.zeros((2, 2, 3), np.uint8), np.zeros((2, 2), np.uint8)
    shown = Examples([image], [[labels] * 3], [FORMULA], np.zeros((256, 3), np.uint8))
    monkeypatch.setattr(compare, "examples", lambda *_: shown)
    runs = [tmp_path / "runs" / name for name in (FORMULA.replace("/", ":"), "\x1b[31m|red")]
    for run in runs:
        write_run(tmp_path / "runs", run.name, model__body=run.name)  # so that the two are said to differ
    drawn = tmp_path / "x.png"
    assert compare.main([*map(str, runs), "--picture", str(drawn)]) == 0
    assert drawn.exists() and "\x1b" not in capsys.readouterr().out
    assert compare.main([*map(str, runs), "--markdown"]) == 0
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(table) == 4 and len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1


def test_a_figure_without_formulas_draws_dollar_signs():
    figure, axis = pyplot.subplots()
    axis.plot([1, 2], label=FORMULA)
    axis.set_title("$x$")
    axis.legend()
    without_formulas(figure).savefig(io.BytesIO())
    pyplot.close(figure)


# ---- written -----------------------------------------------------------------------------------------------


def test_a_terminal_gets_one_printable_line_for_every_class():
    lines = class_table(results()).splitlines()
    assert len(lines) == len(NAMES) + 2 and all(line.isprintable() for line in lines)
    assert r"\x1b[31mred" in "".join(lines)
    assert len({len(line) for line in format_table(["x"], [[name] for name in HOSTILE]).splitlines()}) == 1


def test_markdown_tables_hold_every_name_in_one_cell():
    lines = markdown_table(["name", "x"], [[name, "1"] for name in HOSTILE]).splitlines()
    assert len(lines) == len(HOSTILE) + 2
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 3 and line.isprintable() for line in lines)
    whole = "\n".join(lines)
    assert "<script" not in whole and "&amp;amp;" in whole and r"\$\\frac{1}{0\$" in whole
    assert r"\[link\](http://x)" in whole and r"\_x\_" in whole and r"\`code\`" in whole


def test_latex_has_no_command_of_a_name():
    for name in HOSTILE:
        line = text.latex(name)
        assert line.isprintable() and "\n" not in line
        plain = re.sub(r"\\(?:[&%$#_{}]|text\w+\{\})|\{[\[\]*]\}", "", line)  # what an escape looks like
        assert not set(plain) & set("\\&%$#_{}~^[]*"), (name, line)


def test_every_format_of_a_report_holds_hostile_names_as_text(tmp_path):
    hostile = HOSTILE[:20]
    write_run(tmp_path / "runs", "run", names=named(*hostile))
    out = tmp_path / "out"
    assert report.main([str(tmp_path / "runs"), "--out", str(out), "--tables", "table1", "table2"]) == 0
    source = (out / "report.html").read_text("utf-8")
    page = Page(source)
    assert page.tags.count("script") == 1, "that of the filters"
    assert FORMULA in page.text and "<script>alert(1)</script>" in page.text
    assert "\x1b" not in source and "\x00" not in source and "\u202e" not in source
    markdown = (out / "report.md").read_text("utf-8")
    assert "<script" not in markdown and "\x1b" not in markdown and "\u202e" not in markdown
    latex = (out / "report.tex").read_text("utf-8")
    assert r"\input{x}" not in latex.replace("% \\input this file", "") and "\x1b" not in latex
    assert {path.relative_to(out).parts[0] for path in out.rglob("*")} == {
        *("report.html", "report.md", "report.tex", "figures")
    }
    for figure in (out / "figures").glob("*.svg"):
        xml.parse(figure)


# ---- read --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["\x1b[31mred", "a\x00b", "a\x7fb", "a\u2028b", "a\x85b"])
def test_a_control_character_in_classes_txt_is_refused(name, tmp_path):
    path = tmp_path / "classes.txt"
    path.write_text(f"cat\n{name}\n", encoding="utf-8")
    with pytest.raises(DataError, match="holds a control character") as refused:
        read_classes(path)
    assert str(refused.value).isprintable() and str(path) in str(refused.value)


def test_other_names_in_classes_txt_are_taken_as_they_are(tmp_path):
    names = [FORMULA, "<b>", "a|b", "../../x", "\u05e9\u05dc\u05d5\u05dd", "a\tb", LONG]
    Path(tmp_path, "classes.txt").write_text("\n".join(names), encoding="utf-8")
    assert read_classes(tmp_path / "classes.txt")[0] == ("background", *names)
