# SPDX-License-Identifier: Apache-2.0
"""Inject faults into exported graphs and compare which of them each level of the gate finds.

    python benchmarks/gate_power.py                     # writes results/gate_power.json
    python benchmarks/gate_power.py sot-shapes --precision fp32
    python benchmarks/gate_power.py --table             # of docs/artefacts.md

Every shipped checkpoint is exported at its first budget. Each fault of `graph_faults.py` is put
into each file that has a place for it, and the faulty file goes through the gate twice: with the
samples of `thorough`, and with the fewest that `standard` ever takes, which are those of a large
model. It exits with 1 if `thorough` finds a fault that `standard` does not. Rows of checkpoints and
precisions that were not named are kept.
"""

import itertools
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import onnx
from graph_faults import FAULTS, OVERFLOW, with_fault
from result_file import options_of, write_result
from result_file import table as markdown

from saccade.core.errors import GateFailed, SaccadeError
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import FileEntry, Manifest
from saccade.exporter.export import ExportOptions, export
from saccade.exporter.gate.gate import candidates_of, measure
from saccade.exporter.gate.metrics import exceeded
from saccade.exporter.gate.reference import ExpectedAnswers, Reference
from saccade.exporter.graph.half_graph import activation_ranges, check_ranges
from saccade.exporter.graph.samples import THOROUGH, calibration_inputs, gate_sizes
from saccade.models.interface import component_named
from saccade.models.shipped import SHIPPED

CHECKPOINTS = (
    "digits-sum",
    "listops",
    "sot-shapes",
    "sparo-shapes",
    "slots-tetrominoes",
    "vqa-shapes",
    "captioner-shapes",
)
PRECISIONS = ("fp32", "fp16", "int8")
LEVELS = {"thorough": THOROUGH, "standard": gate_sizes("standard", 10**15)}


def rows_of(name: str, precisions: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield a row for each fault of each file of a checkpoint."""
    references: dict[str, Reference] = {}
    for precision in precisions:
        with TemporaryDirectory() as place:
            options = ExportOptions(Path(place) / "out", precision=(precision,), int8_speedup=0)
            try:
                folder = ArtefactFolder(export(f"{SHIPPED}{name}", options, progress=None).folder)
            except SaccadeError as error:  # some checkpoints cannot be exported in every precision
                print(f"{name} {precision}: {error}", file=sys.stderr)
                continue
            # The answers of the checkpoint are the same for all precisions.
            references = references or {
                level: Reference(folder.parent, sizes) for level, sizes in LEVELS.items()
            }
            largest = folder.manifests[0].variant.setting
            for manifest in folder.manifests:
                if manifest.variant.setting == largest:
                    yield from _of_file(folder, manifest, references, Path(place))


def _of_file(
    folder: ArtefactFolder, manifest: Manifest, references: dict[str, Reference], place: Path
) -> Iterator[dict[str, Any]]:
    proto = onnx.load(folder.file(manifest))
    expected = {level: _expected(reference, manifest) for level, reference in references.items()}
    for fault in FAULTS:
        faulty = with_fault(proto, fault)
        if faulty is None:
            continue
        path = place / "faulty.onnx"
        onnx.save(faulty, path)
        found = {
            level: _found(path, faulty, fault, manifest, references[level], expected[level])
            for level in references
        }
        yield {"file": manifest.variant.name, "fault": fault, **found}


def _expected(reference: Reference, manifest: Manifest) -> ExpectedAnswers:
    entry, outputs = manifest.variant, [spec.name for spec in manifest.outputs]
    found = reference.expected(reference.budget(entry), entry.role, outputs, 0)
    inputs, own = found.samples.inputs, cache(lambda: [*found.float32_answers(inputs)])
    # The same for every fault, and most of the time.
    return replace(
        found,
        float32_answers=lambda asked: own() if asked is inputs else found.float32_answers(asked),
    )


def _found(
    path: Path,
    faulty: onnx.ModelProto,
    fault: str,
    manifest: Manifest,
    reference: Reference,
    expected: ExpectedAnswers,
) -> list[str]:
    """Return the figures that exceed their threshold; empty if the fault was not found."""
    entry = manifest.variant
    budget = reference.budget(entry)
    if fault == OVERFLOW:  # ONNX Runtime computes fp16 in float32: the ranges show it
        component = component_named(reference.variant(budget), entry.role)
        count = reference.sizes(0).real_inputs
        inputs = calibration_inputs(reference.checkpoint, component, count)
        try:
            check_ranges(entry.name, activation_ranges(faulty, inputs))
        except GateFailed:
            return ["activation_ranges"]
        return []
    outputs = [spec.name for spec in manifest.outputs]
    try:
        openers = candidates_of(
            path,
            FileEntry(path.name, "", path.stat().st_size),
            manifest.custom_ops,
            partial(reference.folded, budget),
            entry,
            outputs,
        )
        # The rounded torch model of half precision has no fault: only the file is compared.
        openers = openers[1:] if entry.precision in ("fp16", "bf16") else openers
        parity = measure(openers, expected, entry.precision, {})
    except SaccadeError as error:
        return [str(error)[:200]]
    return exceeded(parity.figures, parity.thresholds)


def main() -> None:
    """Inject, compare, write after each checkpoint, and print what only one level finds."""
    parser = options_of(__doc__, "gate_power")
    parser.add_argument("checkpoints", nargs="*", default=CHECKPOINTS)
    parser.add_argument("--precision", nargs="+", default=PRECISIONS)
    parser.add_argument("--table", action="store_true", help="print what was measured")
    given = parser.parse_args()
    if given.table:
        print(table(json.loads(given.out.read_text())["rows"]))
        return
    before = json.loads(given.out.read_text())["rows"] if given.out.exists() else []
    asked = itertools.product(given.checkpoints, given.precision)
    again = [(f"{name}-", f"-{precision}") for name, precision in asked]
    rows = [
        row
        for row in before
        if not any(
            row["file"].startswith(start) and row["file"].endswith(end) for start, end in again
        )
    ]
    result: dict[str, Any] = {}
    for name in given.checkpoints:
        for row in rows_of(name, given.precision):
            rows.append(row)
            print(json.dumps(row), flush=True)
        result = _result(rows)
        write_result(given.out, result)
    print(json.dumps({key: result[key] for key in ("injected", "found", "missed_by_standard")}))
    if result["missed_by_standard"]:
        raise SystemExit(1)


def table(rows: list[dict[str, Any]]) -> str:
    """Return how many faults each level found, by model and precision, as Markdown."""
    counts: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        variant, _, precision = row["file"].rpartition("-")
        name = next(name for name in CHECKPOINTS if variant.startswith(name))
        found = (1, *(bool(row[level]) for level in LEVELS))
        before = counts.get((name, precision), [0] * len(found))
        counts[name, precision] = [sum(pair) for pair in zip(before, found, strict=True)]
    cells = [[f"`{name}`", kind, *map(str, found)] for (name, kind), found in counts.items()]
    return markdown(["model", "precision", "faults", *LEVELS], cells)


def _result(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "sizes": {level: vars(sizes) for level, sizes in LEVELS.items()},
        "injected": len(rows),
        "found": {level: sum(bool(row[level]) for row in rows) for level in LEVELS},
        "missed_by_standard": [row for row in rows if row["thorough"] and not row["standard"]],
        "rows": rows,
    }


if __name__ == "__main__":
    main()
