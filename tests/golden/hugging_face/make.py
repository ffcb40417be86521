# SPDX-License-Identifier: Apache-2.0
"""Tiny models of transformers with random weights, and what they answer (see README.md here)."""

import argparse
import json
import shutil
from pathlib import Path

import numpy as np
import torch
import transformers as hf
from PIL import Image

HERE = Path(__file__).parent
SIDE, CLASSES = 16, 3
TRUNK = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "image_size": SIDE,
    "patch_size": 4,
}
DINO = {key: value for key, value in TRUNK.items() if key != "intermediate_size"} | {
    "mlp_ratio": 2,
    "image_size": 24,  # positions for 36 patches, of which images of 16 px have 16
}
GATED = DINO | {"use_swiglu_ffn": True}  # as the giant: 24 channels, two thirds of 32 rounded up
SWIN = {
    "image_size": SIDE,
    "patch_size": 2,
    "embed_dim": 8,
    "depths": [2, 1],
    "num_heads": [1, 2],
    "window_size": 4,
    "qkv_bias": True,
}
# Windows of 4 in a grid of 8, with offsets as in windows of 3, then one window of 4.
SWIN2 = SWIN | {"pretrained_window_sizes": [3, 0]}
# 16 px are three whole patches of 5 px and a remainder, as in SigLIP SO400M of 384 px.
SIGLIP = {key: value for key, value in TRUNK.items() if key != "patch_size"} | {"patch_size": 5}
# Cells of 32 px: four stages, the image larger than in the other models.
CELLS = 64
# Sides of smaller images, by the model's name; those of DINOv2 have interpolated positions anyway.
SMALLER = dict.fromkeys(("vit", "vit-embedding", "deit", "deit-class"), 12)
SMALLER |= dict.fromkeys(("clip", "clip-projection", "clip-states"), 8)
SMALLER |= {"siglip": 12, "siglip-vision": 10, "siglip-classes": 12, "resnet": 32}
RESNET = {"embedding_size": 4, "hidden_sizes": [16, 32, 64, 128], "depths": [1, 2, 1, 1]}
BASIC = {"embedding_size": 4, "hidden_sizes": [4, 8, 16, 32], "depths": [1, 1, 1, 1]}
TEXT = {
    "vocab_size": 60,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 8,
    "bos_token_id": 58,
    "eos_token_id": 59,
    "pad_token_id": 0,
}
LABELS = {"id2label": {0: "cat", 1: "dog", 2: "eft"}, "label2id": {"cat": 0, "dog": 1, "eft": 2}}
HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.25, 0.5, 0.125]}  # exact in float32
SQUASHED = {"size": {"height": SIDE, "width": SIDE}, **HALF}
CROPPED = {"size": {"shortest_edge": 21}, "crop_size": {"height": SIDE, "width": SIDE}, **HALF}


def models() -> dict[str, tuple]:
    """Return the model and the image processor by the name of the folder."""
    vision = TRUNK | {"hidden_act": "quick_gelu"}
    clip = hf.CLIPConfig(
        vision_config=vision | {"projection_dim": 12},
        text_config=TEXT | {"projection_dim": 12},
        projection_dim=12,
    )
    squash, crop = hf.ViTImageProcessor(**SQUASHED), hf.CLIPImageProcessor(**CROPPED)
    bit = hf.BitImageProcessor(**CROPPED)
    deit = hf.DeiTImageProcessor(
        size={"height": 20, "width": 18}, crop_size={"height": SIDE, "width": SIDE}, **HALF
    )
    vit = hf.ViTConfig(**TRUNK, **LABELS)
    distilled = hf.DeiTConfig(**TRUNK, **LABELS)
    registered = hf.Dinov2WithRegistersConfig(**DINO, num_register_tokens=2, **LABELS)
    registered_alone = hf.Dinov2WithRegistersConfig(**DINO, num_register_tokens=3)
    siglip = hf.SiglipConfig(
        vision_config=TRUNK,
        text_config={**TEXT, "projection_size": 16, "pad_token_id": 1},
        **LABELS,
    )
    square = hf.SiglipImageProcessor(**SQUASHED)
    large = hf.ConvNextImageProcessor(size={"shortest_edge": CELLS}, crop_pct=0.875, **HALF)
    basic = hf.ResNetConfig(**BASIC, layer_type="basic", **LABELS)
    gated = hf.Dinov2Config(**GATED, **LABELS)
    alone = hf.CLIPVisionConfig(**vision, projection_dim=12)
    return {
        "vit": (hf.ViTForImageClassification(vit), squash),
        "vit-embedding": (hf.ViTModel(hf.ViTConfig(**TRUNK)), squash),
        "deit": (hf.DeiTForImageClassificationWithTeacher(distilled), deit),
        "deit-class": (hf.DeiTForImageClassification(distilled), deit),
        "dinov2": (hf.Dinov2ForImageClassification(hf.Dinov2Config(**DINO, **LABELS)), bit),
        "dinov2-embedding": (hf.Dinov2Model(hf.Dinov2Config(**DINO)), bit),
        "swin": (hf.SwinForImageClassification(hf.SwinConfig(**SWIN, **LABELS)), squash),
        "clip": (hf.CLIPModel(clip), crop),
        "clip-projection": (hf.CLIPVisionModelWithProjection(alone), crop),
        "clip-states": (hf.CLIPVisionModel(alone), crop),
        "registers": (hf.Dinov2WithRegistersForImageClassification(registered), bit),
        "registers-embedding": (hf.Dinov2WithRegistersModel(registered_alone), bit),
        "swinv2": (hf.Swinv2ForImageClassification(hf.Swinv2Config(**SWIN2, **LABELS)), squash),
        "siglip": (hf.SiglipModel(siglip), square),
        "siglip-vision": (hf.SiglipVisionModel(hf.SiglipVisionConfig(**SIGLIP)), square),
        "siglip-classes": (hf.SiglipForImageClassification(siglip), square),
        "resnet": (hf.ResNetForImageClassification(hf.ResNetConfig(**RESNET, **LABELS)), large),
        "resnet-basic": (hf.ResNetForImageClassification(basic), large),
        "resnet-embedding": (hf.ResNetModel(hf.ResNetConfig(**RESNET)), large),
        "dinov2-gated": (hf.Dinov2ForImageClassification(gated), bit),
        "dinov2-gated-embedding": (hf.Dinov2Model(hf.Dinov2Config(**GATED)), bit),
    }


def draw(model: torch.nn.Module, seed: int) -> None:
    """Give every parameter other numbers; layer scales are powers of two, so folding is exact."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            numbers = 0.3 * torch.randn(parameter.shape, generator=generator)
            if "lambda1" in name:
                numbers = 2.0 ** torch.randint(-2, 2, parameter.shape, generator=generator)
            elif "norm" in name and name.endswith("weight"):
                numbers = 1 + numbers
            elif "convolution" in name:
                numbers = numbers / parameter[0].numel() ** 0.5  # many of them follow each other
            parameter.copy_(numbers)
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
            elif name.endswith("running_var"):
                buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))


def answers(model: torch.nn.Module, pixels: torch.Tensor, tokens: torch.Tensor, **more) -> dict:
    """Return what a model makes of pixels, in its own type."""
    name = type(model).__name__
    if name == "CLIPModel":
        made = model(input_ids=tokens, pixel_values=pixels, **more)
        return {
            "embedding": made.image_embeds,
            "text": made.text_embeds,
            "logits": made.logits_per_image,
        }
    if name == "SiglipModel":
        return answers(model.vision_model, pixels, tokens, **more)
    made = model(pixel_values=pixels, **more)
    if "Classification" in name:
        return {"logits": made.logits}
    if name.startswith(("CLIPVisionModel", "Siglip", "ResNet")):
        states = made.image_embeds if name.endswith("Projection") else made.pooler_output.flatten(1)
    else:
        states = made.last_hidden_state[:, 0]
    return {"embedding": torch.nn.functional.normalize(states, dim=-1)}


def features(model: torch.nn.Module, pixels: torch.Tensor) -> torch.Tensor:
    """Return all tokens of an image after the last norm; a ResNet has none.

    Shapes: pixels [b c h w] -> [b n d], the patches last.
    """
    vision = getattr(model.base_model, "vision_model", model.base_model)
    made = vision(pixel_values=pixels).last_hidden_state
    if type(model).__name__.startswith("CLIP"):
        return vision.post_layernorm(made)
    return made.flatten(2).mT if made.dim() == 4 else made


def main() -> None:
    """Write a folder per model, as `save_pretrained` does, and answers.npz."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE)
    out = parser.parse_args().out
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (3, SIDE, SIDE, 3), dtype=np.uint8)
    tokens = np.array([[58, 3, 7, 59, 0, 0, 0, 0], [58, 9, 59, 0, 0, 0, 0, 0]], np.int64)
    large = rng.integers(0, 256, (2, CELLS, CELLS, 3), dtype=np.uint8)
    arrays = {"images": images, "large images": large, "tokens": tokens}
    mean, std = (np.array(HALF[key]) for key in ("image_mean", "image_std"))
    pixels = {
        resnet: torch.from_numpy((given / 255 - mean) / std).permute(0, 3, 1, 2).contiguous()
        for resnet, given in ((False, images), (True, large))
    }
    for seed, (name, (model, processor)) in enumerate(models().items()):
        draw(model, seed)
        folder = out / name
        shutil.rmtree(folder, ignore_errors=True)
        model.eval().save_pretrained(folder)
        processor.save_pretrained(folder)
        with torch.no_grad():
            given = pixels[name.startswith("resnet")]
            made = answers(model.double(), given, torch.from_numpy(tokens))
            made["features"] = features(model, given)
            if side := SMALLER.get(name):
                more = {} if name == "resnet" else {"interpolate_pos_encoding": True}
                fewer = answers(model, given[..., :side, :side], torch.from_numpy(tokens), **more)
                made |= {f"{key} at {side} px": fewer[key] for key in fewer if key != "text"}
        arrays |= {f"{name}/{key}": value.numpy() for key, value in made.items()}
        for index, (width, height) in enumerate(((37, 24), (24, 40), (53, 47))):
            photo = photograph(index, width, height)
            values = processor(photo, return_tensors="np")["pixel_values"][0].transpose(1, 2, 0)
            arrays[f"{name}/pixels {index}"] = np.rint((values * std + mean) * 255).astype(np.uint8)
            arrays[f"photograph {index}"] = np.asarray(photo)
    np.savez_compressed(out / "answers.npz", **arrays)
    versions = {"transformers": hf.__version__, "torch": torch.__version__}
    (out / "versions.json").write_text(json.dumps(versions, indent=1) + "\n")


def photograph(seed: int, width: int, height: int) -> Image.Image:
    """Return a smooth random image that is not square."""
    levels = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    return Image.fromarray(levels).resize((width, height), Image.Resampling.BICUBIC)


if __name__ == "__main__":
    main()
