# SPDX-License-Identifier: Apache-2.0
"""timm's names of a transformer's tensors, and how a file's tensors become ours by rules."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from saccade.errors import SaccadeError
from saccade.models.official.conversion import Official
from saccade.models.official.given_files import whole_number
from saccade.models.official.torchvision_keys import is_torchvision, timm_name

if TYPE_CHECKING:
    from torch import Tensor

Rules = Iterable[tuple[str, str]]  # a pattern of a whole key of the file -> our key

BLOCK: Rules = (
    (r"blocks\.(\d+)\.norm1\.(weight|bias)", r"trunk.blocks.\1.norm_attention.\2"),
    (r"blocks\.(\d+)\.attn\.qkv\.(weight|bias)", r"trunk.blocks.\1.attention.qkv.\2"),
    (r"blocks\.(\d+)\.attn\.proj\.(weight|bias)", r"trunk.blocks.\1.attention.out.\2"),
    (r"blocks\.(\d+)\.norm2\.(weight|bias)", r"trunk.blocks.\1.norm_mlp.\2"),
    (r"blocks\.(\d+)\.mlp\.fc1\.(weight|bias)", r"trunk.blocks.\1.widen.\2"),
    (r"blocks\.(\d+)\.mlp\.fc2\.(weight|bias)", r"trunk.blocks.\1.narrow.\2"),
)


@dataclass
class Reading:
    """A file's tensors on their way to our names, by timm's where they have torchvision's."""

    path: str
    tensors: "Mapping[str, Tensor]"
    weights: "dict[str, Tensor]" = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    file_keys: dict[str, str] = field(default_factory=dict)  # where they are not timm's

    @classmethod
    def of(cls, official: Official) -> "Reading":
        """A file of timm or torchvision; what it lacks may come from the --backbone's file."""
        tensors = {**(official.backbone or {}), **official.tensors}
        if not is_torchvision(tensors):
            return cls(official.path, tensors)
        names = {timm_name(key): key for key in tensors}
        renamed = {name: tensors[key] for name, key in names.items()}
        return cls(official.path, renamed, file_keys=names)

    def rename(self, rules: Rules) -> None:
        """Take every tensor whose name one of the rules knows."""
        compiled = [(re.compile(pattern), ours) for pattern, ours in rules]
        for key, value in self.tensors.items():
            for pattern, ours in compiled:
                if match := pattern.fullmatch(key):
                    self.put(match.expand(ours), value, key)

    def put(self, ours: str, value: "Tensor", *keys: str) -> None:
        """One of our tensors, and the keys of the file that it was made of."""
        self.weights[ours] = value
        self.names[ours] = ", ".join(self.file_keys.get(key, key) for key in keys)

    def ignore(self, pattern: str, reason: str) -> None:
        """Leave out every tensor of that name."""
        for key in self.tensors:
            if re.fullmatch(pattern, key):
                self.ignored[self.file_keys.get(key, key)] = reason

    def shape(self, key: str) -> tuple[int, ...]:
        """The shape of a tensor that the file must have.

        Raises: SaccadeError if it has none of that name.
        """
        if key not in self.tensors:
            found = ", ".join(list(self.tensors)[:3])
            raise SaccadeError(
                f"{self.path}: has no tensor {key!r} (found {len(self.tensors)}, first: {found}). "
                "Name the SOURCE that the file comes from, and --checkpoint-key where the weights "
                "lie under a name."
            )
        return tuple(self.tensors[key].shape)

    def depth(self, pattern: str) -> int:
        """One more than the largest number that the pattern's group finds."""
        matches = (re.match(pattern, key) for key in self.tensors)
        return 1 + max((int(match[1]) for match in matches if match), default=-1)


def hint(config: Mapping[str, Any] | None, *path: str, default: Any = None) -> Any:
    """What --config says at a path of nested keys."""
    found: Any = config
    for name in path:
        if not isinstance(found, Mapping) or name not in found:
            return default
        found = found[name]
    return found


def take_specials(reading: Reading, tokens: tuple[str, ...], position: str) -> None:
    """Class tokens, one below the other, and positions, without their axes of length 1."""
    import torch

    given = [reading.tensors[key].flatten(0, -2) for key in tokens]
    reading.put("trunk.class_tokens", torch.cat(given), *tokens)
    reading.put("trunk.position", reading.tensors[position].flatten(0, -2), position)


def block_fields(reading: Reading) -> dict[str, Any]:
    """Width, depth and hidden width of timm's blocks, as configuration."""
    hidden, dim = reading.shape("blocks.0.mlp.fc1.weight")
    return {
        "dim": dim,
        "layers": reading.depth(r"blocks\.(\d+)\."),
        "mlp_dim": hidden,
        "qkv_bias": "blocks.0.attn.qkv.bias" in reading.tensors,
    }


def heads_of(reading: Reading, config: Mapping[str, Any] | None, dim: int) -> int:
    """Heads of a ViT: 64 wide in every usual size, else as --config says.

    Raises: SaccadeError where neither tells.
    """
    given = hint(config, "num_heads")
    if given is not None:
        return whole_number(given, "num_heads")
    if dim in (192, 384, 768, 1024):
        return dim // 64
    raise SaccadeError(
        f"{reading.path}: tokens are {dim} wide, and how many heads share them cannot be read from "
        'the file. Pass it with --config, a JSON file such as {"num_heads": 4}.'
    )


def square_side(reading: Reading, count: int, key: str) -> int:
    """The side of a square grid of that many tokens.

    Raises: SaccadeError if there is none.
    """
    side = round(count**0.5)
    if side * side != count:
        raise SaccadeError(
            f"{reading.path}: {key} is for {count} tokens, which is not a square grid. Expected "
            "the positions of a square image."
        )
    return side
