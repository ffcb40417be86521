# SPDX-License-Identifier: Apache-2.0
"""Put the images of your registry into the manifests and the chart, by digest.

python deploy/pin_images.py REGISTRY/saccade-server:26.07@sha256:... REGISTRY/saccade-proxy:...

`docker push` prints the digest. The committed manifests have a digest of zeros, which no image has.
"""

import re
import sys
from pathlib import Path

DEPLOY = Path(__file__).resolve().parent
PINNED = re.compile(
    r"(?P<place>[a-z0-9./:_-]+/)?(?P<name>saccade-(server|proxy|bulk))(?P<tag>:[\w.-]+)?"
    r"@sha256:[0-9a-f]{64}"
)


def pin(images: list[str]) -> list[Path]:
    """Replace every occurrence of these images in the manifests and the chart's values.

    Raises: ValueError for an image without a digest or with another name.
    """
    chosen = {}
    for image in images:
        pinned = PINNED.fullmatch(image)
        if pinned is None or image.endswith("0" * 64):
            raise ValueError(
                f"{image!r} is not a saccade-server, -proxy or -bulk image with a digest, expected "
                "REGISTRY/saccade-server:26.07@sha256:... as `docker push` prints it"
            )
        chosen[pinned["name"]] = image
    changed = []
    for path in sorted(DEPLOY.rglob("*.yaml")):
        before = path.read_text()
        after = PINNED.sub(lambda pinned: chosen.get(pinned["name"], pinned[0]), before)
        if after != before:
            path.write_text(after)
            changed.append(path)
    return changed


def main() -> None:
    """Pin the images given on the command line."""
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    try:
        changed = pin(sys.argv[1:])
    except ValueError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    for path in changed:
        print(path.relative_to(DEPLOY.parent))


if __name__ == "__main__":
    main()
