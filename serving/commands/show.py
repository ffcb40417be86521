# SPDX-License-Identifier: Apache-2.0
"""`saccade show`: ask a model about one image, outputs included that say where it looked."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from saccade.errors import SaccadeError
from saccade.serving.client.call_options import ShowOptions
from saccade.serving.client.client import Client
from saccade.serving.client.router_view import RouterView
from saccade.serving.commands.map_picture import MapRow, Panel, maps_png


def looked_at(image: Path, options: ShowOptions) -> tuple[bytes, dict[str, Any]]:
    """The picture of what a model looked at, as PNG bytes, and its figures.

    Raises: SaccadeError if the image cannot be read, or the model has no maps to show.
    """
    pixels = read_pixels(image)
    with Client(options.url, options.model, options.timeout_s) as client:
        view = client.view()
        if view.family == "nac":
            if options.against:
                raise SaccadeError(
                    f"--against {options.against}: {options.model} is a NAC, whose circuit is "
                    "drawn by itself. Leave the option out."
                )
            return _circuit(client, view, image, pixels, options)
        rows = [_looked(client, view, image, options)]
    if options.against:
        with Client(options.url, options.against, options.timeout_s) as other:
            view.check_family(other.view())
            rows.append(_looked(other, other.view(), image, options))
    data = {"title": rows[0].title, **rows[0].facts}
    if len(rows) > 1:
        data["against"] = {"title": rows[1].title, **rows[1].facts}
    return maps_png(rows, pixels), data


def read_pixels(image: Path) -> np.ndarray:
    """The image as the picture shows it.

    Shapes: -> uint8 [h w 3].
    Raises: SaccadeError if it cannot be read.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(image) as opened:
            return np.asarray(ImageOps.exif_transpose(opened).convert("RGB"))
    except (OSError, ValueError) as error:
        raise SaccadeError(
            f"{image}: cannot be read as an image ({error}). Name a PNG, JPEG or WebP file."
        ) from error


def _looked(client: Client, view: RouterView, image: Path, options: ShowOptions) -> MapRow:
    families = {
        "sparo": _slots_of_code,
        "sot": _class_token,
        "slot-attention": _slots_of_scene,
        "vqa": _answered,
        "captioner": _captioned,
    }
    return families[view.family](client, view, image, options)


def _slots_of_code(client: Client, view: RouterView, image: Path, options: ShowOptions) -> MapRow:
    found = _ask(client, view, {"image": [image]}, ("attention",), options)
    grid = _grid(view, found["attention"].shape[-1])
    maps = found["attention"][0][:, -grid[0] * grid[1] :].reshape(-1, *grid)
    kept = view.facts(found["by"])["slots"]
    panels = [Panel(f"slot {slot}", each) for slot, each in zip(kept, maps, strict=True)]
    return MapRow(f"{found['by']}: where each slot reads", tuple(panels), {"slots": len(panels)})


def _class_token(client: Client, view: RouterView, image: Path, options: ShowOptions) -> MapRow:
    found = _ask(client, view, {"image": [image]}, ("attention",), options)
    maps = found["attention"][0]
    grid = _grid(view, maps.shape[-1])
    rows = maps.reshape(-1, maps.shape[-1])[:, -grid[0] * grid[1] :].reshape(-1, *grid)
    panels = [Panel(f"head {head}", each) for head, each in enumerate(rows)]
    (best,) = client.classify([image], options.budget, top=1)
    title = f"{found['by']}: {best.labels[0][0]}, where the class token reads"
    return MapRow(title, tuple(panels), best.to_dict())


def _slots_of_scene(client: Client, view: RouterView, image: Path, options: ShowOptions) -> MapRow:
    from saccade.serving.client.editing import pixels

    (found,) = client.segment([image], options.budget, options.seed)
    panels = [Panel(f"slot {slot}", mask, most=1.0) for slot, mask in enumerate(found.masks)]
    if found.reconstruction is not None:
        panels.insert(0, Panel("drawn by the model", pixels=pixels(found.reconstruction)))
    return MapRow(f"{found.variant}: what each slot paints", tuple(panels), found.to_dict())


def _answered(client: Client, view: RouterView, image: Path, options: ShowOptions) -> MapRow:
    from saccade.serving.client.text_tokens import question_tokens

    if not options.question.strip():
        raise SaccadeError(f"{view.model} answers questions. Ask one with --question.")
    tokens = question_tokens([options.question], view.facts(view.variants[0]))
    found = _ask(client, view, {"image": [image], "question": tokens}, ("attention",), options)
    (best,) = client.answer([image], [options.question], options.budget, top=1)
    weights = found["attention"][0].reshape(_cells(view, found["by"]))
    said = f"{options.question} {best.labels[0][0]}"
    panel = Panel(_zeros(weights), weights)
    facts = {**best.to_dict(), "zero_share": float(np.mean(weights == 0))}
    return MapRow(f"{found['by']}: {said}", (panel,), facts)


def _captioned(client: Client, view: RouterView, image: Path, options: ShowOptions) -> MapRow:
    (found,) = client.caption([image], options.budget)
    words = zip(found.text.split(), found.attention, strict=True)
    panels = tuple(Panel(f"{word}\n{_zeros(weights)}", weights) for word, weights in words)
    zeros = float(np.mean(found.attention == 0)) if panels else 0.0
    return MapRow(
        f"{found.variant}: {found.text}", panels, {**found.to_dict(), "zero_share": zeros}
    )


def _circuit(
    client: Client, view: RouterView, image: Path, pixels: np.ndarray, options: ShowOptions
) -> tuple[bytes, dict[str, Any]]:
    from saccade.models.nac.circuit import sample_circuit
    from saccade.models.nac.circuit_drawing import circuit_png

    wanted = ["attention", *(["link"] if "link" in view.outputs("") else [])]
    found = _ask(client, view, {"image": [image]}, wanted, options)
    facts = view.facts(found["by"])
    link = found["link"][0] if "link" in found else None
    circuit = sample_circuit(found["attention"][0], link, grid=tuple(facts["grid"]))
    (best,) = client.classify([image], options.budget, top=1)
    title = f"{found['by']}: {best.labels[0][0]}"
    return circuit_png(circuit, image=pixels, title=title), {"title": title, **circuit.to_dict()}


def _ask(
    client: Client,
    view: RouterView,
    inputs: dict[str, Any],
    outputs: Sequence[str],
    options: ShowOptions,
) -> dict[str, Any]:
    served = {name for role in view.parts for name in view.outputs(role)}
    if missing := [name for name in outputs if name not in served]:
        raise SaccadeError(
            f"{view.model} was exported without {missing[0]}, so that it cannot say where it "
            f"looked. Export again with --outputs {','.join(missing)}, then write the repository."
        )
    found = client.infer(inputs, [*outputs, "variant"], options.budget)
    return {**found, "by": found["variant"].item(0).decode()}


def _grid(view: RouterView, tokens: int) -> tuple[int, int]:
    """Rows and columns of an image's patches, which come behind tokens of another kind."""
    height, width = view.image_size()
    for rows in range(int(tokens**0.5) + height, 0, -1):
        if rows * width % height == 0 and 0 <= tokens - rows * (rows * width // height) <= 2:
            return rows, rows * width // height
    raise SaccadeError(f"{view.model}: {tokens} tokens are no grid over {height} x {width} pixels.")


def _cells(view: RouterView, variant: str) -> tuple[int, int]:
    grid = view.facts(variant)["grid"]
    if grid is None:
        raise SaccadeError(f"{view.model} looks at boxes, not at a grid: nothing to draw.")
    return int(grid[0]), int(grid[1])


def _zeros(weights: np.ndarray) -> str:
    return f"{100 * float(np.mean(weights == 0)):.0f} % zero"
