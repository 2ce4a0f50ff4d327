"""Networks: a backbone, a DeepLab-v3 head and one classifier per step."""

from models.backbone import BACKBONES
from models.segmenter import Output, Segmenter, build_segmenter

__all__ = ["BACKBONES", "Output", "Segmenter", "build_segmenter"]
