"""Commands for images: denoise, superres and superres-train."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mvrbm.cli import options as opt
from mvrbm.interrupt import INTERRUPTS

if TYPE_CHECKING:
    from mvrbm.io.pictures import Picture
    from mvrbm.vision.superres.enlarging import Enlarger

Scale = StrEnum("Scale", {"TWO": "2", "THREE": "3", "FOUR": "4"})
NoiseKind = StrEnum("NoiseKind", {"SALT_AND_PEPPER": "salt-and-pepper", "GAUSSIAN": "gaussian"})
Method = StrEnum("Method", {"MEAN_FIELD": "mean-field", "GIBBS": "gibbs"})

_HIDDEN = opt.Shape((24, 24))
_MODEL_HELP = "Folder of a saved model, for images like its own; default: the denoiser for photographs."
_NOISE_HELP = "Kind of noise; default: salt-and-pepper with --model, estimated without."
_LEVEL_HELP = "Fraction of pixels hit, or standard deviation (black to white is 1); default: estimated."
_ENSEMBLE_HELP = "With --model: average over flips and turns, which is better and slower."
_STRENGTH_HELP = "How much is removed, against the estimate; default: 1."
_JPEG_HELP = "Quality of the JPEG that the image once was; default: that of the file, if it is one."
_STRIDE_HELP = (
    "With --model: pixels from patch to patch, for images larger than the model's; default: a quarter of a patch."
)
_CROPS_HELP = "Crops to fine-tune with after that, such as 20000: better, but slow without a GPU."


def denoise(
    source: opt.Input,
    out: opt.ImagesOut,
    model_folder: Annotated[Path | None, opt.new(_MODEL_HELP, "--model")] = None,
    noise: Annotated[NoiseKind | None, opt.new(_NOISE_HELP)] = None,
    level: Annotated[float | None, opt.new(_LEVEL_HELP, min=0)] = None,
    method: Annotated[Method | None, opt.new("With --model: method of inference; default: mean-field.")] = None,
    rounds: Annotated[int | None, opt.new("With --model: rounds of mean field; default: 5.", min=1)] = None,
    steps: Annotated[int | None, opt.new("With --model: Gibbs steps to average over; default: 100.", min=1)] = None,
    burn_in: Annotated[int | None, opt.new("With --model: Gibbs steps before those; default: 20.", min=0)] = None,
    stride: Annotated[int | None, opt.new(_STRIDE_HELP, min=1)] = None,
    rows: opt.Rows = None,
    seed: opt.Seed = 0,
    device: opt.Where = opt.Device.AUTO,
    data_dir: opt.DataDir = None,
    force: opt.Force = False,
    as_json: opt.AsJson = False,
) -> None:
    """Remove noise from a photograph, or from images with a model of your own as the prior.

    A .npy input with two axes is one image; without --model, so is one with a third axis of 3 or 4 colors. A picture
    in color stays in color: with --model, its red, green and blue are three images with one level of noise.
    """
    opt.check_out(out, force)
    how_long: Any = {"method": method, "rounds": rounds, "steps": steps, "burn_in": burn_in}
    if model_folder is None:
        opt.check_absent("has no effect without --model", **how_long, stride=stride, rows=rows, data_dir=data_dir)
        _denoise_photograph(source, out, noise, level, device.value, force, as_json)
        return
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
        images = picture.pixels[..., :3].transpose(2, 0, 1)
        for text in (*picture.notes, *(() if opt.is_array(out) else check_format(out, picture))):
            opt.note(text)
    how = "estimated" if level is None else "given"
    if level is None:
        level = vision.estimate_level(model, images, noise=noise.value, stride=stride)
    how_long = {name: value for name, value in how_long.items() if value is not None}
    clean = vision.denoise(model, images, noise=noise.value, level=level, stride=stride, seed=seed, **how_long)
    if picture is not None:
        clean = np.concatenate([clean.transpose(1, 2, 0), picture.pixels[..., 3:]], 2)
    if picture is None or opt.is_array(out):
        write_output(out, clean if opt.is_array(out) or clean.ndim == 3 else clean[None], force)
    else:
        write_picture(out, picture.with_pixels(clean), force)
    result = {"out": str(out), "shape": clean.shape, "dtype": str(clean.dtype), "noise": noise.value, "level": level}
    size = opt.times(clean.shape) if picture is None or opt.is_array(out) else picture.size
    text = f"{out}: {size} {clean.dtype}, {noise.value} of level {level:.4g} ({how})"
    opt.show(result, as_json, text)


def _denoise_photograph(
    source: str, out: Path, noise: NoiseKind | None, level: float | None, device: str, force: bool, as_json: bool
) -> None:
    """Denoise a picture by the stages that come with the package."""
    from mvrbm.io.arrays import write_output
    from mvrbm.io.atomic import check_output
    from mvrbm.io.pictures import FORMATS, check_format, write_picture
    from mvrbm.vision.photographs import denoise_photograph, estimate_noise, estimate_salt

    plain = opt.is_array(out)
    check_output(out, force, (".npy", *FORMATS))
    picture = _photograph(source, plain)
    for text in (*picture.notes, *(() if plain else check_format(out, picture))):
        opt.note(text)
    how = "estimated" if level is None else "given"
    salt = 0.0 if level is not None or noise is NoiseKind.GAUSSIAN else estimate_salt(picture.pixels)
    kind = noise or (NoiseKind.SALT_AND_PEPPER if salt else NoiseKind.GAUSSIAN)
    if level is None and kind is NoiseKind.GAUSSIAN:
        level = estimate_noise(picture.pixels)
    with _bar("denoise") as progress:
        # A level of 0 can be estimated, but not given.
        how_much: Any = {"noise": kind.value, "level": level or None}
        clean = denoise_photograph(picture.pixels, **how_much, device=device, progress=progress)
    if plain:
        write_output(out, clean, force)
    else:
        write_picture(out, picture.with_pixels(clean), force)
    found = salt if level is None else level
    result = {"out": str(out), "shape": clean.shape, "dtype": str(clean.dtype), "noise": kind.value, "level": found}
    size = opt.times(clean.shape) if plain else picture.size
    opt.show(result, as_json, f"{out}: {size} {clean.dtype}, {kind.value} of level {found:.4g} ({how})")


def _photograph(source: str, floats: bool) -> "Picture":
    """Read a picture, or a .npy file of one, whose floats may stay floats or become bytes."""
    from mvrbm.io.arrays import read_array
    from mvrbm.io.pictures import Picture, read_picture
    from mvrbm.vision.images import check_image, to_dtype

    if not opt.is_array(Path(source)):
        return read_picture(Path(source))
    pixels = read_array(source).copy()  # PyTorch warns of arrays that are read-only
    if pixels.ndim != 2 and (pixels.ndim != 3 or pixels.shape[2] not in (3, 4)):
        wanted = "a photograph has 2 axes, or a third one of 3 or 4 colors; several images need --model"
        raise ValueError(f"{source} has shape {pixels.shape}: {wanted}")
    pixels = check_image(pixels, unit_range=True)
    return Picture(pixels if floats or pixels.dtype.kind == "u" else to_dtype(pixels, "uint8"))


def restore(
    source: Annotated[Path, opt.argument("IN", "A photograph.")],
    out: Annotated[Path, opt.argument("OUT", "A .png, .jpg, .tif, .webp or .bmp file.")],
    mask: Annotated[Path, opt.new("An image of the same size, white where the photograph is to be filled.")],
    device: opt.Where = opt.Device.AUTO,
    force: opt.Force = False,
    as_json: opt.AsJson = False,
) -> None:
    """Fill scratches, or text, on a photograph."""
    import numpy as np

    from mvrbm.io.atomic import check_output
    from mvrbm.io.pictures import FORMATS, check_format, read_picture, write_picture
    from mvrbm.vision.photographs import restore_photograph

    check_output(out, force, tuple(FORMATS))
    picture, holes = read_picture(source), read_picture(mask).pixels
    for text in (*picture.notes, *check_format(out, picture)):
        opt.note(text)
    holes = holes if holes.ndim == 2 else holes[..., :3].max(2)
    with _bar("restore") as progress:
        pixels = restore_photograph(picture.pixels, holes, device=device.value, progress=progress)
    write_picture(out, picture.with_pixels(pixels), force)
    share = float((holes > np.iinfo(holes.dtype).max // 2).mean())
    result = {"out": str(out), "shape": pixels.shape, "dtype": str(pixels.dtype), "missing": share}
    opt.show(result, as_json, f"{out}: {picture.size}, {share:.2%} filled")


@contextlib.contextmanager
def _bar(name: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar, to be called with the number of finished parts and their total."""
    from tqdm import tqdm

    with tqdm(desc=name, unit="part", file=sys.stderr, disable=None, leave=False, delay=0.5) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield progress


def _in_color(source: str) -> "Picture | None":
    """Return the picture of a file as bytes if it has colors, otherwise None."""
    from mvrbm.io.formats import IMAGE_SUFFIXES
    from mvrbm.io.pictures import read_picture

    path = Path(source)
    if path.suffix.lower() not in IMAGE_SUFFIXES or not path.is_file():
        return None
    picture = read_picture(path)
    if picture.pixels.dtype.itemsize == 2:
        picture = picture.with_pixels((picture.pixels >> 8).astype("uint8"))
    return picture if picture.pixels.ndim == 3 else None


def superres(
    source: Annotated[Path, opt.argument("IN", "An image.")],
    out: Annotated[Path, opt.argument("OUT", "A .png, .jpg, .tif, .webp or .bmp file.")],
    scale: Annotated[Scale | None, opt.new("Enlargement per side; default: the model's, or 2.")] = None,
    model_folder: Annotated[Path | None, opt.new("Folder that superres-train wrote.", "--model")] = None,
    self_ensemble: Annotated[bool, opt.new(_ENSEMBLE_HELP, "--self-ensemble")] = False,
    clean: Annotated[bool, opt.new("Remove nothing before enlarging: the image is clean.", "--clean")] = False,
    jpeg: Annotated[int | None, opt.new(_JPEG_HELP, min=1, max=100)] = None,
    strength: Annotated[float | None, opt.new(_STRENGTH_HELP, min=0, max=4)] = None,
    device: opt.Where = opt.Device.AUTO,
    force: opt.Force = False,
    as_json: opt.AsJson = False,
) -> None:
    """Enlarge an image: gray or color, 8 or 16 bits, with or without transparency.

    Traces of JPEG and noise are removed first, as much of them as is found. The result is upright, and keeps the ICC
    profile and EXIF data.
    """
    if model_folder is None:
        opt.check_absent("has no effect without --model", self_ensemble=self_ensemble or None)
    if clean:
        opt.check_absent("has no effect with --clean", jpeg=jpeg, strength=strength)
    strength = 1.0 if strength is None else strength
    from mvrbm.io.atomic import check_output
    from mvrbm.io.pictures import FORMATS, check_format, read_picture, write_picture
    from mvrbm.vision.photographs import Degradation, clean_photograph, estimate_degradation, jpeg_steps

    check_output(out, force, tuple(FORMATS))
    picture = read_picture(source)
    model = _enlarger(None if scale is None else int(scale), model_folder, device.value)
    for text in (*picture.notes, *check_format(out, picture, model.scale)):
        opt.note(text)
    began = time.perf_counter()
    table = _jpeg_table(source) if jpeg is None else list(jpeg_steps(jpeg))
    found = Degradation(None, 0.0) if clean or not strength else estimate_degradation(picture.pixels, table)
    with _bar("clean") as progress:
        pixels = clean_photograph(picture.pixels, found, strength=strength, device=device.value, progress=progress)
    with _bar("superres") as progress:
        large = picture.with_pixels(model.upscale(pixels, self_ensemble=self_ensemble, progress=progress))
    seconds = time.perf_counter() - began
    write_picture(out, large, force)
    result = {"out": str(out), "from": picture.pixels.shape[:2], "shape": large.pixels.shape, "scale": model.scale}
    result |= {"dtype": str(large.pixels.dtype), "seconds": round(seconds, 3)}
    result |= {"jpeg": found.quality, "noise": found.noise, "strength": strength}
    removed = "" if found == (None, 0.0) else f", without {found}"
    opt.show(result, as_json, f"{out}: {picture.size} -> {large.size} in {seconds:.1f} s{removed}")


def _enlarger(scale: int | None, folder: Path | None, device: str) -> "Enlarger":
    """Return a trained model; that of the package without importing what training needs."""
    if folder is None:
        from mvrbm.vision.superres.enlarging import StagedEnlarger

        return StagedEnlarger(2 if scale is None else scale, device)
    from mvrbm.vision import SuperResolver

    return SuperResolver.pretrained(scale, folder, device=device)


def _jpeg_table(path: Path) -> list[int] | None:
    """Return the luminance table of a JPEG file, None for other files."""
    from PIL import Image

    with Image.open(path) as image:
        tables = getattr(image, "quantization", None)
        return list(tables[0]) if tables and 0 in tables else None


def superres_train(
    folder: Annotated[Path, opt.argument("FOLDER", "A folder of images.")],
    out: opt.ModelOut,
    scale: Annotated[Scale, typer.Option(help="Enlargement per side.")] = Scale.TWO,
    patch: Annotated[int, typer.Option(min=1, help="Side of a patch of the large image.")] = 10,
    hidden: Annotated[opt.Shape, opt.new("Shape of the hidden layer; default: 24x24.", **opt.SHAPE)] = _HIDDEN,
    rank: Annotated[int, typer.Option(min=1, help="Number of Kronecker products in the sum.")] = 16,
    patches: Annotated[int, typer.Option(min=1, help="Patches for contrastive divergence.")] = 10_000,
    epochs: Annotated[int | None, opt.new("Epochs over them; default: the recipe's.", min=1)] = None,
    recipe: opt.RecipeOption = opt.Recipe.DEFAULT,
    fine_tune: Annotated[bool, typer.Option(help="Train inference by backpropagation afterwards.")] = True,
    tuning_patches: Annotated[int, typer.Option(min=1, help="Patches to fine-tune with.")] = 100_000,
    tuning_epochs: Annotated[int, typer.Option(min=1, help="Epochs over them.")] = 15,
    tuning_crops: Annotated[int, typer.Option(min=0, help=_CROPS_HELP)] = 0,
    checkpoints: Annotated[Path | None, opt.new(opt.CHECKPOINTS_HELP)] = None,
    quiet: opt.Quiet = False,
    seed: opt.Seed = 0,
    device: opt.Where = opt.Device.AUTO,
    force: opt.Force = False,
    as_json: opt.AsJson = False,
) -> None:
    """Train super-resolution on a folder of large images. Their sizes and kinds may differ.

    Ctrl-C or SIGTERM ends training after the current batch and saves; the same command with --checkpoints resumes it.
    """
    if len(hidden) != 2:
        raise typer.BadParameter(f"{hidden} has {len(hidden)} axes, 2 are required", param_hint="'--hidden'")
    if tuning_crops and not fine_tune:
        raise ValueError("--tuning-crops is part of fine-tuning, which --no-fine-tune leaves out: give one of them")
    opt.check_model_out(out, force)
    from mvrbm.io.pictures import read_pictures
    from mvrbm.vision import SuperResolver

    images = [picture.pixels for picture in read_pictures(folder)]
    training: Any = {"n_patches": patches, "n_epochs": epochs, "recipe": recipe.value, "random_state": seed}
    training |= {"device": device.value, "verbose": int(not quiet)}
    model = SuperResolver(int(scale), patch, (hidden[0], hidden[1]), rank, **training)
    tuning = {"tuning_patches": tuning_patches if fine_tune else 0, "tuning_epochs": tuning_epochs}
    began, cause = time.perf_counter(), None
    try:
        model.fit_and_tune(images, **tuning, tuning_crops=tuning_crops, checkpoints=checkpoints, force=force)
    except INTERRUPTS as error:
        if not hasattr(model, "machine_"):
            raise
        cause = error
    seconds = time.perf_counter() - began
    model.save(out)
    parameters = model.machine_.n_parameters
    result = {"model": str(out), "scale": int(scale), "patch": patch, "hidden_shape": hidden, "rank": rank}
    result |= {"fine_tuned": fine_tune, "images": len(images), "parameters": parameters, "seconds": round(seconds, 3)}
    size = f"x{scale}, patches of {patch}x{patch} -> {hidden}, rank {rank}, {parameters:,} parameters"
    opt.show(result, as_json, f"{out}: {size}, from {len(images)} images in {seconds:.1f} s")
    if cause is not None:
        raise opt.Interrupted(f"interrupted: the model so far is in {out}", cause)
