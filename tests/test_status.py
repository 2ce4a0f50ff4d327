"""scripts.status: every state of a run, and folders that are none."""

import json
import resource
import shutil
import sys
import time
from unittest.mock import Mock

import pytest
import torch
from conftest import Killed, walk_until

from configs import yaml_core
from configs.schema import dump_config
from engine import watch
from engine.arguments import read_config
from engine.optim import last_iteration_of
from engine.ranks import Ranks, StoppedBySignal
from engine.run_folder import RunFolder
from scripts import status
from scripts.status import State


@pytest.fixture
def done(toy_run):
    return toy_run("method.name=mib", "phase.name=altersgd", "phase.p=0.5", name="done")


@pytest.fixture
def stopped(toy_arguments, tmp_path):
    """By a signal in iteration 2 of the 4 of step 1, after the 4 of step 0."""
    with pytest.raises(StoppedBySignal):
        walk_until(toy_arguments("method.name=lwf", name="stopped"), 4 + 1)
    return tmp_path / "runs/stopped"


@pytest.fixture
def killed(toy_arguments, tmp_path, monkeypatch):
    """After the third iteration of step 0, saved after the second."""
    monkeypatch.setattr(watch, "SECONDS_BETWEEN_WRITES", 0.0)
    arguments = toy_arguments("run.checkpoint_every=2", "train.epochs=4", name="killed")
    with pytest.raises(Killed):
        walk_until(arguments, 3, kill=True)
    return tmp_path / "runs/killed"


def cells(text: str) -> dict[str, list[str]]:
    """Run -> its cells by the columns of the table."""
    rows = [line.replace(" + ", "+").replace("> ", ">").split() for line in text.splitlines()]
    return {
        row[0].rsplit("/", 1)[-1]: row
        for row in rows
        if len(row) == len(status.HEADER) and set(row[0]) != {"-"}
    }


def show(*arguments, capsys) -> tuple[int, str]:
    capsys.readouterr()
    code = status.main([str(argument) for argument in arguments])
    return code, capsys.readouterr().out


@pytest.mark.slow
def test_every_state_in_one_table(done, stopped, tmp_path, capsys):
    """The lock outlives a walk that was interrupted inside this process, as long as nobody lets go of it."""
    shutil.copytree(stopped, tmp_path / "runs/running")
    holder = RunFolder(tmp_path / "runs/running")
    holder.lock()
    code, text = show(tmp_path / "runs", capsys=capsys)
    rows = cells(text)
    assert code == 0 and set(rows) == {"run", "done", "stopped", "running"}
    metrics = json.loads((done / "results.json").read_text())["steps"]
    last = metrics[1]["miou"]
    assert rows["done"][1:8] == [
        *("mib+altersgd", "done", "2/2", "-"),
        *(f"{100 * last[group]:.1f}" for group in ("old", "new", "all")),
    ]
    assert rows["done"][9] == "-"
    assert rows["stopped"][1:5] == ["lwf", "stopped", "1/2", "2/4"]
    assert rows["running"][2:5] == ["running", "1/2", "2/4"]
    assert rows["stopped"][9].count(":") == 2  # the images of step 1 are known from the run that is done
    holder.unlock()
    assert cells(show(tmp_path / "runs", capsys=capsys)[1])["running"][2] == "stopped"


def test_a_killed_run_is_unfinished_and_goes_on_from_what_it_saved(killed, capsys):
    code, text = show(killed, capsys=capsys)
    assert code == 0
    row = cells(text)["killed"]
    assert row[1:8] == ["ft", "unfinished", "0/2", "2/8", "-", "-", "-"]
    assert row[9].startswith(">")  # nobody knows how long step 1 will be


def test_nothing_is_known_of_a_run_that_has_just_begun(toy_arguments, tmp_path, capsys):
    folder = RunFolder(tmp_path / "runs/run")
    folder.lock()
    folder.write_config(dump_config(read_config(toy_arguments())))
    row = cells(show(tmp_path / "runs", capsys=capsys)[1])["run"]
    assert row[1:] == ["ft", "running", "0/2", "-", "-", "-", "-", "0:00:00", "?"]


def test_a_trained_step_without_metrics_is_being_scored(done, capsys):
    results = json.loads((done / "results.json").read_text())
    results["steps"].pop()
    (done / "results.json").write_text(json.dumps(results))
    row = cells(show(done, capsys=capsys)[1])["done"]
    assert row[2:5] == ["unfinished", "1/2", "scoring"] and row[9] == "0:00:00"


def test_fewer_steps_can_be_asked_for(toy_arguments, tmp_path, capsys):
    walk_until(toy_arguments("train.last_step=0", name="step0"))
    assert cells(show(tmp_path / "runs", capsys=capsys)[1])["step0"][2:4] == ["done", "1/1"]


def test_broken_and_foreign_folders_are_listed_with_the_reason(done, tmp_path, capsys):
    runs = tmp_path / "runs"
    broken = {
        "half": ("results.json", '{"steps": [', "not readable as JSON"),
        "list": ("results.json", "[1, 2]", "it holds a list"),
        "other": ("config.yaml", "optim: {lrr: 1}", "not what a run writes"),
        "torn": ("config.yaml", "optim: {lr: ", "not what a run writes"),
        "alien": ("results.json", '{"accuracy": 3}', "neither config.yaml nor"),
        "older": ("results.json", '{"config": {"data": {}}, "steps": []}', "not what a run writes"),
        "holes": ("results.json", None, "the metrics of a step are missing"),
        "words": ("results.json", None, "not what a run writes"),
        "photos": ("me.jpg", "", "no run in it"),
    }
    results = json.loads((done / "results.json").read_text())
    contents = {
        "holes": json.dumps(results | {"steps": results["steps"][1:]}),
        "words": json.dumps(results | {"steps": [{"step": 0, "miou": "good"}]}),
    }
    for name, (file, content, _) in broken.items():
        (runs / name).mkdir()
        (runs / name / file).write_text(contents.get(name, content))
    code, text = show(runs, tmp_path / "nowhere", capsys=capsys)
    assert code == 0 and set(cells(text)) == {"run", "done"}
    for name, (_, _, why) in broken.items():
        assert any(line.startswith(f"{runs / name}: ") and why in line for line in text.splitlines()), name
    assert f"{tmp_path / 'nowhere'}: no such folder" in text


def test_nothing_found_is_code_2(tmp_path, capsys):
    assert show(tmp_path, capsys=capsys) == (2, f"{tmp_path}: no run in it\n")
    (tmp_path / "results.json").write_text("{}")
    assert show(tmp_path, capsys=capsys)[0] == 2


def test_a_run_is_listed_once_and_results_without_a_config_file_do(done, tmp_path, capsys):
    (done / "config.yaml").unlink()
    text = show(tmp_path / "runs", done, done, capsys=capsys)[1]
    assert len(text.splitlines()) == 3 and cells(text)["done"][2] == "done"


def test_watch_looks_again_until_interrupted(done, monkeypatch, capsys):
    naps = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    code, text = show(done, "--watch", "5", capsys=capsys)
    assert code == 0 and naps == [5, 5, 5] and text.count(str(done)) == 3
    with pytest.raises(SystemExit):
        status.main([str(done), "--watch", "0"])


# ---- where a step stands -----------------------------------------------------------------------------------


def test_a_running_step_shows_the_iteration_it_has_reached(killed, capsys):
    holder = RunFolder(killed)
    holder.lock()
    row = cells(show(killed, capsys=capsys)[1])["killed"]
    assert row[2:5] == ["running", "0/2", "3/8"]
    assert row[9].startswith(">")
    holder.unlock()


def test_what_one_run_has_finished_tells_another_how_much_is_left(killed, done, tmp_path, capsys):
    row = cells(show(tmp_path / "runs", capsys=capsys)[1])["killed"]
    assert row[2:5] == ["unfinished", "0/2", "2/8"] and row[9].count(":") == 2 and ">" not in row[9]


def test_a_run_of_an_older_version_is_read_without_its_progress(killed, toy_run, tmp_path, capsys):
    (killed / "progress.json").unlink()
    assert cells(show(killed, capsys=capsys)[1])["killed"][2:5] == ["stopped", "0/2", "2"]
    holder = RunFolder(killed)
    holder.lock()
    assert cells(show(killed, capsys=capsys)[1])["killed"][2:5] == ["running", "0/2", "2"]
    holder.unlock()
    older = toy_run(name="older")
    (older / "progress.json").unlink()
    rows = cells(show(tmp_path / "runs", capsys=capsys)[1])
    assert rows["older"][2:5] == ["done", "2/2", "-"]
    assert rows["killed"][2:5] == [
        "stopped",
        "0/2",
        "2/8",
    ]  # the images of step 0 are known from the other run


def test_neither_tensorboard_nor_its_files_are_needed(killed, monkeypatch, capsys):
    before = show(killed, capsys=capsys)
    for file in killed.glob("events.*"):
        file.unlink()
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert show(killed, capsys=capsys) == before


def test_the_length_of_a_step_does_not_depend_on_its_learning_rates(toy_arguments, tmp_path, capsys):
    """Step 2 of 3: its learning rate is decayed, and held in the phase.

    Stopped after 2 + 8 + 6 of 8 iterations.
    """
    options = ("optim.lr_decay=0.5", "optim.power=0.5", "phase.name=altersgd", "phase.p=0.5", "phase.lr=hold")
    arguments = toy_arguments(*options, "data.steps=[[1], [2], [3]]", "train.batch_size=2", name="held")
    with pytest.raises(StoppedBySignal):
        walk_until(arguments, 2 + 8 + 5)
    assert cells(show(tmp_path / "runs", capsys=capsys)[1])["held"][2:5] == ["stopped", "2/3", "6/8"]


@pytest.mark.parametrize(
    ("overrides", "last"),
    [
        ((), (10530, 8 * 13)),
        (("phase.name=altersgd", "phase.p=0.5", "phase.lr=hold"), (10530, 8 * 13)),
        (("phase.name=stop", "phase.p=0.5"), (10530, 4 * 13)),
        (("phase.name=stop", "phase.p=25/30", "phase.from_step=0"), (8775, 86)),
    ],
)
def test_the_last_iteration_of_a_step_follows_from_its_images(overrides, last):
    config = read_config(["data.root=unused", "train.epochs=30", "train.epochs_later=8", *overrides])
    written = yaml_core.parse(dump_config(config))
    for step, images in enumerate((351 * 24 + 5, 13 * 24)):
        assert last_iteration_of(config, images, step) == last[step]
        assert last_iteration_of(written, images, step) == last[step]


def test_progress_says_where_a_run_is_and_follows_it_when_it_goes_on(toy_arguments, tmp_path):
    arguments, folder = toy_arguments("train.epochs=6", "method.name=mib"), RunFolder(tmp_path / "runs/run")
    assert folder.read_progress() is None
    with pytest.raises(StoppedBySignal):
        walk_until(arguments, 9)
    first = json.loads(folder.progress_file.read_text())
    assert {name: first[name] for name in ("step", "iteration", "total")} == {
        "step": 0,
        "iteration": 10,
        "total": 12,
    }
    assert first["seconds"] > 0 and folder.read_progress() == first
    with pytest.raises(StoppedBySignal):
        walk_until(arguments, 0)
    second = folder.read_progress()
    assert second["iteration"] == 11 and second["seconds"] > first["seconds"]
    walk_until(arguments)
    last, metrics = folder.read_progress(), folder.read_results()["steps"]
    assert (last["step"], last["iteration"], last["total"]) == (1, 4, 4)
    assert 0 < last["seconds"] <= metrics[1]["seconds"] + 1e-3


def test_a_step_that_ends_early_says_so_from_its_beginning(toy_arguments, tmp_path):
    arguments = toy_arguments("phase.name=stop", "phase.p=0.75")
    with pytest.raises(StoppedBySignal):
        walk_until(arguments, 4)
    progress = RunFolder(tmp_path / "runs/run").read_progress()
    assert (progress["step"], progress["iteration"], progress["total"]) == (1, 1, 3)


def test_progress_is_written_at_most_once_in_a_while(toy_arguments, monkeypatch):
    written, write = [], RunFolder.write_progress
    monkeypatch.setattr(watch, "SECONDS_BETWEEN_WRITES", 1e9)
    monkeypatch.setattr(
        RunFolder, "write_progress", lambda *a, **k: (written.append(k["iteration"]), write(*a, **k))
    )
    walk_until(toy_arguments("train.last_step=0", "train.epochs=4", "run.checkpoint_every=3"))
    assert written == [0, 3, 6, 8]  # the beginning, two checkpoints and the end


@pytest.mark.parametrize(("rank", "written"), [(0, True), (1, False)])
def test_only_the_main_rank_writes_its_progress(rank, written, tmp_path):
    ranks = Ranks(rank, world=2, local_rank=rank, device=torch.device("cpu"), group=None)
    folder, step, bar = RunFolder(tmp_path), Mock(index=1), Mock(done=3)
    run = Mock(ranks=ranks, folder=folder)
    watch.Watch(run, step, Mock(), {}, Mock(), Mock(), bar, last=8, seconds=2.0, measured={})
    assert folder.read_progress() == (
        {"step": 1, "iteration": 3, "total": 8, "seconds": pytest.approx(2.0, abs=0.5)} if written else None
    )


def test_a_half_written_progress_does_no_harm(killed, capsys):
    folder = RunFolder(killed)
    whole = folder.progress_file.read_bytes()
    foreign = [
        b"[]",
        b"null",
        b"{}",
        b"\x07" * 300,
        whole.replace(b"3", b"null"),
        whole.replace(b"3", b"1e999"),
    ]
    for content in [*(whole[:length] for length in range(len(whole) - 1)), *foreign]:
        folder.progress_file.write_bytes(content)
        assert folder.read_progress() is None, content
    assert cells(show(killed, capsys=capsys)[1])["killed"][2:5] == ["stopped", "0/2", "2"]


def test_a_full_disk_keeps_the_progress_before_and_ends_no_run(tmp_path):
    folder = RunFolder(tmp_path)
    folder.write_progress(step=0, iteration=1, total=4, seconds=0.5)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))  # bytes that a file may have
    try:
        folder.write_progress(step=0, iteration=2, total=4, seconds=1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert folder.read_progress() == {"step": 0, "iteration": 1, "total": 4, "seconds": 0.5}
    assert [path.name for path in tmp_path.iterdir()] == ["progress.json"]
    RunFolder(tmp_path / "gone").write_progress(step=0, iteration=1, total=4, seconds=0.5)


def test_a_batch_that_no_step_can_fill_is_named(done, tmp_path, capsys):
    """Such a run ends before its first iteration and leaves a folder behind."""
    large = tmp_path / "runs/large"
    large.mkdir()
    results = json.loads((done / "results.json").read_text())
    results["config"]["train"]["batch_size"] = 5
    (large / "results.json").write_text(json.dumps(results | {"steps": []}))
    text = show(tmp_path / "runs", capsys=capsys)[1]
    assert set(cells(text)) == {"run", "done"}
    assert f"{large}: step 1 has 4 training images, fewer than one batch of 5" in text


def test_damaged_files_say_nothing(stopped, capsys):
    for file in [*stopped.glob("resume*"), stopped / "progress.json"]:
        file.write_bytes(b"\x07" * 300)
    row = cells(show(stopped, capsys=capsys)[1])["stopped"]
    assert row[2:5] == [State.UNFINISHED, "1/2", "-"]
