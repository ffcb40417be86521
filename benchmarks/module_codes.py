# SPDX-License-Identifier: Apache-2.0
"""Draw the image in docs/nac.md: codes and signatures of a trained NAC in two dimensions.

    python benchmarks/module_codes.py                        # the shipped digits-sum
    python benchmarks/module_codes.py --init nac.safetensors --data digits

By principal components and by t-SNE. A module has the color of the quadrant of the image that it
reads most, over 200 test images, and the size of its expected number of links. Prints how many of
a module's five nearest neighbors read the same quadrant, and by chance.
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.decomposition import PCA
from sklearn.manifold import TSNE
from sklearn.neighbors import NearestNeighbors

from saccade.models.checkpoint import load
from saccade.models.data.datasets import load_data

IMAGES, NEIGHBORS = 200, 5
COLORS = ("#0b6e99", "#c8553d", "#4f772d", "#8a5a9e")
QUADRANTS = ("top left", "top right", "bottom left", "bottom right")


def quadrants(attention: np.ndarray) -> np.ndarray:
    """Return the quadrant in which each module reads most, 0 to 3 by rows.

    Shapes: attention [u n] of a square grid -> [u].
    """
    half = round(attention.shape[1] ** 0.5) // 2
    grid = attention.reshape(len(attention), 2, half, 2, half)
    return np.asarray(grid.sum((2, 4)).reshape(-1, 4).argmax(1))


def alike(rows: np.ndarray, reads: np.ndarray) -> float:
    """Return the share of each row's nearest neighbors that read the same quadrant."""
    near = NearestNeighbors(n_neighbors=NEIGHBORS + 1).fit(rows).kneighbors(rows)[1][:, 1:]
    return float((reads[near] == reads[:, None]).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--init", type=Path, default=Path("shipped:digits-sum"))
    parser.add_argument("--data", default="digits-sum")
    default = Path(__file__).resolve().parent.parent / "docs" / "module_codes.png"
    parser.add_argument("--out", type=Path, default=default)
    options = parser.parse_args()
    model = load(options.init).build().eval()
    images = torch.from_numpy(np.asarray(load_data(options.data, "test").images[:IMAGES]))
    with torch.inference_mode():
        found = model.fold().details(images)
        circuit = model.generator()
    reads = quadrants(found["attention"].mean(0).numpy())
    link = found["link"].numpy()
    degree = link.reshape(-1, *link.shape[-2:])[0].sum(1) - 1
    signatures = torch.nn.functional.normalize(circuit.signatures, dim=-1)
    chance = float(((np.bincount(reads, minlength=4) / len(reads)) ** 2).sum())
    figure, panels = plt.subplots(2, 2, figsize=(9, 8.4), layout="constrained")
    for row, (name, rows) in enumerate({"codes": circuit.codes, "signatures": signatures}.items()):
        vectors = rows.detach().numpy()
        share = alike(vectors, reads)
        print(f"{name}: {share:.1%} of {NEIGHBORS} neighbors read the same, by chance {chance:.1%}")
        principal = PCA(2).fit(vectors)
        kept = 100 * principal.explained_variance_ratio_.sum()
        drawn = TSNE(random_state=0, init="pca", perplexity=20).fit_transform(vectors)
        for panel, title, places in (
            (panels[row, 0], f"PCA ({kept:.0f} % of the variance)", principal.transform(vectors)),
            (panels[row, 1], "t-SNE", drawn),
        ):
            for quadrant, color in enumerate(COLORS):
                mine = reads == quadrant
                panel.scatter(
                    *places[mine].T,
                    8 + 4 * degree[mine],
                    color,
                    alpha=0.75,
                    label=QUADRANTS[quadrant],
                )
            panel.set_title(f"{name}, {title}", fontsize=10)
            panel.set_xticks([])
            panel.set_yticks([])
    panels[0, 0].legend(title="reads most", fontsize=8)
    figure.savefig(options.out, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    main()
