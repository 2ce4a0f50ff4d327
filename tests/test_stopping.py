"""Signals that come while nothing is trained, and what a killed run leaves behind."""

import fcntl
import json
import multiprocessing
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from processes import become_rank, free_port, run_ranks

import train
from data import index
from engine import checkpoint, evaluation, step
from engine.objective import Objective
from engine.run_folder import RunError, RunFolder


def signal_in(monkeypatch, module, name: str, call: int = 1) -> None:
    """Send SIGTERM to this process when a function is called for the `call`th time."""
    original, calls = getattr(module, name), 0

    def signalled(*arguments, **options):
        nonlocal calls
        calls += 1
        if calls == call:
            signal.raise_signal(signal.SIGTERM)
        return original(*arguments, **options)

    monkeypatch.setattr(module, name, signalled)


def figures(folder: Path) -> list:
    return [step["confusion"] for step in json.loads((folder / "results.json").read_text())["steps"]]


def test_a_signal_while_a_step_is_scored_stops_the_run(toy_arguments, toy_run, tmp_path, capsys):
    arguments = toy_arguments("method.name=mib", "train.evaluate_batch=1", "train.last_step=0")
    folder = tmp_path / "runs/run"
    with pytest.MonkeyPatch.context() as patch:
        signal_in(patch, evaluation, "predict")
        assert train.main(arguments) == train.STOPPED_BY_SIGNAL
    assert "stopped while scoring step 0, which is trained and saved" in capsys.readouterr().err
    assert figures(folder) == []
    trained = (folder / "step_0.pt").stat().st_mtime_ns
    assert train.main(arguments) == 0
    assert (folder / "step_0.pt").stat().st_mtime_ns == trained
    assert figures(folder) == figures(toy_run("method.name=mib", name="whole"))[:1]


def test_a_signal_stops_a_run_that_only_scores(toy_arguments, toy_run, capsys):
    folder = toy_run("method.name=mib")
    before = figures(folder)
    with pytest.MonkeyPatch.context() as patch:
        signal_in(patch, evaluation, "predict")
        options = ("method.name=mib", "train.evaluate_batch=1", "train.evaluate_only=true")
        assert train.main(toy_arguments(*options)) == train.STOPPED_BY_SIGNAL
    assert "stopped while scoring step 0" in capsys.readouterr().err and figures(folder) == before


def test_a_signal_while_the_data_set_is_scanned_stops_the_run(toy_arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(index, "CHUNK", 2)
    signal_in(monkeypatch, index, "_look_at", call=3)
    assert train.main(toy_arguments()) == train.STOPPED_BY_SIGNAL
    assert "stopped while scanning the data set" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_signal_in_a_survey_stops_the_run(toy_arguments, toy_run, tmp_path, capsys):
    options = ("method.name=plop", "method.strength=null", "train.batch_size=2")
    arguments = toy_arguments(*options)
    with pytest.MonkeyPatch.context() as patch:
        signal_in(patch, step, "ask")
        assert train.main(arguments) == train.STOPPED_BY_SIGNAL
    assert "stopped while surveying step 1" in capsys.readouterr().err
    assert train.main(arguments) == 0
    pieces, whole = tmp_path / "runs/run", toy_run(*options, name="whole")
    one, other = (checkpoint.load(folder / "step_1.pt")["model"] for folder in (pieces, whole))
    assert all(torch.equal(one[name], other[name]) for name in one)


def rank_that_is_told(rank: int, world: int, ports: list[int], arguments: list[str], errors: Path) -> None:
    """Train three times: rank 1 alone gets a signal in the first step, then while that is scored,
    then none.
    """
    for number, (module, name) in enumerate(((Objective, "on_next_batch"), (evaluation, "predict"))):
        become_rank(rank, world, ports[number])
        with pytest.MonkeyPatch.context() as patch, open(errors / f"{rank}_{number}", "w") as file:
            patch.setattr("sys.stderr", file)
            if rank == 1:
                signal_in(patch, module, name)
            assert train.main(arguments) == train.STOPPED_BY_SIGNAL
    become_rank(rank, world, ports[2])
    assert train.main(arguments) == 0


@pytest.mark.slow
def test_two_ranks_stop_together_when_one_is_told(toy_arguments, tmp_path):
    """Also in a step with fewer iterations than there are between two lines of progress."""
    arguments = toy_arguments("run.log_every=10", "train.evaluate_batch=1", "train.last_step=0")
    ports = [free_port() for _ in range(3)]
    run_ranks(rank_that_is_told, (2, ports, arguments, tmp_path))
    for rank in range(2):
        assert "stopped at step 0, iteration 1 of 4" in (tmp_path / f"{rank}_0").read_text()
        assert "stopped while scoring step 0" in (tmp_path / f"{rank}_1").read_text()
    assert len(figures(tmp_path / "runs/run")) == 1


# ---- what a killed run leaves behind -----------------------------------------------------------------------


def test_a_loader_that_outlives_its_run_does_not_keep_the_folder(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.lock()
    fork = multiprocessing.get_context("fork")
    loading = fork.Event()
    loader = fork.Process(target=lambda: (loading.set(), time.sleep(60)))
    loader.start()
    loading.wait(10)
    folder.unlock()  # as a kill does
    try:
        assert not folder.is_held()
        RunFolder(tmp_path / "run").lock()
    finally:
        loader.kill()
        loader.join()


def test_a_look_at_a_run_does_not_keep_it_from_starting(tmp_path):
    """status holds a shared lock for a moment."""
    folder = RunFolder(tmp_path / "run")
    folder.lock()
    folder.unlock()
    looking = open(tmp_path / "run/.lock", "rb")  # noqa: SIM115
    fcntl.flock(looking, fcntl.LOCK_SH)
    end = threading.Timer(0.1, looking.close)
    end.start()
    folder.lock()
    end.join()
    assert folder.is_held()
    folder.unlock()


def test_unfinished_files_of_a_killed_run_are_removed_by_the_next_start(tmp_path, monkeypatch):
    monkeypatch.setattr("engine.run_folder.SECONDS_FOR_A_LOOK", 0.0)
    running, folder = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")
    running.lock()
    left = [
        tmp_path / "run" / name for name in (".resume.pt.123.tmp", ".results.json.x1y2", "..pt", "notes.tmp")
    ]
    for file in left:
        file.touch()
    with pytest.raises(RunError, match="another run is writing"):
        folder.lock()
    assert all(file.exists() for file in left)  # they may be those of the run that lives
    running.unlock()
    folder.lock()
    assert [file.name for file in left if file.exists()] == ["..pt", "notes.tmp"]
    folder.unlock()
