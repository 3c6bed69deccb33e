"""The claims of the paper's sections 4.1 and 4.2, each with a test on the numbers of experiments 1 and 2."""

from __future__ import annotations

from collections.abc import Callable

from studies.baselines import BASELINES
from studies.digits.evidence import Evidence
from studies.digits.plan import BATCH, capped
from studies.report import Claim, Measured

__all__ = ["CLAIMS"]

_MANY = 10_000  # samples
_STABLE = _ALIKE = 0.01  # of error
_NEAR = 0.8  # share of the energy that a Haar function explains


def _stable_after_70(evidence: Evidence) -> tuple[bool, str] | None:
    n = evidence.scale.curve_n
    curve = {t: one for t in evidence.scale.curve_stops if (one := evidence.by_paper(n, t)) is not None}
    if not curve or max(curve) < 100:
        return None
    last = curve[max(curve)].mean
    late = {t: one.mean for t, one in curve.items() if t >= 70}
    off = max(late, key=lambda t: abs(late[t] - last))
    holds = abs(late[off] - last) <= _STABLE
    early = ", ".join(f"{one.mean:.4f} at T = {t:,}" for t, one in curve.items() if t <= 100)
    return (
        holds,
        f"{early}; from T = 70 on it is furthest from its last value ({last:.4f}) at T = {off:,}: {late[off]:.4f}",
    )


def _changes_little(evidence: Evidence) -> tuple[bool, str] | None:
    n, last = evidence.scale.curve_n, max(evidence.scale.curve_stops)
    ends = evidence.by_paper(n, 300), evidence.by_paper(n, last)
    if ends[0] is None or ends[1] is None or capped(evidence.scale, n, 300) == capped(evidence.scale, n, last):
        return None
    falls = sum(late < early for early, late in zip(ends[0].values, ends[1].values, strict=True))
    text = f"from {ends[0].mean:.4f} at T = 300 to {ends[1].mean:.4f} at T = {last:,}; it falls in {falls} of "
    return ends[1].mean <= ends[0].mean, f"{text}{len(ends[0].values)} subsets"


def _more_is_better(evidence: Evidence) -> tuple[bool, str] | None:
    last = max(evidence.scale.stops)
    curve = {n: one.mean for n in evidence.scale.all_sizes if (one := evidence.by_paper(n, last)) is not None}
    if len(curve) < 3:
        return None
    errors = list(curve.values())
    return errors == sorted(errors, reverse=True), ", ".join(f"{e:.4f} at N = {n:,}" for n, e in curve.items())


def _near_haar(evidence: Evidence) -> tuple[bool, str] | None:
    numbers = evidence.filters("paper")
    if not numbers:
        return None
    likeness, chance, cosine = (numbers[f"filters.{key}"].mean for key in ("mean", "scrambled", "dct"))
    text = f"likeness {likeness:.2f} of 1; equally smooth vectors without edges {chance:.2f}, cosines {cosine:.2f}"
    return likeness >= _NEAR and likeness > chance, text


def _networks(evidence: Evidence, settings: str, n: int) -> dict[str, float]:
    found = {}
    for name, entry in BASELINES.items():
        one = evidence.baseline(name, n)
        if entry.settings == settings and one is not None:
            found[entry.title] = one.mean
    return found


def _against_networks(
    ours: Callable[[Evidence, int], Measured | None],
    settings: str,
    sizes: Callable[[int], bool],
    holds: Callable[[float], bool],
) -> Callable[[Evidence], tuple[bool, str] | None]:
    """Return a test of an error minus that of the best network, at some N.

    Parameters
    ----------
    ours : callable
        From evidence and N to our error.
    settings : {"modern", "toolbox"}
        Which networks.
    sizes : callable
        Whether an N counts.
    holds : callable
        Whether the claim holds for a difference of errors.
    """

    def test(evidence: Evidence) -> tuple[bool, str] | None:
        lines, differences = [], []
        for n in evidence.scale.baseline_sizes:
            error, theirs = ours(evidence, n), _networks(evidence, settings, n)
            if not sizes(n) or error is None or not theirs:
                continue
            best = sorted(theirs, key=lambda title: theirs[title])[:2]
            differences.append(error.mean - theirs[best[0]])
            others = ", ".join(f"{title} {theirs[title]:.4f}" for title in best)
            lines.append(f"N = {n:,}: MVRBM {error.mean:.4f}, {others}")
        return (all(map(holds, differences)), "; ".join(lines)) if lines else None

    return test


def _by_paper(evidence: Evidence, n: int) -> Measured | None:
    return evidence.by_paper(n, max(evidence.scale.stops))


def _best_of_few(settings: str) -> Callable[[Evidence], tuple[bool, str] | None]:
    return _against_networks(_by_paper, settings, lambda n: n < _MANY, lambda difference: difference < 0)


def _comparable(settings: str) -> Callable[[Evidence], tuple[bool, str] | None]:
    return _against_networks(_by_paper, settings, lambda n: n >= _MANY, lambda difference: difference <= _ALIKE)


def _tvrbm_restrictive(evidence: Evidence) -> tuple[bool, str] | None:
    lines, worse = [], []
    for n in evidence.scale.tvrbm_sizes:
        ours = evidence.error("mvrbm", "default", n)
        theirs = [evidence.error(model, "default", n) for model in ("tvrbm", "tvrbm-small")]
        there = [one.mean for one in theirs if one is not None]
        if ours is not None and there:
            worse.append(min(there) > ours.mean)
            lines.append(f"N = {n:,}: MVRBM {ours.mean:.4f}, the better TvRBM {min(there):.4f}")
    return (all(worse), "; ".join(lines)) if lines else None


def _growing(
    key: str, shown: Callable[[float], str], unit: str, most: float = 1.0
) -> Callable[[Evidence], tuple[bool, str] | None]:
    """Return a test of a number of the MVRBM against `most` times that of the classic RBM, at every image size."""

    def test(evidence: Evidence) -> tuple[bool, str] | None:
        ours, theirs = (evidence.growth(model, key) for model in ("mvrbm", "rbm"))
        both = sorted(set(ours) & set(theirs))
        if not both:
            return None
        text = "; ".join(f"{s}x{s}: {shown(ours[s])} against {shown(theirs[s])}{unit}" for s in both)
        return all(ours[side] <= most * theirs[side] for side in both), text

    return test


def _faster(evidence: Evidence) -> tuple[bool, str] | None:
    found = _growing("seconds_per_update", lambda seconds: f"{1e3 * seconds:.3g}", " ms per update")(evidence)
    if found is None:
        return None
    updates = -(-evidence.scale.photographs // BATCH)
    count = f"{updates} update" + ("s" if updates > 1 else "")
    note = f"; an epoch has {count}, and for small images the fixed cost of an epoch dominates"
    return found[0], found[1] + note


def _better_than_pixels(evidence: Evidence) -> tuple[bool, str] | None:
    last, lines, better = max(evidence.scale.stops), [], []
    for n in evidence.scale.all_sizes:
        ours, raw, own = evidence.by_paper(n, last), evidence.raw(n), evidence.error("mvrbm", "default", n)
        if ours is not None and raw is not None:
            better.append(ours.mean < raw.mean)
            ending = "" if own is None else f" (our recipe {own.mean:.4f})"
            lines.append(f"N = {n:,}: {ours.mean:.4f} against {raw.mean:.4f}{ending}")
    return (all(better), "; ".join(lines)) if lines else None


def _one_pass_denoises(evidence: Evidence) -> tuple[bool, str] | None:
    numbers = evidence.denoising("paper", evidence.scale.nines_hidden[0])
    if not numbers:
        return None
    noisy, passed, median = (numbers[f"psnr.{key}.psnr"].mean for key in ("noisy", "one-pass", "median"))
    return passed > median, f"noisy {noisy:.2f} dB, the pass {passed:.2f} dB, 3x3 median filter {median:.2f} dB"


CLAIMS: tuple[Claim, ...] = (
    Claim(
        "one-pass",
        "A pass up and down denoises nines, visually pleasing (4.1). Measured: it is better than a median filter.",
        _one_pass_denoises,
        "The pass rebuilds every pixel, including those without noise, and ignores the noise model; our denoiser keeps "
        "pixels that cannot be noise and weighs the others against the model.",
    ),
    Claim(
        "haar",
        "The filters are quite close to Haar filters (4.1).",
        _near_haar,
        "The filters have edges, but of several widths at once: strokes are not blocks. One Haar function explains "
        "only part of a filter, and part of that by smoothness alone.",
    ),
    Claim(
        "more-data",
        "Sufficient training samples lead to better classification (4.2).",
        _more_is_better,
        "With few updates the factors have not left their start, whatever the number of samples.",
    ),
    Claim(
        "stable-after-70",
        "Learning is stable after 70 iterations (4.2).",
        _stable_after_70,
        "At rate 0.05 the factors overshoot in the first epochs, and only weight decay brings them back; how long that "
        "takes depends on the initial values, which the paper does not give.",
    ),
    Claim(
        "300-to-3000",
        "From T = 300 to 3,000 the error falls, from 0.0571 to 0.0520 (4.2).",
        _changes_little,
        "After 300 epochs the model has settled: the rest is noise of the last updates and of the subset, and the "
        "paper has one subset.",
    ),
    Claim(
        "few-samples-toolbox",
        "With fewer than 10,000 samples the MVRBM outperforms the others (4.2), these as the toolbox has them.",
        _best_of_few("toolbox"),
        "Some of the toolbox's networks learn enough in one epoch.",
    ),
    Claim(
        "few-samples-modern",
        "The same, these at today's customary settings.",
        _best_of_few("modern"),
        "The toolbox's examples train for one epoch, which is a handful of updates where samples are few: the paper's "
        "other methods had hardly begun to learn. A network trained to convergence has more parameters and still does "
        "not overfit as much as the paper supposes; convolutions build in that digits may be shifted.",
    ),
    Claim(
        "few-samples-fine-tuned",
        "Not the paper's, but ours: with fewer than 10,000 samples the MVRBM with a softmax on top, fine-tuned, "
        "outperforms today's networks.",
        _against_networks(Evidence.fine_tuned, "modern", lambda n: n < _MANY, lambda difference: difference < 0),
        "Labels help it as they help the others, but it has one layer and a small part of their parameters. "
        "Convolutions also build in that digits may be shifted.",
    ),
    Claim(
        "comparable-toolbox",
        "With sufficient samples it is comparable to the others (4.2; within 1 % of the best), as in the toolbox.",
        _comparable("toolbox"),
        "One epoch of many samples is enough for some of them.",
    ),
    Claim(
        "comparable-modern",
        "The same, these at today's customary settings.",
        _comparable("modern"),
        "Nearest neighbors in features that were learned without labels are no match for a network that has learned "
        "from the labels.",
    ),
    Claim(
        "better-than-pixels",
        "Hidden probabilities are good features (4.2). Measured: 1-NN on them is better than on raw pixels.",
        _better_than_pixels,
        "The paper does not show raw pixels. With very few samples some training runs have not recovered from their "
        "first overshoot. Otherwise a bilinear map of rank one keeps most distances, so the features gain little, "
        "least where there are many neighbors to choose from.",
    ),
    Claim(
        "tvrbm",
        "TvRBM is too restrictive (2). Measured: at no more parameters it is worse than the MVRBM.",
        _tvrbm_restrictive,
        "With fewer hidden units the same number of parameters allows a higher rank.",
    ),
    Claim(
        "parameters",
        "The MVRBM has far fewer parameters than the classic RBM (1).",
        _growing("parameters", "{:,.0f}".format, ""),
        "",
    ),
    Claim(
        "faster",
        "It trains faster than the classic RBM (1).",
        _faster,
        "Small products take as long as their launch, even more so on a GPU: only where the classic RBM's matrix is "
        "large does its arithmetic count.",
    ),
    Claim(
        "as-good",
        "It is comparable to the classic RBM (5). Measured: reconstruction error at most 10 % larger, same epochs.",
        _growing("error", "{:.4f}".format, " per pixel", most=1.1),
        "One bilinear map has a small part of the classic RBM's freedom; a higher rank restores it step by step.",
    ),
)
