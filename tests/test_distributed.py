"""Two gloo ranks with half the batch each are one process with the whole batch."""

import gc
import json
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import become_rank, free_port, run_ranks

import engine.step
import train
from data import DataError
from engine import checkpoint
from engine import ranks as parallel
from engine.arguments import read_config
from engine.run import prepare
from metrics.confusion import ConfusionMatrix


def train_rank(rank: int, world: int, port: int, arguments: list[str]) -> None:
    become_rank(rank, world, port)
    torch.set_default_dtype(torch.float64)
    assert train.main(arguments) == 0


ALTERNATING = ("phase.name=altersgd", "phase.p=0.5")
# one iteration, two down, two up, one down
BY_TWO = ("phase.name=altersgd", "phase.p=0.25", "phase.flip=all", "phase.every=2", "train.epochs_later=6")
PAUSE = ("phase.name=pause", "phase.p=0.5")
CASES = [
    *(
        pytest.param(method, accumulate, ALTERNATING, id=f"{method}-{accumulate}")
        for method in ("mib", "ewc", "plop")
        for accumulate in (1, 2)
    ),
    pytest.param("ewc", 1, BY_TWO, id="ewc-1-by-two"),
    pytest.param("mib", 2, PAUSE, id="mib-2-pause"),
    *(pytest.param(method, 1, ALTERNATING, id=f"{method}-1") for method in ("dkd", "ssul", "dft")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "accumulate", "phase"), CASES)
def test_two_ranks_end_with_the_weights_of_one_process(method, accumulate, phase, toy_arguments, tmp_path):
    options = (
        f"method.name={method}",
        *phase,
        f"train.accumulate={accumulate}",
        # PLOP's is 0.01, and 10 magnifies rounding
        f"method.strength={'null' if method in ('plop', 'dkd') else 10}",
    )
    for world, name in ((1, "one"), (2, "two")):
        # In one process the synchronised norm sees micro-batches of 4 / accumulate images, so cut alike for
        # two.
        arguments = toy_arguments(*options, name=name)
        run_ranks(train_rank, (world, free_port(), arguments), world)
    for step in (0, 1):
        one, two = (checkpoint.load(tmp_path / f"runs/{name}/step_{step}.pt") for name in ("one", "two"))
        worst = max((one["model"][k] - two["model"][k]).abs().max().item() for k in one["model"])
        assert worst < 1e-9
        for statistic, tensors in one["methods"].get(method, {}).items():
            for name, tensor in tensors.items():
                torch.testing.assert_close(
                    tensor, two["methods"][method][statistic][name], rtol=1e-6, atol=1e-9
                )
    results = [json.loads((tmp_path / f"runs/{name}/results.json").read_text()) for name in ("one", "two")]
    assert [s["confusion"] for s in results[0]["steps"]] == [s["confusion"] for s in results[1]["steps"]]
    assert results[1]["environment"]["world_size"] == 2


@pytest.mark.slow
def test_two_ranks_find_the_statistics_of_one_process(toy_arguments, tmp_path):
    """STAR divides by weights of each rank's own images, so its later steps are alike, not equal."""
    for world, name in ((1, "one"), (2, "two")):
        arguments = toy_arguments("method.name=star", "method.strength=null", name=name)
        run_ranks(train_rank, (world, free_port(), arguments), world)
    first, later = (
        [checkpoint.load(tmp_path / f"runs/{name}/step_{step}.pt") for name in ("one", "two")]
        for step in (0, 1)
    )
    torch.testing.assert_close(first[0]["methods"], first[1]["methods"], rtol=1e-6, atol=1e-7)
    assert later[0]["methods"]["star"]["numbers"].shape == later[1]["methods"]["star"]["numbers"].shape
    assert all(tensor.isfinite().all() for tensor in later[1]["model"].values())


def watched_rank(rank: int, world: int, port: int, arguments: list[str], code: int) -> None:
    """Train, told to stop in the first iteration if the exit code is to be that,
    and look what is left when the group is left.
    """
    become_rank(rank, world, port)
    students, left, wrap, leave = [], [], engine.step.wrap, dist.destroy_process_group

    def watched_wrap(*arguments):
        student = wrap(*arguments)
        students.append(weakref.ref(student))
        return student

    def watched_leave():
        left.extend(student() for student in students)
        leave()

    engine.step.wrap, dist.destroy_process_group = watched_wrap, watched_leave
    parallel.StopRequest.requested = property(lambda self: code != 0 and bool(students))
    gc.disable()  # or it might be gone by chance
    assert train.main(arguments) == code
    assert left and not any(left)


@pytest.mark.slow
@pytest.mark.parametrize("code", [0, train.STOPPED_BY_SIGNAL])
def test_the_wrapped_model_is_gone_before_its_process_group(code, toy_arguments):
    """A process that drops it later may wait for gloo, and gloo for it, for ever."""
    arguments = toy_arguments("method.name=mib", "train.epochs=8", "run.log_every=1")
    run_ranks(watched_rank, (2, free_port(), arguments, code))


def sum_rank(rank: int, world: int, port: int, folder: Path) -> None:
    become_rank(rank, world, port)
    ranks = parallel.start_ranks("cpu")
    matrix = ConfusionMatrix(3)
    truth = torch.tensor([0, 1, 2, 255, 1])[rank::world]
    matrix.update(truth, torch.tensor([0, 1, 1, 0, 2])[rank::world])
    matrix.sum_over_ranks()
    told = parallel.any_rank(ranks, rank == 1), parallel.any_rank(ranks, False)
    assert told == (True, False)
    assert parallel.gather_objects(ranks, rank * 10) == [0, 10]
    torch.save(matrix.counts, folder / f"{rank}.pt")
    parallel.stop_ranks()


@pytest.mark.slow
def test_confusion_matrices_add_up_over_ranks_without_duplicates(tmp_path):
    run_ranks(sum_rank, (2, free_port(), tmp_path))
    expected = torch.tensor([[1, 0, 0], [0, 1, 1], [0, 1, 0]])
    for rank in range(2):
        assert torch.equal(torch.load(tmp_path / f"{rank}.pt"), expected)


def test_a_batch_that_the_ranks_cannot_share_is_refused(toy_arguments, capsys, monkeypatch):
    alone = parallel.start_ranks("cpu")
    pretended = parallel.Ranks(0, 3, 0, alone.device, None)
    with pytest.raises(DataError, match="3 ranks"):
        prepare(read_config(toy_arguments()), pretended, parallel.StopRequest())
