# SPDX-License-Identifier: Apache-2.0
"""What a request of each family is: what comes in, what computes it, what is asked for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from saccade.export.artefact.frontier import Ops
from saccade.export.artefact.variant_files import VariantParts, encoded, filled
from saccade.export.runtimes.runners import Runner
from saccade.export.runtimes.runtime import Runtime
from saccade.models.captioner.caption_search import best_captions, step_of
from saccade.models.interface import Arrays
from saccade.serving.bench.load_requests import png_files, request

SPECIAL = 4  # tokens in front of a captioner's first word
# What a caller asks for; large maps are left out unless they are the answer.
ANSWERS = {
    "nac": ("probabilities",),
    "sot": ("probabilities",),
    "sparo": ("embedding",),
    "slot-attention": ("slots", "masks"),
    "vqa": ("probabilities",),
    "captioner": ("caption",),
}
# Parts that answer requests of their own, beside the one that answers a plain one.
BESIDE = {"sparo": ("text",)}


@dataclass(frozen=True)
class Work:
    """One kind of request of one variant.

    Shapes: inputs [n ...], a row a request.
    """

    variant: str
    role: str  # empty for plain requests
    setting: str
    run: Runner
    inputs: Mapping[str, np.ndarray]
    answers: tuple[str, ...]
    model: str | None  # that takes the inputs as they are; none where only the router can
    router: str
    encoded: tuple[str, ...] = ()  # inputs that the router takes as image files
    filled: tuple[str, ...] = ()  # inputs that the router draws itself

    @property
    def key(self) -> tuple[str, str]:
        """Variant and role."""
        return self.variant, self.role

    @property
    def title(self) -> str:
        """For a reader."""
        return f"{self.variant} {self.role}".rstrip()

    def __len__(self) -> int:
        return len(next(iter(self.inputs.values())))

    def row(self, index: int) -> dict[str, np.ndarray]:
        """The inputs of one request."""
        return {name: each[index : index + 1] for name, each in self.inputs.items()}

    def direct(self, index: int, *outputs: str) -> bytes:
        """One request to the variant itself, raw tensors."""
        assert self.model is not None
        return request(self.model, self.row(index), outputs or self.answers)

    def routed(self, index: int, *outputs: str) -> bytes:
        """One request to the router, as a caller sends it."""
        row = {name: each for name, each in self.row(index).items() if name not in self.filled}
        row |= {name: png_files(row[name]) for name in self.encoded}
        parameters = {"budget": self.setting}
        return request(self.router, row, outputs or self.answers, parameters)


def works_of(
    folder: Path,
    variant: VariantParts,
    inputs: Mapping[str, Arrays],
    runtime: Runtime,
    ops: Ops,
) -> list[Work]:
    """What is measured of one variant in that runtime: plain requests first.

    Shapes: inputs by role, [n ...] each.
    """
    runners = {
        role: runtime.load(folder, part, ops, threads=1) for role, part in variant.parts.items()
    }
    entry = variant.main.variant
    roles = [entry.role, *(role for role in BESIDE.get(entry.family, ()) if role in runners)]
    return [
        Work(
            variant=variant.name,
            role="" if role == entry.role else role,
            setting=entry.setting,
            run=_captioned(variant, runners) if entry.family == "captioner" else runners[role],
            inputs=dict(inputs[role]),
            answers=ANSWERS[entry.family],
            model=None if entry.family == "captioner" else variant.parts[role].variant.name,
            router=entry.model,
            encoded=encoded(variant.parts[role]),
            filled=filled(variant.parts[role]),
        )
        for role in roles
    ]


def _captioned(
    variant: VariantParts, runners: Mapping[str, Runner]
) -> Callable[[Arrays], dict[str, np.ndarray]]:
    """Encode and every step of the search with the model's own beam, as the router does it."""
    facts, step = variant.facts, step_of(runners["step"])
    limits = {name: int(facts[name]) for name in ("beam", "start", "end", "max_length")}

    def run(inputs: Arrays) -> dict[str, np.ndarray]:
        found = best_captions(step, runners["encode"](inputs), **limits)
        captions = [_sentence(each.tokens, facts["words"]) for each in found]
        return {"caption": np.array(captions, dtype=object)}

    return run


def _sentence(tokens: tuple[int, ...], words: list[str]) -> bytes:
    shown = (words[token - SPECIAL] if token >= SPECIAL else "?" for token in tokens)
    return " ".join(shown).encode()
