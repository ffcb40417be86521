# SPDX-License-Identifier: Apache-2.0
"""Draw the image in docs/nac.md: codes and signatures of a trained NAC in two dimensions.

A module has the color of the quadrant of the image that it reads most, over 200 test images, and
the size of its expected number of links. Prints how many of a module's five nearest neighbors read
the same quadrant, and by chance.
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

QUADRANTS = ("top left", "top right", "bottom left", "bottom right")


def quadrants(attention: np.ndarray) -> np.ndarray:
    """Return the quadrant in which each module reads most, 0 to 3 by rows.

    Shapes: attention [u n] of a square grid -> [u].
    """
    half = round(attention.shape[1] ** 0.5) // 2
    grid = attention.reshape(len(attention), 2, half, 2, half)
    return np.asarray(grid.sum((2, 4)).reshape(-1, 4).argmax(1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--init", type=Path, default=Path("shipped:digits-sum"))
    parser.add_argument("--data", default="digits-sum")
    default = Path(__file__).resolve().parent.parent / "docs" / "module_codes.png"
    parser.add_argument("--out", type=Path, default=default)
    options = parser.parse_args()
    model = load(options.init).build().eval().requires_grad_(False)
    images = np.asarray(load_data(options.data, "test").images[:200])
    found, circuit = model.fold().details(torch.from_numpy(images)), model.generator()
    reads = quadrants(found["attention"].mean(0).numpy())
    sizes = 8 + 4 * (found["link"][0].numpy().sum(-1) - 1)
    signatures = torch.nn.functional.normalize(circuit.signatures, dim=-1)
    chance = np.square(np.bincount(reads) / len(reads)).sum()
    figure, panels = plt.subplots(2, 2, figsize=(9, 8.4), layout="constrained")
    for row, (name, rows) in enumerate({"codes": circuit.codes, "signatures": signatures}.items()):
        vectors = rows.numpy()
        near = NearestNeighbors(n_neighbors=6).fit(vectors).kneighbors(vectors)[1][:, 1:]
        share = (reads[near] == reads[:, None]).mean()
        print(f"{name}: {share:.1%} of 5 neighbors read the same quadrant, by chance {chance:.1%}")
        principal = PCA(2).fit(vectors)
        kept = 100 * principal.explained_variance_ratio_.sum()
        drawn = TSNE(random_state=0, init="pca", perplexity=20).fit_transform(vectors)
        titles = f"{name}, PCA ({kept:.0f} % of the variance)", f"{name}, t-SNE"
        for panel, title, places in zip(
            panels[row], titles, (principal.transform(vectors), drawn), strict=True
        ):
            for index, quadrant in enumerate(QUADRANTS):
                mine = reads == index
                panel.scatter(*places[mine].T, sizes[mine], alpha=0.75, label=quadrant)
            panel.set_title(title, fontsize=10)
            panel.set_xticks([])
            panel.set_yticks([])
    handles = panels[0, 0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=4, title="quadrant read most")
    figure.savefig(options.out, dpi=80, metadata={"Software": None})


if __name__ == "__main__":
    main()
