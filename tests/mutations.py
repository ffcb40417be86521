# SPDX-License-Identifier: Apache-2.0
"""Mutation testing: one line of the core is broken at a time, and its tests should fail.

The table is mutations.toml. Files are broken in copies of the tree, so that
nothing is left behind in this one, whenever it is stopped. A kernel that was changed is compiled
again. With --out each result is written down at once, beside those of other rows.
"""

import ctypes
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
TABLE = Path(__file__).with_suffix(".toml")
NATIVE = (".hpp", ".cpp", ".h")
# Of one test, and of one run of them: a change may make a loop endless.
TEST_S, LIMIT_S = 120, 900
# Imported once, before the forks: all that is large and starts no thread.
PRELOADED = ("numpy", "torch", "onnx", "onnxruntime", "safetensors.torch", "PIL.Image", "rich")


@dataclass(frozen=True)
class Mutation:
    """One row of the table."""

    group: str
    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    only: str = ""

    @property
    def arguments(self) -> tuple[str, ...]:
        """Arguments that pytest is asked with."""
        return (*self.tests, "-k", self.only) if self.only else self.tests

    @property
    def is_native(self) -> bool:
        """True if the library of kernels has to be built again."""
        return self.file.endswith(NATIVE)

    def fault(self, root: Path = ROOT) -> str:
        """Why the row cannot be run, such as an old text that is not there; empty if it can."""
        missing = [file for file in (self.file, *self.tests) if not (root / file).is_file()]
        if missing:
            return f"{self.what}: there is no {missing[0]}"
        times = (root / self.file).read_text().count(self.old)
        return "" if times == 1 else f"{self.what}: {self.file} has its old text {times} times"


def table(path: Path = TABLE) -> list[Mutation]:
    """The rows of the table."""
    rows = tomllib.loads(path.read_text())["mutation"]
    return [Mutation(**{**row, "tests": tuple(row["tests"])}) for row in rows]


class Copy:
    """A copy of the tree whose package is imported in place of the installed one."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tree = folder, folder / "tree"
        self.pid, self.began = 0, 0.0
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in filter(None, names.split("\0")):
            if (ROOT / name).is_file() or (ROOT / name).is_symlink():
                (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.tree / name, follow_symlinks=False)

    def put(self, name: str, text: str) -> None:
        """Replace a source, and forget what was compiled of it."""
        (self.tree / name).write_text(text)
        # Compiled files go by time and size, which a change may leave as they were.
        for path in (self.folder / "compiled").rglob(f"{Path(name).stem}.*.pyc"):
            path.unlink()

    def start(self, arguments: Sequence[str], *, own_library: bool = False) -> None:
        """Begin to run these tests in a child of this process.

        It is forked, since nothing takes as long as to import torch.
        """
        shutil.rmtree(self.folder / "cache", ignore_errors=True)
        self.began, self.pid = time.monotonic(), os.fork()
        if self.pid == 0:
            try:
                status = self._test(arguments, own_library)
            except BaseException:
                traceback.print_exc()
                status = 70
            os._exit(status)

    def _test(self, arguments: Sequence[str], own_library: bool) -> int:
        os.setsid()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: not without its parent
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        output = os.open(self.folder / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(self.tree)
        site, compiled = str(self.tree / "src"), str(self.folder / "compiled")
        os.environ |= {"PYTHONPATH": site, "PYTHONPYCACHEPREFIX": compiled}
        if own_library:
            os.environ["XDG_CACHE_HOME"] = str(self.folder / "cache")
        sys.pycache_prefix = compiled
        sys.path[:] = [
            site,
            *(place for place in sys.path if not place.startswith(str(ROOT / "tests"))),
        ]
        options = ["-q", "-p", "no:cacheprovider", f"--timeout={TEST_S}"]
        return int(pytest.main([*options, f"--basetemp={self.folder / 'scratch'}", *arguments]))

    def ended(self) -> tuple[int, str] | None:
        """Pytest's exit status and output, -1 where it took too long; none while it runs."""
        late = time.monotonic() - self.began > LIMIT_S
        if late:
            os.killpg(self.pid, signal.SIGKILL)
        pid, status = os.waitpid(self.pid, 0 if late else os.WNOHANG)
        if pid == 0:
            return None
        self.pid = 0
        code = os.waitstatus_to_exitcode(status)
        return (-1 if late else code), (self.folder / "output").read_text(errors="replace")

    def stop(self) -> None:
        """End the tests that run."""
        if self.pid:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def failures(output: str) -> list[str]:
    """The tests that pytest's summary says failed, or could not be set up."""
    lines = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return [line.split(" - ")[0].split(" ", 1)[1] for line in lines]


class Trial:
    """One row's run: the source is changed, tested and put back, and the result written down."""

    def __init__(self, mutation: Mutation, out: Path | None = None) -> None:
        self.mutation, self.out, self.sound = mutation, out, ""

    def start(self, copy: Copy) -> None:
        """Break the line, and begin."""
        row = self.mutation
        self.sound = (copy.tree / row.file).read_text()
        copy.put(row.file, self.sound.replace(row.old, row.new))
        copy.start(("-x", *row.arguments), own_library=row.is_native)

    def finish(self, copy: Copy, status: int, output: str) -> dict[str, Any]:
        """Result of a run: whether a test noticed, which, and how long that took."""
        row = self.mutation
        copy.put(row.file, self.sound)
        failed = failures(output)
        result: dict[str, Any] = {
            "what": row.what, "group": row.group, "file": row.file, "noticed": status in (1, -1),
            "by": failed[0] if failed else "", "seconds": round(time.monotonic() - copy.began, 1),
        }  # fmt: skip
        if row.is_native:
            result["built_again"] = any((copy.folder / "cache").glob("saccade/*/*.so"))
        # A signal is a kernel that crashed; any other status is no test's.
        if status > 1 or (status == 1 and not failed) or result.get("built_again") is False:
            result |= {"noticed": False, "error": f"pytest ended with {status}: {output[-1500:]}"}
        elif status < -1:
            result |= {"noticed": True, "by": f"signal {-status}"}
        said(result)
        if self.out is not None:
            write(self.out, [result])
        return result


class Control:
    """Tests that noticed something, on the sound tree."""

    def __init__(self, tests: Sequence[str]) -> None:
        self.tests = tests

    def start(self, copy: Copy) -> None:
        """Begin."""
        copy.start(self.tests)

    def finish(self, copy: Copy, status: int, output: str) -> dict[str, Any]:
        """Those that fail there too, and so notice nothing."""
        if status not in (0, 1):
            raise RuntimeError(f"pytest ended with {status}: {output[-3000:]}")
        return {"failed": [test for test in self.tests if test in failures(output)]}


def run_each(jobs: Sequence[Trial | Control], copies: Sequence[Copy]) -> list[dict[str, Any]]:
    """The results in the order of the jobs, as many at a time as there are copies."""
    waiting, free = list(enumerate(jobs))[::-1], list(copies)
    running: list[tuple[int, Trial | Control, Copy]] = []
    results: list[dict[str, Any]] = [{} for _ in jobs]
    try:
        while waiting or running:
            while waiting and free:
                at, job = waiting.pop()
                running.append((at, job, free.pop()))
                job.start(running[-1][2])
            time.sleep(0.02)
            for entry in list(running):
                at, job, copy = entry
                if (end := copy.ended()) is not None:
                    results[at] = job.finish(copy, *end)
                    running.remove(entry)
                    free.append(copy)
    finally:
        for copy in copies:
            copy.stop()
    return results


def counted(results: Sequence[Mapping[str, Any]], key: str = "noticed") -> dict[str, Any]:
    """Number noticed of each group, and what was not."""
    groups: dict[str, dict[str, int]] = {}
    for result in results:
        group = groups.setdefault(result["group"], {"mutations": 0, "noticed": 0})
        group["mutations"] += 1
        group["noticed"] += result[key]
    return {
        "mutations": len(results),
        "noticed": sum(result[key] for result in results),
        "groups": groups,
        "not_noticed": [result["what"] for result in results if not result[key]],
    }


def merged(path: Path, results: Sequence[dict[str, Any]], rows: list[Mutation]) -> dict[str, Any]:
    """The file's content with these results in it; of each row, what its first run found stays."""
    held = json.loads(path.read_text())["results"] if path.exists() else []
    known = {copy["what"]: copy for copy in held}
    for result in results:
        first = known.get(result["what"], result)
        known[result["what"]] = {**result, "at_first": first.get("at_first", first["noticed"])}
    ordered = [known[row.what] for row in rows if row.what in known]
    return {
        "command": "python tests/mutations.py", "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPU",
        "first_run": counted(ordered, "at_first"), **counted(ordered), "results": ordered,
    }  # fmt: skip


def write(path: Path, results: Sequence[dict[str, Any]]) -> None:
    """Put these results into the file."""
    content = merged(path, results, table())
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def said(result: Mapping[str, Any]) -> None:
    """One line of progress."""
    word = "noticed" if result["noticed"] else "ERROR" if "error" in result else "NOT NOTICED"
    line = f"{word:12}{result['seconds']:7.1f} s  {result['group']:9} {result['what']}"
    print(line, file=sys.stderr, flush=True)


def confirmed(results: list[dict[str, Any]], copies: Sequence[Copy]) -> list[dict[str, Any]]:
    """The results without what was noticed by tests that fail on the sound tree as well."""
    tests = sorted({result["by"] for result in results if result["by"].startswith("tests/")})
    (control,) = run_each([Control(tests)], copies[:1]) if tests else [{"failed": []}]
    return [
        {**result, "noticed": False, "error": "its test fails on the sound tree too"}
        if result["by"] in control["failed"]
        else result
        for result in results
    ]


def main(only: str = "", jobs: int = 1, out: Path | None = None, missed: bool = False) -> int:
    """Break each line of the table, and say which tests notice.

    Args:
        only: groups, joined by commas, or a part of one row's description.
        jobs: copies of the tree to work in side by side.
        out: JSON file for the results, written after each.
        missed: leave out what `out` says was noticed.
    """
    rows, groups = table(), only.split(",")
    if faults := [fault for row in rows if (fault := row.fault())]:
        print("\n".join(faults), file=sys.stderr)
        return 2
    held = json.loads(out.read_text())["results"] if out is not None and out.exists() else []
    done = {copy["what"] for copy in held if copy["noticed"]} if missed else set()
    chosen = [row for row in rows if only in row.what or row.group in groups]
    trials = [Trial(each, out) for each in chosen if each.what not in done]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in PRELOADED:
        import_module(name)
    with ExitStack() as stack:
        temporary = (tempfile.TemporaryDirectory(prefix="saccade-mutations-") for _ in range(jobs))
        copies = [Copy(Path(stack.enter_context(folder))) for folder in temporary]
        results = confirmed(run_each(trials, copies), copies)
    if out is not None:
        write(out, results)
    summary = counted(results)
    print(
        json.dumps(
            {**summary, "errors": [result for result in results if "error" in result]}, indent=1
        )
    )
    return 0 if summary["noticed"] == summary["mutations"] else 1


if __name__ == "__main__":
    import tyro

    sys.exit(tyro.cli(main))
