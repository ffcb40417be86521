# SPDX-License-Identifier: Apache-2.0
"""`saccade doctor`: what is installed, what is missing for each use, and how to install it."""

import platform
import shutil
import sys
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from typing import Any

from saccade.core.errors import SaccadeError, install
from saccade.core.machine import advice, instruction_sets
from saccade.exporter.runtimes.runtime import Packages, runtimes
from saccade.serving.client.readiness import Readiness
from saccade.serving.repository.installation import (
    BUNDLED_LINE,
    OLDEST_GLIBC,
    check_installation,
    find_installation,
    glibc_version,
)

# Distributions by use, as the extras in pyproject.toml group them.
PACKAGES = {
    "core": ("numpy", "pillow", "safetensors", "tyro", "rich", "tritonclient", "grpcio"),
    "export": ("torch", "onnx", "onnxscript", "onnx-graphsurgeon", "msgpack"),
    "text": ("instant-clip-tokenizer", "tokenizers"),
    "serve": ("nvidia-pytriton",),
    "bench": ("scikit-learn", "matplotlib", "plotly"),
    "bulk": ("pyarrow", "ray"),
    "hub": ("huggingface-hub",),
    "trace": ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"),
}
_MEANING = {
    "core": "call a server",
    "serve": "run the bundled server",
    "export": "train, convert, export, verify",
    "text": "send sentences to a CLIP model",
    "bench": "measure, plot, use scikit-learn's digits",
    "hub": "upload and download checkpoints",
    "bulk": "write answers for many images to Parquet",
    "trace": "send traces of requests",
    "OpenVINO": "run bf16 and int8 fast on CPUs that have instructions for them",
    "rtx": "build engines with TensorRT-RTX",
    "native kernels": "compile faster custom ops",
}


@dataclass(frozen=True)
class Requirement:
    """One requirement of a use: what was found, and what to do if that is not enough."""

    what: str
    found: str
    needed_for: str
    good: bool
    advice: str = ""
    optional: bool = False


@dataclass(frozen=True)
class DoctorReport:
    """Requirements found on this machine, and the server's answers if one was queried."""

    rows: tuple[Requirement, ...]
    instruction_sets: tuple[str, ...] | None  # None: the system does not list them
    url: str | None = None
    readiness: tuple[Readiness, ...] = ()
    trouble: str = ""
    trouble_code: int = 0

    @property
    def exit_code(self) -> int:
        """The exit code of the trouble with the server at `url`, if there was any.

        Otherwise 1 if a core requirement is not met, or a model at `url` does not answer.
        """
        broken = any(not row.good and row.needed_for == "core" for row in self.rows)
        return self.trouble_code or int(broken or not all(self.readiness))

    def uses(self) -> dict[str, bool]:
        """Return each use and whether this machine is ready for it."""
        uses: dict[str, bool] = {}
        for row in self.rows:
            for use in row.needed_for.split(", "):
                uses[use] = uses.get(use, True) and row.good
        return uses

    def lacking(self, use: str) -> list[Requirement]:
        """Return the requirements of a use that are not met."""
        return [row for row in self.rows if use in row.needed_for.split(", ") and not row.good]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "rows": [asdict(row) for row in self.rows],
            "uses": self.uses(),
            "instruction_sets": self.instruction_sets,
            "url": self.url,
            "readiness": [readiness.to_dict() for readiness in self.readiness],
            "trouble": self.trouble,
            "exit_code": self.exit_code,
        }

    def to_text(self) -> Any:
        """Return a table for the terminal, followed by what each use lacks."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table("", "what", "found", "needed for")
        for row in self.rows:
            mark = "ok" if row.good else "-" if row.optional else "missing"
            # As plain text: rich would read brackets as a style.
            table.add_row(*map(Text, (mark, row.what, row.found, row.needed_for)))
        sets = "unknown" if self.instruction_sets is None else ", ".join(self.instruction_sets)
        lines = [f"instruction sets: {sets or 'none'}. {advice(self.instruction_sets)}"]
        lines += [line for use in self.uses() for line in self._use_lines(use)]
        for readiness in self.readiness:
            answers = {readiness.model: readiness.router, **readiness.variants}
            lines += [
                f"{self.url} {name}: {'answers' if good else readiness.reasons[name]}"
                for name, good in answers.items()
            ]
        if self.trouble:
            lines.append(self.trouble)
        return Group(table, *map(Text, lines))

    def _use_lines(self, use: str) -> list[str]:
        """Return whether a use is ready, and the commands that install what is missing."""
        name = f"{use} ({_MEANING.get(use, use)})"
        lacking = self.lacking(use)
        if not lacking:
            return [f"{name}: ready"]
        advice = dict.fromkeys(row.advice for row in lacking if row.advice)
        names = ", ".join(row.what for row in lacking)
        return [f"{name}: not ready ({names})", *(f"  {each}" for each in advice)]


def doctor(url: str | None = None) -> DoctorReport:
    """Check this machine and, if `url` is given, the server there: one inference per variant."""
    rows = (*_system(), *_packages(), *_server(), _compiler())
    report = DoctorReport(rows, instruction_sets())
    if url is None:
        return report
    try:
        return replace(report, url=url, readiness=_ask(url))
    except SaccadeError as error:
        return replace(report, url=url, trouble=str(error), trouble_code=error.exit_code)


def _system() -> list[Requirement]:
    glibc = glibc_version()
    python = platform.python_version()
    supported = (3, 11) <= sys.version_info[:2] <= (3, 13)
    serves = sys.platform == "linux" and glibc is not None and glibc >= OLDEST_GLIBC
    libc = f"glibc {'.'.join(map(str, glibc))}" if glibc else "no glibc"
    return [
        Requirement(
            "Python", python, "core", supported, "" if supported else "Use Python 3.11 to 3.13."
        ),
        Requirement(
            "system",
            f"{platform.system()} {platform.machine()}, {libc}",
            "serve",
            serves,
            "" if serves else "Use Linux with glibc 2.35 or newer. Other systems export and call.",
        ),
    ]


def _packages() -> list[Requirement]:
    rows = [_package(name, use) for use, names in PACKAGES.items() for name in names]
    needed = [runtime.packages for runtime in reversed(runtimes()) if runtime.packages]
    return [*rows, *map(_runtime, needed)]


def _runtime(packages: Packages) -> Requirement:
    """Check a runtime's packages: one distribution, not two that write the same files."""
    names = packages.distributions
    versions = {name: version for name in names if (version := _version(name))}
    good = len(versions) == 1
    advice = packages.conflict if len(versions) > 1 else packages.advice
    # The first one is the row's name.
    shown = versions.values() if list(versions) == [names[0]] else map(" ".join, versions.items())
    text = ", ".join(shown) or "no"
    return Requirement(
        names[0], text, packages.needed_for, good, "" if good else advice, packages.optional
    )


def _package(name: str, use: str) -> Requirement:
    version = _version(name)
    # Every extra brings the core packages.
    advice = "" if version else f"pip install {name}" if use == "core" else install(use)
    return Requirement(name, version or "no", use, version is not None, advice)


def _server() -> list[Requirement]:
    try:
        installation = find_installation()
        check_installation(installation)
    except SaccadeError as error:
        return [Requirement("tritonserver", "does not start", "serve", False, str(error))]
    found = f"{BUNDLED_LINE}, bundled" if installation.bundled else str(installation.binary)
    return [Requirement("tritonserver", found, "serve", True)]


def _compiler() -> Requirement:
    compiler = next((name for name in ("c++", "g++", "clang++", "cl") if shutil.which(name)), None)
    advice = "" if compiler else "Optional, for speed. On Debian or Ubuntu: apt-get install g++"
    return Requirement(
        "C++ compiler", compiler or "no", "native kernels", bool(compiler), advice, optional=True
    )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _ask(url: str) -> tuple[Readiness, ...]:
    from saccade.serving.client.client import Client, routers_at

    readiness = []
    for model in routers_at(url):
        with Client(url, model) as client:
            readiness.append(client.ready())
    return tuple(readiness)
