# SPDX-License-Identifier: Apache-2.0
"""Every kind of image that arrives: converted as defined, or refused with found and allowed."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from saccade.models import image_decoding as decoding
from saccade.models.preprocessing import Preprocessing

SQUASHING = {"resize_mode": "squash", "min_side_px": 1}
GREY = Preprocessing(8, 8, 1, (0.5,), (0.5,), **SQUASHING).wanted()
COLOUR = Preprocessing(8, 8, 3, (0.5,) * 3, (0.5,) * 3, **SQUASHING).wanted()
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


OPENED = {
    "alpha over black": ({"alpha": "black"}, solid("RGBA", (*RED, 51)), (51, 0, 0)),
    "alpha dropped": ({"alpha": "dropped"}, solid("RGBA", (*RED, 51)), RED),
    "a palette's colour seen, though transparent": ({"alpha": "dropped"}, palette(RED), RED),
    "blue first": ({"channel_order": "bgr"}, solid("RGB", RED), RED[::-1]),
    "CMYK after the resize": ({"conversion": "after"}, solid("CMYK", (0, 255, 255, 0)), RED),
}


@pytest.mark.parametrize("case", OPENED)
def test_an_image_is_opened_as_the_manifest_says(case):
    fields, image, expected = OPENED[case]
    kind = "JPEG" if image.mode == "CMYK" else "PNG"
    options = {"transparency": 0} if image.mode == "P" else {}
    pixels = decoding.decode(encode(image, kind, **options), COLOUR._replace(**fields))
    np.testing.assert_allclose(pixels[4, 4], expected, atol=2)


def test_a_rotation_can_be_left_alone():
    upright = decoding.decode(rotated("JPEG", 6), GREY._replace(exif=False))[..., 0]
    assert upright[:, :3].max() < 20 and upright[:, 5:].min() > 235


def test_padding_has_its_colour_and_the_odd_pixel_below():
    wanted = COLOUR._replace(resize_mode="longest", fill=(1, 2, 3), height_px=9, width_px=8)
    pixels = decoding.decode(encode(solid("RGB", RED)), wanted)
    np.testing.assert_array_equal(pixels[:8], np.broadcast_to(RED, (8, 8, 3)))
    np.testing.assert_array_equal(pixels[8], np.broadcast_to((1, 2, 3), (8, 3)))


@pytest.mark.parametrize("shape", [(3, 900), (900, 3), (2000, 16)])
@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "lanczos"])
def test_a_strip_is_resized_only_where_it_is_kept(shape, interpolation, monkeypatch):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8))
    wanted = COLOUR._replace(
        resize_mode="shortest", interpolation=interpolation, height_px=20, width_px=20,
        resize_px=(23, 23),
    )  # fmt: skip
    whole = decoding.fit(image, wanted)
    monkeypatch.setattr(decoding, "WHOLE_PIXELS", 0)
    monkeypatch.setattr(decoding, "WHOLE_INPUTS", 0)
    monkeypatch.setattr(Image.Image, "resize", None)
    np.testing.assert_allclose(decoding.fit(image, wanted), whole.astype(int), atol=1)


def test_the_longest_strip_that_is_allowed_is_never_made_whole(monkeypatch):
    data = encode(Image.new("L", (16_384, 2), 77))
    monkeypatch.setattr(Image.Image, "resize", None)  # of 4,194,304 x 512 pixels
    side = {"height_px": 512, "width_px": 512, "resize_px": (512, 512)}
    pixels = decoding.decode(data, GREY._replace(resize_mode="shortest", **side))
    assert pixels.shape == (512, 512, 1) and (pixels == 77).all()


def test_without_antialiasing_two_pixels_of_an_axis_count():
    # Half-pixel centres: each of 4 columns lies between two of 12, whatever stands beside them.
    row = np.arange(12, dtype=np.uint8)[None].repeat(12, 0) * 20
    row[:, 0::3] = 255  # none of these is one of the two
    wanted = GREY._replace(antialias=False, height_px=4, width_px=4, resize_px=(4, 4))
    pixels = decoding.fit(Image.fromarray(row), wanted)
    np.testing.assert_array_equal(pixels[0, :, 0], [20, 80, 140, 200])


OF_3 = b"\xff\xc0\x00\x11\x08\x00\x40\x00\x40\x03"  # start of frame: 64 x 64, three channels
REFUSED = {
    "0 bytes": (b"", "0 bytes", "JPEG, PNG or WebP"),
    "text": (b"hello, not an image", "68 65 6c 6c 6f", "not a JPEG, PNG or WebP file"),
    "GIF": (encode(solid("L", 1), "GIF"), "47 49 46 38", "JPEG, PNG or WebP"),
    "TIFF": (encode(solid("L", 1), "TIFF"), "it starts with", "not a JPEG, PNG or WebP file"),
    "BMP": (encode(solid("L", 1), "BMP"), "42 4d", "JPEG, PNG or WebP"),
    "20,000 pixels wide": (encode(Image.new("1", (20_000, 1))), "20000 x 1", "16384"),
    "one pixel": (encode(solid("L", 1).resize((1, 1))), "1 x 1", "at least 2"),
    "one row": (encode(solid("L", 1).resize((9, 1))), "9 x 1", "at least 2"),
    "100,000 x 10": (encode(Image.new("1", (100_000, 10))), "100000 x 10", "16384"),
    "two channels": (cut("JPEG", 1).replace(OF_3, OF_3[:-1] + b"\2"), "JPEG", "nor CMYK"),
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
    data, shown, allowed = REFUSED[case]
    with pytest.raises(decoding.ImageRefused) as caught:
        decoding.decode(data, GREY._replace(min_side_px=2))
    message = str(caught.value)
    assert shown in message and allowed in message
    assert "/" not in message and "0x" not in message and "object at" not in message


def test_caps_are_those_of_the_repository():
    small = GREY._replace(max_side_px=8, max_megapixels=1, max_image_mib=1)
    assert decoding.decode(encode(solid("L", 5)), small).shape == (8, 8, 1)
    with pytest.raises(decoding.ImageRefused, match="9 x 8 pixels, at most 8"):
        decoding.decode(encode(Image.new("L", (9, 8))), small)


def test_no_pixel_is_decoded_before_the_caps_have_been_checked(monkeypatch):
    def load(self):
        raise AssertionError("decoded")

    monkeypatch.setattr(Image.Image, "load", load)
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", load)
    with pytest.raises(decoding.ImageRefused, match="megapixels"):
        decoding.decode(png(10_200, 5_000, 8, 0, b""), GREY)
