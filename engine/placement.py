"""Where the tensors of a run live, and in which layout and precision they are used."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from configs.schema import TrainConfig
from data.transforms import normalise

AMP_DTYPES = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Placement:
    device: torch.device
    channels_last: bool
    amp: str

    @classmethod
    def of(cls, train: TrainConfig, device: torch.device) -> "Placement":
        return cls(device, train.channels_last, train.amp)

    def arrange(self, tensors: Any) -> Any:
        """Return a module or a batch of images in the memory format of the run."""
        return tensors.to(memory_format=torch.channels_last) if self.channels_last else tensors

    def images(self, images: Tensor) -> Tensor:
        """Return images as floats on the device; they travel there as uint8."""
        return self.arrange(normalise(images.to(self.device, non_blocking=True), torch.get_default_dtype()))

    def labels(self, labels: Tensor) -> Tensor:
        return labels.to(self.device, non_blocking=True).long()

    def autocast(self) -> torch.autocast:
        dtype = AMP_DTYPES[self.amp]
        return torch.autocast(self.device.type, dtype, enabled=dtype is not None)
