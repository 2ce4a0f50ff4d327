import math
import os
import shutil
import signal
import sys
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from PIL import Image

TINY_NETWORK = {
    "body": "resnet_tiny",
    "output_stride": 8,
    "norm": "abn",
    "head_channels": 8,
    "dilations": [1, 2, 3],
}
COLOURS = [(250, 250, 120), (250, 60, 60), (60, 250, 60), (60, 60, 250), (250, 60, 250)]

# Longer fuzzing:  pytest tests/test_config_fuzz.py tests/test_data.py --hypothesis-profile=long
settings.register_profile("short", max_examples=60, deadline=None)
settings.register_profile("long", max_examples=3000, deadline=None)
settings.load_profile("short")

# The suite runs several processes side by side: each has one thread, and so has what it starts.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # in this process, not in a pool of further ones


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Each process begins with its share of the slow tests, so that none has a long one left when the others
    are done.
    """
    processes = getattr(config, "workerinput", {}).get("workercount", 1)  # of pytest-xdist
    kinds = [[item for item in items if (item.get_closest_marker("slow") is None) == fast] for fast in (0, 1)]
    items[:] = [
        item
        for number in range(processes)
        for kind in kinds
        for item in kind[len(kind) * number // processes : len(kind) * (number + 1) // processes]
    ]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A process keeps to its part of the files, whose runs and data it has made, until it has to help."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.getoption("dist") == "load" else None


def mostly_slow(values: Iterable[Any], fast: Container[Any]) -> list[Any]:
    """Parameters of a test of which `bash scripts/test.sh --fast` tries only those in `fast`."""
    return [pytest.param(value, marks=[] if value in fast else pytest.mark.slow) for value in values]


@pytest.fixture(scope="session")
def shared() -> Path:
    """Real images, lists and weights, where somebody has them."""
    place = os.environ.get("ALTERSGD_SHARED")
    if not place:
        pytest.skip("ALTERSGD_SHARED does not point to the shared data and weights")
    return Path(place)


def write_voc(
    root: Path, train: list[list[int]], val: list[list[int]], size: int = 32, seed: int = 0
) -> Path:
    """A data set in VOC's layout: each image shows a square of every listed class, in a colour of its own."""
    rng = np.random.default_rng(seed)
    for folder in ("JPEGImages", "SegmentationClassAug", "ImageSets/Segmentation"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for split, images in {"train_aug": train, "val": val}.items():
        names = []
        for number, classes in enumerate(images):
            image = rng.integers(0, 80, (size, size, 3), dtype=np.uint8)
            mask = np.zeros((size, size), dtype=np.uint8)
            for c in classes:
                side = size // 2
                top, left = rng.integers(0, size - side, 2)
                mask[top : top + side, left : left + side] = c
                image[top : top + side, left : left + side] = (
                    60 * c % 256,
                    255 - 40 * c % 256,
                    100 + 30 * c % 156,
                )
            mask[0] = 255
            names.append(f"{split}_{number:03d}")
            Image.fromarray(image).save(root / "JPEGImages" / f"{names[-1]}.jpg", quality=95)
            Image.fromarray(mask).save(root / "SegmentationClassAug" / f"{names[-1]}.png")
        (root / "ImageSets" / "Segmentation" / f"{split}.txt").write_text("\n".join(names) + "\n")
    return root


@pytest.fixture(scope="session")
def toy_voc(tmp_path_factory) -> Path:
    """Three classes; the steps [[1, 2], [3]] have 8 and 4 images."""
    train = [[1], [2], [1, 2], [2], [1], [2], [1, 2], [1], [3], [3, 1], [3], [3, 2]]
    return write_voc(tmp_path_factory.mktemp("toy_voc"), train, [[1, 2], [3], [2, 3], [1], [3, 1]])


@pytest.fixture
def toy_arguments(toy_voc, tmp_path):
    """Arguments of train.py for a run of seconds; each call may add overrides."""

    def arguments(*overrides: str, name: str = "run") -> list[str]:
        return [
            *(f"data.root={toy_voc}", "data.steps=[[1, 2], [3]]", "data.crop=32", "data.evaluate=full"),
            *(
                f"data.cache={tmp_path}/cache",
                "data.workers=0",
                "model.body=resnet_tiny",
                "model.output_stride=8",
            ),
            *("model.head_channels=8", "model.dilations=[1, 2, 3]", "optim.lr=0.05", "optim.lr_later=0.02"),
            *("train.epochs=2", "train.epochs_later=4", "train.batch_size=4", "train.evaluate_batch=4"),
            *(f"run.folder={tmp_path}/runs", f"run.name={name}", "run.log_every=1", "run.pictures=1"),
            *("train.device=cpu", "method.strength=10", *overrides),
        ]

    return arguments


TRAINED: dict[tuple[bool, tuple[str, ...]], Path] = {}  # toy runs of this process, by figures and overrides


@pytest.fixture
def toy_run(toy_arguments, figures, tmp_path, tmp_path_factory) -> Callable[..., Path]:
    """A finished run with the given overrides, as a copy of one that is trained once for all tests."""

    def make(*overrides: str, name: str = "run") -> Path:
        import train

        overrides = overrides or ("method.name=mib",)
        key = figures, overrides
        if key not in TRAINED:
            folder = tmp_path_factory.mktemp("trained")
            assert train.main(toy_arguments(*overrides, f"run.folder={folder}")) == 0
            TRAINED[key] = folder / "run"
        return Path(shutil.copytree(TRAINED[key], tmp_path / "runs" / name))

    return make


class Killed(Exception):
    """Stands for SIGKILL: nothing is saved any more."""


def walk_until(arguments: list[str], iterations: float = math.inf, kill: bool = False) -> None:
    """Train in this process, which is asked to stop, or killed,
    in the iteration after so many of all steps.
    """
    import train
    from engine.arguments import read_config
    from engine.ranks import start_ranks
    from engine.watch import Watch

    stop, done, original = SimpleNamespace(requested=False), 0, Watch.after

    def after(self, *iteration):
        nonlocal done
        done += 1
        if kill and done > iterations:
            raise Killed
        stop.requested = done > iterations
        original(self, *iteration)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Watch, "after", after)
        train.walk(read_config(arguments), start_ranks("cpu"), stop)


@pytest.fixture
def at_the_root(monkeypatch):
    """In the project's folder, from where overlays are named."""
    monkeypatch.chdir(Path(__file__).parent.parent)


@pytest.fixture
def double_precision():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(autouse=True)
def keep_signal_handlers():
    """train.main listens to signals; a test must not leave that behind."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def figures(request, monkeypatch) -> bool:
    """Whether matplotlib draws what runs show: for tests marked `figures`. Two thirds of a toy run would be
    spent on it; others are drawn as where there is no matplotlib.
    """
    wanted = request.node.get_closest_marker("figures") is not None
    if not wanted:
        monkeypatch.setattr("tracking.drawing._figure", lambda width, height: None)
    return wanted


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    """What is written need not outlive the machine."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


@pytest.fixture(autouse=True)
def event_files_in_order(monkeypatch):
    """TensorBoard reads event files in the order of their names, which end in a count per process: after a
    second's 9 comes its 10, which sorts before. A process that trains does not open ten in a second; a
    process that tests does.
    """
    writer = sys.modules.get("tensorboard.summary.writer.event_file_writer")
    if writer is not None:
        monkeypatch.setattr(writer, "_global_uid", writer.AtomicCounter(0))
