"""scripts.status: every state of a run, and folders that are none."""

import json
import shutil
import time

import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

import train
from configs.schema import dump_config
from engine.arguments import read_config
from engine.ranks import start_ranks
from engine.run_folder import RunFolder
from engine.watch import StoppedBySignal
from scripts import status
from scripts.status import State


class StopAfter:
    """Asks the run to stop, or kills it, once it was asked `count` times."""

    def __init__(self, count: int, kill: bool = False):
        self.left, self.kill = count, kill

    @property
    def requested(self) -> bool:
        self.left -= 1
        if self.left < 0 and self.kill:
            raise Killed
        return self.left < 0


class Killed(Exception):
    pass


def walk(arguments: list[str], stop: StopAfter) -> None:
    train.walk(read_config(arguments), start_ranks("cpu"), stop)


@pytest.fixture
def done(toy_run):
    return toy_run("method.name=mib", "phase.name=altersgd", "phase.p=0.5", name="done")


@pytest.fixture
def stopped(toy_arguments, tmp_path):
    """By a signal in iteration 2 of the 4 of step 1; each iteration asks twice."""
    with pytest.raises(StoppedBySignal):
        walk(toy_arguments("method.name=lwf", name="stopped"), StopAfter(2 * 4 + 2))
    return tmp_path / "runs/stopped"


@pytest.fixture
def killed(toy_arguments, tmp_path):
    """After the third iteration of step 0, saved after the second."""
    arguments = toy_arguments("run.checkpoint_every=2", "train.epochs=4", name="killed")
    with pytest.raises(Killed):
        walk(arguments, StopAfter(2 * 3, kill=True))
    # The writer of the walk still lives in this process and has not flushed what a killed one would have.
    with SummaryWriter(tmp_path / "runs/killed") as writer:
        writer.add_scalar("lr", 0.05 * (1 - 2 / 8) ** 0.9, 3)
    return tmp_path / "runs/killed"


def cells(text: str) -> dict[str, list[str]]:
    """Run -> its cells by the columns of the table."""
    rows = [line.replace(" / ", "/").replace("> ", ">").split() for line in text.splitlines()]
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
    figures = json.loads((done / "results.json").read_text())["steps"]
    last = figures[1]["miou"]
    assert rows["done"][1:8] == [
        *("mib/altersgd", "done", "2/2", "-"),
        *(f"{100 * last[group]:.1f}" for group in ("old", "new", "all")),
    ]
    assert rows["done"][9] == "-"
    assert rows["stopped"][1:5] == ["lwf/descent", "stopped", "1/2", "2/4"]
    assert rows["running"][2:5] == ["running", "1/2", "2/4"]
    assert rows["stopped"][9].count(":") == 2  # the pictures of step 1 are known from the run that is done
    holder.unlock()
    assert cells(show(tmp_path / "runs", capsys=capsys)[1])["running"][2] == "stopped"


def test_a_killed_run_is_unfinished_and_goes_on_from_what_it_saved(killed, capsys):
    code, text = show(killed, capsys=capsys)
    assert code == 0
    row = cells(text)["killed"]
    assert row[1:8] == ["ft/descent", "unfinished", "0/2", "2/8", "-", "-", "-"]
    assert row[9].startswith(">")  # nobody knows how long step 1 will be


def test_nothing_is_known_of_a_run_that_has_just_begun(toy_arguments, tmp_path, capsys):
    folder = RunFolder(tmp_path / "runs/run")
    folder.lock()
    folder.write_config(dump_config(read_config(toy_arguments())))
    row = cells(show(tmp_path / "runs", capsys=capsys)[1])["run"]
    assert row[1:] == ["ft/descent", "running", "0/2", "-", "-", "-", "-", "0:00:00", "?"]


def test_a_trained_step_without_figures_is_being_scored(done, capsys):
    results = json.loads((done / "results.json").read_text())
    results["steps"].pop()
    (done / "results.json").write_text(json.dumps(results))
    row = cells(show(done, capsys=capsys)[1])["done"]
    assert row[2:5] == ["unfinished", "1/2", "scoring"] and row[9] == "0:00:00"


def test_fewer_steps_can_be_asked_for(toy_arguments, tmp_path, capsys):
    walk(toy_arguments("train.last_step=0", name="step0"), StopAfter(10**9))
    assert cells(show(tmp_path / "runs", capsys=capsys)[1])["step0"][2:4] == ["done", "1/1"]


def test_broken_and_foreign_folders_are_listed_with_the_reason(done, tmp_path, capsys):
    runs = tmp_path / "runs"
    broken = {
        "half": ("results.json", '{"steps": [', "not readable as JSON"),
        "list": ("results.json", "[1, 2]", "neither config.yaml nor"),
        "other": ("config.yaml", "optim: {lrr: 1}", "not what a run writes"),
        "torn": ("config.yaml", "optim: {lr: ", "not what a run writes"),
        "alien": ("results.json", '{"accuracy": 3}', "neither config.yaml nor"),
        "older": ("results.json", '{"config": {"data": {}}, "steps": []}', "not what a run writes"),
        "holes": ("results.json", None, "the figures of a step are missing"),
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


# ---- where a step stands ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("power", [0.9, 1.0, 0.5])
def test_the_learning_rate_tells_the_length_of_a_step(power):
    config = {
        "optim": {"lr": 0.01, "lr_later": 0.001, "power": power},
        "train": {"epochs": 30, "epochs_later": 8},
        "phase": {"lr": "decay"},
    }
    for step, start, total in ((0, 0.01, 10530), (1, 0.001, 8 * 13)):
        for iteration in (total // 50 + 2, total // 2, total):
            lr = torch.tensor(start * (1 - (iteration - 1) / total) ** power).item()
            assert status.total_iterations(config, step, iteration, lr) == total
        assert status.total_iterations(config, step, 1, start) is None


def test_tensorboard_tells_where_a_running_step_is(toy_arguments, tmp_path):
    arguments = toy_arguments("train.epochs=6", "method.name=mib")
    with pytest.raises(StoppedBySignal):
        walk(arguments, StopAfter(2 * 9))
    folder = tmp_path / "runs/run"
    [file] = folder.glob("events.*")
    config = read_config(arguments).model_dump(mode="json")
    deadline = time.monotonic() + 5
    place = status.logged_place(folder, config, [])
    while place is None and time.monotonic() < deadline:  # the writer is a thread
        time.sleep(0.05)
        place = status.logged_place(folder, config, [])
    assert place is not None and 1 <= place.iteration <= 10
    assert next(status.learning_rates(file))[1] == 1
    torn = file.with_name(file.name + ".torn")
    for length in range(0, file.stat().st_size, 97):
        torn.write_bytes(file.read_bytes()[:length])
        list(status.learning_rates(torn))


def test_damaged_files_say_nothing(stopped, capsys):
    for file in [*stopped.glob("resume*"), *stopped.glob("events*")]:
        file.write_bytes(b"\x07" * 300)
    row = cells(show(stopped, capsys=capsys)[1])["stopped"]
    assert row[2:5] == [State.UNFINISHED, "1/2", "-"]
