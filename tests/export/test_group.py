# SPDX-License-Identifier: Apache-2.0
"""Groups: artefact folders whose variants come from several checkpoints."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.serving.frontiers import frontier_entry, point
from support.serving.repositories import reasons, routes_of
from tiny_artefacts import LABELS, MODEL, PREPROCESSING, manifest_of, onnx_model, rehash

from saccade.core.errors import SaccadeError
from saccade.core.files import sha256_of
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.frontier import FrontierEntry, cost_shares, merged
from saccade.exporter.artefact.manifest import (
    SUFFIX,
    Cost,
    MultiplyAdds,
    ParentEntry,
    label_order,
    write_manifest,
)
from saccade.exporter.evaluation.calibrate import calibrate
from saccade.exporter.evaluation.evaluated_model import EvaluatedFunction, subjects_of_folder
from saccade.exporter.gate import gate
from saccade.exporter.gate.report import VariantReport
from saccade.exporter.group import GroupOptions, group
from saccade.exporter.policy.options import CalibrateOptions
from saccade.exporter.runtimes.runtime import runtime_named
from saccade.serving.local.artefact import load_artefact
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.options import RepositoryOptions

TURNED = ("star", "circle", "square")
COSTS = {"large": 4000, "small": 1000}


def member(
    folder: Path,
    name: str,
    labels: tuple[str, ...] = LABELS,
    seed: int = 0,
    **changes: Any,
) -> Path:
    """Write a folder with one variant that has these labels."""
    folder.mkdir()
    data = onnx_model(seed).SerializeToString()
    parent = ParentEntry(f"{name}.safetensors", name.encode().hex().ljust(64, "0"))
    cost = Cost(76, MultiplyAdds(COSTS[name], {"tiny": COSTS[name]}), 256)
    manifest = manifest_of("b1000", data, parent, labels=labels, cost=cost)
    entry = replace(manifest.variant, name=f"{name}-b1000-fp32", model=name)
    file = replace(manifest.file, name=f"{entry.name}.onnx")
    manifest = replace(manifest, variant=entry, file=file, **changes)
    (folder / file.name).write_bytes(data)
    write_manifest(folder, manifest)
    return folder


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A small model whose labels have another order, and a large one that sees other crops."""
    wide = replace(PREPROCESSING, resize_px=(6, 6))
    return (
        member(tmp_path / "a", "small", TURNED, seed=1),
        member(tmp_path / "b", "large", preprocessing=wide),
    )


@pytest.fixture
def grouped(folders: tuple[Path, Path], tmp_path: Path) -> Path:
    return group(folders, GroupOptions(out=tmp_path / "shapes")).path


def test_members_keep_their_files_and_records(folders: tuple[Path, Path], tmp_path: Path) -> None:
    (folders[0] / "small.safetensors").write_bytes(b"small")
    grouped = group(folders, GroupOptions(out=tmp_path / "shapes")).path
    large, small = ArtefactFolder(grouped).manifests
    own = ArtefactFolder(folders[0]).manifests[0]
    assert [one.variant.name for one in (large, small)] == [
        "shapes-large-fp32", "shapes-small-fp32"
    ]  # fmt: skip
    assert (float(large.variant.budget), float(small.variant.budget)) == (1.0, 0.25)
    assert small.member == small.exported == own.variant
    assert replace(
        small, variant=own.variant, member=None, file=own.file, parent=own.parent
    ) == own  # fmt: skip
    assert sha256_of(grouped / small.file.name) == own.file.sha256
    assert (grouped / "small-small.safetensors").read_bytes() == b"small"


def test_words_name_the_variants(folders: tuple[Path, Path], tmp_path: Path) -> None:
    one, other = folders
    options = GroupOptions(out=tmp_path / "out", name="animals")
    made = group([f"s={one}", f"l={other}"], options)
    assert [one.variant.name for one in made.manifests] == ["animals-l-fp32", "animals-s-fp32"]


def test_what_all_names_begin_with_is_left_out(tmp_path: Path) -> None:
    folders = [member(tmp_path / f"vit-{name}", name, seed=at) for at, name in enumerate(COSTS)]
    for folder, model in zip(folders, ("vit-l", "vit-b16"), strict=True):
        old = next(folder.glob("*.onnx")).stem
        new = f"{model}-b1000-fp32"
        content = json.loads((folder / f"{old}{SUFFIX}").read_text())
        content["variant"] |= {"name": new, "model": model}
        content["file"]["name"] = f"{new}.onnx"
        (folder / f"{old}.onnx").rename(folder / f"{new}.onnx")
        (folder / f"{old}{SUFFIX}").unlink()
        (folder / f"{new}{SUFFIX}").write_text(json.dumps(content))
    made = group(folders, GroupOptions(out=tmp_path / "out"))
    assert {one.variant.setting for one in made.manifests} == {"l", "b16"}


def test_a_folder_of_several_budgets_keeps_their_names(tmp_path: Path) -> None:
    from tiny_artefacts import artefacts

    both = artefacts(tmp_path / MODEL, checkpoint=False)
    single = member(tmp_path / "b", "large", seed=5)
    made = group([both, single], GroupOptions(out=tmp_path / "out"))
    assert {one.variant.setting for one in made.manifests} == {"tinyb1000", "tinyb0500", "large"}


def change(path: Path, **changes: Any) -> None:
    """Write a manifest again with other values."""
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, **changes}))


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["a"], "found 1 artefact folder"),
        (["a", "a"], "is also in"),
        (["a", "b/../a"], "is also in"),
        (["x=a", "x=b"], "would both be called 'x'"),
        (["Small=a", "b"], "'Small' is not 1 to 16 of a-z and 0-9"),
        (["averyveryverylongword=a", "b"], "is not 1 to 16"),
        (["a", "nowhere"], "no such folder"),
        (["a", "names"], "only the first has star; only the second has ring"),
        (["a", "more"], "different labels: only the second has ring"),
        (["a", "twice"], "only the first has circle; only the second has square"),
        (["same", "turned"], "in another order, and 'crane' is there twice"),
        (["a", "segments"], "found a model of family slot-attention"),
        (["a", "unlabelled"], "answers with"),
        (["a", "tokens"], "take different inputs"),
        (["a", "changed"], "SHA-256 is"),
        (["a", "group"], "is a group itself"),
        (["a", "repository"], "is a model repository"),
    ],
)
def test_wrong_members_are_refused(
    folders: tuple[Path, Path],
    grouped: Path,
    tmp_path: Path,
    words: list[str],
    found: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    member(tmp_path / "names", "large", ("circle", "square", "ring"), seed=2)
    member(tmp_path / "more", "large", (*LABELS, "ring"), seed=2)
    member(tmp_path / "twice", "large", ("star", "square", "square"), seed=2)
    member(tmp_path / "same", "large", ("crane", "crane", "maillot"), seed=2)
    member(tmp_path / "turned", "small", ("maillot", "crane", "crane"), seed=3)
    member(tmp_path / "segments", "large", seed=2)
    manifest = tmp_path / "segments" / f"large-b1000-fp32{SUFFIX}"
    content = json.loads(manifest.read_text())
    change(manifest, variant={**content["variant"], "family": "slot-attention"})
    outputs = content["outputs"][:2]
    member(tmp_path / "unlabelled", "large", (), seed=2)
    change(tmp_path / "unlabelled" / manifest.name, outputs=outputs)
    tokens = [{"name": "tokens", "axes": "b 8", "dtype": "int64"}]
    member(tmp_path / "tokens", "large", seed=2, preprocessing=None)
    change(tmp_path / "tokens" / manifest.name, inputs=tokens)
    with (member(tmp_path / "changed", "large", seed=2) / "large-b1000-fp32.onnx").open("ab") as it:
        it.write(b"more")
    grouped.rename(tmp_path / "group")
    (tmp_path / "repository").mkdir()
    (tmp_path / "repository" / "saccade.json").write_text("{}")
    with pytest.raises(SaccadeError) as refused:
        group(words, GroupOptions(out=tmp_path / "out"))
    assert found in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_an_output_is_not_replaced_unasked(folders: tuple[Path, Path], grouped: Path) -> None:
    with pytest.raises(SaccadeError, match="exists already"):
        group(folders, GroupOptions(out=grouped))
    with pytest.raises(SaccadeError, match="would remove the input"):
        group(folders, GroupOptions(out=folders[0], force=True))


def test_a_file_that_changes_after_grouping_is_refused(grouped: Path) -> None:
    file = grouped / "shapes-small-fp32.onnx"
    file.write_bytes(file.read_bytes() + b"more")
    with pytest.raises(SaccadeError, match="changed after its export"):
        deploy(grouped, RepositoryOptions(out=grouped.with_name("repository")))


def entries(grouped: Path, **rates: float) -> list[FrontierEntry]:
    """Return measurements of a group's variants in process, by the members' names."""
    shas = {one.variant.setting: one.file.sha256 for one in ArtefactFolder(grouped).manifests}
    return [
        frontier_entry(f"shapes-{name}-fp32", shas[name], inside=point(rate))
        for name, rate in rates.items()
    ]


def test_budgets_are_shares_of_the_measured_time(grouped: Path) -> None:
    variants = ArtefactFolder(grouped).variants
    measured = {one.variant: one for one in entries(grouped, small=300.0, large=30.0)}
    names = [variant.name for variant in variants]
    assert cost_shares(variants, measured) == dict(zip(names, (1.0, 0.1), strict=True))
    del measured["shapes-large-fp32"]
    assert cost_shares(variants, measured) == dict(zip(names, (1.0, 0.25), strict=True))
    old = ArtefactFolder(grouped)
    old.merge(entries(grouped, small=10.0, large=30.0))
    found = {one.variant: one.budget for one in ArtefactFolder(grouped).frontier.entries}
    assert found == {"shapes-small-fp32": 1.0, "shapes-large-fp32": 0.3333}
    again = merged(old.frontier, entries(grouped, small=60.0), variants)
    assert {one.variant: one.budget for one in again.entries}["shapes-small-fp32"] == 0.5


def test_a_repository_has_measured_budgets_and_the_form_of_each_variant(
    grouped: Path, tmp_path: Path
) -> None:
    ArtefactFolder(grouped).merge(entries(grouped, small=300.0, large=30.0))
    repository = tmp_path / "repository"
    deploy(grouped, RepositoryOptions(out=repository, max_image_mib=3))
    large, small = routes_of(repository, "shapes")["variants"]
    assert (large["budget"], small["budget"]) == (1.0, 0.1)
    assert "order" not in large and small["order"] == [1, 2, 0]
    assert small["preprocessing"]["resize_px"] == [4, 4]
    assert small["preprocessing"]["max_image_mib"] == 3
    assert (repository / "shapes" / "labels.txt").read_text().split() == list(LABELS)
    found = reasons(repository, "routes", "router_fields", model="shapes")
    assert found == []


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("order", [0, 1, 2], "order"),
        ("budget", 1.5, "budget is 1.5, expected above 0 and at most 1"),
        ("preprocessing", None, "preprocessing"),
    ],
)
def test_preflight_notices_another_form(
    grouped: Path, tmp_path: Path, key: str, value: Any, found: str
) -> None:
    repository = deploy(grouped, RepositoryOptions(out=tmp_path / "repository")).folder
    path = repository / "shapes" / "1" / "routes.json"
    routes = json.loads(path.read_text())
    routes["variants"][1][key] = value
    path.write_text(json.dumps(routes))
    rehash(repository)
    assert any(found in reason for reason in reasons(repository, "routes", model="shapes"))


def test_answers_have_the_labels_of_the_group(folders: tuple[Path, Path], grouped: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (5, 4, 4, 1), dtype=np.uint8)
    runtime = runtime_named("onnxruntime")
    (alone,) = subjects_of_folder(ArtefactFolder(folders[0]), runtime)
    _, small = subjects_of_folder(ArtefactFolder(grouped), runtime)
    own, mapped = (one.component("")({"image": images}) for one in (alone, small))
    assert (alone.labels, small.labels) == (TURNED, LABELS)
    for name in ("logits", "probabilities"):
        by_label = dict(zip(TURNED, own[name].T, strict=True))
        assert np.array_equal(mapped[name], np.stack([by_label[one] for one in LABELS], 1))
    assert np.array_equal(mapped["embedding"], own["embedding"])


def test_predict_answers_with_the_labels_of_the_group(
    folders: tuple[Path, Path], grouped: Path
) -> None:
    image = np.random.default_rng(3).integers(0, 256, (4, 4, 1), dtype=np.uint8)
    with load_artefact(folders[0]) as alone, load_artefact(grouped) as both:
        (own,), (mapped,) = alone.classify([image]), both.classify([image], budget="small")
    assert mapped.variant == "shapes-small-fp32"
    assert mapped.labels == own.labels


def test_label_order() -> None:
    assert label_order(LABELS, LABELS) == ()
    assert label_order(("a", "b", "c"), ("c", "a", "b")) == (1, 2, 0)
    function = EvaluatedFunction((), lambda inputs: {"logits": np.eye(3)}, (1, 2, 0))
    assert np.array_equal(function.answer({})["logits"], np.eye(3)[:, [1, 2, 0]])


def test_policies_are_compared_with_the_most_expensive_variant_unless_it_is_dominated(
    grouped: Path, tmp_path: Path
) -> None:
    images = tmp_path / "images.npz"
    drawn = np.random.default_rng(0).integers(0, 256, (64, 4, 4, 1), dtype=np.uint8)
    np.savez(images, images=drawn)
    options = CalibrateOptions(data=str(images), split="all", risk=(0.9,))
    large, small = "shapes-large-fp32", "shapes-small-fp32"

    def calibrated(dominated_by: str | None) -> Any:
        one, other = entries(grouped, small=900.0, large=30.0)
        ArtefactFolder(grouped).merge([one, replace(other, dominated_by=dominated_by)])
        return calibrate(grouped, options, progress=None)

    assert calibrated(None).content.full == large
    # Nothing is cheaper than the small one, so there is no policy.
    (refused,) = calibrated(small).refused
    assert refused.bound <= refused.risk


def step_only(folder: Path) -> None:
    """Make a folder's variant one that only policies use."""
    for path in folder.glob("*" + SUFFIX):
        change(path, step_only=True)


def test_a_step_is_not_chosen(folders: tuple[Path, Path], tmp_path: Path) -> None:
    step_only(folders[0])
    with pytest.raises(SaccadeError, match="every variant is only a step"):
        deploy(folders[0], RepositoryOptions(out=tmp_path / "alone"))
    grouped = group(folders, GroupOptions(out=tmp_path / "shapes")).path
    repository = deploy(grouped, RepositoryOptions(out=tmp_path / "repository")).folder
    large, small = routes_of(repository, "shapes")["variants"]
    assert "step_only" not in large and small["step_only"] is True
    assert reasons(repository, "routes", model="shapes") == []


def test_each_file_is_verified_with_its_own_checkpoint(
    grouped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, str, str]] = []

    def reference(checkpoint: Any, level: Any) -> Any:
        return checkpoint

    def row(folder: Any, manifest: Any, checkpoint: Any, *_: Any) -> VariantReport:
        seen.append((manifest.variant.name, manifest.exported.name, checkpoint))
        return VariantReport(manifest.variant.name, None, ("not measured",))

    monkeypatch.setattr(gate, "Reference", reference)
    monkeypatch.setattr(gate, "_verify_variant", row)
    monkeypatch.setattr(gate, "tried", lambda *_: {})
    monkeypatch.setattr(ArtefactFolder, "parent_of", lambda _, manifest: manifest.parent.name)
    report = gate.verify(grouped, progress=None)
    assert [one.name for one in report.variants] == ["shapes-large-fp32", "shapes-small-fp32"]
    assert seen == [
        ("shapes-large-fp32", "large-b1000-fp32", "large-large.safetensors"),
        ("shapes-small-fp32", "small-b1000-fp32", "small-small.safetensors"),
    ]
