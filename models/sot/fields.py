# SPDX-License-Identifier: Apache-2.0
"""The fields of a second-order transformer's configuration, one after the other."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SoTFields:
    """What `SoTConfig` checks; defaults are a small model of 8x8 images with the paper's formulas.

    A comment says what the paper leaves open and what the authors' code does instead.
    """

    input: str = "image"  # image: uint8 values [b h w c]; tokens: states [b n d] of BERT or GPT
    height_px: int = 8
    width_px: int = 8
    channels: int = 1
    mean: tuple[float, ...] = (0.5,)  # per channel, of pixels scaled to [0, 1]
    std: tuple[float, ...] = (0.5,)
    max_tokens: int = 128  # of a text
    class_token: str = "first"  # of a text: BERT's is the first, GPT's the last
    # The trunk.
    trunk: str = "vit"  # vit: one resolution and a class token; swin: windows, no class token
    token_embedding: str = "naive"  # of a ViT: one linear layer a patch, or a stem and three blocks
    dense_norm: bool = False  # batch norms in dense blocks, as later releases of timm have them
    patch_px: int = 2  # side of the square that becomes one token
    position: str = "learned"  # sinusoid: fixed, as the authors'
    distillation: bool = False  # a second class token with its own classifier; the two are averaged
    dim: int = 48  # width of a token; of a Swin's first stage
    layers: int = 3
    heads: int = 4
    mlp_dim: int = 96
    qkv_bias: bool = False
    layer_norm_epsilon: float = 1e-5
    stage_layers: tuple[int, ...] = ()  # of a Swin; each stage has half the grid of the last
    stage_heads: tuple[int, ...] = ()
    window: int = 7  # tokens on a side
    # The head.
    fusion: str = "sum"  # of class token and word tokens
    class_projection: int = 0  # width that the class token is brought to first (1,280 in table 3)
    class_activation: str = "none"  # behind that projection
    pooling: str = "mgcrp"
    pool_heads: int = 6
    m: int = 14
    n: int = 14
    pool_bias: bool = False  # of the projections W and R
    pool_dropout: float = 0.0  # on the pooled vector; the authors: 0.5 in Small, 0.7 in Base
    gcp_dim: int = 48  # to which GCP reduces the tokens; 48 gives 1,176 numbers
    # Numerics of the pooling: the paper's by default, the authors' in converted checkpoints.
    mean_removal: str = "none"  # scalar: one number a sample and head, from each side (the authors)
    gcp_divisor: str = "tokens"  # channels: the authors divide by the number of channels
    mpn_steps: int = 5  # of Newton and Schulz in iSQRT; the authors: 3
    normalization: str = "svpn"
    alpha: float = 0.5
    singular_values: int = 1  # found by svpn-fast; 0: all, and no remainder
    iterations: int = 1
    svpn_epsilon: float = 0.0  # of svpn-fast's last division; the authors: 1e-5
    learned_start: bool = False  # of svpn-fast; false: ones
    epn_axis: str = "matrix"  # over which L2 runs; rows: the authors', each column has length 1
    epn_epsilon: float = 1e-8  # under the root, whose slope at 0 has no bound
    classes: int = 10
    seed: int = 0  # of the initial weights
