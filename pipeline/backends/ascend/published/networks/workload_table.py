"""The networks of published steps that the package doesn't ship, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from pipeline.backends.ascend.published.networks import (
    classifiers,
    detectors,
    patch_networks,
    pixels,
    sequences,
)
from pipeline.backends.ascend.published.networks.parts import (
    Body,
    absolute_loss,
    class_loss,
    square_loss,
)

Sample = tuple[int, ...]
OptimizerName = Literal["momentum", "adam", "adamw"]


@dataclass(frozen=True)
class Workload:
    """A network, its samples and its training.

    `body` takes inputs (batch, *sample) and the number of classes. `sample` is None for square
    images of three channels. `labels` is the shape of a sample's label, of integers with
    `class_loss` and of numbers otherwise; None: the shape of the outputs. `parameters` is the
    number that the network's authors or a package publish, for 1,000 classes unless `classes` is
    another number, 0 if none is published.
    """

    body: Body
    sample: Sample | None = None
    labels: Sample | None = ()
    loss: Callable[[Any, Any], Any] = class_loss
    optimizer: OptimizerName = "momentum"
    parameters: float = 0
    """In millions."""
    classes: int = 1000


def _maps(body: Body, sample: Sample | None = None, **options: Any) -> Workload:
    """Return a workload whose labels are as large as its outputs."""
    return Workload(body, sample, None, **options)


def _segments(body: Body, sample: Sample, parameters: float, *, sides: int = 1) -> Workload:
    """Return a workload with a class for each pixel, on `sides` outputs below each other."""
    labels = (sides * sample[0], sample[1])
    return Workload(body, sample, labels, parameters=parameters)


def _twins(local: bool) -> Body:
    depths = (2, 2, 10, 4) if local else (3, 4, 6, 3)
    widths = (64, 128, 256, 512) if local else (64, 128, 320, 512)
    return partial(patch_networks.twins, local=local, depths=depths, widths=widths)


WORKLOADS: Mapping[str, Workload] = {
    "resnet50_v1c": Workload(classifiers.resnet50, parameters=25.58),
    "resnet50_v1d": Workload(partial(classifiers.resnet50, pools=True), parameters=25.58),
    "cspdarknet53": Workload(classifiers.cspdarknet53, parameters=27.64),
    "resnet50_bam": Workload(classifiers.resnet50_bam, parameters=25.92),
    "glore_resnet50": Workload(classifiers.glore_resnet50, parameters=30.5),
    "residual_attention_net": Workload(classifiers.residual_attention_net, parameters=51.3),
    "convmixer": Workload(classifiers.convmixer, optimizer="adamw", parameters=51.63),
    "beit": Workload(patch_networks.beit, optimizer="adamw", parameters=86.53),
    "dino": _maps(patch_networks.dino, loss=square_loss, optimizer="adamw"),
    "ghostnet": Workload(classifiers.ghostnet, parameters=5.18),
    "hrnet_w18": Workload(classifiers.hrnet_w18, parameters=21.30),
    "inception_resnet_v2": Workload(classifiers.inception_resnet_v2, parameters=55.84),
    "facenet": Workload(classifiers.facenet, optimizer="adam", parameters=27.91, classes=8631),
    "arc_resnet100": Workload(patch_networks.arc_resnet100, parameters=65.16, classes=0),
    "tresnet_m": Workload(classifiers.tresnet_m, parameters=31.39),
    "bit_resnet50": Workload(classifiers.bit_resnet50, parameters=25.55),
    "ibn_resnet50": Workload(classifiers.ibn_resnet50, parameters=25.56),
    "osnet": Workload(patch_networks.osnet, (256, 128, 3), parameters=2.19, classes=0),
    "pcb": Workload(patch_networks.pcb, (384, 128, 3), (6,)),
    "spatial_mlp": Workload(patch_networks.spatial_mlp, optimizer="adamw", parameters=24.1),
    "twins_pcpvt_s": Workload(_twins(False), optimizer="adamw", parameters=24.11),
    "twins_altgvt_s": Workload(_twins(True), optimizer="adamw", parameters=24.06),
    "convit_tiny": Workload(patch_networks.convit_tiny, optimizer="adamw", parameters=5.71),
    "mnasnet": Workload(classifiers.inverted(classifiers.MNASNET, 32, 16, 1280), parameters=4.38),
    "spnasnet": Workload(classifiers.inverted(classifiers.SPNASNET, 32, 16, 1280), parameters=4.42),
    "efficientnet_v2_s": Workload(classifiers.efficientnet_v2_s, parameters=21.46),
    "cmt_small": Workload(patch_networks.cmt_small, optimizer="adamw", parameters=25.1),
    "van_b2": Workload(patch_networks.van_b2, optimizer="adamw", parameters=26.6),
    "light_cnn9": Workload(patch_networks.light_cnn9, (128, 128, 1), parameters=5.56, classes=0),
    "shufflenet_v2_plus": Workload(classifiers.shufflenet_v2_plus, parameters=5.1),
    "dncnn": _maps(pixels.dncnn, (40, 40, 1), loss=square_loss, optimizer="adam", parameters=0.56),
    "brdnet": _maps(pixels.brdnet, (50, 50, 3), loss=square_loss, optimizer="adam", parameters=1.1),
    "rdn": _maps(pixels.rdn, (48, 48, 3), loss=absolute_loss, optimizer="adam", parameters=22.12),
    "rcan": _maps(pixels.rcan, (48, 48, 3), loss=absolute_loss, optimizer="adam", parameters=15.44),
    "deeplab_v3_s16": _segments(partial(pixels.deeplab_v3, stride=16), (513, 513, 3), 58.1),
    "deeplab_v3_s8": _segments(partial(pixels.deeplab_v3, stride=8), (513, 513, 3), 58.1),
    "deeplab_v3_plus_s16": _segments(
        partial(pixels.deeplab_v3_plus, stride=16), (513, 513, 3), 59.3
    ),
    "deeplab_v3_plus_s8": _segments(partial(pixels.deeplab_v3_plus, stride=8), (513, 513, 3), 59.3),
    "pspnet": _segments(pixels.pspnet, (473, 473, 3), 49.1, sides=2),
    "densedepth": _maps(
        pixels.densedepth, (480, 640, 3), loss=absolute_loss, optimizer="adam", parameters=42.6
    ),
    "dlinknet34": _maps(
        pixels.dlinknet34, (1024, 1024, 3), loss=square_loss, optimizer="adam", parameters=31.1
    ),
    "midas": _maps(
        pixels.midas, (384, 384, 3), loss=absolute_loss, optimizer="adam", parameters=105.4
    ),
    "ocrnet": _segments(pixels.ocrnet, (512, 1024, 3), 70.4, sides=2),
    "openpose": _maps(
        pixels.openpose, (368, 368, 3), loss=square_loss, optimizer="adam", parameters=52.3
    ),
    "hed": _maps(pixels.hed, (481, 321, 3), loss=square_loss, optimizer="adam", parameters=14.7),
    "simple_baseline": _maps(
        pixels.simple_baseline, (256, 192, 3), loss=square_loss, optimizer="adam", parameters=34.0
    ),
    "fast_pose": _maps(
        pixels.fast_pose, (256, 192, 3), loss=square_loss, optimizer="adam", parameters=40.5
    ),
    "pvnet": _maps(pixels.pvnet, (480, 640, 3), loss=absolute_loss, optimizer="adam"),
    "centerface": _maps(
        pixels.centerface, (512, 512, 3), loss=square_loss, optimizer="adam", parameters=1.8
    ),
    "u2net": _maps(
        pixels.u2net, (320, 320, 3), loss=square_loss, optimizer="adam", parameters=44.0
    ),
    "retinanet_resnet101": _maps(
        partial(detectors.retinanet, depth=101), (600, 600, 3), loss=detectors.focal_loss
    ),
    "retinanet_resnet152": _maps(
        partial(detectors.retinanet, depth=152), (640, 640, 3), loss=detectors.focal_loss
    ),
    "ssd_mobilenet_v2": _maps(
        detectors.ssd_mobilenet_v2, (300, 300, 3), loss=detectors.focal_loss, parameters=4.5
    ),
    "ssd_mobilenet_v2_fpnlite": _maps(
        detectors.ssd_mobilenet_v2_fpnlite, (320, 320, 3), loss=detectors.focal_loss
    ),
    "ssd_resnet34": _maps(detectors.ssd_resnet34, (300, 300, 3), loss=detectors.focal_loss),
    "ssd_resnet50_fpn": _maps(detectors.ssd_resnet50_fpn, (640, 640, 3), loss=detectors.focal_loss),
    "yolo_v3_resnet18": _maps(
        detectors.yolo_v3_resnet18, (352, 640, 3), loss=detectors.yolo_loss, optimizer="adam"
    ),
    "yolo_v5_s": _maps(
        detectors.yolo_v5_s, (640, 640, 3), loss=detectors.yolo_loss, parameters=7.3, classes=80
    ),
    "faceboxes": _maps(
        detectors.faceboxes, (1024, 1024, 3), loss=detectors.focal_loss, parameters=1.0, classes=2
    ),
    "siamfc": _maps(detectors.siamfc, (255, 255, 6), loss=square_loss, parameters=2.3),
    "crnn": Workload(sequences.crnn, (32, 100, 1), (24,), parameters=8.3, classes=37),
    "transformer_big": Workload(sequences.transformer, (128, 1, 2), (128,), optimizer="adam"),
    "seq2seq_lstm": Workload(sequences.seq2seq, (51, 1, 2), (51,), optimizer="adam"),
    "cnnctc": Workload(
        sequences.cnn_ctc, (32, 100, 3), (26,), optimizer="adam", parameters=44.3, classes=37
    ),
    "gru": Workload(sequences.gru_translator, (32, 1, 2), (31,), optimizer="adam", classes=6113),
    "dam": Workload(sequences.deep_attention_matching, (10, 50, 1), optimizer="adam", classes=2),
    "melgan": _maps(sequences.mel_gan, (64, 1, 336), loss=square_loss, optimizer="adam"),
    "gnmt": Workload(sequences.gnmt, (51, 1, 2), (51,), optimizer="adam"),
    "text_rcnn": Workload(sequences.text_rcnn, (50, 1, 1), optimizer="adam"),
    "deepfm": Workload(sequences.deepfm, (39, 1, 2), optimizer="adam"),
    "speech_transformer": Workload(
        sequences.speech_transformer, (250, 1, 321), (30,), optimizer="adam"
    ),
    "fcn4": Workload(sequences.fcn4, (96, 1366, 1), optimizer="adam", classes=50),
    "c3d": Workload(sequences.c3d, (16, 112, 112, 3), parameters=78.4, classes=101),
    "tcn": Workload(sequences.tcn, (784, 1, 1), optimizer="adam", classes=10),
    "stable_diffusion_1_5": _maps(
        partial(sequences.stable_diffusion, head_width=None, text_width=768),
        (512, 512, 3),
        loss=square_loss,
        optimizer="adamw",
    ),
    "stable_diffusion_2_0": _maps(
        partial(sequences.stable_diffusion, head_width=64, text_width=1024),
        (512, 512, 3),
        loss=square_loss,
        optimizer="adamw",
    ),
}
