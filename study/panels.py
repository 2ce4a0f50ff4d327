"""What the networks of several runs see on the same test images."""

from pathlib import Path

import numpy as np
import torch

from configs.schema import load_config
from data import configured_dataset
from data.images import read_image
from data.loaders import read_labels
from data.transforms import normalise
from engine import checkpoint
from engine.inference import predict
from tracking.examples import Examples


@torch.inference_mode()
def examples(runs: list[Path], last_steps: list[int], count: int) -> Examples:
    """Return some test images of old and new classes, their truth, and what each run's last model sees."""
    config = load_config([runs[0] / "config.yaml"])
    dataset = configured_dataset(config.data)
    chosen = dataset.test[:: max(1, len(dataset.test) // count)][:count]
    images = [read_image(sample.image) for sample in chosen]
    labels = [[read_labels(sample)] for sample in chosen]
    for run, step in zip(runs, last_steps, strict=True):
        model, state = checkpoint.load_segmenter(run / f"step_{step}.pt")
        model, ids = model.eval(), np.array(state["class_ids"])
        for image, seen in zip(images, labels, strict=True):
            batch = torch.from_numpy(image).permute(2, 0, 1)[None]
            batch = normalise(batch, torch.float32, *model.colours)
            seen.append(ids[predict(model, batch).argmax(dim=1)[0].numpy()])
    return Examples(images, labels, dataset.class_names, dataset.palette)
