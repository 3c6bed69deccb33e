"""Measure what the documentation says of super-resolution, and make the weights that are shipped.

    python tools/superres_study.py collect      # the open images, as PNG under carry/superres-open
    python tools/superres_study.py paper        # the paper's setting: CD-1 alone, patch and hidden sizes
    python tools/superres_study.py starts       # CD-1 of the settings below, which the next three go on from
    python tools/superres_study.py choose       # fine-tuning, judged by eight images of T91 that are held out
    python tools/superres_study.py t91          # what was chosen, on all of T91; looks at Set5 and Lena
    python tools/superres_study.py open         # settings of the shipped weights, judged by three held-out open images
    python tools/superres_study.py ship         # the shipped weights; looks at Set5 and Lena
    python tools/superres_study.py cpu          # what was trained on T91 and what is shipped, in single precision
    python tools/superres_study.py speed        # seconds and memory of enlarging, on a CPU
    python tools/superres_study.py generative   # free energies and samples before and after fine-tuning
    python tools/superres_study.py picture      # the crops of the documentation
    python tools/superres_study.py compare      # time and quality beside sparse representation, in one run
    python tools/superres_study.py table        # print all of it

Every run is a cell, kept in OUT/<study>.json with its model in MODELS/<study>/<cell>, and not repeated. `--only TEXT`
takes the cells whose name contains TEXT, `--budget SECONDS` begins none that is not likely to end in time. T91, Set5
and Lena are found through MVRBM_DATA; what needs them is left out where they are not, so that anyone can make the
shipped weights again:

    python tools/superres_study.py collect
    python tools/superres_study.py starts --only open --device cpu
    python tools/superres_study.py ship --device cuda --tf32 --out fresh --models fresh
"""

from __future__ import annotations

import argparse
import fcntl
import importlib
import json
import os
import re
import resource
import subprocess
import sys
import time
import traceback
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from mvrbm.vision import enlarge_image, luminance, psnr_ssim, reduce_image
from mvrbm.vision.generative import generative_report
from mvrbm.vision.resampling import crop_to_multiple
from mvrbm.vision.superres import SuperResolver
from mvrbm.vision.windows import cut_windows, image_pair
from studies.baselines.sparse_representation import SparseRepresentation

OPEN = Path("carry/superres-open")
STARTS = Path("carry/superres-starts")

# -- images -------------------------------------------------------------------------------------------

#: The open images: where each comes from, and what its licence is.
LICENCES = {
    "astronaut": "scikit-image; NASA, public domain",
    "brick": "scikit-image; CC0, CC0Textures",
    "camera": "scikit-image; CC0, Lav Varshney",
    "chelsea": "scikit-image; CC0, Stefan van der Walt",
    "coffee": "scikit-image; CC0, Rachel Michetti",
    "coins": "scikit-image; Brooklyn Museum, no known copyright restrictions",
    "grass": "scikit-image; CC0, linolafett",
    "gravel": "scikit-image; CC0, CC0Textures",
    "hubble_deep_field": "scikit-image; NASA, public domain",
    "retina": "scikit-image; CC0, Mikael Haggstrom",
    "china": "scikit-learn; CC BY 2.0, danielbuechele",
    "flower": "scikit-learn; CC BY 2.0, vultilion",
}
HELD_OUT_OPEN = ("chelsea", "china", "coins")
HELD_OUT_T91 = ("t5", "t17", "t33", "t48", "t60", "tt3", "tt12", "tt22")
SET5 = ("baby", "bird", "butterfly", "head", "woman")


def data():
    return Path(os.environ.get("MVRBM_DATA", "../shared/data")) / "superres"


def read(path):
    with Image.open(path) as image:
        return np.asarray(image.convert("L" if image.mode == "L" else "RGB"))


def t91(names=None):
    files = sorted((data() / "T91").glob("*.bmp"))
    return {path.stem: read(path) for path in files if names is None or path.stem in names}


def scsr():
    names = {line.removesuffix(".bmp") for line in (data() / "ScSR69.txt").read_text().split()}
    return list(t91(names).values())


def split_t91():
    images = t91()
    held_out = [images.pop(name) for name in HELD_OUT_T91]
    return list(images.values()), held_out


def open_images():
    return {name: read(OPEN / f"{name}.png") for name in LICENCES}


def with_halves(images):
    """Images, and the same at half their size: sharper, and other content at the scale of a patch."""
    return [*images, *(reduce_image(image, 2) for image in images)]


def collect(_):
    OPEN.mkdir(parents=True, exist_ok=True)
    samples = importlib.import_module("skimage.data")
    from sklearn.datasets import load_sample_image

    for name, licence in LICENCES.items():
        ours = licence.startswith("scikit-image")
        image = getattr(samples, name)() if ours else load_sample_image(f"{name}.jpg")
        Image.fromarray(np.asarray(image)).save(OPEN / f"{name}.png")
        print(name, image.shape, licence)


# -- measures -----------------------------------------------------------------------------------------


def literature(model, images, **options):
    """Mean PSNR and SSIM in the literature's protocol: luminance alone is reduced and enlarged."""
    rows = []
    for image in images:
        truth = crop_to_multiple(luminance(image), model.scale)
        low = reduce_image(truth, model.scale)
        rows.append(psnr_ssim(truth, model.upscale(low, **options), "literature", model.scale))
    return [round(float(value), 4) for value in np.mean(rows, 0)]


def paper_protocol(model, image, **options):
    """PSNR and SSIM in the paper's protocol: RGB is reduced and enlarged."""
    truth = crop_to_multiple(image, model.scale)
    quality = psnr_ssim(truth, model.upscale(reduce_image(truth, model.scale), **options), "paper", model.scale)
    return [round(float(value), 4) for value in quality]


def lena():
    return read(data() / "Lena" / "lena_scsr_512.bmp")


def set5():
    return [read(data() / "Set5" / f"{name}_GT.bmp") for name in SET5]


class Bicubic:
    """Bicubic interpolation, to be measured as models are."""

    def __init__(self, scale):
        self.scale = scale

    def upscale(self, image):
        return enlarge_image(image, self.scale)


def tested(model):
    """All that is said of a finished model."""
    if not data().is_dir():
        print("  Set5 and Lena are not here: not measured", flush=True)
        return {}
    row = {"set5": literature(model, set5()), "set5_ensemble": literature(model, set5(), self_ensemble=True)}
    row |= {"lena_paper": paper_protocol(model, lena()), "lena_literature": literature(model, [lena()])}
    rounds, model.back_projection = model.back_projection, 0
    row |= {
        "set5_no_back_projection": literature(model, set5()),
        "lena_paper_no_back_projection": paper_protocol(model, lena()),
    }
    model.back_projection = rounds
    return row


def paper_protocol_of(model, images):
    """Mean PSNR and SSIM in the paper's protocol."""
    return [round(float(value), 4) for value in np.mean([paper_protocol(model, image) for image in images], 0)]


# -- cells --------------------------------------------------------------------------------------------


def slug(name):
    """A name that every file system takes."""
    return re.sub(r"[^A-Za-z0-9]+", "-", name)


def record(study, name, row, options):
    """Write what a cell found beside what others have."""
    path = options.out / f"{study}.json"
    options.out.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:  # another process may be writing
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = json.loads(path.read_text()) if path.exists() else {}
        done[name] = row
        staging = path.with_suffix(".staging")
        staging.write_text(json.dumps(dict(sorted(done.items())), indent=1) + "\n")
        staging.replace(path)
    print(study, name, row, flush=True)


def run(study, cells, options):
    """Run the cells that are not there yet, and write each as soon as it is done."""
    path = options.out / f"{study}.json"
    options.out.mkdir(parents=True, exist_ok=True)
    began, longest = time.perf_counter(), 0.0
    for name, work in cells.items():
        done = json.loads(path.read_text()) if path.exists() else {}
        if name in done or (options.only and options.only not in name):
            continue
        if time.perf_counter() - began + longest > options.budget:
            print(f"{study}: no time for {name!r}", flush=True)
            continue
        start = time.perf_counter()
        try:
            model, row = work(options)
        except (RuntimeError, ArithmeticError):  # the others are still worth having
            traceback.print_exc()
            continue
        seconds = time.perf_counter() - start
        longest = max(longest, seconds)
        row |= {"seconds": round(seconds, 1), "device": options.device, "parameters": model.machine_.n_parameters}
        model.save_pretrained(options.models / study / slug(name))
        record(study, name, row, options)


TINY: dict = {}  # filled by `--tiny`, to see that everything runs


# -- the paper's setting ------------------------------------------------------------------------------


def paper_cell(patch, hidden):
    def work(options):
        model = SuperResolver(
            patch=patch, hidden_shape=(hidden, hidden), device=options.device, **{"n_epochs": 30, **TINY}
        )
        model.fit(scsr())
        row = {"patch": patch, "hidden": hidden}
        for rounds in (20, 0):
            model.back_projection = rounds
            what = "back_projection" if rounds else "no_back_projection"
            row |= {f"lena_paper_{what}": paper_protocol(model, lena()), f"set5_{what}": literature(model, set5())}
        model.back_projection = 20
        return model, row

    return work


PAPER = {f"patch {patch}, hidden 20": paper_cell(patch, 20) for patch in (15, 10, 20, 30, 35)} | {
    f"patch 15, hidden {hidden}": paper_cell(15, hidden) for hidden in (5, 10, 15, 25, 30, 40)
}

# -- fine-tuned ---------------------------------------------------------------------------------------


def start(name, scale, images, options, cd=5, **settings):
    """A machine trained by CD-1; from STARTS where it is there already."""
    folder = options.starts / slug(name)
    if folder.is_dir():
        return SuperResolver.from_pretrained(folder, device=options.device)
    few = {"n_patches": 20_000, "n_epochs": cd, **settings, **TINY}
    return SuperResolver(scale, device=options.device, **few).fit(images)


def fine_tune(model, images, row, options, patches=None, crops=None):
    """Patches first, crops second; each a dict of settings of `fine_tune`, or None."""
    for objective, settings in (("patches", patches), ("images", crops)):
        if settings is not None:
            if TINY:
                settings = {**settings, "n_samples": 64, "n_epochs": 2, "batch_size": 16}
            began = time.perf_counter()
            model.fine_tune(images, objective=objective, **settings)
            row[f"{objective}_loss"] = [
                round(1e6 * each["loss"], 3) for each in model.history_[-settings["n_epochs"] :]
            ]
            row[f"{objective}_seconds"] = round(time.perf_counter() - began, 1)
            print(f"  {objective}: {row[f'{objective}_seconds']} s, loss {row[f'{objective}_loss'][-1]}", flush=True)
    return model


PATCHES = {"n_samples": 100_000, "n_epochs": 15, "batch_size": 512, "learning_rate": 3e-3}
CROPS = {"n_samples": 20_000, "n_epochs": 12, "batch_size": 16, "learning_rate": 1e-3, "averaging": 0.999}
SETTINGS = {
    "p10 h24 R16": {"patch": 10, "hidden_shape": (24, 24), "rank": 16},
    "p10 h32 R16": {"patch": 10, "hidden_shape": (32, 32), "rank": 16},
    "p12 h32 R16": {"patch": 12, "hidden_shape": (32, 32), "rank": 16},
    "p8 h32 R16": {"patch": 8, "hidden_shape": (32, 32), "rank": 16},
    "p10 h32 R32": {"patch": 10, "hidden_shape": (32, 32), "rank": 32},
    "p14 h32 R16": {"patch": 14, "hidden_shape": (32, 32), "rank": 16},
    "p10 h24 R4": {"patch": 10, "hidden_shape": (24, 24), "rank": 4},
    "p10 h24 R1": {"patch": 10, "hidden_shape": (24, 24), "rank": 1},
}
#: Where the other scales differ: as many low-resolution pixels a patch.
LARGER = {
    3: {"patch": 15, "hidden_shape": (32, 32), "rank": 16},
    4: {"patch": 20, "hidden_shape": (32, 32), "rank": 16},
}


def choose_cell(setting, name=None, cd=5, patches=PATCHES, crops=CROPS):
    def work(options):
        images, held_out = split_t91()
        model = start(name or setting, 2, images, options, cd=cd, **SETTINGS[setting])
        row = {"held_out_cd": literature(model, held_out)}
        fine_tune(model, images, row, options, patches, None)
        row["held_out_patches"] = literature(model, held_out)
        fine_tune(model, images, row, options, None, crops)
        return model, row | {"held_out": literature(model, held_out)}

    return work


CHOOSE = {
    "p10 h24 R16": choose_cell("p10 h24 R16"),
    "p10 h32 R16": choose_cell("p10 h32 R16"),
    "p12 h32 R16": choose_cell("p12 h32 R16"),
    "p10 h24 R16, rate 3e-3": choose_cell("p10 h24 R16", crops={**CROPS, "learning_rate": 3e-3}),
    "p10 h24 R16, no patches": choose_cell("p10 h24 R16", patches=None),
    "p10 h32 R32": choose_cell("p10 h32 R32"),
    "p8 h32 R16": choose_cell("p8 h32 R16"),
    "p14 h32 R16": choose_cell("p14 h32 R16"),
    "p10 h24 R16, no CD": choose_cell("p10 h24 R16", "p10 h24 R16, no CD", cd=0),
    "p10 h24 R16, 4 times the crops": choose_cell("p10 h24 R16", crops={**CROPS, "n_samples": 80_000}),
    "p10 h24 R4": choose_cell("p10 h24 R4"),
    "p10 h24 R1": choose_cell("p10 h24 R1"),
}


MOST_RANK = 16  # weights for all scales are to be less than a megabyte
FINAL = {**CROPS, "n_samples": 40_000}


def best(study, names, options, otherwise):
    """The cell that did best on its held-out images, of some; `otherwise` where none has been run."""
    path = options.out / f"{study}.json"
    rows = json.loads(path.read_text()) if path.exists() else {}
    return max((name for name in names if name in rows), key=lambda name: rows[name]["held_out"][0], default=otherwise)


def chosen(options):
    names = [name for name, settings in SETTINGS.items() if settings["rank"] <= MOST_RANK]
    return best("choose", names, options, "p10 h32 R16")


def t91_cell(scale):
    def work(options):
        images, setting = list(t91().values()), chosen(options)
        settings = SETTINGS[setting] if scale == 2 else LARGER[scale]
        model = start(f"x{scale} T91 {setting}", scale, images, options, **settings)
        row = {"setting": setting, "bicubic": literature(Bicubic(scale), set5()), "cd": tested(model)}
        fine_tune(model, images, row, options, PATCHES, FINAL if scale == 2 else CROPS)
        return model, row | tested(model)

    return work


T91 = {f"x{scale}": t91_cell(scale) for scale in (2, 3, 4)}


def open_cell(halves, only=None):
    def work(options):
        images = open_images()
        held_out = [images.pop(name) for name in HELD_OUT_OPEN]
        images = [image for name, image in images.items() if only is None or name in only]
        images = with_halves(images) if halves else images
        model = start("open p10 h32 R16", 2, images, options, **SETTINGS["p10 h32 R16"])
        row = {}
        fine_tune(model, images, row, options, PATCHES, CROPS)
        return model, row | {"held_out": literature(model, held_out)}

    return work


OPEN_CELLS = {"halves": open_cell(True), "no halves": open_cell(False)}


def ship_cell(scale):
    def work(options):
        images, setting = list(open_images().values()), chosen(options)
        halves = best("open", OPEN_CELLS, options, "halves") == "halves"
        images = with_halves(images) if halves else images
        settings = SETTINGS[setting] if scale == 2 else LARGER[scale]
        model = start(f"x{scale} open {setting}", scale, images, options, **settings)
        row = {"setting": setting, "halves": halves}
        fine_tune(model, images, row, options, PATCHES, FINAL if scale == 2 else CROPS)
        return model, row | tested(model)

    return work


SHIP = {f"x{scale}": ship_cell(scale) for scale in (2, 3, 4)}


def starts(options):
    """Train by CD-1 what the other studies start from, so that they need not."""
    kept_open = with_halves([image for name, image in open_images().items() if name not in HELD_OUT_OPEN])
    plan = [("open p10 h32 R16", 2, kept_open, SETTINGS["p10 h32 R16"], 5)]
    kinds = {"open": with_halves(list(open_images().values()))}
    if data().is_dir():
        t91_train, _ = split_t91()
        plan += [(name, 2, t91_train, settings, 5) for name, settings in SETTINGS.items()]
        plan += [("p10 h24 R16, no CD", 2, t91_train, SETTINGS["p10 h24 R16"], 0)]
        kinds["T91"] = list(t91().values())
    setting = chosen(options)
    for kind, images in kinds.items():
        for scale, settings in ({2: SETTINGS[setting]} | LARGER).items():
            plan.append((f"x{scale} {kind} {setting}", scale, images, settings, 5))
    for name, scale, images, settings, cd in plan:
        if (options.starts / slug(name)).is_dir() or (options.only and options.only not in name):
            continue
        began = time.perf_counter()
        model = start(name, scale, images, options, cd=cd, **settings)
        model.save_pretrained(options.starts / slug(name))
        print("start", name, f"{time.perf_counter() - began:.0f} s", flush=True)


# -- what comes out of it -----------------------------------------------------------------------------


def finished(options):
    """The models that are spoken of, by name: those that are shipped, and those trained on T91."""
    models = {f"shipped x{scale}": (None, scale) for scale in (2, 3, 4)}
    models |= {f"T91 x{scale}": (options.models / "t91" / f"x{scale}", scale) for scale in (2, 3, 4)}
    for name, (folder, scale) in models.items():
        if (folder is None or folder.is_dir()) and (not options.only or options.only in name):
            yield name, SuperResolver.from_pretrained(folder, scale=scale, device="cpu")


def cpu(options):
    """Measure the finished models in single precision."""
    for scale in (2, 3, 4):
        bicubic = Bicubic(scale)
        row = {"set5": literature(bicubic, set5()), "set5_paper": paper_protocol_of(bicubic, set5())}
        row |= {"lena_paper": paper_protocol(bicubic, lena()), "lena_literature": literature(bicubic, [lena()])}
        record("cpu", f"bicubic x{scale}", row, options)
    for name, model in finished(options):
        record("cpu", name, tested(model) | {"set5_paper": paper_protocol_of(model, set5())}, options)


def speed(options):
    """Seconds for Lena, 256 to 512 and 5 times over, and seconds and memory for a photo of 4000 x 3000 pixels."""
    low = reduce_image(lena(), 2)
    for name, model in finished(options):
        if model.scale != 2:
            continue
        # A process of its own, whose largest size is that of nothing else.
        command = [sys.executable, __file__, "large", "--only", name, "--models", str(options.models)]
        row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        model.upscale(low)
        seconds = []
        for _ in range(5):
            began = time.perf_counter()
            model.upscale(low)
            seconds.append(time.perf_counter() - began)
        row |= {"threads": torch.get_num_threads(), "lena_seconds": [round(each, 3) for each in sorted(seconds)]}
        record("speed", name, row | {"lena_median": round(float(np.median(seconds)), 3)}, options)


def large(options):
    """Enlarge a photo of 4000 x 3000 pixels by 2, and say what it took."""

    def mebibytes():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    ((_, model),) = finished(options)
    image = np.tile(read(OPEN / "astronaut.png"), (6, 8, 1))[:3000, :4000]
    before, began = mebibytes(), time.perf_counter()
    found = model.upscale(image)
    row = {"large": list(found.shape), "large_seconds": round(time.perf_counter() - began, 1)}
    row |= {"large_peak_mib": round(mebibytes()), "large_growth_mib": round(mebibytes() - before)}
    print(json.dumps(row))


def generative(options):
    """What fine-tuning does to the model of patches: T91 but for eight images was learned from, those are unseen."""
    train, held_out = split_t91()
    for setting in ("p10 h24 R16", "p10 h32 R16", "p12 h32 R16"):
        patch = SETTINGS[setting]["patch"]
        seen, unseen = (cut_windows(images, 2, patch, 5000, seed=1).layers() for images in (train, held_out))
        for kind, folder in (("CD", options.starts), ("fine-tuned", options.models / "choose")):
            name = f"{setting}, {kind}"
            if options.only and options.only not in name:
                continue
            model = SuperResolver.from_pretrained(folder / slug(setting), device=options.device)
            began = time.perf_counter()
            row = generative_report(model.machine_, seen, unseen) | image_correlation(model, held_out)
            norms = {key: float(link.dense().detach().norm()) for key, link in model.machine_.links.items()}
            row |= {"norms": norms, "seconds": round(time.perf_counter() - began, 1)}
            record("generative", name, rounded(row), options)


def image_correlation(model, images):
    """Correlation of what is missing from bicubic images with what the averaged patches put there."""
    row, kept = {}, model.back_projection
    for name, rounds in (("image_correlation_no_back_projection", 0), ("image_correlation", kept)):
        model.back_projection, found, missing = rounds, [], []
        for image in images:
            low, high = image_pair(image, model.scale)
            bicubic = enlarge_image(low, model.scale)
            found.append((model.upscale_luminance(low) - bicubic).ravel())
            missing.append((high - bicubic).ravel())
        row[name] = float(np.corrcoef(np.concatenate(found), np.concatenate(missing))[0, 1])
    return row


def rounded(row):
    return {key: rounded(value) if isinstance(value, dict) else round(value, 4) for key, value in row.items()}


def picture(options):
    """Crops of a photo that the shipped weights have not seen: bicubic, ours, the truth."""
    from skimage.data import rocket

    zoom, gap = 3, 6
    truth = crop_to_multiple(rocket(), 4)
    rows = []
    for scale in (2, 4):
        low = reduce_image(truth, scale)
        model = SuperResolver.from_pretrained(scale=scale, device="cpu")
        images = [enlarge_image(low, scale), model.upscale(low), truth]
        print(scale, [psnr_ssim(truth, image, "literature", scale) for image in images[:2]])
        crops = [image[CROP].repeat(zoom, 0).repeat(zoom, 1) for image in images]
        rows.append(
            np.concatenate([np.pad(each, ((0, 0), (0, gap), (0, 0)), constant_values=255) for each in crops], 1)
        )
    sheet = np.concatenate([np.pad(each, ((0, gap), (0, 0), (0, 0)), constant_values=255) for each in rows])
    Image.fromarray(sheet[:-gap, :-gap]).save(PICTURE, optimize=True)


CROP = (slice(335, 415), slice(540, 640))
PICTURE = Path("docs/_static/super-resolution.png")


def compare(options):
    """Lena by sparse representation and by ours, one after the other on one thread: quality and time."""
    torch.set_num_threads(1)
    low = reduce_image(lena(), 2)
    began = time.perf_counter()
    models = {
        "weights in the package": SuperResolver.from_pretrained(device="cpu"),
        "T91, fine-tuned": SuperResolver.from_pretrained(options.models / "t91" / "x2", device="cpu"),
        "sparse representation": SparseRepresentation(random_state=0).fit(scsr()),
    }
    found = {"fit_seconds": round(time.perf_counter() - began, 1)}
    for name, model in models.items():
        times = []
        for _ in range(1 if name == "sparse representation" else 5):
            began, used = time.perf_counter(), time.process_time()
            image = model.upscale(low)
            times.append((time.perf_counter() - began, time.process_time() - used))
        psnr, ssim = psnr_ssim(lena(), image, "paper", 2)
        seconds, processor = np.median(times, 0).round(3).tolist()
        found[name] = {
            "seconds": seconds,
            "processor_seconds": processor,
            "psnr": round(psnr, 4),
            "ssim": round(ssim, 4),
        }
        print(name, found[name], flush=True)
    slow = found["sparse representation"]["processor_seconds"]
    found["times_faster"] = {name: round(slow / found[name]["processor_seconds"], 1) for name in list(models)[:2]}
    (options.out / "compare.json").write_text(json.dumps(found, indent=1) + "\n")


def table(options):
    for path in sorted(options.out.glob("*.json")):
        for name, row in json.loads(path.read_text()).items():
            shown = {key: value for key, value in row.items() if not key.endswith("_loss")}
            print(path.stem, "|", name, "|", shown)


STUDIES = {"paper": PAPER, "choose": CHOOSE, "t91": T91, "open": OPEN_CELLS, "ship": SHIP}
OTHERS = {
    "compare": compare,
    "collect": collect,
    "starts": starts,
    "cpu": cpu,
    "speed": speed,
    "large": large,
    "generative": generative,
    "picture": picture,
    "table": table,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="+", choices=[*STUDIES, *OTHERS])
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--tf32", action="store_true", help="products on a GPU in TF32, as the shipped weights had them"
    )
    parser.add_argument("--out", type=Path, default=Path("results/superres"))
    parser.add_argument("--models", type=Path, default=Path("runs/superres"))
    parser.add_argument("--starts", type=Path, default=STARTS)
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds for each study")
    parser.add_argument("--only", help="cells whose name contains this")
    parser.add_argument("--tiny", action="store_true", help="too little training to learn: to see that it runs")
    options = parser.parse_args()
    if options.tf32:
        torch.set_float32_matmul_precision("high")
    if options.tiny:
        TINY.update(n_patches=200, n_epochs=1)
    for study in options.studies:
        if study in OTHERS:
            OTHERS[study](options)
        else:
            run(study, STUDIES[study], options)


if __name__ == "__main__":
    main()
