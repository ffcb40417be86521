# SPDX-License-Identifier: Apache-2.0
"""Fuzz every file reader with many changed files, in processes with limits; write the counts.

    python tests/fuzz.py --examples 100000 --minutes 60
    python tests/fuzz.py --graphs --minutes 60     # ONNX files and their manifests

The rule: a file is read or refused with SaccadeError within 5 s of CPU time, and the process
never uses more than 1 GiB.
"""

import argparse
import json
import multiprocessing
import platform
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from places import ROOT

sys.path.append(str(Path(__file__).parent / "plugins"))
RESULTS = ROOT / "benchmarks" / "results"

GRAPHS = ("graph", "manifest")
MOST_SECONDS, MOST_MIB = 5.0, 1024
_ADDRESSES = 8 * 2**30  # torch alone needs some of it
KEPT = 20  # failures
# Writing each file to a disk would take nearly all the time.
SCRATCH = "/dev/shm" if Path("/dev/shm").is_dir() else None


Example = Callable[[], str]  # reads one changed file, and says whether it was read or refused


def examples_of(name: str, folder: Path) -> Callable[[int], Example]:
    """Return what changes the file of a seed, for one reader or for ONNX files."""
    if name == "graph":
        import graph_fuzz

        return lambda seed: partial(graph_fuzz.outcome, seed)
    from reader_fuzz import outcome, readers, sound_bytes, write_changed

    reader = readers()[name]
    path = folder / reader.name
    sound = sound_bytes(reader, path)
    reader.read(path)  # a valid file can be read

    def changed(seed: int) -> Example:
        write_changed(reader, sound, seed, path)
        return lambda: outcome(reader, path)

    return changed


def fuzz(name: str, examples: int, seconds: float, first: int) -> dict[str, Any]:
    """Fuzz one reader with `examples` seeds from `first` on, or as many as time allows."""
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESSES, _ADDRESSES))
    signal.signal(signal.SIGVTALRM, too_long)
    ended = {"read": 0, "refused": 0}
    failures: list[dict[str, Any]] = []
    slowest, slowest_seed = 0.0, first
    with tempfile.TemporaryDirectory(dir=SCRATCH) as folder:
        changed = examples_of(name, Path(folder))
        start = time.monotonic()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        for seed in range(first, first + examples):
            if time.monotonic() - start > seconds:
                break
            took, end = timed(changed(seed))
            if isinstance(end, dict):
                failures.append({"seed": seed, **end})
                end = "failed"
            ended[end] = ended.get(end, 0) + 1
            if took > slowest:
                slowest, slowest_seed = took, seed
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "examples": sum(ended.values()), "first_seed": first, **ended, "failures": failures[:KEPT],
        "slowest_seconds": round(slowest, 3), "slowest_seed": slowest_seed,
        "largest_mib": round(after), "before_mib": round(before),
    }  # fmt: skip


def timed(run: Callable[[], str]) -> tuple[float, str | dict[str, str]]:
    """Return CPU seconds and outcome of one file; an error if it is not a SaccadeError."""
    began = time.process_time()
    signal.setitimer(signal.ITIMER_VIRTUAL, MOST_SECONDS)
    end: str | dict[str, str]
    try:
        end = run()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        end = {"error": f"{error!r:.200}", "where": f"{Path(last.filename).name}:{last.lineno}"}
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    took = time.process_time() - began
    if took > MOST_SECONDS and isinstance(end, str):  # inside a library, or caught there
        end = {"error": f"{end} after {took:.1f} s", "where": ""}
    return took, end


def too_long(*_: object) -> None:
    raise TimeoutError(f"more than {MOST_SECONDS:g} s")


def _child(name: str, examples: int, seconds: float, first: int, queue: Any) -> None:
    queue.put(fuzz(name, examples, seconds, first))


def in_a_process(name: str, examples: int, seconds: float, first: int) -> dict[str, Any]:
    """Run `fuzz` in a new process; if a signal kills it, that is a failure too."""
    context = multiprocessing.get_context("fork")  # torch is imported once
    queue = context.Queue()
    process = context.Process(target=_child, args=(name, examples, seconds, first, queue))
    process.start()
    while process.is_alive():
        process.join(1.0)
        if not queue.empty():
            break
    if queue.empty() and process.exitcode != 0:
        return {"examples": 0, "failed": 1, "failures": [{"exit code": process.exitcode}]}
    counts: dict[str, Any] = queue.get(timeout=60)
    process.join()
    return counts


def main() -> int:
    from reader_fuzz import outcome, readers, sound_bytes

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=100_000, help="files for each reader")
    parser.add_argument("--minutes", type=float, default=600, help="time for all readers together")
    parser.add_argument("--first", type=int, default=0, help="seed")
    parser.add_argument("--reader", action="append", help="only this reader; may be repeated")
    parser.add_argument("--graphs", action="store_true", help="ONNX files and manifests instead")
    parser.add_argument("--go-on", action="store_true", help="continue after the seeds in --out")
    parser.add_argument("--out", type=Path, help="fuzz_readers.json, or fuzz_graphs.json")
    given = parser.parse_args()
    title = "kinds" if given.graphs else "readers"
    out = given.out or RESULTS / f"fuzz_{'graphs' if given.graphs else 'readers'}.json"
    names = given.reader or list(GRAPHS if given.graphs else readers())
    with tempfile.TemporaryDirectory() as folder:  # so that the children have these imports
        reader = readers()["checkpoint"]
        sound_bytes(reader, Path(folder) / reader.name)
        outcome(reader, Path(folder) / reader.name)
    began_all = time.monotonic()
    counts: dict[str, Any] = {}
    if (given.reader or given.go_on) and out.exists():  # keep the counts of the others
        counts = json.loads(out.read_text())[title]
    for index, name in enumerate(names):
        left = 60 * given.minutes - (time.monotonic() - began_all)
        seconds = left / (len(names) - index)
        began = time.monotonic()
        before = counts.get(name) if given.go_on else None
        done = before["examples"] if before else 0
        first = before["first_seed"] if before else given.first
        one = in_a_process(name, given.examples - done, seconds, first + done)
        one["wall_seconds"] = round(time.monotonic() - began, 1)
        counts[name] = together(before, one) if before else one
        print(name, json.dumps(counts[name])[:600], flush=True)
        _write(out, title, counts)
    failed = [
        name
        for name, count in counts.items()
        if count.get("failed") or count["largest_mib"] > MOST_MIB
    ]
    print(f"failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


def together(before: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Add the counts of later seeds to those of `before`."""
    merged = {**more, "first_seed": before["first_seed"]}
    for key in ("examples", "read", "refused", "failed", "wall_seconds"):
        if key in before or key in more:
            merged[key] = round(before.get(key, 0) + more.get(key, 0), 1)
    merged["failures"] = [*before["failures"], *more["failures"]][:KEPT]
    if before.get("slowest_seconds", 0) > more.get("slowest_seconds", 0):
        merged |= {key: before[key] for key in ("slowest_seconds", "slowest_seed")}
    merged["largest_mib"] = max(before.get("largest_mib", 0), more.get("largest_mib", 0))
    return merged


def _write(path: Path, title: str, counts: dict[str, Any]) -> None:
    content = {
        "law": {"seconds": MOST_SECONDS, "mib": MOST_MIB, "traces": 0},
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "examples": sum(count["examples"] for count in counts.values()),
        title: counts,
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
