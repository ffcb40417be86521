# SPDX-License-Identifier: Apache-2.0
"""An LSTM that captions an image, looking at it before and after each update of its state."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from saccade.core.errors import SaccadeError
from saccade.models.captioner.caption_search import (
    SearchedCaption,
    Step,
    WrongSearch,
    best_captions,
    check_search,
    step_of,
)
from saccade.models.captioner.components import (
    CaptionerFunction,
    StepOutput,
    attend,
    convolutions,
    feature_parts,
    output_weights,
    scored,
)
from saccade.models.captioner.config import CaptionerConfig as CaptionerConfig
from saccade.models.interface import Family
from saccade.models.layers.pixels import PixelScale
from saccade.models.layers.resnet import ResNet
from saccade.models.resnet_sizes import sizes_of
from saccade.models.word_tokens import WordVocabulary


class Captioner(CaptionerFunction, Family):
    """A grid of visual features and an LSTM with an input and an output attention over it.

    The paper gives no initial state. Here it is tanh(affine(mean feature)), separately for h and
    c. Its two components exchange `features`: each cell's vector, followed by its parts of the
    affine maps of both attentions. These do not depend on the state: one computation per image.

    Source: Martins et al. 2021, section 3.1; Bahdanau et al. 2015 for the scores.
    """

    config_class = CaptionerConfig

    def __init__(self, config: CaptionerConfig, *, fresh: bool = True) -> None:
        """Draw the weights from config.seed; `fresh` has no effect here."""
        super().__init__()
        self.config = config
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self._build(config)

    def _build(self, config: CaptionerConfig) -> None:
        g, a, n = config.dim, config.attention_dim, config.hidden_dim
        if config.takes_pixels:
            self.scale = PixelScale(config)
            self.convolutions = (
                convolutions(config)
                if config.encoder == "cnn"
                else ResNet(sizes_of(config.encoder))
            )
        self.feed_forward = nn.Linear(config.feature_dim, g)
        if config.position:
            cells = (config.grid_height, config.grid_width)
            self.position = nn.Parameter(0.3 * torch.randn(*cells, g))
        self.first_h, self.first_c = nn.Linear(g, n), nn.Linear(g, n)
        self.embedding = nn.Embedding(config.vocabulary, config.embedding_dim)
        # The affine map of [v; h] in two parts: for the cell (with the bias) and for the state.
        self.input_key, self.output_key = nn.Linear(g, a), nn.Linear(g, a)
        self.input_query = nn.Linear(n, a, bias=False)
        self.output_query = nn.Linear(n, a, bias=False)
        self.input_score = nn.Linear(a, 1, bias=False)
        self.output_score = nn.Linear(a, 1, bias=False)
        self.lstm = nn.LSTMCell(config.embedding_dim + g, n)
        self.image_layer = nn.Linear(g, g)
        self.head = nn.Linear(g + n, config.vocabulary)

    def first_state(self, mean: Tensor) -> tuple[Tensor, Tensor]:
        """Do the same as `CaptionerFunction.first_state`."""
        return torch.tanh(self.first_h(mean)), torch.tanh(self.first_c(mean))

    def keys_of(self, visual: Tensor) -> tuple[Tensor, ...]:
        """Do the same as `CaptionerFunction.keys_of`."""
        return self.input_key(visual), self.output_key(visual)

    def step(self, features: Tensor, h: Tensor, c: Tensor, token: Tensor) -> StepOutput:
        """Predict the next word.

        Shapes: features as returned by `encode`, h and c [b n], token [b] int64.
        """
        parts = feature_parts(features, self.config)
        return self._advance(parts, h, c, self.embedding(token))

    def _advance(
        self, parts: tuple[Tensor, Tensor, Tensor], h: Tensor, c: Tensor, word: Tensor
    ) -> StepOutput:
        visual, input_key, output_key = parts
        score = scored(input_key, self.input_query(h), self.input_score)
        input_attention = score.flatten(1).softmax(-1).view_as(score)
        context = attend(input_attention, visual)
        h, c = self.lstm(torch.cat([word, context], -1), (h, c))
        score = scored(output_key, self.output_query(h), self.output_score)
        attention, error = output_weights(score, self.config)
        image = torch.tanh(self.image_layer(attend(attention, visual)))
        logits = self.head(torch.cat([image, h], -1))
        return StepOutput(logits, h, c, attention, input_attention, error)

    def forward(self, image: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of each next token, given the true ones, and the output attention.

        Shapes: image as in `encode`, tokens [b t] -> logits [b t v], attention [b t H W].
        """
        features, h, c = self.encode(image)
        parts = feature_parts(features, self.config)
        logits, maps = [], []
        for word in self.embedding(tokens).unbind(1):
            answer = self._advance(parts, h, c, word)
            h, c = answer.h, answer.c
            logits.append(answer.logits)
            maps.append(answer.attention)
        return torch.stack(logits, 1), torch.stack(maps, 1)

    @torch.no_grad()
    def caption(
        self, images: np.ndarray, *, beam: int | None = None, max_length: int | None = None
    ) -> list[SearchedCaption]:
        """Return the best caption of each image; a beam of 1 is the greedy search over all images.

        Shapes: images [b ...] as in `encode`.
        Raises: SaccadeError if the beam or length is out of range.
        """
        beam = self.config.beam if beam is None else beam
        length = self.config.max_length if max_length is None else max_length
        start, end = self.config.start, self.config.end
        limits = {"longest": self.config.max_length, "vocabulary": self.config.vocabulary}
        try:
            check_search(beam=beam, max_length=length, end=end, **limits)
            state, step = self._searchable(images)
            tokens = {"start": start, "end": end, "max_length": length}
            return best_captions(step, state, beam=beam, **tokens)
        except WrongSearch as error:
            raise SaccadeError(f"caption: {error}") from error

    def texts(self, captions: Sequence[SearchedCaption]) -> list[str]:
        """Return the captions in words."""
        vocabulary = WordVocabulary(self.config.words)
        return [vocabulary.decode(caption.tokens) for caption in captions]

    def _searchable(self, images: np.ndarray) -> tuple[dict[str, np.ndarray], Step]:
        encode, step = self.components()
        where = self.head.weight.device
        sent = torch.from_numpy(np.ascontiguousarray(images)).to(where)
        first = encode.run(**{encode.inputs[0].name: sent})

        def run(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            tensors = {name: torch.from_numpy(array).to(where) for name, array in arrays.items()}
            return {name: array.cpu().numpy() for name, array in step.run(**tensors).items()}

        return {name: array.cpu().numpy() for name, array in first.items()}, step_of(run)

    def runtime_metadata(self) -> dict[str, Any]:
        """Return the runtime metadata for a search over the two components.

        Units: max_length in words.
        """
        config = self.config
        return {
            "words": list(config.words),
            "start": config.start,
            "end": config.end,
            "max_length": config.max_length,
            "beam": config.beam,
            "attention": config.attention,
        }
