"""Sphinx: what a page of the reference lists, and the types that its functions return.

The template of a class asks `documented_members` for the members to document. Docstrings without a section Returns get
one with the annotated type. Those without a section See Also get one with the guide and the relatives of the object.
Links from source code lead to the names that users import.
"""

import importlib
import inspect
import re

from sphinx.util.inspect import safe_getattr

import mvrbm
from mvrbm.couplings import Coupling
from mvrbm.units import Unit

# Members that other modules of the package call, and users do not need.
INTERNAL = {
    "as_layers",
    "as_masks",
    "bytes_to_check",
    "check_bounded",
    "check_parameters",
    "extra_repr",
    "free_energy_gradient",
    "gaussian_norm",
    "largest_order",
    "learns_from_incomplete",
    "like",
    "limit_norm",
    "may_be_unbounded",
    "own_energy",
    "prepare",
    "takes_arrays",
    "unit_gradient",
}
# Methods of scikit-learn that are the same for all estimators.
SCIKIT_LEARN = re.compile(
    r"(get|set)_(params|metadata_routing|output|\w+_request)$"
)
# Units and couplings have the members that these classes document.
BASES = (Unit, Coupling)
SECTION = re.compile(r"^(Returns|Yields)\n-+$", re.MULTILINE)
# A guide, and names that belong together, in the module before them.
GROUPS = [
    (
        "imputation",
        "mvrbm: MVRBMImputer MatrixMixture mvrbm.estimators.imputer.factor_analysis: fit_factors",
    ),
    ("outliers", "mvrbm: MVRBMOutlierDetector MatrixMixture MVRBMImputer"),
    (
        "density",
        "mvrbm: MatrixMixture WhitenedMixture MVRBMImputer MVRBMOutlierDetector",
    ),
    (
        "topics",
        "mvrbm: ReplicatedSoftmax Counts mvrbm.models: replicated_softmax documents",
    ),
    (
        "deep",
        "mvrbm: MVRBMClassifier DeepMVRBMClassifier DeepMVRBM ClassificationMVRBM mvrbm.estimators: Layer",
    ),
    (
        "hyperparameters",
        "mvrbm: Sweep mvrbm.estimators: Candidate mvrbm.training: fit_together",
    ),
    (
        "sequences",
        "mvrbm: SequenceRBM mvrbm.sequences: contact_map ranked_pairs contact_precision effective_couplings "
        "plot_contact_map",
    ),
    (
        "sequences",
        "mvrbm.sequences: mutation_scan plot_mutations hidden_weights plot_logo",
    ),
    (
        "sequences",
        "mvrbm.sequences: correlations plot_correlations project plot_projection adversarial_accuracy Accuracy "
        "nearest_distances",
    ),
    (
        "sequences",
        "mvrbm.sequences: load_lattice_proteins mvrbm.io.alignments: Alignment as_alignment read_alignment "
        "write_fasta mvrbm.io.alphabets: Alphabet as_alphabet mvrbm.data.sequence_weights: identity_weights",
    ),
    (
        "denoising",
        "mvrbm.vision: PhotoDenoiser denoise_photograph repair_photograph estimate_noise estimate_salt",
    ),
    (
        "denoising",
        "mvrbm.vision: denoise add_noise NOISES estimate_level psnr",
    ),
    (
        "super-resolution",
        "mvrbm.vision: SuperResolver TrainingStep enlarge_image reduce_image psnr_ssim luminance",
    ),
    (
        "super-resolution",
        "mvrbm.vision: clean_photograph estimate_degradation Degradation jpeg_level",
    ),
    (
        "sampling",
        "mvrbm.sampling: sample gibbs independent_sample mean_field conditional_mean label_log_posterior State",
    ),
    (
        "sampling",
        "mvrbm.sampling: ParallelTempering TemperedPath check_mixing Mixing chain_memory",
    ),
    (
        "likelihood",
        "mvrbm.likelihood: log_likelihood log_likelihood_interval LikelihoodInterval pseudo_log_likelihood "
        "PseudoLikelihood",
    ),
    (
        "likelihood",
        "mvrbm.likelihood: log_partition log_partition_interval LogPartitionInterval annealed_importance_sampling "
        "reverse_annealed_importance_sampling AnnealedEstimate",
    ),
    (
        "training",
        "mvrbm.training: Trainer Recipe RECIPES TrainState TrainingRun fit_together",
    ),
    (
        "training",
        "mvrbm.training: load_checkpoint mvrbm.training.checkpoints: newest mvrbm.training: Checkpoint",
    ),
    (
        "training",
        "mvrbm.training: Callback Monitor Checkpoint EarlyStopping CSVLog TensorBoard EpochLines ProgressBar",
    ),
    ("learning", "mvrbm.training: NegativePhase CD PCD TemperedPCD"),
    (
        "learning",
        "mvrbm.updates.gradient: contrast contrast_by_autograd Centering mvrbm.updates.step: step balance "
        "normalize mvrbm.updates.initialization: initialize "
        "mvrbm.updates.learning_rate: learning_rates safe_rates",
    ),
    (
        "sharing",
        "mvrbm: load save save_pretrained push_to_hub ModelCard mvrbm.hub: find download mvrbm.saving: register",
    ),
    (
        "models",
        "mvrbm: Bernoulli Gaussian Categorical Poisson Counts DoubleRectified Rectified WhitenedMixture",
    ),
    ("models", "mvrbm: Kronecker CP Tucker MPO Dense"),
    (
        "models",
        "mvrbm: BoltzmannMachine mvrbm.models: rbm mvrbm multimodal_mvrbm cp_rbm",
    ),
    (
        "extending",
        "mvrbm: Unit mvrbm.units.base: Alternatives mvrbm.units: make_unit unit_names",
    ),
    (
        "extending",
        "mvrbm: Coupling mvrbm.couplings.base: Chain mvrbm.couplings: make_coupling",
    ),
    ("playground", "mvrbm.pages: write_playground write_enlarging_page"),
    (
        "playground",
        "mvrbm.pages: Page Section Figure Table image_grid curves",
    ),
    (
        "distributed",
        "mvrbm.distributed: World single_process mvrbm.io.shards: Shards Rows",
    ),
    (
        "training",
        "mvrbm.data.sources: Source Batch as_source mvrbm.io.shards: Shards",
    ),
    (
        "cli",
        "mvrbm.io.arrays: read_samples read_labels read_array write_output contact_sheet",
    ),
    (
        "cli",
        "mvrbm.io.datasets: load fetch where describe patches Dataset",
    ),
    ("cli", "mvrbm.export: to_onnx compare_onnx Graph"),
    ("sampling", "mvrbm: RandomSource mvrbm.sampling: sample"),
]
ALIASES = {
    "Array": "ndarray",
    "Self": "self",
    "Any": None,
    "None": None,
    "object": None,
}


def documented_members(cls):
    """Return the names of the public methods, and of the other public members, that the package defines for a class."""
    names = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith(mvrbm.__name__):
            names |= dict.fromkeys(
                [*vars(base), *vars(base).get("__annotations__", {})]
            )
    of_base = {
        name
        for base in BASES
        if issubclass(cls, base) and cls is not base
        for name in dir(base)
    }
    found = [
        name
        for name in names
        if not name.startswith("_")
        and name not in INTERNAL | of_base
        and not SCIKIT_LEARN.match(name)
    ]
    methods = [
        name
        for name in found
        if inspect.isroutine(safe_getattr(cls, name, None))
    ]
    return sorted(methods), [name for name in found if name not in methods]


class Members(dict):
    """`documented_members` of classes by their full names, for templates. Sphinx stores it as an empty dictionary."""

    def __missing__(self, name):
        module, _, cls = name.rpartition(".")
        return documented_members(
            getattr(importlib.import_module(module), cls)
        )


def add_returns(app, what, name, obj, options, lines):
    """Add a section Returns with the annotated type to a docstring that has none."""
    if (
        what not in ("function", "method")
        or not any(lines)
        or SECTION.search("\n".join(lines))
    ):
        return
    annotation = getattr(inspect.unwrap(obj), "__annotations__", {}).get(
        "return"
    )
    text = (
        annotation
        if isinstance(annotation, str)
        else getattr(annotation, "__name__", None)
    )
    text = ALIASES.get(text, text)
    if text:
        at = next(
            (
                i
                for i in range(1, len(lines))
                if re.fullmatch(r"-{3,}", lines[i])
                and follows(lines[i - 1])
            ),
            None,
        )
        at = len(lines) if at is None else at - 1
        lines[at:at] = [
            "",
            "Returns",
            "-------",
            re.sub(r"\bArray\b", "ndarray", text),
            "",
        ]


def follows(title):
    """Return whether a section comes after Returns in the order of numpydoc."""
    return title in {
        "Raises",
        "Warns",
        "See Also",
        "Notes",
        "References",
        "Examples",
    }


def members_of(text):
    """Return the full names in the text of a group."""
    names, module = [], ""
    for word in text.split():
        if word.endswith(":"):
            module = word[:-1]
        else:
            names.append(f"{module}.{word}")
    return names


def add_relatives(app, what, name, obj, options, lines):
    """Add the guide and the other members of its groups to an object without a section See Also."""
    found = [
        (guide, names)
        for guide, text in GROUPS
        if name in (names := members_of(text))
    ]
    if (
        what not in ("class", "function", "data")
        or not found
        or any("seealso::" in line for line in lines)
    ):
        return
    others = dict.fromkeys(
        other for _, names in found for other in names if other != name
    )
    guides = dict.fromkeys(guide for guide, _ in found)
    lines += ["", ".. seealso::", ""]
    word = "Guide" if len(guides) == 1 else "Guides"
    pages = ", ".join(f":doc:`/{guide}`" for guide in guides)
    lines += [f"   {word}: {pages}"]
    lines += [
        "",
        "   " + ", ".join(f":obj:`~{other}`" for other in others),
    ]


# A link from the source of an object to its page, whose name contains the name that users import.
BACK = re.compile(
    r'(generated/([\w.]*?(\w+))\.html#)[\w.]+\.\3((?:\.\w+)*)"'
)


def correct_links(app, page, template, context, doctree):
    """Correct links from source code to the reference: viewcode takes one import path for all objects of a module."""
    if page.startswith("_modules/"):
        context["body"] = BACK.sub(r'\1\2\4"', context["body"])


def setup(app):
    app.connect(
        "autodoc-process-docstring", add_returns, priority=450
    )  # before numpydoc, at 500
    app.connect("autodoc-process-docstring", add_relatives, priority=550)
    app.connect("html-page-context", correct_links)
    app.config.autosummary_context = {"documented": Members()}
    return {"parallel_read_safe": True}
