"""Networks: a body, a DeepLab-v3 head and one classifier per step."""

from models.segmenter import BODIES, Output, Segmenter, build_segmenter

__all__ = ["BODIES", "Output", "Segmenter", "build_segmenter"]
