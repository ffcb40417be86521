# SPDX-License-Identifier: Apache-2.0
"""Instruction sets of the CPU that decide whether int8 and bf16 pay, as the kernel reports them."""

from pathlib import Path

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
