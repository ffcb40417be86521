# SPDX-License-Identifier: Apache-2.0
"""TensorRT-RTX builds an engine of every variant of every family, fp32 and fp16, without a GPU."""

import shutil
from pathlib import Path

import family_folders
import onnx
import pytest
import tiny_families
from family_folders import family_folder
from half_typed import add_variant, half_typed
from rtx_builds import needs_rtx

from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.graph.layer_types import MATRIX_NODES, matrix_types
from saccade.exporter.runtimes.tensorrt.build import BuildOptions, build
from saccade.models.families import FAMILIES

TYPED_AT_EXPORT = ("sot", "captioner")  # by the exporter; of the others the test puts casts in
QUICK = ("nac", "sot", "slot-attention")  # whose engines are built in seconds


@needs_rtx
@pytest.mark.parametrize(
    ("family", "all_variants"),
    [
        *((family, False) for family in QUICK),
        *(pytest.param(family, True, marks=pytest.mark.journey) for family in FAMILIES),
    ],
)
def test_builds_every_family_in_both_types(
    family: str, all_variants: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The largest budget in fp16 and the smallest in fp32, or every budget in both."""
    is_nac = family == "nac"
    exported = request.getfixturevalue("tiny_folder") if is_nac else family_folder(family)
    folder = Path(shutil.copytree(exported, tmp_path / "folder"))
    expected: dict[str, tuple[str, int]] = {}
    budgets = [manifest.variant.setting for manifest in ArtefactFolder(exported).manifests]
    wanted = {"fp32": budgets if all_variants else budgets[-1:]}
    wanted["fp16"] = budgets if all_variants else budgets[:1]
    if family in TYPED_AT_EXPORT:
        (tmp_path / "typed").mkdir()
        asked = tiny_families.BUDGETS.get(family, ())[: None if all_variants else 1]
        typed = family_folders.exported(family, tmp_path / "typed", ("fp16",), budget=asked)
        for manifest in ArtefactFolder(typed).manifests:
            if manifest.variant.setting not in wanted["fp16"]:
                continue
            nodes = matrix_types(onnx.load(typed / manifest.file.name))
            count = len(nodes) - len(manifest.float32_layers)
            assert count > 0
            expected[manifest.variant.name] = ("fp16", count)
            for path in typed.glob(f"{manifest.variant.name}.*"):
                shutil.copy(path, folder)
    for manifest in ArtefactFolder(exported).manifests:
        name, setting = manifest.variant.name, manifest.variant.setting
        proto = onnx.load(folder / manifest.file.name)
        count = sum(node.op_type in MATRIX_NODES for node in proto.graph.node)
        if setting in wanted["fp32"]:
            expected[name] = ("fp32", count)
        if setting in wanted["fp16"] and family not in TYPED_AT_EXPORT:
            made = add_variant(folder, name, "fp16", half_typed(proto, "fp16"))
            expected[made.variant.name] = ("fp16", count)
    options = BuildOptions(engine="tensorrt-rtx", variant=tuple(expected), out=tmp_path / "out")
    engines = build(folder, options)
    assert {manifest.variant.name for manifest in engines.manifests} == set(expected)
    for each in engines.manifests:
        kind, count = expected[each.variant.name]
        # What is beyond those nodes is an island, or computes inside a custom op's body.
        more = each.layer_types[kind] - count
        assert more >= 0 if kind == "fp32" else more == 0
        assert set(each.layer_types) <= {kind, "fp32"}
        assert all(profile["max"][0] == 64 for profile in each.profiles.values())
