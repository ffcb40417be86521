# SPDX-License-Identifier: Apache-2.0
"""Every kind of image that arrives: converted as defined, or refused with found and allowed."""

import importlib.util
import io
import struct
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

SOURCE = Path(__file__).resolve().parents[2] / "model_repository" / "router" / "decode.py"
spec = importlib.util.spec_from_file_location("router_decode", SOURCE)
decoding = sys.modules["router_decode"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(decoding)

GREY = decoding.Wanted(8, 8, 1, "bilinear", 16, 50, 16384)
COLOUR = GREY._replace(channels=3)
RAMP = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4
RED = (255, 0, 0)


def encode(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, depth: int, colour: int, pixels: bytes) -> bytes:
    """A PNG with any header: what a library would not write."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def sixteen_bit(levels: np.ndarray) -> bytes:
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in levels)
    return png(levels.shape[1], levels.shape[0], 16, 0, rows)


def animated(kind: str) -> bytes:
    frames = [Image.new("RGB", (8, 8), (shade, 0, 0)) for shade in (0, 90, 180)]
    return encode(frames[0], kind, save_all=True, append_images=frames[1:])


def rotated(kind: str, orientation: int) -> bytes:
    """Left half black, right half white, to be turned as its EXIF says."""
    image = Image.fromarray(np.repeat(np.uint8([[0] * 8 + [255] * 8]), 16, axis=0)).convert("RGB")
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encode(image, kind, exif=exif, **({"lossless": True} if kind == "WEBP" else {}))


def test_pixels_of_the_right_size_arrive_unchanged():
    np.testing.assert_array_equal(
        decoding.decode(encode(Image.fromarray(RAMP)), GREY)[..., 0], RAMP
    )


def solid(mode: str, value) -> Image.Image:
    return Image.new(mode, (8, 8), value)


def palette(value: tuple[int, int, int]) -> Image.Image:
    return solid("RGB", value).quantize(4)


CONVERTED = {
    "grey for a grey model": (encode(solid("L", 77)), GREY, 77),
    "grey for a colour model": (encode(solid("L", 77)), COLOUR, (77, 77, 77)),
    "colour for a grey model": (encode(solid("RGB", RED)), GREY, 76),
    "one bit": (encode(solid("1", 1)), GREY, 255),
    "RGBA, half seen, over white": (encode(solid("RGBA", (*RED, 51))), COLOUR, (255, 204, 204)),
    "RGBA, unseen, is white": (encode(solid("RGBA", (*RED, 0))), GREY, 255),
    "grey with alpha": (encode(solid("LA", (0, 51))), GREY, 204),
    "palette": (encode(palette(RED)), COLOUR, RED),
    "palette with a transparent colour": (
        encode(palette(RED), transparency=0), COLOUR, (255, 255, 255),
    ),
    "grey with a transparent level": (encode(solid("L", 9), transparency=9), GREY, 255),
    "colour with a transparent colour": (
        encode(solid("RGB", RED), transparency=RED), COLOUR, (255, 255, 255),
    ),
    "16 bit": (sixteen_bit(np.full((8, 8), 77 * 257)), GREY, 77),
    "16 bit, full": (sixteen_bit(np.full((8, 8), 65535)), COLOUR, (255, 255, 255)),
    "CMYK": (encode(solid("CMYK", (0, 255, 255, 0)), "JPEG", quality=100), COLOUR, (254, 0, 0)),
    "JPEG": (encode(solid("L", 77), "JPEG", quality=100), GREY, 77),
    "WebP": (encode(solid("RGB", RED), "WEBP", lossless=True), COLOUR, RED),
    "larger": (encode(Image.new("L", (640, 480), 77)), GREY, 77),
    "one pixel": (encode(Image.new("L", (1, 1), 77)), GREY, 77),
}  # fmt: skip


@pytest.mark.parametrize("case", CONVERTED)
def test_is_converted(case):
    data, wanted, expected = CONVERTED[case]
    pixels = decoding.decode(data, wanted)
    assert pixels.dtype == np.uint8 and pixels.shape == (8, 8, wanted.channels)
    np.testing.assert_allclose(pixels, np.broadcast_to(expected, pixels.shape), atol=1)


def test_16_bit_levels_are_scaled_not_cut():
    levels = np.linspace(0, 65535, 64).round().reshape(8, 8)
    np.testing.assert_array_equal(
        decoding.decode(sixteen_bit(levels), GREY)[..., 0], np.round(levels / 257)
    )


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize(
    ("orientation", "dark"), [(1, np.s_[:, :3]), (3, np.s_[:, 5:]), (6, np.s_[:3]), (8, np.s_[5:])]
)
def test_exif_rotation_is_applied(kind, orientation, dark):
    pixels = decoding.decode(rotated(kind, orientation), GREY)[..., 0].astype(int)
    assert pixels[dark].max() < 20
    assert pixels.mean() == pytest.approx(127, abs=6)


def test_photograph_with_a_preview_in_its_jpeg_is_one_image():
    big, preview = Image.new("RGB", (32, 32), RED), Image.new("RGB", (8, 8), "blue")
    data = encode(big, "MPO", save_all=True, append_images=[preview])
    np.testing.assert_allclose(decoding.decode(data, COLOUR)[0, 0], (254, 0, 0), atol=2)


def cut(kind: str, share: float, **options) -> bytes:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    data = encode(Image.fromarray(noise), kind, **options)
    return data[: int(share * len(data))]


REFUSED = {
    "0 bytes": (b"", "0 bytes", "JPEG, PNG or WebP"),
    "text": (b"hello, not an image", "19 bytes", "JPEG, PNG or WebP"),
    "GIF": (encode(solid("L", 1), "GIF"), "47 49 46 38", "JPEG, PNG or WebP"),
    "TIFF": (encode(solid("L", 1), "TIFF"), "bytes starting with", "JPEG, PNG or WebP"),
    "BMP": (encode(solid("L", 1), "BMP"), "42 4d", "JPEG, PNG or WebP"),
    "20,000 pixels wide": (encode(Image.new("1", (20_000, 1))), "20000 x 1", "16384"),
    "51 megapixels": (png(10_200, 5_000, 8, 0, b""), "51.0 megapixels", "50 megapixels"),
    "bomb of 4 gigapixels": (png(65_000, 65_000, 8, 0, b""), "4225.0 megapixels", "50 megapixels"),
    "17 MiB": (bytes(17 * 2**20), "17.0 MiB", "16 MiB"),
    "animated PNG": (animated("PNG"), "3 frames", "one"),
    "animated WebP": (animated("WEBP"), "3 frames", "one"),
    "header only": (encode(Image.fromarray(RAMP))[:33], "truncated", "whole"),
    "no pixels": (png(8, 8, 8, 0, b""), "truncated or corrupt", "whole file"),
    "wrong deflate stream": (
        encode(Image.fromarray(RAMP)).replace(b"IDAT", b"IDAU"), "corrupt", "whole",
    ),
    **{
        f"{kind} cut at {share:.0%}": (cut(kind, share, **options), "bytes", "whole")
        for kind, options in (("PNG", {}), ("JPEG", {}), ("WEBP", {"lossless": True}))
        for share in (0.02, 0.5, 0.9, 0.98)
    },
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_is_refused_with_found_and_allowed(case, recwarn):
    data, found, allowed = REFUSED[case]
    with pytest.raises(decoding.ImageRefused) as caught:
        decoding.decode(data, GREY)
    message = str(caught.value)
    assert found in message and allowed in message
    assert "/" not in message and "0x" not in message and "object at" not in message


def test_caps_are_those_of_the_repository():
    small = GREY._replace(max_side_px=8, max_megapixels=1, max_image_mib=1)
    assert decoding.decode(encode(solid("L", 5)), small).shape == (8, 8, 1)
    with pytest.raises(decoding.ImageRefused, match="9 x 8 pixels, allowed are 8"):
        decoding.decode(encode(Image.new("L", (9, 8))), small)


def test_no_pixel_is_decoded_before_the_caps_have_been_checked(monkeypatch):
    def load(self):
        raise AssertionError("decoded")

    monkeypatch.setattr(Image.Image, "load", load)
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", load)
    with pytest.raises(decoding.ImageRefused, match="megapixels"):
        decoding.decode(png(10_200, 5_000, 8, 0, b""), GREY)
