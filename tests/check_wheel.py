# SPDX-License-Identifier: Apache-2.0
"""Two builds of the wheel with its kernels give the same bytes: `make check-wheel`, minutes."""

import os
import shutil
from pathlib import Path

import pytest
from places import ROOT, module_at

from saccade.core.files import sha256_of
from saccade.plugins.native import library


def built(place: Path, monkeypatch: pytest.MonkeyPatch, *, mask: int, when: int) -> Path:
    """Build a wheel from scratch, with another folder, umask and file times."""
    builder = module_at(ROOT / "supply_chain" / "wheel.py")
    names, tree = builder.tracked(ROOT), place / "source"
    before = os.umask(mask)
    try:
        for name in names if mask else reversed(names):
            if (ROOT / name).is_file() or (ROOT / name).is_symlink():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, tree / name, follow_symlinks=False)
                os.utime(tree / name, (when, when), follow_symlinks=False)
        monkeypatch.setattr(library, "NATIVE", tree / "plugins" / "native")
        lib = tree / builder.KERNELS
        library.compile_library(lib / library.NAME)
        library.source_hash.cache_clear()
        library.write_record(lib)
        return builder.build(tree, place, pure=False, names=names)
    finally:
        os.umask(before)


@pytest.mark.timeout(7200)
def test_two_builds_give_the_same_bytes(tmp_path, monkeypatch):
    (tmp_path / "another place").mkdir()
    one = built(tmp_path, monkeypatch, mask=0o022, when=2**30)
    other = built(tmp_path / "another place", monkeypatch, mask=0o077, when=1_700_000_000)
    assert one.name == other.name
    assert sha256_of(one) == sha256_of(other)
