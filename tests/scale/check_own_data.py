# SPDX-License-Identifier: Apache-2.0
"""100,000 images in shards: memory stays flat while they are listed and read.

make check-scale
"""

import io
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
from labelled_sets import add_member
from PIL import Image

IMAGES, PER_SHARD, DISTINCT = 100_000, 5_000, 200
MOST_MIB = 100  # the pixels of all images would be 1,054 MiB

_READ = """
import sys
import numpy as np
from pathlib import Path
from saccade.models.data.datasets import load_data
from saccade.models.preprocessing import Preprocessing

def mib():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) // 1024

start = mib()
fitted = Preprocessing(64, 64, 3, (0.0,) * 3, (1.0,) * 3)
data = load_data(sys.argv[1], "train", preprocessing=fitted)
most, count = mib(), len(data.labels)
for at in range(0, count, 256):
    data.images[np.arange(at, min(at + 256, count))]
    most = max(most, mib())
print(count, most - start, data.images.nbytes // 2**20)
"""


def test_memory_is_flat(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    files = []
    for _ in range(DISTINCT):
        file = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (48, 64, 3), dtype=np.uint8)).save(file, "JPEG")
        files.append(file.getvalue())
    for shard in range(IMAGES // PER_SHARD):
        with tarfile.open(tmp_path / f"train-{shard:03}.tar", "w") as tar:
            for number in range(shard * PER_SHARD, (shard + 1) * PER_SHARD):
                add_member(tar, f"{number:07}.jpg", files[number % DISTINCT])
                add_member(tar, f"{number:07}.cls", str(number % 100).encode())
    command = [sys.executable, "-c", _READ, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    count, used, whole = map(int, done.stdout.split())
    print(f"{count:,} images read with {used} MiB more than before; as one array {whole} MiB")
    assert count == IMAGES * 9 // 10 and used < MOST_MIB < whole
