# SPDX-License-Identifier: Apache-2.0
"""Upper limits of the caps on a request's images: a larger cap would protect nothing."""

from collections.abc import Iterator

from saccade.models.preprocessing import Preprocessing
from saccade.serving.repository.model_config import MAX_BATCH

# A gRPC message has at most 2 GiB, and an image of 1,000 megapixels takes 3 GB when decoded.
MOST = {
    "max_image_mib": 1024,
    "max_megapixels": 1000,
    "max_side_px": 65_535,
    "min_side_px": 65_535,
    "max_images": MAX_BATCH,
}
LARGEST_INPUT_PX = 16_384  # side of the model's own input


def absurd_caps(declared: Preprocessing) -> Iterator[str]:
    """Describe each cap that is above its limit."""
    for name, most in MOST.items():
        if (value := getattr(declared, name)) > most:
            yield f"{name} is {value}, expected at most {most}"
    sides = {"height_px": declared.height_px, "width_px": declared.width_px}
    sides |= {f"resize_px[{at}]": side for at, side in enumerate(declared.resize_px)}
    for name, side in sides.items():
        if side > LARGEST_INPUT_PX:
            yield f"{name} is {side}, expected at most {LARGEST_INPUT_PX}"
