#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Asks the registries what the images of the Dockerfiles are today, as lines NAME=sha256:...
#   sh docker/pin.sh > digests.env
# Keep the file with your deployment and look at what changes in it: it says which bytes you build
# on. It is not part of this repository, whose authors had no registry to ask.
set -eu
release="${RELEASE:-26.07}"

digest() {
    found="$(docker buildx imagetools inspect "$2" --format '{{.Manifest.Digest}}')"
    case "$found" in
        sha256:????????????????????????????????????????????????????????????????) ;;
        *) echo "$2: the registry said '$found', expected sha256:..." >&2; exit 2 ;;
    esac
    echo "$1=$found"
}

digest SERVER_DIGEST "nvcr.io/nvidia/tritonserver:$release-py3"
digest TENSORRT_DIGEST "nvcr.io/nvidia/tensorrt:$release-py3"
digest DEBIAN_DIGEST debian:bookworm-slim
digest PYTHON_DIGEST python:3.11-slim-bookworm
