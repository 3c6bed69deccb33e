"""The findings of experiment 3: numbers next to the paper's, and whether its claims hold, from stored runs alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from studies.report import Claim, Measured, StoredRuns, Target, by_key, plain, summary
from studies.runs import Store
from studies.superres import work
from studies.superres.plan import GROUPS, Scale, plan

__all__ = ["CLAIMS", "METHODS", "PAPER", "PUBLISHED", "Evidence", "results"]

#: The paper's numbers: its Table 1 by patch, and its two comparisons by method.
TABLE1 = {10: 35.1621, 15: 35.3227, 20: 35.3555, 30: 35.3606, 35: 35.3564}
PAPER: dict[str, dict[str, dict[str, float]]] = {
    "lena": {
        "bicubic": {"rmse": 5.0134, "psnr": 34.1282},
        "sparse": {"rmse": 4.0900, "psnr": 35.8963, "seconds": 679.529},
        "cd": {"rmse": 4.3804, "psnr": 35.3006, "seconds": 36.116},
    },
    "bird": {
        "bicubic": {"rmse": 4.7932, "psnr": 34.5184},
        "sparse": {"rmse": 3.7975, "psnr": 36.5409, "seconds": 748.225},
        "cd": {"rmse": 3.9459, "psnr": 36.2514, "seconds": 35.196},
    },
}
#: Mean PSNR on Set5 at scale 2, as published.
PUBLISHED = {"bicubic": 33.66, "A+": 36.54, "SRCNN": 36.66}

#: Titles of the methods, in the order of the tables.
METHODS = {
    "bicubic": "bicubic",
    "sparse": "sparse representation",
    "cd-plain": "MMVRBM, CD-1, without back-projection",
    "cd": "MMVRBM, CD-1",
    "tuned": "MMVRBM, fine-tuned",
    "tuned-ensemble": "the same, self-ensemble",
    "shipped": "MMVRBM, shipped weights",
    "shipped-ensemble": "the same, self-ensemble",
}


class Evidence(StoredRuns):
    """The numbers of the stored runs of a plan, by method."""

    def __init__(self, store: Store, scale: Scale, *, seeds: int, first_seed: int = 0) -> None:
        super().__init__(store, plan(scale, list(GROUPS), seeds=seeds, first_seed=first_seed))
        self.scale = scale

    def learned(self, patch: int, hidden: int) -> dict[str, Measured]:
        """All numbers of the machines of one size trained by CD-1, nested ones under names with dots."""
        size = {"patch": patch, "hidden_shape": (hidden, hidden)}
        runs = [
            numbers
            for run, numbers in self.found(work.learn)
            if all(run.settings["model"][key] == value for key, value in size.items())
        ]
        return by_key(runs)

    def compared(self, image: str) -> dict[str, Measured]:
        """All numbers of the methods on one image."""
        return by_key([numbers["methods"] for _, numbers in self.found(work.compare, image=image)])

    def published(self) -> dict[str, Measured]:
        """All numbers of the methods in the literature's protocol."""
        return by_key([numbers["methods"] for _, numbers in self.found(work.published_protocol)])

    def tuned(self) -> dict[str, Measured]:
        """All numbers of the fine-tuned machines; those `before` and `after` fine-tuning have names with dots."""
        return by_key([numbers for _, numbers in self.found(work.fine_tune)])

    def times_faster(self, method: str) -> Measured | None:
        """Return the time of sparse representation over that of a method, on the first image."""
        numbers = self.compared(self.scale.compared[0])
        ours, theirs = numbers.get(f"{method}.seconds"), numbers.get("sparse.seconds")
        if ours is None or theirs is None:
            return None
        return Measured(tuple(slow / fast for slow, fast in zip(theirs.values, ours.values, strict=True)))

    @property
    def is_set5(self) -> bool:
        """Whether the images are those of Set5."""
        return len(self.scale.published) == 5

    @property
    def by_patch(self) -> dict[int, dict[str, Measured]]:
        """Numbers by patch size, where there are any."""
        return _there({patch: self.learned(patch, self.scale.hidden) for patch in self.scale.patches})

    @property
    def by_hidden(self) -> dict[int, dict[str, Measured]]:
        """Numbers by hidden size, where there are any."""
        return _there({hidden: self.learned(self.scale.patch, hidden) for hidden in self.scale.hiddens})


def _there(found: dict[int, dict[str, Measured]]) -> dict[int, dict[str, Measured]]:
    return {size: numbers for size, numbers in found.items() if "with.psnr" in numbers}


# -- next to the paper ------------------------------------------------------------------------------


def targets(evidence: Evidence) -> list[Target]:
    """Return the paper's numbers and the numbers to reach, next to ours."""
    name = evidence.scale.compared[0]
    first, many = evidence.compared(name), evidence.published()
    paper = PAPER["lena"]
    title = name.capitalize()
    decibels: dict[str, Any] = {"lower": False, "unit": "dB", "digits": 3}
    found = []
    for key, ours, wanted in (
        ("bicubic", paper["bicubic"]["psnr"], 34.127),
        ("cd", paper["cd"]["psnr"], 35.30),
        ("cd-plain", paper["cd"]["psnr"], None),
        ("sparse", paper["sparse"]["psnr"], 35.6),
        ("tuned", None, 36.0),
        ("tuned-ensemble", None, None),
        ("shipped", None, None),
    ):
        method = METHODS[key] if key != "tuned-ensemble" else "MMVRBM, fine-tuned, self-ensemble"
        found.append(Target(f"{name}-{key}", f"{title}, {method}", ours, wanted, first.get(f"{key}.psnr"), **decibels))
    for key, wanted in (("bicubic", 33.62), ("cd", None), ("tuned", 36.5), ("tuned-ensemble", None), ("shipped", 36.3)):
        method = METHODS[key] if key != "tuned-ensemble" else "MMVRBM, fine-tuned, self-ensemble"
        what = f"{'Set5' if evidence.is_set5 else 'test images'}, literature's protocol, {method}"
        found.append(Target(f"set5-{key}", what, None, wanted, many.get(f"{key}.psnr"), **decibels))
    faster = paper["sparse"]["seconds"] / paper["cd"]["seconds"]
    for key in ("cd", "tuned", "shipped"):
        what = f"{title}: times faster than sparse representation, {METHODS[key]}"
        given = faster if key == "cd" else None
        found.append(Target(f"faster-{key}", what, given, 40.0, evidence.times_faster(key), lower=False, digits=0))
    what, seconds = f"{title}: seconds, {METHODS['shipped']}", first.get("shipped.seconds")
    found.append(Target("seconds-shipped", what, None, 1.0, seconds, unit="s", digits=2))
    return found


# -- claims of the paper ----------------------------------------------------------------------------


def _against(method: str, holds: Callable[[float], bool]) -> Callable[[Evidence], tuple[bool, str] | None]:
    """Return a test of how far CD-1 is above another method, in dB, on every compared image."""

    def test(evidence: Evidence) -> tuple[bool, str] | None:
        lines, gains = [], []
        for image in evidence.scale.compared:
            numbers = evidence.compared(image)
            if numbers:
                ours, theirs = numbers["cd.psnr"].mean, numbers[f"{method}.psnr"].mean
                gains.append(ours - theirs)
                lines.append(f"{image}: {ours:.2f} against {theirs:.2f} dB")
        return (all(map(holds, gains)), "; ".join(lines)) if lines else None

    return test


def _faster(evidence: Evidence) -> tuple[bool, str] | None:
    times = evidence.times_faster("cd")
    return None if times is None else (times.mean >= 19, f"{times.mean:.0f} times as fast")


def _best(found: Mapping[int, Mapping[str, Measured]], size: int, what: str) -> tuple[bool, str] | None:
    curve = {each: numbers["with.psnr"].mean for each, numbers in found.items()}
    if size not in curve or len(curve) < 3:
        return None
    text = ", ".join(f"{psnr:.2f} dB at {each}" for each, psnr in curve.items())
    return max(curve, key=lambda each: curve[each]) == size, f"{what}: {text}"


def _claim(key: str, says: str, test: Callable[[Evidence], tuple[bool, str] | None], reason: str = "") -> Claim:
    return Claim(key, says, cast("Any", test), reason)


CLAIMS: tuple[Claim, ...] = (
    _claim(
        "superres-bicubic",
        "The MMVRBM is much better than bicubic interpolation (4.3).",
        _against("bicubic", lambda gain: gain > 0),
    ),
    _claim(
        "superres-sparse",
        "It is slightly inferior to sparse representation (4.3). Tested: by less than 1 dB.",
        _against("sparse", lambda gain: -1 < gain < 0),
        "The two are so close that the number of atoms and the training images decide.",
    ),
    _claim(
        "superres-faster",
        "It is much faster than sparse representation (4.3): 19 times.",
        _faster,
        "With few atoms, small images or little overlap of patches, the lasso has little to do.",
    ),
    _claim(
        "superres-patch",
        "Patches of 30 x 30 are best (Table 1).",
        lambda evidence: _best(evidence.by_patch, 30, "with back-projection"),
        "The paper does not say how patches overlap, nor how they are scaled. A bilinear map of a large patch has as "
        "few filters as one of a small patch, and they have to explain more.",
    ),
    _claim(
        "superres-hidden",
        "A hidden layer of 20 x 20 gives better results than other sizes (4.3).",
        lambda evidence: _best(evidence.by_hidden, 20, f"patches of {evidence.scale.patch}"),
        "Beyond some size the curve is flat, and the best size depends on the random patches.",
    ),
)


# -- all of it --------------------------------------------------------------------------------------


def results(evidence: Evidence) -> dict[str, Any]:
    """Return all findings as plain values."""
    comparable = evidence.scale.compared[0] == "lena"
    return {
        **summary(evidence, targets(evidence), CLAIMS, comparable=comparable),
        "patch_size": {
            str(size): {"paper": TABLE1.get(size), **plain(numbers)} for size, numbers in evidence.by_patch.items()
        },
        "hidden_size": {str(size): plain(numbers) for size, numbers in evidence.by_hidden.items()},
        "comparison": {image: plain(evidence.compared(image)) for image in evidence.scale.compared},
        "set5": plain(evidence.published()),
        "fine_tuning": plain(evidence.tuned()),
    }
