"""What a user may do or meet: each gives a message that says what to do and exit code 2, never a traceback or
a wrong file."""

import errno
import gc
import json
import math
import os
import shutil
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import walk_until
from PIL import Image
from processes import become_rank, free_port, run_ranks
from tensorboard.summary.writer.record_writer import RecordWriter

import engine.step
import train
from configs.schema import ConfigError
from data.files import write_atomically
from engine import checkpoint, run_folder
from engine import ranks as parallel
from engine.arguments import read_config
from engine.checkpoint import CheckpointError
from engine.ranks import StoppedBySignal
from engine.watch import stop_all_ranks
from metrics.health import NonFiniteWeights
from scripts import predict

MIB = "method.name=mib"


def same_weights(one: Path, other: Path) -> bool:
    ours, theirs = (checkpoint.load(path)["model"] for path in (one, other))
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


def change(path: Path, **facts) -> None:
    """Other facts in a checkpoint."""
    torch.save(checkpoint.load(path) | facts, path)


def put(tensor: torch.Tensor, value: float) -> None:
    tensor[(0,) * tensor.dim()] = value


# ---- weights that are not finite ---------------------------------------------------------------------------


@pytest.fixture
def spoil(monkeypatch):
    """Spoils the weights or the momentum after the given update, whose losses were finite."""

    def spoil_update(number: int, what: str, value: float) -> None:
        original, count = engine.step.apply_update, 0

        def apply_update(model, optimizer, *others):
            nonlocal count
            terms = original(model, optimizer, *others)
            count += 1
            if count == number:
                parameter = next(model.parameters())
                tensor = parameter if what == "model" else optimizer.state[parameter]["momentum_buffer"]
                put(tensor.data, value)
            return terms

        monkeypatch.setattr(engine.step, "apply_update", apply_update)

    return spoil_update


@pytest.mark.parametrize(("what", "value"), [("model", math.nan), ("optimizer", math.inf)])
def test_weights_that_are_not_finite_are_never_saved_to_resume_from(
    what, value, spoil, toy_arguments, toy_run, tmp_path, capsys, monkeypatch
):
    arguments = toy_arguments(MIB, "run.checkpoint_every=1", "train.last_step=0", name="hurt")
    spoil(2, what, value)
    assert train.main(arguments) == 2
    error = capsys.readouterr().err
    assert (
        "the weights are not finite after iteration 2 of step 0" in error
        and "last good state is kept" in error
    )
    assert checkpoint.load(tmp_path / "runs/hurt/resume.pt")["position"]["iteration"] == 1
    monkeypatch.undo()
    gc.collect()  # the error holds the run, and with it the folder's lock, which else ends with the process
    assert train.main(arguments) == 0
    assert "resuming step 0 after iteration 1" in capsys.readouterr().out
    assert same_weights(tmp_path / "runs/hurt/step_0.pt", toy_run() / "step_0.pt")


def test_weights_that_are_not_finite_are_no_finished_step(
    spoil, toy_arguments, tmp_path, capsys, monkeypatch
):
    arguments = toy_arguments("run.checkpoint_every=3", "train.last_step=0")
    spoil(4, "model", math.inf)
    assert train.main(arguments) == 2
    assert "the weights are not finite at the end of step 0" in capsys.readouterr().err
    assert not (tmp_path / "runs/run/step_0.pt").exists()
    monkeypatch.undo()
    gc.collect()  # the error holds the run, and with it the folder's lock, which else ends with the process
    assert train.main(arguments) == 0
    assert "resuming step 0 after iteration 3" in capsys.readouterr().out


def test_a_state_that_is_not_finite_is_passed_over(toy_arguments, tmp_path, capsys):
    """Versions that did not look have left such files, after which the same command failed for ever."""
    arguments = toy_arguments(MIB, "train.last_step=0", "run.checkpoint_every=1")
    with pytest.raises(StoppedBySignal):
        walk_until(arguments, 1)
    newest = tmp_path / "runs/run/resume.pt"
    state = checkpoint.load(newest)
    put(next(iter(state["parts"]["model"].values())), math.nan)
    torch.save(state, newest)
    assert train.main(arguments) == 0
    said = capsys.readouterr().out
    assert "holds weights that are not finite" in said and "falling back to an older state" in said
    assert f"resuming step 0 after iteration {state['position']['iteration'] - 1}" in said


def test_a_finished_step_that_is_not_finite_is_refused(toy_run, toy_arguments, capsys):
    path = toy_run() / "step_0.pt"
    (path.parent / "step_1.pt").unlink()
    weights = checkpoint.load(path)["model"]
    put(next(iter(weights.values())), math.nan)
    change(path, model=weights)
    assert train.main(toy_arguments(MIB)) == 2
    assert "step_0.pt: holds weights that are not finite" in capsys.readouterr().err


def stop_on_one(rank: int, world: int, port: int) -> None:
    become_rank(rank, world, port)
    run = SimpleNamespace(ranks=parallel.start_ranks("cpu"))
    stop_all_ranks(run, None)
    with pytest.raises(NonFiniteWeights, match="mine" if rank == 1 else "another rank"):
        stop_all_ranks(run, NonFiniteWeights("mine") if rank == 1 else None)
    parallel.stop_ranks()


@pytest.mark.slow
def test_weights_that_are_not_finite_on_one_rank_stop_all():
    run_ranks(stop_on_one, (2, free_port()))


# ---- what lies in a run's folder ---------------------------------------------------------------------------


def test_a_step_best_of_somebodys_own_is_left_alone(toy_run, toy_arguments):
    folder = toy_run()
    own = folder / "step_best.pt"
    own.write_bytes(b"whatever")
    assert train.main(toy_arguments(MIB)) == 0
    assert own.read_bytes() == b"whatever" and (folder / "step_1.pt").exists()


@pytest.mark.parametrize("damage", ["truncated", "truncated behind a section", "empty", "of another version"])
def test_a_config_file_that_cannot_be_read_is_named(damage, toy_run, toy_arguments, capsys):
    file = toy_run() / "config.yaml"
    text = file.read_text()
    damaged = {
        "truncated": text[: text.index("steps:") + 8],
        "truncated behind a section": text[: text.index("method:\n")],
        "empty": "",
        "of another version": text.replace("train:\n", "train:\n  colour: 1\n"),
    }
    file.write_text(damaged[damage])
    assert train.main(toy_arguments(MIB)) == 2
    error = capsys.readouterr().err
    assert f"{file}: damaged, or of another version of this code" in error and "run.force=true" in error
    assert train.main(toy_arguments(MIB, "run.force=true")) == 0
    assert read_config([str(file)]).method.name == "mib"


@pytest.mark.parametrize("content", ['{"steps": []}', '{"data": {}, "steps": []}', "[]", "3"])
def test_results_without_their_data_are_named(content, toy_run, toy_arguments, capsys):
    file = toy_run() / "results.json"
    file.write_text(content)
    assert train.main(toy_arguments(MIB)) == 2
    error = capsys.readouterr().err
    assert str(file) in error and "move it away" in error
    file.unlink()
    assert train.main(toy_arguments(MIB)) == 0
    assert len(json.loads(file.read_text())["steps"]) == 2


@pytest.mark.parametrize("foreign", ["a step", "another network", "no position"])
def test_a_resume_file_that_is_none_is_named(foreign, toy_run, toy_arguments, capsys):
    folder = toy_run()
    (folder / "step_1.pt").rename(folder / "resume.pt")
    if foreign == "another network":
        position = {"step": 1, "iteration": 1, "seconds": 1.0}
        parts = {key: {"weight": torch.zeros(1)} for key in ("model", "method", "optimizer", "scaler")}
        torch.save({"parts": parts, "rng": [], "position": position}, folder / "resume.pt")
    elif foreign == "no position":
        torch.save(
            {"parts": {}, "rng": [], "position": {"step": "1", "iteration": None}}, folder / "resume.pt"
        )
    assert train.main(toy_arguments(MIB)) == 2
    error = capsys.readouterr().err
    assert f"{folder}/resume.pt: not a state inside a step of this run" in error and "away" in error
    (folder / "resume.pt").unlink()
    assert train.main(toy_arguments(MIB)) == 0


# ---- folders that cannot be written to, full disks ---------------------------------------------------------


def test_a_file_in_the_way_of_the_run_folder_is_named(toy_arguments, tmp_path, capsys):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/run").write_text("a letter")
    assert train.main(toy_arguments()) == 2
    assert f"{tmp_path}/runs/run: no run can write here (File exists)" in capsys.readouterr().err


def test_a_run_name_of_300_characters_is_refused(toy_arguments, capsys):
    assert train.main(toy_arguments(name="x" * 300)) == 2
    error = capsys.readouterr().err
    assert "no run can write here (File name too long)" in error and "run.name" in error


def test_a_read_only_run_folder_is_refused(toy_arguments, tmp_path, monkeypatch, capsys):
    def read_only(*_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(run_folder, "open", read_only, raising=False)
    assert train.main(toy_arguments()) == 2
    assert (
        "no run can write here (Read-only file system); choose another run.folder" in capsys.readouterr().err
    )


@pytest.mark.parametrize("name", ["config.yaml", "results.json"])
def test_a_disk_that_is_full_is_said_and_the_same_command_goes_on(
    name, toy_run, toy_arguments, monkeypatch, capsys
):
    folder = toy_run()
    (folder / "step_1.pt").unlink()
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    def fsync(file, original=os.fsync):
        if Path(os.readlink(f"/proc/self/fd/{file}")).name.startswith(f".{name}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(file)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        assert train.main(toy_arguments(MIB)) == 2
    error = capsys.readouterr().err
    assert (
        f"{folder / name}: could not be written (No space left on device)" in error and "make room" in error
    )
    assert (folder / name).read_bytes() == before[name] and not list(folder.glob(".*.tmp"))
    assert train.main(toy_arguments(MIB)) == 0
    assert len(json.loads((folder / "results.json").read_text())["steps"]) == 2


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("records", [0, 40])
def test_a_disk_too_full_for_curves_does_not_stop_a_run(
    records, toy_arguments, tmp_path, monkeypatch, capsys
):
    written = 0

    def write(self, data, original=RecordWriter.write):
        nonlocal written
        written += 1
        if written > records:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(self, data)

    monkeypatch.setattr(RecordWriter, "write", write)
    assert train.main(toy_arguments(MIB)) == 0
    error = capsys.readouterr().err
    assert "TensorBoard's files cannot be written ([Errno 28] No space left on device)" in error
    assert "Traceback" not in error
    assert len(json.loads((tmp_path / "runs/run/results.json").read_text())["steps"]) == 2


def test_files_are_as_private_as_the_umask_says(tmp_path):
    for mask, mode in ((0o077, 0o600), (0o022, 0o644), (0o027, 0o640)):
        before = os.umask(mask)
        try:
            write_atomically(tmp_path / "results.json", b"{}")
        finally:
            os.umask(before)
        assert (tmp_path / "results.json").stat().st_mode & 0o777 == mode
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


# ---- settings ----------------------------------------------------------------------------------------------


def test_a_folder_at_home_is_at_home(toy_arguments, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    config = read_config(
        toy_arguments("run.folder=~/mine", "train.start_from=~/step_0.pt", "data.root=~/VOC")
    )
    assert config.run.folder == f"{tmp_path}/mine"
    assert config.train.start_from == f"{tmp_path}/step_0.pt"
    assert config.data.root == f"{tmp_path}/VOC"
    with pytest.raises(ConfigError, match=r"run\.folder: .* home of nobody"):
        read_config(toy_arguments("run.folder=~nobody-of-this-name/x"))


@pytest.mark.parametrize("norm", ["abn", "abn_lean"])
def test_one_image_at_a_time_is_refused_where_a_norm_needs_two(norm, toy_arguments, capsys):
    assert train.main(toy_arguments("train.accumulate=4", f"model.norm={norm}")) == 2
    error = capsys.readouterr().err
    assert "the network one image at a time" in error and "lower train.accumulate" in error


def test_epochs_without_end_begin_at_once(toy_arguments, tmp_path):
    with pytest.raises(StoppedBySignal):
        walk_until(toy_arguments(f"train.epochs={10**15}"), 0)
    assert checkpoint.load(tmp_path / "runs/run/resume.pt")["position"]["iteration"] >= 1


# ---- checkpoints from elsewhere ----------------------------------------------------------------------------


@pytest.fixture
def image(tmp_path) -> str:
    Image.fromarray(np.zeros((32, 32, 3), np.uint8)).save(tmp_path / "picture.png")
    return str(tmp_path / "picture.png")


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"classes": ["background", "cat"]}, "names 2 of its 4 classes"),
        ({"classes": [0, 1, 2, 3]}, "are not the names of classes"),
        ({"class_ids": [0, 1, 2, 300]}, "are not the ids of classes"),
        ({"class_ids": [0, 1], "classes": ["background", "cat"]}, "scores 4 classes, but it lists 2"),
        ({"step": "one"}, "'one' is not the number of a step"),
    ],
)
def test_predict_refuses_a_checkpoint_that_contradicts_itself(facts, words, toy_run, tmp_path, image, capsys):
    path = toy_run() / "step_1.pt"
    change(path, **facts)
    assert predict.main([str(path), image, "--out", str(tmp_path / "seen")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {path}: ") and words in error


@pytest.mark.parametrize("step", ["../../../owned", -1, True, None, 10**30])
def test_a_step_that_is_no_number_names_no_path(step, toy_run, toy_arguments, tmp_path, capsys):
    source = shutil.copy(toy_run() / "step_0.pt", tmp_path / "foreign.pt")
    change(Path(source), step=step)
    assert train.main(toy_arguments(MIB, f"train.start_from={source}", name="other")) == 2
    assert f"{source}: " in (error := capsys.readouterr().err) and "is not the number of a step" in error
    assert not list(tmp_path.rglob("*owned*")) and not list((tmp_path / "runs/other").glob("step_*"))


def test_a_zip_bomb_is_refused_without_unpacking_it(tmp_path, monkeypatch):
    monkeypatch.setattr(zipfile.ZipFile, "testzip", lambda archive: pytest.fail("it was unpacked"))
    bomb = tmp_path / "step_0.pt"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/0", bytes(10**6))
    with pytest.raises(CheckpointError, match="compressed"):
        checkpoint.verify(bomb)
    with zipfile.ZipFile(bomb, "w") as archive:  # one record, listed a hundred times
        archive.writestr("archive/data/0", bytes(10**4))
        archive.filelist *= 100
    with pytest.raises(CheckpointError, match="larger than the file"):
        checkpoint.verify(bomb)
