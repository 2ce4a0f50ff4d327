"""Ranks that cannot work together say why, all of them, before anything is trained."""

import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from conftest import write_voc
from processes import become_rank, free_port, run_ranks

import train
from data import DataError
from engine import ranks as parallel
from engine import rendezvous
from engine.ranks import RankError, Ranks, StoppedBySignal
from engine.rendezvous import meet


@pytest.fixture
def announce(monkeypatch):
    """Sets what torchrun would."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)

    def announce(**variables: str | int) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))

    return announce


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": 2, "WORLD_SIZE": 2}, "RANK=2 and WORLD_SIZE=2 do not fit"),
        ({"RANK": -1, "WORLD_SIZE": 2}, "RANK=-1 and WORLD_SIZE=2 do not fit"),
        ({"RANK": 1}, "RANK=1 and WORLD_SIZE=1 do not fit"),
        ({"RANK": 0, "WORLD_SIZE": 0}, "do not fit"),
        ({"RANK": "first"}, "RANK='first' is no number"),
        ({"RANK": 0, "WORLD_SIZE": 2}, "MASTER_ADDR and MASTER_PORT, where the ranks meet, are not set"),
        ({"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": "x"}, "MASTER_PORT='x'"),
    ],
)
def test_an_environment_that_does_not_fit_is_explained(variables, message, announce, toy_arguments, capsys):
    announce(**variables)
    assert train.main(toy_arguments()) == 2
    assert message in capsys.readouterr().err


def test_a_rank_without_a_gpu_is_explained(announce):
    announce(RANK=1, WORLD_SIZE=2, LOCAL_RANK=1)
    with pytest.raises(RankError, match="LOCAL_RANK=1 has no GPU: torch sees 1"):
        rendezvous.announced_place(devices=1)


def test_a_port_in_use_is_explained(announce, toy_arguments, capsys):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        announce(RANK=0, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=other.getsockname()[1])
        assert train.main(toy_arguments()) == 2
    assert "the port is in use" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        (0, "rank 1 of 2 did not come within 0.01 minutes"),
        (1, "rank 1 does not reach the ranks' meeting place"),
    ],
)
def test_a_rank_that_never_comes_is_not_waited_for_for_ever(
    rank, message, announce, toy_arguments, monkeypatch, capsys
):
    monkeypatch.setattr(rendezvous, "MINUTES_TO_MEET", 0.01)
    monkeypatch.setattr(rendezvous, "SECONDS_OF_SILENCE", 0.1)
    announce(RANK=rank, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())
    assert train.main(toy_arguments()) == 2
    shown = capsys.readouterr().err
    assert message in shown and (rank == 1 or "rank 0 waits for rank 1 of 2" in shown)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ((1, 3, "gloo"), "WORLD_SIZE=2 and gloo"),
        ((1, 2, "nccl"), "WORLD_SIZE=2 and nccl"),
        ((0, 2, "gloo"), "two processes say that they are rank 0|the port is in use"),
    ],
)
def test_ranks_that_were_announced_differently_do_not_wait(others, message, announce, monkeypatch):
    monkeypatch.setattr(rendezvous, "MINUTES_TO_MEET", 0.02)
    announce(MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())
    with ThreadPoolExecutor(2) as threads:
        met = [threads.submit(meet, *place) for place in ((0, 2, "gloo"), others)]
        said = [str(one.exception()) for one in met if one.exception()]
    assert all(isinstance(one.exception(), RankError | None) for one in met)
    assert any(part in text for text in said for part in message.split("|")), said


# ---- ranks that would train something else -----------------------------------------------------------------


@pytest.fixture
def rank_0(monkeypatch):
    """Of two ranks, of which the other answers as told."""

    def answer(theirs) -> Ranks:
        monkeypatch.setattr(parallel, "gather_objects", lambda ranks, ours: [ours, theirs])
        return Ranks(0, 2, 0, torch.device("cpu"), None)

    return answer


def test_what_another_rank_cannot_do_ends_this_one(rank_0):
    with (
        pytest.raises(RankError, match="rank 1 cannot continue: no such folder"),
        parallel.together(rank_0(("no such folder", False))),
    ):
        pass
    with pytest.raises(StoppedBySignal, match="scanning"), parallel.together(rank_0(("scanning", True))):
        pass
    with pytest.raises(DataError, match="our own"), parallel.together(rank_0(("theirs", False))):
        raise DataError("our own")
    with parallel.together(rank_0(None)):
        pass


def test_a_rank_that_differs_is_named(rank_0):
    theirs = {"optim": {"lr": 0.1}, "data": {"root": "/b"}, "images": {"train": "b"}}
    ours = {"optim": {"lr": 0.2}, "data": {"root": "/a"}, "images": {"train": "a"}}
    with pytest.raises(RankError) as raised:
        parallel.check_alike(rank_0(theirs), ours, free=("data.root",))
    assert "rank 1: optim.lr: 0.1 -> 0.2" in str(raised.value)
    assert "rank 1: images.train: 'b' -> 'a'" in str(raised.value) and "root" not in str(raised.value)
    parallel.check_alike(rank_0(ours), ours)


def rank_of_its_own(
    rank: int, world: int, ports: list[int], cases: list[list[list[str]]], notes: Path
) -> None:
    for number, (port, arguments) in enumerate(zip(ports, cases, strict=True)):
        become_rank(rank, world, port)
        with open(notes / f"{number}_{rank}", "w") as sys.stderr:
            assert train.main(arguments[rank]) == 2


@pytest.mark.slow
def test_ranks_with_other_data_or_another_config_are_refused(toy_arguments, toy_voc, tmp_path):
    """Equal sizes went unnoticed, other sizes hung until the timeout."""
    classes = [[1], [2], [1, 2], [2], [1], [2], [1, 2], [1], [3], [3, 1], [3], [3, 2]]
    test_classes = [[1, 2], [3], [2, 3], [1], [3, 1]]
    other = write_voc(tmp_path / "other", classes, test_classes, seed=1)
    larger = write_voc(tmp_path / "larger", [*classes, *classes], test_classes)
    small = write_voc(tmp_path / "small", [[1, 2], [3]], test_classes)
    ours = toy_arguments()
    cases = {
        "rank 1: images.train:": toy_arguments(f"data.root={other}"),
        "rank 1: images.of each step: [16, 8] -> [8, 4]": toy_arguments(f"data.root={larger}"),
        "rank 1: images.of each step: [1, 1] -> [8, 4]": toy_arguments(f"data.root={small}"),
        "rank 1: optim.lr: 0.07 -> 0.05": toy_arguments("optim.lr=0.07"),
        "rank 1: run.folder.locked by: 'nobody' ->": toy_arguments(f"run.folder={tmp_path}/unshared"),
    }
    ports = [free_port() for _ in cases]
    both = [[ours, theirs] for theirs in cases.values()]
    run_ranks(rank_of_its_own, (2, ports, both, tmp_path))
    for number, message in enumerate(cases):
        for rank in range(2):
            assert message in (tmp_path / f"{number}_{rank}").read_text()


def test_a_machine_that_joins_later_has_counted_fewer_restarts(announce):
    """With a store of torchrun each restart has keys of its own, with one of rank 0 the keys are the same."""
    keys = {}
    for store in ("True", "False"):
        for restarts in (0, 1):
            announce(TORCHELASTIC_USE_AGENT_STORE=store, TORCHELASTIC_RESTART_COUNT=restarts)
            keys[store, restarts] = rendezvous._attempt()
    assert keys["True", 0] != keys["True", 1] and keys["False", 0] == keys["False", 1]
