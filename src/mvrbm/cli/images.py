"""Commands for images: denoise, denoise-train, repair, superres and superres-train."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mvrbm.cli import options as opt
from mvrbm.cli import resuming
from mvrbm.interrupt import INTERRUPTS

if TYPE_CHECKING:
    from mvrbm.io.pictures import Picture
    from mvrbm.vision import PhotoDenoiser, SuperResolver, TrainingStep
    from mvrbm.vision.images import Array

Scale = StrEnum("Scale", {"TWO": "2", "THREE": "3", "FOUR": "4"})
NoiseKind = StrEnum("NoiseKind", {"SALT_AND_PEPPER": "salt-and-pepper", "GAUSSIAN": "gaussian"})
Method = StrEnum("Method", {"MEAN_FIELD": "mean-field", "GIBBS": "gibbs"})
Configuration = StrEnum("Configuration", {"STAGES": "stages", "FINE_TUNED": "fine-tuned", "PAPER": "paper"})
DenoiserKind = StrEnum("DenoiserKind", ["COLOR", "GRAY", "SALT", "JPEG"])

_MODEL_HELP = (
    "Folder of a photo denoiser saved by denoise-train, or of a model trained on clean images similar to INPUT."
)
_NOISE_HELP = "Type of noise."
_LEVEL_HELP = (
    "Noise level: the fraction of corrupted pixels for salt-and-pepper noise, or the standard deviation for Gaussian "
    "noise, where white is 1."
)
_METHOD_HELP = "Inference method. Only for models other than photo denoisers."
_ROUNDS_HELP = "Number of mean-field iterations."
_STEPS_HELP = "Number of Gibbs steps to average over."
_BURN_IN_HELP = "Number of Gibbs steps before averaging."
_STRIDE_HELP = "Distance between patches in pixels, for images larger than the model's training images."
_ENSEMBLE_HELP = (
    "Average the results for all flips and rotations of the image, which takes eight times as long. Only for models "
    "trained with --configuration fine-tuned or paper."
)
_RESOLVER_HELP = "Folder of a model saved by superres-train."
_CLEANUP_HELP = "Enlarge the image without removing noise and JPEG artifacts first."
_STRENGTH_HELP = "Factor that multiplies the estimated levels of noise and JPEG artifacts."
_JPEG_HELP = "JPEG quality with which the image was compressed."
_CONFIGURATION_HELP = (
    "stages: the architecture of the pretrained models. fine-tuned: a single machine, trained by contrastive "
    "divergence and backpropagation. paper: the machine in the paper, trained by contrastive divergence."
)
_PATCH_HELP = "Side length of a patch in the enlarged image. Repeat the option to use several stages."
_SHAPE_HELP = "Shape of the hidden layer in each stage, such as 24x24."
_RANK_HELP = "Number of Kronecker products in each weight matrix."
_PATCHES_HELP = "Number of patches for contrastive divergence. Only for fine-tuned and paper."
_EPOCHS_HELP = "Number of epochs of contrastive divergence. Only for fine-tuned and paper."
_RECIPE_HELP = "Training recipe for contrastive divergence. Only for fine-tuned and paper."
_TUNING_PATCHES_HELP = "Number of patches for backpropagation through the first stage, or 0 to skip it."
_CROPS_HELP = (
    "Number of image crops for backpropagation through all stages, or 0 to skip this step. More crops and epochs take "
    "longer, but give better results."
)
_TUNING_EPOCHS_HELP = "Number of epochs of backpropagation."


# -- denoising --------------------------------------------------------------------------------------


def denoise(
    source: opt.Input,
    out: opt.ImagesOut,
    model_folder: Annotated[
        Path | None, opt.new(_MODEL_HELP, "--model", default="the pretrained photo denoiser")
    ] = None,
    noise: Annotated[
        NoiseKind | None,
        opt.new(_NOISE_HELP, default="detected automatically for photographs, or salt-and-pepper with --model"),
    ] = None,
    level: Annotated[float | None, opt.new(_LEVEL_HELP, default="estimated from the images", min=0)] = None,
    method: Annotated[Method | None, opt.new(_METHOD_HELP, default="mean-field")] = None,
    rounds: Annotated[int | None, opt.new(_ROUNDS_HELP, default="5", min=1)] = None,
    steps: Annotated[int | None, opt.new(_STEPS_HELP, default="100", min=1)] = None,
    burn_in: Annotated[int | None, opt.new(_BURN_IN_HELP, default="20", min=0)] = None,
    stride: Annotated[
        int | None, opt.new(_STRIDE_HELP, default="a quarter of the shorter side of a training image", min=1)
    ] = None,
    rows: opt.Rows = None,
    columns: opt.Columns = None,
    seed: opt.Seed = 0,
    device: opt.Where = opt.Device.AUTO,
    data_dir: opt.DataDir = None,
    force: opt.Force = False,
    as_json: opt.AsJson = False,
) -> None:
    """Remove noise from a photograph, or from images that resemble the training images of a model.

    Without --model, or if --model is a photo denoiser, INPUT is one photograph: an image file, or a .npy file of shape
    HxW, HxWx3 or HxWx4. With any other model, INPUT can contain several gray images. Such a model denoises the channels
    of a color image separately, assuming the same noise level.
    """
    opt.check_out(out, force)
    inference: Any = {"method": method, "rounds": rounds, "steps": steps, "burn_in": burn_in}
    others: Any = {**inference, "stride": stride, "rows": rows, "columns": columns, "data_dir": data_dir}
    if model_folder is None:
        opt.check_absent("has no effect without --model", **others)
        _denoise_photograph(source, out, noise, level, device.value, force, as_json)
        return
    import mvrbm

    loaded = mvrbm.load(model_folder, device.value)
    if hasattr(loaded, "denoise"):
        opt.check_absent("has no effect with a photo denoiser", **others, noise=noise)
        _denoise_with(loaded, source, out, level, force, as_json)
        return
    opt.check_columns(columns, out)
    noise = noise or NoiseKind.SALT_AND_PEPPER
    import numpy as np

    from mvrbm import vision
    from mvrbm.io.arrays import write_output
    from mvrbm.io.pictures import check_format, write_picture

    model = opt.load_model(model_folder, device, "inpaint")
    picture = _in_color(source)
    if picture is None:
        images = opt.read(source, data_dir, rows, out)
    else:
        opt.check_absent("has no effect with a color image", columns=columns)
        images = picture.pixels[..., :3].transpose(2, 0, 1)
        for text in (*picture.notes, *(() if opt.is_array(out) else check_format(out, picture))):
            opt.note(text)
    origin = "estimated" if level is None else "given"
    if level is None:
        level = vision.estimate_level(model, images, noise=noise.value, stride=stride)
    inference = {name: value for name, value in inference.items() if value is not None}
    clean = vision.denoise(model, images, noise=noise.value, level=level, stride=stride, seed=seed, **inference)
    if picture is not None:
        clean = np.concatenate([clean.transpose(1, 2, 0), picture.pixels[..., 3:]], 2)
    if picture is None or opt.is_array(out):
        write_output(out, clean if opt.is_array(out) or clean.ndim == 3 else clean[None], force, columns=columns)
    else:
        write_picture(out, picture.with_pixels(clean), force)
    result = {"out": str(out), "shape": clean.shape, "dtype": str(clean.dtype), "noise": noise.value, "level": level}
    size = opt.times(clean.shape) if picture is None or opt.is_array(out) else picture.size
    text = f"{out}: {size} {clean.dtype}, {noise.value} of level {level:.4g} ({origin})"
    opt.show(result, as_json, text)


def _check_level(level: float | None) -> None:
    """Raise ValueError if the noise level is 0."""
    if level == 0:
        raise ValueError("--level must be greater than 0; omit it to estimate the noise level")


def _denoise_photograph(
    source: str, out: Path, noise: NoiseKind | None, level: float | None, device: str, force: bool, as_json: bool
) -> None:
    """Denoise a photograph with the pretrained weights, write the result to `out`, and print the noise level."""
    from mvrbm.vision import denoise_photograph, estimate_noise, estimate_salt

    _check_level(level)
    picture = _read_photograph(source, out, force)
    origin = "estimated" if level is None else "given"
    salt = 0.0 if level is not None or noise is NoiseKind.GAUSSIAN else estimate_salt(picture.pixels)
    kind = noise or (NoiseKind.SALT_AND_PEPPER if salt else NoiseKind.GAUSSIAN)
    if level is None and kind is NoiseKind.GAUSSIAN:
        level = estimate_noise(picture.pixels)
    with _bar("denoise") as progress:
        # The estimate may be 0, but the argument must be positive.
        given: Any = {"noise": kind.value, "level": level or None}
        clean = denoise_photograph(picture.pixels, **given, device=device, progress=progress)
    found = salt if level is None else level
    _write_photograph(out, picture, clean, force, as_json, kind.value, found, origin)


def _denoise_with(
    model: "PhotoDenoiser", source: str, out: Path, level: float | None, force: bool, as_json: bool
) -> None:
    """Denoise a photograph with a saved photo denoiser, write the result to `out`, and print the noise level."""
    from mvrbm.vision import estimate_noise, jpeg_level

    _check_level(level)
    picture = _read_photograph(source, out, force)
    origin = "estimated" if level is None else "given"
    if level is None and model.kind in ("gray", "color"):
        level = estimate_noise(picture.pixels)
    if level is None and model.kind == "jpeg":
        quality = _jpeg_quality(Path(source))
        if quality is None:
            raise ValueError(f"--level is required because {source} is not a JPEG file")
        level = jpeg_level(quality)
    with _bar("denoise") as progress:
        clean = model.denoise(picture.pixels, level=level or None, progress=progress)
    _write_photograph(out, picture, clean, force, as_json, model.kind, level or 0.0, origin)


def _read_photograph(source: str, out: Path, force: bool) -> "Picture":
    """Validate the output path, and read a photograph from an image file or a .npy file."""
    from mvrbm.io.arrays import read_array
    from mvrbm.io.atomic import check_output
    from mvrbm.io.pictures import FORMATS, Picture, check_format, read_picture
    from mvrbm.vision.images import check_image, to_dtype

    to_array = opt.is_array(out)
    check_output(out, force, (".npy", *FORMATS))
    if opt.is_array(Path(source)):
        pixels = read_array(source).copy()  # PyTorch warns about read-only arrays
        if pixels.ndim != 2 and (pixels.ndim != 3 or pixels.shape[2] not in (3, 4)):
            raise ValueError(
                f"a photograph must have shape (H, W), (H, W, 3) or (H, W, 4), but {source} has shape {pixels.shape}; "
                "use --model to denoise several images"
            )
        pixels = check_image(pixels, unit_range=True)
        picture = Picture(pixels if to_array or pixels.dtype.kind == "u" else to_dtype(pixels, "uint8"))
    else:
        picture = read_picture(Path(source))
    for text in (*picture.notes, *(() if to_array else check_format(out, picture))):
        opt.note(text)
    return picture


def _write_photograph(
    out: Path, picture: "Picture", clean: Any, force: bool, as_json: bool, noise: str, level: float, origin: str
) -> None:
    """Write a denoised photograph and print its size and the noise level."""
    from mvrbm.io.arrays import write_output
    from mvrbm.io.pictures import write_picture

    to_array = opt.is_array(out)
    if to_array:
        write_output(out, clean, force)
    else:
        write_picture(out, picture.with_pixels(clean), force)
    result = {"out": str(out), "shape": clean.shape, "dtype": str(clean.dtype), "noise": noise, "level": level}
    size = opt.times(clean.shape) if to_array else picture.size
    opt.show(result, as_json, f"{out}: {size} {clean.dtype}, {noise} of level {level:.4g} ({origin})")


def _in_color(source: str) -> "Picture | None":
    """Read a color image file and reduce 16-bit channels to 8 bits. Return None for any other source."""
    from mvrbm.io.formats import IMAGE_SUFFIXES
    from mvrbm.io.pictures import as_bytes, read_picture

    path = Path(source)
    if path.suffix.lower() not in IMAGE_SUFFIXES or not path.is_file():
        return None
    picture = read_picture(path)
    picture = picture.with_pixels(as_bytes(picture.pixels))
    return picture if picture.pixels.ndim == 3 else None


def denoise_train(
    folder: Annotated[Path, opt.argument("FOLDER", "Folder of clean images.")],
    out: opt.ModelOut,
    kind: Annotated[
        DenoiserKind,
        typer.Option(help="Type of noise: Gaussian on color or gray images, salt-and-pepper, or JPEG artifacts."),
    ] = DenoiserKind.COLOR,
    tuning_crops: Annotated[int | None, opt.new(_CROPS_HELP, default="2000", min=0)] = None,
    tuning_epochs: Annotated[
        int | None, opt.new(_TUNING_EPOCHS_HELP, default="15 for patches, 6 for crops", min=1)
    ] = None,
    checkpoints: resuming.Folder = None,
    resume: resuming.Resume = False,
    ignore_mismatch: resuming.IgnoreMismatch = False,
    seed: opt.Seed = 0,
    device: opt.Where = opt.Device.AUTO,
    force: opt.Force = False,
    as_json: opt.AsJson = False,
) -> None:
    """Train a photo denoiser on a folder of clean images, for use with `mvrbm denoise --model`.

    The model has the same architecture as the pretrained photo denoiser. The images can have different sizes and file
    formats. Ctrl-C or SIGTERM stops training after the current batch and saves the model. If you use --checkpoints,
    running the same command again with --resume continues training.
    """
    run = resuming.Resuming(out, checkpoints, resume, ignore_mismatch, force)
    resumed = run.check()
    from mvrbm.vision import PhotoDenoiser
    from mvrbm.vision.stage_training import training_images

    images = training_images(folder)
    model = PhotoDenoiser(kind.value, random_state=seed, device=device.value)
    model.set_params(steps=_resized(model.training_steps, None, tuning_crops, tuning_epochs))
    result = {"model": str(out), "kind": kind.value, "images": len(images), "resumed": resumed}
    _fit_and_save(model, images, out, run, result, f"{kind.value}", as_json)


# -- repairing --------------------------------------------------------------------------------------


def _reject_mask(value: str | None) -> None:
    if value is not None:
        reason = f"it marks known entries in other commands; use --damage {value} to mark the pixels to fill in"
        raise typer.BadParameter(reason)


def repair(
    source: Annotated[Path, opt.argument("IN", "Image file with a photograph.")],
    out: Annotated[Path, opt.argument("OUT", "A .png, .jpg, .tif, .webp or .bmp file.")],
    damage: Annotated[
        Path, opt.new("Image of the same size: white where pixels should be filled in, black elsewhere.")
    ],
    mask: Annotated[str | None, opt.new("", hidden=True, callback=_reject_mask)] = None,
    device: opt.Where = opt.Device.AUTO,
    force: opt.Force = False,
    as_json: opt.AsJson = False,
) -> None:
    """Remove scratches or text from a photograph."""
    import numpy as np

    from mvrbm.io.atomic import check_output
    from mvrbm.io.pictures import FORMATS, check_format, read_picture, write_picture
    from mvrbm.vision import repair_photograph

    check_output(out, force, tuple(FORMATS))
    picture = read_picture(source)
    holes = read_picture(damage).pixels
    for text in (*picture.notes, *check_format(out, picture)):
        opt.note(text)
    holes = holes if holes.ndim == 2 else holes[..., :3].max(2)
    share = float((holes > np.iinfo(holes.dtype).max // 2).mean())
    if share == 0:
        raise ValueError(f"--damage {damage} marks no pixels; it must be white where pixels should be filled in")
    with _bar("repair") as progress:
        pixels = repair_photograph(picture.pixels, holes, device=device.value, progress=progress)
    write_picture(out, picture.with_pixels(pixels), force)
    result = {"out": str(out), "shape": pixels.shape, "dtype": str(pixels.dtype), "missing": share}
    opt.show(result, as_json, f"{out}: {picture.size}, {share:.2%} filled")


@contextlib.contextmanager
def _bar(name: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar and yield a function that updates it, given the number of finished parts and the total."""
    from tqdm import tqdm

    with tqdm(desc=name, unit="part", file=sys.stderr, disable=None, leave=False, delay=0.5) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield progress


# -- super-resolution -------------------------------------------------------------------------------


def superres(
    source: Annotated[Path, opt.argument("IN", "An image file.")],
    out: Annotated[Path, opt.argument("OUT", "A .png, .jpg, .tif, .webp or .bmp file.")],
    scale: Annotated[Scale | None, opt.new("Enlargement factor for each side.", default="set by --model, or 2")] = None,
    model_folder: Annotated[
        Path | None, opt.new(_RESOLVER_HELP, "--model", default="the pretrained model for --scale")
    ] = None,
    self_ensemble: Annotated[bool, opt.new(_ENSEMBLE_HELP, "--self-ensemble")] = False,
    no_cleanup: Annotated[bool, opt.new(_CLEANUP_HELP, "--no-cleanup")] = False,
    jpeg: Annotated[
        int | None, opt.new(_JPEG_HELP, default="read from IN if it is a JPEG file", min=1, max=100)
    ] = None,
    strength: Annotated[float | None, opt.new(_STRENGTH_HELP, default="1", min=0, max=4)] = None,
    device: opt.Where = opt.Device.AUTO,
    force: opt.Force = False,
    as_json: opt.AsJson = False,
) -> None:
    """Enlarge a gray or color image with 8 or 16 bits per channel, with or without transparency.

    The command first estimates and removes noise and JPEG artifacts. It applies the EXIF orientation and keeps the ICC
    profile and the EXIF data.
    """
    if model_folder is None:
        opt.check_absent("has no effect without --model", self_ensemble=self_ensemble or None)
    if no_cleanup:
        opt.check_absent("has no effect with --no-cleanup", jpeg=jpeg, strength=strength)
    strength = 1.0 if strength is None else strength
    from mvrbm.io.atomic import check_output
    from mvrbm.io.pictures import FORMATS, check_format, read_picture, write_picture
    from mvrbm.vision import Degradation, SuperResolver, clean_photograph, estimate_degradation
    from mvrbm.vision.degradation import jpeg_steps

    check_output(out, force, tuple(FORMATS))
    picture = read_picture(source)
    model = SuperResolver.pretrained(None if scale is None else int(scale), model_folder, device=device.value)
    for text in (*picture.notes, *check_format(out, picture, model.scale)):
        opt.note(text)
    began = time.perf_counter()
    table = _jpeg_table(source) if jpeg is None else list(jpeg_steps(jpeg))
    found = Degradation(None, 0.0) if no_cleanup or not strength else estimate_degradation(picture.pixels, table)
    with _bar("clean") as progress:
        pixels = clean_photograph(picture.pixels, found, strength=strength, device=device.value, progress=progress)
    with _bar("superres") as progress:
        large = picture.with_pixels(model.upscale(pixels, self_ensemble=self_ensemble, progress=progress))
    seconds = time.perf_counter() - began
    write_picture(out, large, force)
    result = {"out": str(out), "from": picture.pixels.shape[:2], "shape": large.pixels.shape, "scale": model.scale}
    result |= {"dtype": str(large.pixels.dtype), "seconds": round(seconds, 3)}
    result |= {"jpeg": found.quality, "noise": found.noise, "strength": strength}
    removed = "" if found == (None, 0.0) else f", removed {found}"
    opt.show(result, as_json, f"{out}: {picture.size} -> {large.size} in {seconds:.1f} s{removed}")


def _jpeg_table(path: Path) -> list[int] | None:
    """Return the luminance quantization table of a JPEG file, or None for other files."""
    from PIL import Image

    with Image.open(path) as image:
        tables = getattr(image, "quantization", None)
        return list(tables[0]) if tables and 0 in tables else None


def _jpeg_quality(path: Path) -> int | None:
    """Return the quality setting of a JPEG file, or None for other files."""
    from mvrbm.vision.degradation import jpeg_quality

    table = None if opt.is_array(path) else _jpeg_table(path)
    return None if table is None else jpeg_quality(table)


def superres_train(
    folder: Annotated[Path, opt.argument("FOLDER", "Folder of images.")],
    out: opt.ModelOut,
    scale: Annotated[Scale, typer.Option(help="Enlargement factor for each side.")] = Scale.TWO,
    configuration: Annotated[Configuration, typer.Option(help=_CONFIGURATION_HELP)] = Configuration.STAGES,
    patch: Annotated[list[int] | None, opt.new(_PATCH_HELP, min=1)] = None,
    hidden: Annotated[opt.Shape | None, opt.new(_SHAPE_HELP, **opt.SHAPE)] = None,
    rank: Annotated[int | None, opt.new(_RANK_HELP, min=1)] = None,
    patches: Annotated[int | None, opt.new(_PATCHES_HELP, default="10000", min=1)] = None,
    epochs: Annotated[int | None, opt.new(_EPOCHS_HELP, default="set by the recipe", min=1)] = None,
    recipe: Annotated[opt.Recipe | None, opt.new(_RECIPE_HELP, default="default")] = None,
    tuning_patches: Annotated[
        int | None, opt.new(_TUNING_PATCHES_HELP, default="100000, or 0 for paper", min=0)
    ] = None,
    tuning_crops: Annotated[
        int | None, opt.new(_CROPS_HELP, default="2000, or 0 for fine-tuned and paper", min=0)
    ] = None,
    tuning_epochs: Annotated[
        int | None, opt.new(_TUNING_EPOCHS_HELP, default="15 for patches, 6 for crops", min=1)
    ] = None,
    checkpoints: resuming.Folder = None,
    resume: resuming.Resume = False,
    ignore_mismatch: resuming.IgnoreMismatch = False,
    quiet: opt.Quiet = False,
    seed: opt.Seed = 0,
    device: opt.Where = opt.Device.AUTO,
    force: opt.Force = False,
    as_json: opt.AsJson = False,
) -> None:
    """Train a super-resolution model on a folder of images, for use with `mvrbm superres --model`.

    The images can have different sizes and file formats. Ctrl-C or SIGTERM stops training after the current batch and
    saves the model. If you use --checkpoints, running the same command again with --resume continues training.
    """
    if hidden is not None and len(hidden) != 2:
        raise typer.BadParameter(f"{hidden} has {len(hidden)} axes, but 2 are required", param_hint="'--hidden'")
    if configuration is Configuration.STAGES:
        reason = "has no effect with --configuration stages"
        opt.check_absent(reason, patches=patches, epochs=epochs, recipe=recipe)
    run = resuming.Resuming(out, checkpoints, resume, ignore_mismatch, force)
    resumed = run.check()
    from mvrbm.vision import SuperResolver
    from mvrbm.vision.stage_training import training_images
    from mvrbm.vision.super_resolution import CONFIGURATIONS

    images = training_images(folder)
    given: dict[str, Any] = {
        "patch": None if not patch else patch[0] if len(patch) == 1 else tuple(patch),
        "hidden_shape": None if hidden is None else (hidden[0], hidden[1]),
        "rank": rank,
        "n_patches": patches,
        "n_epochs": epochs,
        "recipe": None if recipe is None else recipe.value,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    parameters = {**CONFIGURATIONS[configuration.value], **changes}
    model = SuperResolver(int(scale), **parameters, random_state=seed, device=device.value, verbose=int(not quiet))
    model.set_params(steps=_resized(model.training_steps, tuning_patches, tuning_crops, tuning_epochs))
    result = {"model": str(out), "scale": int(scale), "configuration": configuration.value, "images": len(images)}
    result["resumed"] = resumed
    _fit_and_save(model, images, out, run, result, f"x{scale}, {configuration.value}", as_json)


def _resized(
    steps: "tuple[TrainingStep, ...]", patches: int | None, crops: int | None, epochs: int | None
) -> "tuple[TrainingStep, ...]":
    """Return a copy of the training steps with the given numbers of patches, crops and epochs.

    A number of 0 removes the corresponding step. A positive number adds the step if it is missing. None keeps the
    number in `steps`.
    """
    import dataclasses

    from mvrbm.vision.super_resolution import DEFAULT_STEPS

    found = []
    wanted = {"patches": patches, "images": crops}
    for objective in ("divergence", "patches", "images"):
        step = next((step for step in steps if step.objective == objective), None)
        size = wanted.get(objective)
        if size == 0 or (step is None and size is None):
            continue
        step = step or next(step for step in DEFAULT_STEPS if step.objective == objective)
        step = step if size is None else dataclasses.replace(step, n_samples=size)
        if epochs is not None and objective in wanted:
            step = dataclasses.replace(step, n_epochs=epochs)
        found.append(step)
    return tuple(found)


def _fit_and_save(
    model: "SuperResolver | PhotoDenoiser",
    images: "list[Array]",
    out: Path,
    run: resuming.Resuming,
    result: dict[str, Any],
    words: str,
    as_json: bool,
) -> None:
    """Train and save a model, and print its number of parameters and the training time.

    If training is interrupted, save the partially trained model.
    """
    began = time.perf_counter()
    cause = None
    try:
        with run.training():
            model.fit(images, checkpoints=run.checkpoints, ignore_mismatch=run.ignore_mismatch)
    except INTERRUPTS as error:
        if not hasattr(model, "stages_"):
            raise
        cause = error
    seconds = time.perf_counter() - began
    model.save(out, overwrite=True)
    parameters = model.n_parameters_
    result |= {"parameters": parameters, "seconds": round(seconds, 3)}
    text = f"{out}: {words}, {parameters:,} parameters, from {len(images)} images in {seconds:.1f} s"
    opt.show(result, as_json, text)
    if cause is not None:
        raise run.interrupted("", cause, saved=True)
