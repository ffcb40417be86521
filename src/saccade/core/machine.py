# SPDX-License-Identifier: Apache-2.0
"""The machine of a measurement: CPU and its instruction sets, cores, memory, versions, load."""

import ctypes
import gc
import os
import platform
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import saccade

_PACKAGES = (
    *("numpy", "onnxruntime", "onnxruntime-gpu", "openvino"),
    *("nvidia-pytriton", "tritonclient", "grpcio"),
)
_SAME_MODULE = {"onnxruntime": "onnxruntime-gpu"}  # distributions of the same module

# The kernel's flags, by the name that manuals use.
_FLAGS = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_vnni": "AVX-512 VNNI",
    "avx_vnni": "AVX-VNNI",
    "avx512_bf16": "AVX-512 BF16",
    "amx_int8": "AMX-INT8",
    "amx_bf16": "AMX-BF16",
    "asimddp": "Arm DotProd",
    "i8mm": "Arm I8MM",
}
# Instructions that sum four 8-bit products in 32 bits.
INT8 = frozenset({"AVX-512 VNNI", "AVX-VNNI", "AMX-INT8", "Arm DotProd", "Arm I8MM"})
_BF16 = {"AVX-512 BF16", "AMX-BF16"}
CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Machine:
    """The machine of a measurement, as every report describes it.

    Units: memory_mib is in MiB; load_average is the mean number of runnable threads over one
        minute.
    """

    processor: str
    cores: int
    memory_mib: int
    system: str
    python: str
    versions: dict[str, str]
    load_average: float
    runtime: str  # the runtime that ran the variants, with its version
    instruction_sets: tuple[str, ...] | None  # of the CPU; None: unknown

    @property
    def device(self) -> str:
        """The name under which a frontier lists its measurements."""
        return f"{self.processor}, {self.cores} core{'s' if self.cores != 1 else ''}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, including the device."""
        return {**asdict(self), "device": self.device}


def this_machine(runtime: str | None = None) -> Machine:
    """Return the machine this process runs on; the default label is that of ONNX Runtime."""
    versions = _versions()
    return Machine(
        processor=_cpu_name(),
        cores=cores(),
        memory_mib=memory_bytes() // 2**20,
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        versions=versions,
        load_average=os.getloadavg()[0],
        runtime=runtime or f"onnxruntime {versions.get('onnxruntime', 'unknown')} CPU",
        instruction_sets=instruction_sets(),
    )


def cores(control_group: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the number of cores that this process may use: its affinity, and a container's limit.

    `control_group` is the folder of the limit, which a container sees as its own.
    """
    count = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    try:
        quota, period = (control_group / "cpu.max").read_text().split()
        return max(1, min(count, int(quota) // int(period)))
    except (OSError, ValueError, ZeroDivisionError):  # no limit is the word max, not a number
        return count


def version_of(package: str) -> str:
    """Return the version of an installed package; ONNX Runtime may be either distribution.

    Raises: PackageNotFoundError if it is not installed.
    """
    if package == "saccade":  # the distribution is called saccade-serving
        return saccade.__version__
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return metadata.version(_SAME_MODULE.get(package, package))


def memory_bytes() -> int:
    """Return the memory of this machine, regardless of how much this process may use."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory_limit_bytes() -> int:
    """Return the memory of this machine, or of a control group of this process if smaller."""
    return min([memory_bytes(), *(limit for limit, _ in control_groups())])


def available_memory_bytes() -> int:
    """Return how much memory this process can still take: of the machine, or within its limits.

    Copies of files in memory, which the system gives up when it needs the space, are available.
    """
    free = memory_bytes()
    with suppress(OSError):  # a system without this file
        lines = Path("/proc/meminfo").read_text().splitlines()
        kib = {line.partition(":")[0]: int(line.split()[1]) for line in lines}
        free = 1024 * kib["MemAvailable"]
    groups = [limit - used for limit, used in control_groups()]
    return min([free, *groups, *_address_space_left()])


def _address_space_left() -> list[int]:
    """The bytes that `ulimit -v` leaves, if it is set."""
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except (ImportError, OSError):  # a system without them
        return []
    return [] if limit == resource.RLIM_INFINITY else [limit - used]


def return_memory() -> None:
    """Free objects that refer to each other, and give what is free back to the system.

    glibc keeps freed blocks of up to 32 MiB for itself, which are most weights of a large model.
    """
    gc.collect()
    with suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


# Folder below /sys/fs/cgroup, and the names of the files with limit and use, by version.
_VERSIONS = (
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ("", "memory.max", "memory.current", ""),
)


def control_groups(root: Path = Path("/")) -> list[tuple[int, int]]:
    """Return limit and use of memory, in bytes, of the groups of this process, innermost last.

    The use does not count copies of files.
    """
    found = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for controller, limit, use, prefix in _VERSIONS:
        own = [line.split(":")[2] for line in lines if line.split(":")[1] == controller]
        top = root / "sys/fs/cgroup" / controller
        # A container sees its own group at the top, and its path as outside.
        places = {top, *(top / path.strip("/") for path in own)}
        places |= {parent for place in places for parent in place.parents if top in parent.parents}
        for place in sorted(places):
            with suppress(OSError, ValueError):  # no such group, or `max`
                words = (place / "memory.stat").read_text().split()
                kept = dict(zip(words[::2], map(int, words[1::2]), strict=True))
                files = sum(kept.get(f"{prefix}{name}_file", 0) for name in ("active", "inactive"))
                most, used = (int((place / name).read_text()) for name in (limit, use))
                found.append((most, max(0, used - files)))
    return found


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    # Both distributions contain the module `onnxruntime`, and the report names the module.
    if "onnxruntime-gpu" in versions:
        versions.setdefault("onnxruntime", versions["onnxruntime-gpu"])
    return versions


def family_of(pid: int) -> list[int]:
    """Return a process and its living descendants."""
    parents = {
        int(path.name): int(fields[1])
        for path in Path("/proc").glob("[0-9]*")
        if (fields := process_fields(int(path.name)))
    }
    family = {pid}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    return sorted(family)


def cpu_seconds(pids: Iterable[int]) -> dict[str, float]:
    """Return the CPU time that each of these processes has used, unless it has exited.

    The key is `<pid> <name>`, which distinguishes a server from its helpers.
    """
    ticks = os.sysconf("SC_CLK_TCK")
    seconds = {}
    for pid in pids:
        if fields := process_fields(pid):
            seconds[f"{pid} {fields[-1]}"] = (int(fields[11]) + int(fields[12])) / ticks
    return seconds


def memory_mib(pids: Iterable[int], *, files: bool = True) -> dict[str, float]:
    """Return the memory of each of these processes, with its share of shared pages.

    Without `files`, count only the pages that the process has written: its share of a library
    grows when another program that uses the library exits. Processes that have exited are left
    out.

    Units: MiB, by `<pid> <name>` as in `cpu_seconds`.
    """
    mib = {}
    counted = ("Pss:",) if files else ("Pss_Anon:", "Pss_Shmem:")
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        kib = [int(line.split()[1]) for line in lines if line.startswith(counted)]
        if kib and (fields := process_fields(pid)):
            mib[f"{pid} {fields[-1]}"] = sum(kib) / 1024
    return mib


def process_fields(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat from its state, then the name; empty if gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    # The name in parentheses may itself contain spaces and parentheses.
    return [*text[text.rindex(")") + 1 :].split(), text[text.index("(") + 1 : text.rindex(")")]]


def instruction_sets(source: Path = CPUINFO) -> tuple[str, ...] | None:
    """Return the instruction sets of this CPU; None if the system does not list them."""
    try:
        lines = source.read_text().splitlines()
    except OSError:
        return None
    named = (line for line in lines if line.startswith(("flags", "Features")))  # x86, Arm
    flags = next(named, "").partition(":")[2].split()
    return tuple(name for flag, name in _FLAGS.items() if flag in flags) if flags else None


def advice(sets: tuple[str, ...] | None) -> str:
    """Return one sentence that says what the instruction sets mean for int8 and bf16."""
    if sets is None:
        return "Whether int8 and bf16 are faster than fp32 here is unknown: measure it with bench."
    int8 = (
        "int8 has instructions of its own here (such as VNNI)"
        if INT8 & {*sets}
        else "int8 has no instructions of its own here (such as VNNI), so it may not be faster"
    )
    bf16 = (
        "OpenVINO computes bf16 in that type"
        if _BF16 & {*sets}
        else "bf16 gains nothing, because OpenVINO computes it in float32 (no AVX-512 BF16 or AMX)"
    )
    return f"{int8}, and {bf16}."
