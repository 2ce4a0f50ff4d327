"""What the paper's table 1 should cost on GPUs, and on which it fits: a plan from counted operations,
not a measurement.

    python -m scripts.gpu_plan [--teraflops 60] [--bandwidth 1.5] [--seeds 3]

Operations are counted on the meta device, images are those of VOC 15-1 disjoint, and what cannot be counted
is an assumption printed with the table. What will measure it: torchrun --nproc_per_node=8 train.py
configs/voc/15-1.yaml, whose log shows img/s.
"""

import argparse
from functools import cache

import torch
from torch.utils.flop_counter import FlopCounterMode

from data.official import STEP_SIZES
from engine.terminal import exit_with
from models.segmenter import build_segmenter
from scripts.benchmarks.counting import count_iteration
from tracking.tables import markdown_table

CROP, EPOCHS, BATCH = 512, 30, 24
TEACHERS = 5  # LwF, LwF-MC, ILT, MiB, AlterSGD
OTHERS = 4  # FT, PI, EWC, RW
CARDS = (11, 16, 24, 40, 80)  # GB
GPUS = (1, 2, 8)
STEP_0_TRAININGS = 2  # one for all but LwF-MC, one for LwF-MC


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--teraflops",
        type=float,
        default=60.0,
        help="reached by one GPU, 1e12 per second (60: about 40 %% of an A100 with TF32)",
    )
    parser.add_argument(
        "--bandwidth", type=float, default=1.5, help="memory of one GPU, 1e12 bytes per second"
    )
    parser.add_argument("--link", type=float, default=0.1, help="between GPUs, 1e12 bytes per second")
    parser.add_argument("--seeds", type=int, default=3, help="runs of the whole table")
    parser.add_argument(
        "--reserve",
        type=float,
        default=1.0,
        help="GB of each GPU for CUDA itself and the libraries' workspaces",
    )
    parser.add_argument(
        "--gaps", type=float, default=0.1, help="share of the rest that the allocator cannot use"
    )
    options = parser.parse_args(arguments)

    forward, parameters, activations = count()
    first, later = image_passes()
    plain, with_teacher = 3 * forward, 4 * forward  # the backward pass costs twice the forward one

    def seconds(operations: float, passes: int, gpus: int) -> float:
        """Arithmetic, then memory traffic (each activation written and read in both directions),
        then the exchange.
        """
        alone = operations / (options.teraflops * 1e12) + passes * 4 * activations / (
            options.bandwidth * 1e12
        )
        exchange = passes / BATCH * 2 * 4 * parameters / (options.link * 1e12)
        return alone / gpus + (exchange if gpus > 1 else 0.0)

    operations = (
        (STEP_0_TRAININGS * first + OTHERS * later) * plain
        + TEACHERS * later * with_teacher
        + (first + later) * plain  # Joint
    )
    passes = STEP_0_TRAININGS * first + (OTHERS + TEACHERS) * later + first + later
    print(
        f"forward pass of ResNet-101, crop {CROP}: {forward / 1e9:.0f} GFLOP an image; "
        f"{parameters / 1e6:.1f} M parameters; {activations / 1e9:.2f} GB of activations an image\n"
        f"table 1, one seed, step 0 shared: {passes:,} image passes, {operations / 1e15:.0f} PFLOP\n"
        f"assumed: {options.teraflops:g} TFLOP/s and {options.bandwidth:g} TB/s reached per GPU, gradients "
        f"exchanged at {options.link:g} TB/s without overlap, loading hidden, evaluation not counted\n"
    )
    table = options.seeds * seconds(operations, passes, 8)
    chain = seconds(first * plain + later * with_teacher, first + later, 8)  # no later step before its step 0
    rows = [
        ["1", "one run after another", options.seeds * seconds(operations, passes, 1)],
        ["8", "one run after another, each on 8", table],
        ["64", "8 runs at once, each on 8", max(table / 8, chain)],
    ]
    header = ["GPUs", "layout", f"hours for {options.seeds} seeds: expected, not measured"]
    print(markdown_table(header, [[gpus, layout, f"{time / 3600:.1f}"] for gpus, layout, time in rows]))
    print()
    print(memory_plan(options.reserve, options.gaps))
    return 0


def memory_plan(reserve: float, gaps: float) -> str:
    """Return what fits, in words and as a table."""
    iteration, (fixed, per_image) = count_iteration("resnet101", CROP, 2), memory_of_an_iteration()
    _, parameters, _ = count()
    rows = []
    for card in CARDS:
        usable = (card - reserve) * 1e9 * (1 - gaps)
        rows.append(
            [f"{card} GB", *(fitting(usable, gpus, fixed, per_image, 4 * parameters) for gpus in GPUS)]
        )
    header = ["each GPU", *(f"{gpus} GPU{'s' if gpus > 1 else ''}" for gpus in GPUS)]
    return (
        f"an iteration of MiB, single precision: {iteration.operators:,} operators that are not views; "
        f"{iteration.kept / 2e9:.2f} GB an image kept for the backward pass\n"
        f"its tensors at the fullest moment: {fixed / 1e9:.2f} GB (student, teacher, momentum) and "
        f"{per_image / 1e9:.2f} GB an image; with several GPUs or micro-batches gradients too, "
        f"{4 * parameters / 1e9:.2f} GB\n"
        f"assumed: {reserve:g} GB of each GPU for CUDA and workspaces, {gaps:.0%} of the rest lost to gaps\n"
        f"train.accumulate for a batch of {BATCH} in all, and images at once on each GPU: counted, not "
        "measured on a GPU\n"
        "\n" + markdown_table(header, rows)
    )


def memory_of_an_iteration() -> tuple[float, float]:
    """Return bytes that do not depend on the batch, and bytes per image: the line through two counts."""
    small, large = (count_iteration("resnet101", CROP, batch).peak for batch in (2, 4))
    per_image = (large - small) / 2
    return small - 2 * per_image, per_image


def fitting(usable: float, gpus: int, fixed: float, per_image: float, gradients: float) -> str:
    """Return the smallest `train.accumulate` with which the batch fits into the usable bytes of each GPU.

    At the fullest moment gradients are there from the micro-batch before, or in the buckets that the GPUs
    exchange.
    """
    for accumulate in range(1, BATCH // gpus + 1):
        images, rest = divmod(BATCH, gpus * accumulate)
        if rest or images * gpus < 2:  # the pooled norm wants more than one image
            continue
        needed = fixed + images * per_image + (gradients if gpus * accumulate > 1 else 0.0)
        if needed <= usable:
            return f"{accumulate} ({images} at once)"
    return "does not fit"


@cache
def count() -> tuple[int, int, int]:
    """Forward FLOP per image, parameters, and bytes of activations per image in single precision."""
    with torch.device("meta"):
        model = build_segmenter("resnet101").train()
        model.add_classes(21)
        sizes: list[int] = []
        for module in model.modules():
            if not list(module.children()):
                module.register_forward_hook(lambda _m, _i, out: sizes.append(out.numel()))
        counter = FlopCounterMode(display=False)
        with counter:
            model(torch.empty(2, 3, CROP, CROP), enlarged=False)  # the pooled norm wants more than one image
    parameters = sum(p.numel() for p in model.parameters())
    return counter.get_total_flops() // 2, parameters, 4 * sum(sizes) // 2


def image_passes() -> tuple[int, int]:
    """Images trained on in step 0 and in all later steps."""
    sizes = STEP_SIZES["voc", "train_aug", "15-1", "disjoint"]
    return EPOCHS * sizes[0], EPOCHS * sum(sizes[1:])


if __name__ == "__main__":
    exit_with(main)
