# SPDX-License-Identifier: Apache-2.0
"""The configuration `bench`, on which speed is measured."""

from saccade.models.nac.model import NACConfig


def bench_config(modules: int = 256) -> NACConfig:
    """Return the configuration `bench`.

    d 128, code 64, 4 propagator layers with 4 heads, ffn 256, read-in 1 head, 64 tokens, 4
    read-out modules. The tokens are the 4x4 patches of a 32x32 color image.
    """
    return NACConfig(
        height_px=32,
        width_px=32,
        channels=3,
        mean=(0.5, 0.5, 0.5),
        std=(0.25, 0.25, 0.25),
        patch_px=4,
        modules=modules,
        readout_modules=4,
        dim=128,
        code_dim=64,
        signature_dim=16,
        propagator_layers=4,
        heads=4,
        ffn_dim=256,
        classes=10,
        signature_init="random",  # does not affect speed, and the prior takes seconds
    )
