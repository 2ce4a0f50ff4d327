"""Checkpoints are whole or refused, and loading runs no code from a file."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import TINY_NETWORK, mostly_slow

from engine import checkpoint
from engine.checkpoint import CheckpointError, previous_path
from engine.run_folder import RunError, RunFolder
from models import build_segmenter


def toy_state(value: float = 1.0) -> dict:
    weights = torch.arange(40, dtype=torch.float32) + value
    return {"step": 3, "model": {"weight": weights, "count": torch.arange(5)}}


def same_state(a: dict, b: dict) -> bool:
    return a["step"] == b["step"] and all(torch.equal(a["model"][k], b["model"][k]) for k in b["model"])


@pytest.fixture
def place(tmp_path):
    return tmp_path / "run" / "resume.pt"


# ---- writing -----------------------------------------------------------------------------------------------


def test_saved_state_comes_back_and_nothing_else_is_left(place):
    checkpoint.save(toy_state(), place)
    assert same_state(checkpoint.load(place), toy_state())
    assert [p.name for p in place.parent.iterdir()] == ["resume.pt"]


@pytest.mark.parametrize("moment", ["write", "flush", "verify"])
def test_a_failed_save_leaves_the_old_file_and_no_rubbish(moment, place, monkeypatch):
    checkpoint.save(toy_state(1), place)

    def full_disk(*_):
        raise OSError("No space left on device")

    def half_written(state, file):
        file.write(b"PK half of a checkpoint")

    owner, name, action = {
        "write": (torch, "save", full_disk),
        "flush": (os, "fsync", full_disk),
        "verify": (torch, "save", half_written),
    }[moment]
    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="could not be written"):
        patch.setattr(owner, name, action)
        checkpoint.save(toy_state(2), place, keep_previous=True)
    assert same_state(checkpoint.load(place), toy_state(1))
    assert [p.name for p in place.parent.iterdir()] == ["resume.pt"]


def test_the_new_file_takes_its_place_in_one_move(place, monkeypatch):
    """At every moment the place holds nothing or a whole file: it is only ever the target of a rename."""
    moved = []

    def replace(source, target, original=os.replace):
        checkpoint.verify(source)
        moved.append((os.path.basename(target), os.path.exists(target)))
        original(source, target)

    monkeypatch.setattr(os, "replace", replace)
    checkpoint.save(toy_state(1), place)
    checkpoint.save(toy_state(2), place)
    assert moved == [("resume.pt", False), ("resume.pt", True)]


@pytest.mark.parametrize("keep", [True, False])
def test_keep_previous_sets_the_old_file_aside(keep, place):
    for value in (1, 2, 3):
        checkpoint.save(toy_state(value), place, keep_previous=keep)
    assert same_state(checkpoint.load(place), toy_state(3))
    assert previous_path(place).exists() == keep
    if keep:
        assert same_state(checkpoint.load(previous_path(place)), toy_state(2))


# ---- damage ------------------------------------------------------------------------------------------------


def harmless_or_refused(path, contents: bytes) -> bool:
    path.write_bytes(contents)
    try:
        return same_state(checkpoint.load(path), toy_state())
    except CheckpointError:
        return True


@pytest.mark.parametrize("bits", mostly_slow([0x01, 0x08, 0x10, 0xFF], fast=[0x01]))
def test_a_flipped_byte_is_noticed_or_changes_nothing(bits, place):
    """Positions are sampled, but every byte of the table of contents at the end is tried."""
    checkpoint.save(toy_state(), place)
    whole = place.read_bytes()
    contents = whole.index(b"PK\x01\x02")
    positions = [*range(bits % 7, contents, 7), *range(contents, len(whole), 1 if bits == 0x10 else 3)]
    for position in positions:
        damaged = bytearray(whole)
        damaged[position] ^= bits
        assert harmless_or_refused(place, bytes(damaged)), f"byte {position} of {len(whole)}"


def test_every_byte_of_every_tensor_is_guarded(place):
    checkpoint.save(toy_state(), place)
    whole = place.read_bytes()
    for tensor in toy_state()["model"].values():
        payload = tensor.numpy().tobytes()
        start = whole.index(payload)
        for position in range(start, start + len(payload)):
            place.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
            with pytest.raises(CheckpointError, match="does not match its checksum"):
                checkpoint.verify(place)


def test_a_truncated_file_is_refused(place):
    checkpoint.save(toy_state(), place)
    whole = place.read_bytes()
    for length in (*range(0, len(whole), 41), *range(len(whole) - 40, len(whole))):
        place.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            checkpoint.verify(place)


def test_load_newest_takes_the_newest(place):
    assert checkpoint.load_newest(place, "cpu", pytest.fail) is None
    checkpoint.save(toy_state(1), place, keep_previous=True)
    checkpoint.save(toy_state(2), place, keep_previous=True)
    assert same_state(checkpoint.load_newest(place, "cpu", pytest.fail), toy_state(2))


def test_load_newest_falls_back_to_the_previous_and_says_so(place):
    checkpoint.save(toy_state(1), place, keep_previous=True)
    checkpoint.save(toy_state(2), place, keep_previous=True)
    place.write_bytes(place.read_bytes()[:-100])
    told = []
    assert same_state(checkpoint.load_newest(place, "cpu", told.append), toy_state(1))
    assert len(told) == 1 and str(place) in told[0] and "falling back" in told[0]
    place.unlink()  # as if the power failed between the two renames
    assert same_state(checkpoint.load_newest(place, "cpu", pytest.fail), toy_state(1))


def test_load_newest_gives_up_when_both_are_damaged(place):
    checkpoint.save(toy_state(1), place, keep_previous=True)
    checkpoint.save(toy_state(2), place, keep_previous=True)
    place.write_bytes(b"")
    previous_path(place).write_bytes(b"nothing")
    told = []
    assert checkpoint.load_newest(place, "cpu", told.append) is None
    assert len(told) == 2


# ---- files that are not ours -------------------------------------------------------------------------------


class Malice:
    def __init__(self, target):
        self.target = str(target)

    def __reduce__(self):
        return os.mkdir, (self.target,)


def test_code_in_a_file_is_refused_and_not_run(place, tmp_path):
    place.parent.mkdir()
    torch.save({"step": 0, "model": Malice(tmp_path / "owned")}, place)
    with pytest.raises(CheckpointError, match="not a checkpoint of this project"):
        checkpoint.load(place)
    assert not (tmp_path / "owned").exists()
    torch.load(place, weights_only=False)  # the trap works where it is let
    assert (tmp_path / "owned").exists()


def step_state() -> dict:
    torch.manual_seed(0)
    model = build_segmenter(**TINY_NETWORK)
    model.add_classes(3)
    model.add_classes(2)
    return checkpoint.step_state(
        model,
        TINY_NETWORK,
        step=1,
        class_ids=range(5),
        class_names=["background", *"abcd"],
        methods={},
        costs={"seconds": 1.5, "images": 2, "iterations": 3},
        config="",
    )


def test_load_segmenter_gives_the_same_logits_and_the_rest(place):
    state = step_state()
    original = build_segmenter(**TINY_NETWORK)
    original.add_classes(3)
    original.add_classes(2)
    original.load_state_dict(state["model"])
    checkpoint.save(state, place)
    loaded, rest = checkpoint.load_segmenter(place)
    assert [c.out_channels for c in loaded.classifiers] == [3, 2]
    assert rest == {k: v for k, v in state.items() if k != "model"}
    images = torch.randn(2, 3, 32, 32)
    for mode in (False, True):
        ours, theirs = original.train(mode)(images), loaded.train(mode)(images)
        assert torch.equal(ours.logits, theirs.logits) and torch.equal(ours.features, theirs.features)


def without(key: str) -> dict:
    return {k: v for k, v in step_state().items() if k != key}


def with_network(**changes) -> dict:
    return step_state() | {"network": {"arguments": TINY_NETWORK, "classifiers": [3, 2]} | changes}


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        (lambda: torch.zeros(3), "Tensor"),
        (lambda: [1, 2], "list"),
        (lambda: step_state()["model"], "not a step checkpoint"),
        (lambda: without("network"), "no network"),
        (lambda: without("costs"), "no costs"),
        (lambda: with_network(classifiers=[3]), "do not fit"),
        (lambda: with_network(classifiers=[3, 4]), "do not fit"),
        (lambda: with_network(arguments=TINY_NETWORK | {"head_channels": 16}), "do not fit"),
        (lambda: with_network(arguments=TINY_NETWORK | {"body": "vgg"}), "vgg"),
        (lambda: with_network(arguments={"bodies": 1}), "do not fit"),
        (lambda: step_state() | {"network": {}}, "do not fit"),
    ],
)
def test_wrong_contents_are_a_checkpoint_error_that_names_the_file(contents, words, place):
    place.parent.mkdir()
    torch.save(contents(), place)
    with pytest.raises(CheckpointError, match=words) as caught:
        checkpoint.load_segmenter(place)
    assert str(place) in str(caught.value)


@pytest.mark.parametrize(
    "contents", [b"", b"hello", b"PK\x03\x04", b"\x89PNG\r\n", b"PK\x05\x06" + bytes(18)]
)
def test_wrong_files_are_a_checkpoint_error(contents, place):
    place.parent.mkdir()
    place.write_bytes(contents)
    with pytest.raises(CheckpointError, match=r"resume\.pt"):
        checkpoint.load(place)


def test_missing_files_and_folders_are_a_checkpoint_error(tmp_path):
    for path in (tmp_path / "step_0.pt", tmp_path):
        with pytest.raises(CheckpointError, match="no such checkpoint"):
            checkpoint.load(path)


# ---- one run per folder ------------------------------------------------------------------------------------


def test_a_folder_has_one_holder_at_a_time(tmp_path):
    first, second = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")
    first.lock()
    with pytest.raises(RunError, match=r"another run is writing.*run\.name"):
        second.lock()
    RunFolder(tmp_path / "other").lock()
    first.unlock()
    second.lock()


@pytest.mark.slow
def test_the_lock_dies_with_its_process(tmp_path):
    code = (
        "import sys, pathlib; from engine.run_folder import RunFolder\n"
        "folder = RunFolder(pathlib.Path(sys.argv[1])); folder.lock(); print('held', flush=True); "
        "sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    root = Path(checkpoint.__file__).parents[1]
    with subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout.readline() == b"held\n"
            with pytest.raises(RunError):
                RunFolder(tmp_path).lock()
        finally:
            holder.kill()
    RunFolder(tmp_path).lock()
