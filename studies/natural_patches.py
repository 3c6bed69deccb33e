"""Densities of 8x8 patches of natural images, in nats per patch.

    python -m studies.natural_patches --data-dir DATA --out results.json

The protocol is that of the literature: gray bytes plus uniform noise, divided by 256, without the mean of the patch
and without the last pixel, which leaves 63 dimensions. The model of a whole patch has a level, whose own density is
subtracted. An orthonormal basis of patches with mean zero, followed by dropping the last pixel, has the determinant
1 / sqrt(64), which adds log(64) / 2.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mvrbm import MatrixMixture
from mvrbm.estimators.mixture.conditional import in_chunks
from studies.data import data_file

#: Settings of MatrixMixture and the number of epochs, by the largest number of parameters.
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "100": {"n_components": 1, "n_contrasts": 12, "whiten": False, "n_epochs": 6},
    "600": {"n_components": 7, "n_contrasts": 6, "whiten": False, "n_epochs": 20},
    "3000": {"n_components": 17, "n_contrasts": 4, "n_epochs": 40},
    "12000": {"n_components": 68, "n_contrasts": 4, "n_epochs": 60},
    "23000": {"n_components": 131, "n_contrasts": 4, "n_epochs": 60},
    "90000": {"n_components": 514, "n_contrasts": 4, "n_epochs": 60},
}
# The validation set is the last 20 training pictures, with 1,100 patches each.
_VALIDATION = 22_000
_SIZE = 64


def load(part: str, data_dir: str | None, limit: int | None, seed: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return training patches and those to score, with noise, as arrays of shape (n, 8, 8) between 0 and 1.

    If `part` is "validation", the last 20 training pictures are held out. Otherwise, the test pictures are scored.
    """
    rng = np.random.default_rng(seed)
    with np.load(data_file("patches/bsds_8x8.npz", data_dir)) as stored:
        train, test = stored["train"], stored["test"]
    if part == "validation":
        train, test = train[:-_VALIDATION], train[-_VALIDATION:]
    train = train if limit is None else train[rng.permutation(len(train))[:limit]]
    return with_noise(flipped(train, rng), rng), with_noise(test, np.random.default_rng(0))


def flipped(patches: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
    """Flip and transpose each patch at random."""
    found = patches.copy()
    for flip in (lambda x: x[:, ::-1], lambda x: x[:, :, ::-1], lambda x: x.transpose(0, 2, 1)):
        chosen = rng.random(len(found)) < 0.5
        found[chosen] = flip(found[chosen])
    return found


def with_noise(patches: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
    """Add uniform noise to bytes, and divide by 256."""
    return ((patches + rng.random(patches.shape)) / 256).astype(np.float32)


@torch.no_grad()
def score(model: MatrixMixture, patches: NDArray[Any]) -> float:
    """Return the mean log-density of patches without their means and without their last pixels, in nats."""
    unit = model.unit_
    rotated = unit.rotate(torch.from_numpy(patches).to(unit.center))
    logs = torch.logsumexp(in_chunks(unit, unit.joint_log_density, rotated).flatten(1), 1).double()
    level = unit.level_log_density(rotated).double() - float(unit.log_scale.flatten()[0])
    return float((logs - level).mean()) + 0.5 * math.log(_SIZE)


def main() -> None:
    """Train and score the configurations, and print one row each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", help="folder with patches/bsds_8x8.npz; default: MVRBM_DATA")
    parser.add_argument("--part", choices=("validation", "test"), default="test", help="patches to score")
    parser.add_argument("--only", nargs="+", choices=list(CONFIGURATIONS), default=list(CONFIGURATIONS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--limit", type=int, help="number of training patches")
    parser.add_argument("--epochs", type=float, default=1.0, help="factor for the numbers of epochs")
    parser.add_argument("--batch-size", type=int, help="default: 500 on a CPU, 2000 on a GPU")
    parser.add_argument(
        "--copies", type=int, help="random flips of each training patch; default: 1 on a CPU, 8 on a GPU"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, help="JSON file for the results, which is written after each configuration")
    given = parser.parse_args()
    gpu = torch.cuda.is_available() and given.device in ("auto", "cuda")
    copies = given.copies or (8 if gpu else 1)
    batch_size = given.batch_size or (2000 if gpu else 500)
    results = []
    for seed in given.seeds:
        parts = [load(given.part, given.data_dir, given.limit, 100 * seed + copy) for copy in range(copies)]
        train, held = np.concatenate([part[0] for part in parts]), parts[0][1]
        for name in given.only:
            options = CONFIGURATIONS[name]
            n_epochs = max(3, round(given.epochs * options["n_epochs"] / copies))
            settings = {"level": True, "means": "one", "batch_size": batch_size, **options, "n_epochs": n_epochs}
            model = MatrixMixture(**settings, random_state=seed, device=given.device)
            start = time.perf_counter()
            model.fit(train)
            seconds = time.perf_counter() - start
            found = {"at_most": int(name), "parameters": model.n_parameters_, "nats": score(model, held)}
            results.append({**found, "seconds": seconds, "seed": seed, "part": given.part, "settings": settings})
            print(
                f"{name:>6} {model.n_parameters_:>6} parameters {found['nats']:8.3f} nats {seconds:7.1f} s", flush=True
            )
            if given.out is not None:
                given.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
