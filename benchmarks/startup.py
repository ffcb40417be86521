# SPDX-License-Identifier: Apache-2.0
"""Measure CPU seconds of commands that should exit immediately: helps and refused requests.

Each runs in a separate process, in turn. Writes benchmarks/results/startup.json.
"""

import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from result_file import options_of, spread, write_result

SHIPPED = "shipped:digits-sum"


def commands(place: Path) -> dict[str, list[str]]:
    """Return command lines by what is wrong with them; their files are created in `place`."""
    text, folder, out = place / "text.txt", place / "folder", str(place / "out")
    text.write_text("no checkpoint")
    folder.mkdir()
    torch_file, repository = place / "vit_b32.pt", place / "repository"
    torch_file.write_bytes(b"PK\x03\x04" + bytes(100))
    repository.mkdir()
    (repository / "saccade.json").write_text("{}")
    image = str(Path(__file__).parents[1] / "docs" / "examples" / "seven.png")
    export = ["export", SHIPPED, "--out", out]
    return {
        "--help": ["--help"],
        "export --help": ["export", "--help"],
        "export: no such file": ["export", "nosuch", "--out", out],
        "export: no such shipped checkpoint": ["export", "shipped:nosuch", "--out", out],
        "export: no checkpoint": ["export", str(text), "--out", out],
        "export: a folder": ["export", str(folder), "--out", out],
        "export: budget that is no number": [*export, "--budget", "half"],
        "export: budget out of range": [*export, "--budget", "1.5"],
        "export: budget that keeps nothing": [*export, "--budget", "0.001"],
        "export: unknown precision": [*export, "--precision", "fp8"],
        "export: unknown threshold": [*export, "--threshold", "nosuch", "1"],
        "export: --out exists": ["export", SHIPPED, "--out", str(folder)],
        "bench: no such folder": ["bench", "nosuch", "--out", out],
        "bench: no artefact folder": ["bench", str(folder), "--out", out],
        "bench: --out exists": ["bench", "nosuch", "--out", str(folder)],
        "verify: no such folder": ["verify", "nosuch"],
        "verify: no artefact folder": ["verify", str(folder)],
        "verify: a file": ["verify", str(text)],
        "evaluate: no such file": ["evaluate", "nosuch"],
        "evaluate: budget that is no number": ["evaluate", SHIPPED, "--budget", "half"],
        "sweep: no such file": ["sweep", "nosuch", "--out", out],
        "sweep: budget that is no number": ["sweep", SHIPPED, "--out", out, "--budget", "half"],
        "models": ["models"],
        "models: no such family": ["models", "gpt"],
        # prose: allow of-ours (a name in the recorded results)
        "export: no checkpoint of ours": ["export", str(torch_file), "--out", out],
        "choose: a file": ["choose", str(text), "--budget", "1"],
        "verify: a repository": ["verify", str(repository)],
        "train: wrong ending": ["train", "nac", "--out", f"{out}.pt"],
        "train: unknown field": ["train", "nac", "--out", f"{out}.safetensors", "--set", "dmi=8"],
        "no such command": ["exprt", "nosuch"],
        "predict --help": ["predict", "--help"],
        "predict: no such folder": ["predict", "nosuch", image],
        "predict: no artefact folder": ["predict", str(folder), image],
        "classify: no such image": ["classify", "nosuch.png"],
        "classify: an address that is none": ["classify", image, "--url", "http://127.0.0.1:8000"],
        "convert: no such file": ["convert", "swin", "nosuch", "--out", out],
        "repository: no such folder": ["repository", "nosuch", "--out", out],
        "serve: no such folder": ["serve", "nosuch"],
    }


def answers(words: Sequence[str]) -> bool:
    """Whether there is nothing wrong with a command line."""
    return "--help" in words or list(words) == ["models"]


def cpu_s(words: Sequence[str]) -> float:
    """Return the CPU seconds of one command and its children.

    Raises: RuntimeError if it exited differently from a help or a refusal.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-m", "saccade", *words], capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != (0 if answers(words) else 2):
        raise RuntimeError(f"{words} exited with {done.returncode}: {done.stderr.decode()[-500:]}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measure and write the results."""
    options = options_of(__doc__, "startup", rounds=5).parse_args()
    with tempfile.TemporaryDirectory(prefix="saccade-bench-") as name:
        lines = commands(Path(name))
        measured: dict[str, list[float]] = {what: [] for what in lines}
        for _ in range(options.rounds):
            for what, words in lines.items():
                measured[what].append(cpu_s(words))
    seconds = {what: spread(values) for what, values in measured.items()}
    content = {
        "benchmark": "CPU seconds of helps and refusals",
        "rounds": options.rounds,
        "cpu_seconds": seconds,
        "slowest_median": max(value["median"] for value in seconds.values()),
    }
    write_result(options.out, content)


if __name__ == "__main__":
    main()
