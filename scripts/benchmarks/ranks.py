"""A rank of the part `scaling`, started by torchrun: prints the seconds of its iterations as JSON.

torchrun --nproc_per_node=2 -m scripts.benchmarks.ranks <folder that all ranks see> [--quick]
"""

import json
import sys
from pathlib import Path

import torch

from engine.ranks import Ranks, start_ranks, stop_ranks
from scripts.benchmarks.measure import timed
from scripts.benchmarks.training import STEPS, Trainee, begin_last_step, make_run

WARM_UPS = 3


def main(folder: str, quick: bool) -> None:
    torch.set_num_threads(1)
    ranks = start_ranks("cpu")
    seconds = measure(ranks, folder, quick)
    if ranks.is_main:
        print(json.dumps(seconds))
    stop_ranks()


def measure(ranks: Ranks, folder: str, quick: bool) -> list[float]:
    crop, batch, repeats = (32, 4, 3) if quick else (128, 16, 20)
    overrides = ("method.name=mib", "model.body=resnet_tiny", "model.head_channels=64")
    run = make_run(
        Path(folder), STEPS, *overrides, f"data.crop={crop}", f"train.batch_size={batch}", ranks=ranks
    )
    iterate = timed(Trainee(run, *begin_last_step(run)).iterate)
    return [iterate() for _ in range(WARM_UPS + repeats)][WARM_UPS:]


if __name__ == "__main__":
    main(sys.argv[1], "--quick" in sys.argv[2:])
