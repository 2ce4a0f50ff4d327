"""What the ranks of a run know only together: sums and means over all of them, one rank included."""

import torch.distributed as dist
from torch import Tensor


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def summed(numbers: Tensor) -> Tensor:
    """Return the sum over all ranks, in the place of this rank's numbers."""
    if is_distributed():
        dist.all_reduce(numbers)
    return numbers


def averaged(numbers: Tensor) -> Tensor:
    """Return the mean over all ranks, in the place of this rank's numbers."""
    if is_distributed():
        summed(numbers).div_(dist.get_world_size())
    return numbers
