"""Sentences about tasks that aren't trained here, such as detection."""

from __future__ import annotations

import re
from collections.abc import Mapping

OTHER_TASKS: Mapping[str, str] = {
    r"coco|voc|yolo|ssd|.*rcnn|retinanet|.*detr|fcos|centernet|(?:.*(?:object|face)_)?detect\w*": (
        "boxes of objects aren't predicted here; an image has a class, numbers or a mask"
    ),
    r"whisper|librispeech|asr|.*speech_recogn\w*": (
        "sound isn't transcribed here; it has a class or numbers"
    ),
    r"wmt|t5|bart|seq2seq|.*translat\w*|.*summariz\w*": (
        "texts aren't translated here; they are continued, classified or matched"
    ),
    r"stable_diffusion|ddpm|.*diffusion": "images aren't made by diffusion here",
    r"gym|atari|cartpole|ppo|dqn|.*reinforce\w*": "there is no reinforcement learning here",
    r"cora|ogb\w*|gcn|gat|gnn|graphsage": "graphs of nodes and edges aren't read here",
    r"kinetics|ucf101|hmdb\w*|.*video\w*": "videos aren't read here; images and series are",
    r"modelnet|shapenet|pointnet|kitti|.*point_cloud": "clouds of points aren't read here",
}
"""Sentences about tasks that aren't trained here, by patterns of the first part of the names of
datasets and networks."""


def explain_other_task(name: str) -> str | None:
    """Return a sentence about the task of a dataset or a network that isn't trained here."""
    lowered = name.lower().replace("-", "_")
    for pattern, sentence in OTHER_TASKS.items():
        if re.match(rf"(?:{pattern})(?:v\d)?(?![a-z])", lowered):
            return sentence
    return None
