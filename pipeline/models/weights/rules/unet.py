"""Names of U-Nets."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.models.weights.rules.syntax import LayerRules

_DEPTHS = 5


def _scope(depth: int) -> str:
    """The scope of the layers at a depth; each depth is nested in the one above."""
    return "".join(f"below{above}/branch_1/" for above in range(depth))


def _unet() -> Iterator[tuple[str, str]]:
    """Rules: the first two convolutions of a depth are the encoder's, the others the decoder's."""
    yield r"conv_0\.conv_(\d)\..+", r"{kind}_\1"
    yield r"inc\.double_conv\.[01]", "{kind}_0"
    yield r"inc\.double_conv\.[34]", "{kind}_1"
    for depth in range(1, _DEPTHS):
        below, above = _scope(depth), _scope(depth - 1)
        yield rf"down_{depth}\.convs\.conv_(\d)\..+", rf"{below}{{kind}}_\1"
        yield rf"upcat_{depth}\.upsample\.deconv", f"{below}conv_transpose_0"
        yield rf"upcat_{depth}\.convs\.conv_(\d)\..+", rf"{above}{{kind}}_<\1+2>"
        yield rf"down{depth}\.maxpool_conv\.1\.double_conv\.[01]", f"{below}{{kind}}_0"
        yield rf"down{depth}\.maxpool_conv\.1\.double_conv\.[34]", f"{below}{{kind}}_1"
        up = rf"up{_DEPTHS - depth}\."
        yield rf"{up}up", f"{below}conv_transpose_0"
        yield rf"{up}conv\.double_conv\.[01]", f"{above}{{kind}}_2"
        yield rf"{up}conv\.double_conv\.[34]", f"{above}{{kind}}_3"
    yield r"final_conv|outc\.conv", "conv_4"


UNET: LayerRules = tuple(_unet())
"""MONAI's BasicUNet, and the widespread `inc`, `down1`, `up1`, `outc` of five depths."""
