"""Kill real runs at random moments, start them again, and compare what they end with
to a run that was left alone.

python -m scripts.dev.crash_test --kills 50 [--ranks 2] [--seed 0] [--folder DIR]

Every trial is the same small 15-1 run with MiB and AlterSGD under torchrun. It is killed (SIGKILL, torchrun
with all its processes) one to six times at random moments, so also in the middle of a save or of an
evaluation, then runs to its end. Exit code 0 means: every tensor of every step checkpoint and every metric is
the same, bit for bit.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import torch

from data import shapes
from engine import checkpoint

ROOT = Path(__file__).parents[2]
STEPS = 6


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--kills", type=int, default=50, help="how many times runs are killed in all (default 50)"
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes a run has (default 2)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--method", default="mib", help="method.name of the runs (default mib)")
    parser.add_argument(
        "--folder", type=Path, help="work here and keep everything (default: a temporary folder)"
    )
    options = parser.parse_args(arguments)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="crash_test_"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return crash(options, folder)
    finally:
        if options.folder is None:
            shutil.rmtree(folder, ignore_errors=True)


def crash(options: argparse.Namespace, folder: Path) -> int:
    shapes.generate(folder / "shapes", train=240, val=40, size=32, progress=False)
    moments = random.Random(options.seed)
    started = time.monotonic()
    run_to_the_end(options, folder, "undisturbed")
    duration = time.monotonic() - started
    print(f"undisturbed run: {duration:.1f} s; now killing {options.kills} times", flush=True)
    kills, trial, different = 0, 0, 0
    while kills < options.kills:
        name = f"trial_{trial}"
        for _ in range(min(moments.randint(1, 6), options.kills - kills)):
            process = launch(options, folder, name)
            time.sleep(moments.uniform(0.1, duration))
            for pid in process_tree(process.pid):
                kill(pid)
            process.wait()
            kills += 1
        run_to_the_end(options, folder, name)
        problems = differences(folder / "undisturbed", folder / name)
        different += bool(problems)
        print(f"{name}: {kills} kills so far, {problems[0] if problems else 'identical'}", flush=True)
        trial += 1
    minutes = (time.monotonic() - started) / 60
    print(f"{trial - different} of {trial} trials identical after {kills} kills ({minutes:.1f} minutes)")
    return 1 if different else 0


def launch(options: argparse.Namespace, folder: Path, name: str) -> subprocess.Popen:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={options.ranks}",
    ]
    command += [
        "train.py",
        "configs/quickstart.yaml",
        "configs/altersgd.yaml",
        f"method.name={options.method}",
    ]
    command += [f"data.root={folder}/shapes", f"data.cache={folder}/cache", "data.crop=32", "data.workers=1"]
    command += [f"run.folder={folder}", f"run.name={name}", "run.checkpoint_every=1", "run.log_every=2"]
    command += ["model.head_channels=8", "train.batch_size=4", "train.epochs=1", "train.epochs_later=2"]
    command += ["train.device=cpu", "run.pictures=0"]
    log = open(folder / f"{name}.log", "ab")  # noqa: SIM115 (the child holds it)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=log,
        stderr=log,
        stdin=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    )


def process_tree(root: int) -> list[int]:
    """torchrun, its ranks (each in a session of its own) and their data workers."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # ended meanwhile
        children.setdefault(parent, []).append(int(stat.parent.name))
    tree = [root]
    for pid in tree:
        tree += children.get(pid, [])
    return tree


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def run_to_the_end(options: argparse.Namespace, folder: Path, name: str) -> None:
    code = launch(options, folder, name).wait()
    if code != 0:
        raise SystemExit(f"{name} ended with code {code}; its log: {folder / name}.log")


def differences(one: Path, other: Path, steps: int = STEPS) -> list[str]:
    """Return in what two finished runs differ: a tensor of a checkpoint, or what was counted in scoring."""
    found = []
    for step in range(steps):
        a, b = (checkpoint.load(run / f"step_{step}.pt")["model"] for run in (one, other))
        found += [f"step {step}: {name} differs" for name in a if not torch.equal(a[name], b[name])]
    a, b = (json.loads((run / "results.json").read_text())["steps"] for run in (one, other))
    found += [
        f"step {x['step']}: metrics differ"
        for x, y in zip(a, b, strict=True)
        if x["confusion"] != y["confusion"]
    ]
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
