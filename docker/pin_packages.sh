#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Write docker/requirements.txt: what pip installs into the image, at the versions of
# constraints.txt, with the hash of every wheel on PyPI. Needs uv (tried with 0.13.9).
#   sh docker/pin_packages.sh
set -eu
cd "$(dirname "$0")/.."
partial="$(mktemp docker/.requirements.XXXXXX)"
trap 'rm -f "$partial"' EXIT
{
    echo "# SPDX-License-Identifier: Apache-2.0"
    echo "# Written by docker/pin_packages.sh. The router decodes images with Pillow; NumPy below 2 is in"
    echo "# NVIDIA's image."
    echo pillow | uv pip compile --quiet --no-config --no-header --no-annotate --no-deps \
        --universal --only-binary :all: --generate-hashes \
        --default-index https://pypi.org/simple --constraint constraints.txt -
} > "$partial"
chmod 644 "$partial"
mv "$partial" docker/requirements.txt
