"""Faults injected for real: signals, full disks, corrupt bytes, dying processes. Nothing may be lost or
silently wrong."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import mostly_slow, write_voc
from PIL import Image
from processes import become_rank, free_port, run_ranks

import train
from data.loaders import StepDataset
from engine import checkpoint
from engine import ranks as parallel
from engine.arguments import read_config
from engine.run import prepare
from engine.run_folder import RunError, RunFolder
from scripts.dev import crash_test

ROOT = Path(train.__file__).parent
SMALL = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def weights_of(folder: Path, step: int = 1) -> dict[str, torch.Tensor]:
    return checkpoint.load(folder / f"step_{step}.pt")["model"]


def same_bits(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


SIGNALS = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])


def stopped_run(arguments: list[str], folder: Path, send: Callable[[int], None]) -> tuple[int, str]:
    """Exit code and errors of a run that is in the middle of training when `send` gets its process id."""
    process = subprocess.Popen(
        [sys.executable, "train.py", *arguments, "run.tracker=jsonl"],
        cwd=ROOT,
        env=os.environ | SMALL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    lines = folder / "scalars.jsonl"
    while not lines.exists() or lines.stat().st_size == 0:
        assert process.poll() is None
        time.sleep(0.02)
    send(process.pid)
    errors = process.communicate(timeout=60)[1]
    assert "Traceback" not in errors
    return process.returncode, errors


@pytest.mark.slow
@SIGNALS
def test_a_signal_saves_and_leaves_with_code_75(number, toy_arguments, toy_run, tmp_path):
    options = ("method.name=mib", "train.epochs=100", "train.epochs_later=2", "run.tracker=jsonl")
    folder = tmp_path / "runs/run"
    code, errors = stopped_run(toy_arguments(*options), folder, lambda pid: os.kill(pid, number))
    assert code == train.STOPPED_BY_SIGNAL and "stopped at step 0, iteration" in errors
    stopped_at = checkpoint.load(folder / "resume.pt")["position"]["iteration"]
    assert 0 < stopped_at < 200
    assert train.main(toy_arguments(*options)) == 0
    assert same_bits(weights_of(folder), weights_of(toy_run(*options, name="whole")))


@pytest.mark.slow
@SIGNALS
def test_a_signal_to_every_process_leaves_the_loaders_alive_until_all_is_saved(
    number, toy_arguments, tmp_path
):
    """A terminal, timeout and Slurm signal them all; a run without its loaders would end before it has
    saved."""
    arguments, folder = toy_arguments("train.epochs=2000", "data.workers=2"), tmp_path / "runs/run"
    code, errors = stopped_run(arguments, folder, lambda pid: os.killpg(pid, number))
    assert code == train.STOPPED_BY_SIGNAL and "stopped at step 0, iteration" in errors, errors
    assert checkpoint.load(folder / "resume.pt")["position"]["iteration"] > 0


# A run that meets a mistake in the code while its loaders are at work.
FAILING = """
import sys
import train
from engine.objective import Objective
def on_next_batch(self):
    raise ZeroDivisionError("a mistake")
Objective.on_next_batch = on_next_batch
sys.exit(train.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_run_that_fails_ends_and_its_loaders_with_it(toy_arguments):
    command = [sys.executable, "-c", FAILING, *toy_arguments("data.workers=2", "train.epochs=50")]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | SMALL, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1 and "ZeroDivisionError: a mistake" in done.stderr


@pytest.fixture
def file_size_limit():
    """A file system that has no room for a checkpoint, but for everything else."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.slow
def test_a_disk_that_fills_up_keeps_the_checkpoint_before(toy_arguments, tmp_path, file_size_limit, capsys):
    assert train.main(toy_arguments("train.last_step=0")) == 0
    first = (tmp_path / "runs/run/step_0.pt").read_bytes()
    file_size_limit(len(first) // 2)
    assert train.main(toy_arguments()) == 2
    message = capsys.readouterr().err
    assert "step_1.pt: the checkpoint could not be written" in message and "make room" in message
    assert (tmp_path / "runs/run/step_0.pt").read_bytes() == first
    assert not list((tmp_path / "runs/run").glob(".*.tmp"))
    file_size_limit(resource.RLIM_INFINITY)
    assert train.main(toy_arguments()) == 0
    assert train.main(toy_arguments(name="whole")) == 0
    assert same_bits(weights_of(tmp_path / "runs/run"), weights_of(tmp_path / "runs/whole"))


@pytest.mark.parametrize("damage", mostly_slow(["truncate", "flip"], fast=["flip"]))
def test_a_damaged_step_checkpoint_is_set_aside_and_trained_again(damage, toy_arguments, tmp_path, capsys):
    assert train.main(toy_arguments("method.name=mib")) == 0
    path = tmp_path / "runs/run/step_1.pt"
    whole, content = weights_of(tmp_path / "runs/run"), bytearray(path.read_bytes())
    if damage == "truncate":
        content = content[: len(content) // 3]
    else:
        content[len(content) // 3] ^= 1
    path.write_bytes(content)
    assert train.main(toy_arguments("method.name=mib")) == 0
    assert "step_1.damaged" in capsys.readouterr().out
    assert same_bits(weights_of(tmp_path / "runs/run"), whole)


@pytest.fixture
def own_voc(tmp_path) -> Path:
    """A copy of a data set that a test may spoil."""
    train_images = [[1], [2], [1, 2], [2], [3], [3, 1], [3], [3, 2]]
    return write_voc(tmp_path / "voc", train_images, [[1, 2], [3], [1]])


def test_an_image_of_other_content_and_equal_size_is_noticed(own_voc, toy_arguments, capsys):
    path = own_voc / "JPEGImages/train_aug_000.jpg"
    with Image.open(path) as file:
        image = file.convert("RGB")
    image.save(path, comment=b"a")
    assert train.main(toy_arguments(f"data.root={own_voc}", "train.last_step=0")) == 0
    size = path.stat().st_size
    image.save(path, comment=b"b")
    assert path.stat().st_size == size
    assert train.main(toy_arguments(f"data.root={own_voc}")) == 2
    assert "begun with other train images" in capsys.readouterr().err


def test_a_run_older_than_digests_of_the_content_goes_on_and_says_so_once(toy_run, toy_arguments, capsys):
    file = toy_run() / "results.json"
    results = json.loads(file.read_text())
    for key in ("train_content", "test_content"):
        del results["data"][key]
    file.write_text(json.dumps(results))
    said = []
    for _ in range(2):
        assert train.main(toy_arguments("method.name=mib")) == 0
        said.append("was begun before the content of images was recorded" in capsys.readouterr().out)
    assert said == [True, False]


def test_training_refuses_a_mask_value_without_a_name_unless_it_is_void(own_voc, toy_arguments, capsys):
    path = own_voc / "SegmentationClassAug/train_aug_000.png"
    with Image.open(path) as file:
        labels = np.array(file)
    labels[1] = 77
    Image.fromarray(labels).save(path)
    arguments = [f"data.root={own_voc}", "train.last_step=0"]
    assert train.main(toy_arguments(*arguments)) == 2
    assert "holds the label 77" in (said := capsys.readouterr().err) and "data.unnamed=void" in said
    assert train.main(toy_arguments(*arguments, "data.unnamed=void")) == 0
    assert "note: 1 masks hold the value 77, which has no name and is void" in capsys.readouterr().out


def test_a_data_set_that_changes_between_starts_is_noticed(own_voc, toy_arguments, tmp_path, capsys):
    arguments = toy_arguments(f"data.root={own_voc}", "train.last_step=0")
    assert train.main(arguments) == 0
    lists = own_voc / "ImageSets/Segmentation/train_aug.txt"
    names = lists.read_text().split()
    lists.write_text("\n".join(names[:-1]) + "\n")
    assert train.main(toy_arguments(f"data.root={own_voc}")) == 2
    message = capsys.readouterr().err
    assert "begun with other train images" in message and "run.force=true" in message
    lists.write_text("\n".join(names) + "\n")
    moved = own_voc.rename(own_voc.with_name("elsewhere"))
    assert train.main(arguments) == 2
    assert "does not exist" in capsys.readouterr().err
    assert train.main(toy_arguments(f"data.root={moved}")) == 0  # the same images at another place


def test_an_image_that_breaks_during_training_is_named(own_voc, toy_arguments, tmp_path, capsys):
    original = StepDataset.__getitem__
    broken = own_voc / "JPEGImages/train_aug_001.jpg"

    def spoiling(self, item):
        broken.write_bytes(b"\xff\xd8 no image")
        return original(self, item)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepDataset, "__getitem__", spoiling)
        assert train.main(toy_arguments(f"data.root={own_voc}", "train.epochs=8")) == 2
    assert "train_aug_001.jpg" in capsys.readouterr().err


def test_a_data_worker_that_dies_is_explained(toy_arguments, monkeypatch, capsys):
    def die(self, item):
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(StepDataset, "__getitem__", die)
    assert train.main(toy_arguments("data.workers=1")) == 1
    message = capsys.readouterr().err
    assert "lower data.workers" in message and "resumes from the last checkpoint" in message


@pytest.mark.slow
def test_two_runs_in_one_folder_are_refused(toy_arguments, tmp_path, capsys):
    folder = RunFolder(tmp_path / "runs/run")
    folder.lock()
    assert train.main(toy_arguments()) == 2
    assert "another run is writing to this folder" in capsys.readouterr().err
    folder.unlock()
    assert train.main(toy_arguments()) == 0


# A rank that dies once, in the middle of step 1, and leaves a note so that it does not die again.
DYING_RANK = """
import os, signal, sys
from pathlib import Path
import train
from engine.objective import Objective
original, note = Objective.on_next_batch, Path(sys.argv.pop())
count = 0
def on_next_batch(self):
    global count
    count += 1
    if os.environ["RANK"] == "1" and count == 7 and not note.exists():
        note.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return original(self)
Objective.on_next_batch = on_next_batch
sys.exit(train.main(sys.argv[1:]))
"""


def torchrun(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *arguments]


def rank_of_a_run(rank: int, world: int, port: int, arguments: list[str]) -> None:
    become_rank(rank, world, port)
    assert train.main(arguments) == 0


@pytest.mark.slow
def test_a_rank_that_dies_is_restarted_from_the_last_checkpoint(toy_arguments, tmp_path):
    script = tmp_path / "dying.py"
    script.write_text(DYING_RANK)
    options = ("method.name=mib", "run.checkpoint_every=1", "run.tracker=none")
    run_ranks(rank_of_a_run, (2, free_port(), toy_arguments(*options, name="whole")))
    launch = torchrun("--standalone", "--nproc_per_node=2", "--max-restarts=1")
    command = [*launch, str(script), *toy_arguments(*options, name="hurt"), str(tmp_path / "died")]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | SMALL, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "died").exists() and "resuming step 1 after iteration" in done.stdout
    assert same_bits(weights_of(tmp_path / "runs/whole"), weights_of(tmp_path / "runs/hurt"))


@pytest.mark.slow
def test_two_machines_on_loopback_equal_one_with_two_ranks(toy_arguments, tmp_path):
    options = ("method.name=mib", "phase.name=altersgd", "run.tracker=none")
    run_ranks(rank_of_a_run, (2, free_port(), toy_arguments(*options, name="one")))
    arguments = toy_arguments(*options, name="two")
    meeting = [
        "--nnodes=2",
        "--nproc_per_node=1",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{free_port()}",
    ]
    agents = [
        subprocess.Popen(
            [*torchrun(*meeting, "--rdzv-id=rehearsal", "--local-addr=127.0.0.1"), "train.py", *arguments],
            cwd=ROOT,
            env=os.environ | SMALL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    errors = [agent.communicate(timeout=300)[1] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], errors
    assert same_bits(weights_of(tmp_path / "runs/one"), weights_of(tmp_path / "runs/two"))
    results = json.loads((tmp_path / "runs/two/results.json").read_text())
    assert results["environment"]["world_size"] == 2


def disagree(rank: int, world: int, port: int) -> None:
    become_rank(rank, world, port)
    ranks = parallel.start_ranks("cpu")
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[0].bias.fill_(0.0)
        model[1].running_mean.fill_(float(rank))
    parallel.agree(model, ranks)
    assert model[1].running_mean.tolist() == [0.0, 0.0]
    with torch.no_grad():
        model[0].bias[1] = 1e-7 * rank
    with pytest.raises(parallel.RankError, match=r"first is 0\.bias"):
        parallel.agree(model, ranks)
    parallel.stop_ranks()


@pytest.mark.slow
def test_ranks_that_drift_apart_are_noticed():
    run_ranks(disagree, (2, free_port()))


def test_norms_that_cannot_synchronise_are_refused(toy_arguments, tmp_path):
    pytest.importorskip("inplace_abn")
    config = read_config(toy_arguments("model.norm=iabn"))
    alone = parallel.start_ranks("cpu")
    run = prepare(config, alone, parallel.StopRequest())
    two = type(
        "Group", (), {"size": lambda self: 2}
    )()  # what the norm asks of a process group before it refuses
    run.ranks = parallel.Ranks(0, 2, 0, alone.device, two)
    with pytest.raises(RunError, match=r"model\.norm=abn|model\.sync=false"):
        train.train_step(run, run.steps[0])
    run.folder.unlock()


@pytest.mark.slow
def test_killed_runs_end_with_the_same_bits(tmp_path, capsys):
    """A short form of `python -m scripts.dev.crash_test --kills 50`."""
    assert crash_test.main(["--kills", "3", "--folder", str(tmp_path)]) == 0
    assert "trials identical after 3 kills" in capsys.readouterr().out
    shutil.rmtree(tmp_path, ignore_errors=True)


def test_a_signal_that_comes_twice_at_once_is_one_request(monkeypatch):
    """As on a cluster, where a rank hears from the scheduler and from torchrun."""
    stop = parallel.StopRequest()
    for _ in range(2):
        signal.raise_signal(signal.SIGTERM)
        assert stop.requested
    monkeypatch.setattr(parallel.StopRequest, "SAME_REQUEST", 0.0)
    ended = []
    monkeypatch.setattr(signal, "raise_signal", ended.append)
    os.kill(os.getpid(), signal.SIGTERM)
    assert ended == [signal.SIGTERM] and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
