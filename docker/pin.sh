#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Asks the registries what the images of the Dockerfiles are today, as lines NAME=sha256:...
#   sh docker/pin.sh > digests.env
# Keep the file with your deployment and review its changes: it records which bytes you build on. It
# is not part of this repository, because its authors could not reach a registry.
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
