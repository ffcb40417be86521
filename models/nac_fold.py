# SPDX-License-Identifier: Apache-2.0
"""A NAC in evaluation with its constants folded: the same function, far fewer products."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.models.modulation import ModFC, ModFFN, activate
from saccade.models.nac import NAC, head_outputs
from saccade.models.nac_layers import Propagator, ReadIn, ReadOut, length_mask
from saccade.models.skmdpa import evaluation_bias
from saccade.models.tokenizers import PatchTokenizer, patches


class FoldedNAC(nn.Module):
    """What `NAC.fold` returns: `forward`, `outputs` and `embed` of a NAC, evaluation only.

    Codes, signatures and initial states are constants, so every modulation is a vector a module,
    the attention bias a matrix, and the read-in's query part of a probe in token space. In a
    conditional NAC they depend on the sample; the two re-associations hold all the same.

    Source: design section 4; equal to the unfolded model up to rounding.
    """

    @torch.no_grad()
    def __init__(self, source: NAC) -> None:
        super().__init__()
        self.config = source.config
        self.conditional = source.config.conditional
        code: Tensor | None = None
        theta: Tensor | None = None
        between: Tensor | None = None
        to_read_out: Tensor | None = None
        if self.conditional:
            self.circuit_source = source  # its generator, initial state and signatures
        else:
            circuit = source.generator()
            code, theta = circuit.codes, source.initial_state(circuit.codes)
            between, to_read_out = _biases(source, circuit)
        self.tokenizer = fold_tokenizer(source.tokenizer)
        self.read_in = FoldedReadIn(source.read_in, theta, code)
        self.propagators = nn.ModuleList(FoldedPropagator(p, code) for p in source.propagators)
        initial = source.initial_state(source.read_out_codes)
        self.read_out = FoldedReadOut(source.read_out, initial, source.read_out_codes, code)
        self.head = source.head
        self.register_buffer("link_bias", between)
        self.register_buffer("read_out_bias", to_read_out)
        self.requires_grad_(False).eval()
