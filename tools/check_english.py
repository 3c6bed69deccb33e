"""Find phrases that the project does not use, in docstrings, comments, messages, help texts and documentation.

    python -m tools.check_english                # src, studies, benchmarks, tools, examples, docs and README.md
    python -m tools.check_english src/mvrbm/io   # these files and folders

Each rule is one regular expression and what to write instead. Words in backticks and examples of code are not
prose and are ignored. Prints `file:line: habit: 'phrase' -> what to write`; the exit code is 1 if there is any.
What an expression cannot find, such as a sentence that is a riddle, remains for people who read the code.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("src", "studies", "benchmarks", "tools", "examples", "docs", "README.md", "CONTRIBUTING.md")
BUILT = ("_build", "generated", "gallery", "tutorials")  # folders of docs
OWN_FILES = ("tools/check_english.py",)  # it lists the phrases


def _any(words: str) -> str:
    """Return an expression for any of some words; an underscore stands for a space."""
    return f"(?:{'|'.join(words.split()).replace('_', ' ')})"


# Nouns that are counted "per" something. Those that are also verbs ("draws a sample") need a number in front.
_MEASURES = r"milliseconds microseconds ms us µs seconds minutes hours bytes bits [KMGT]i?B"
_NOUNS = f"{_MEASURES} rows columns arrays entries pixels patches weights epochs chains"
_MORE_NOUNS = (
    "samples? updates? steps? values? numbers? images? batch(?:es)? models? times? lines? files? states? draws? sweeps? "
    "products? calls? threads? cores? cycles? rounds? units? kernels? programs? process(?:es)? blocks? pass(?:es)? digits? "
    "row column array entry pixel patch weight epoch chain byte bit floats? tiles? graphs? folders? machines?"
)
_NUMBER = _any(
    r"\d[\d,.]* one two three four five six seven eight nine ten twenty an? several many more fewer few number_of half"
)
_PER = _any(
    "update sample second minute pass epoch batch row column model layer chain step image entry pixel run training sweep "
    "unit patch call process thread core group cell method digit line file site factor rank machine product round kernel "
    "program block mode modality axis replica state parameter class side direction point level weight draw cycle read time"
)
_NO_VERB = (
    rf"\b(?! {_any('can could may might will would must should [a-z]+s had made took')}\b)"  # values a unit takes
)
_BE = rf"{_any('is are was were be been being')}(?: not| never| only| also| then)?"
_ONE_OF = _any(r"an? one each every per this last first second next whole \d+ two three many several few of all more")
_AFTER_PASS = r"\b(?! (?:of|through|up|down|from|along)\b)"  # a pass up and down the layers, a pass along an axis
_AFTER_TRAINING = (  # "a training set" is fine
    r"\b(?=$|[.,;:)?!]| "
    + _any(
        "that which is was with of on in from to and or ends? by has may can at for without before after until takes"
    )
    + r"\b)"
)
_SPELLED_WITH_A_VOWEL = _any(
    "MVRBM MMVRBM RBM MPO MNIST RNG SGD SVG SVD SSIM RMSE RMS RGB ONNX HTML HTTP XML FFT MLP NPZ LMDB L1 L2 H100 H200"
)
_LIKE_YOU = r"(?:u(?:ni[^mn]|s[aeiu]|til|biq|ran)|eu|one\b|once\b|one-)\w*"  # unit, use, Euclidean, one
_AFTER_AN = _any("mvrbm rbm mmvrbm npy npz svg hour honest honor heir mpo nth xml html rng mse sgd rms rgb ssim svd")
_PLURALS = _any(
    "passes modes axes epochs samples updates chains steps images rows columns layers entries values modalities files "
    "processes models classes inputs factors"
)


class Rule(NamedTuple):
    """One habit, an expression that finds it (a space stands for any white space), and what to write instead."""

    habit: str
    pattern: str
    instead: str
    raw: bool = False  # also search words in backticks
    flags: int = re.IGNORECASE


RULES = [
    Rule("X a Y", rf"\b(?<!the\s){_any(_NOUNS)} an? {_PER}{_NO_VERB}", "X per Y"),
    Rule("X a Y", rf"\b{_NUMBER}(?: [\w-]+)? {_any(_NOUNS + ' ' + _MORE_NOUNS)} an? {_PER}{_NO_VERB}", "X per Y"),
    Rule("X a Y", rf"^(?:samples|values|updates|steps) an? {_any('update pass epoch second program call run')}\b", "X per Y"),
    Rule("X a Y", rf"\b{_any('error memory cost parameters terms')} an? {_PER}{_NO_VERB}", "X per Y"),
    Rule("passive", rf"\b{_BE} told\b", "reports"),
    Rule("passive", rf"\b{_BE} seen\b", "detects; does not detect"),
    Rule("passive", rf"\b(?:{_BE} looked|looks?|looking) (?:at|for)\b", "checks; reads; searches"),
    Rule("passive", r"\brefus(?:e|es|ed|ing|al)\b", "raises ValueError; does not support; rejects"),
    Rule("manners", r"\bwants\b|(?<!you\s)(?<!we\s)(?<!users\s)\bwant\b(?! to\b)", "requires; use X for Y"),
    Rule("manners", r"\bknows\b|\b(?:does|do) not know\b", "contains; depends on; has access to"),
    Rule("manners", r"\bmanners\b", "name the interface: scikit-learn compatible"),
    Rule("go on", r"\b(?:go|goes|going|went|gone) on\b", "continue; resume"),
    Rule("headless", rf"\bwhat(?:ever)? (?:is|was|are|were) {_any('left there missing unknown known new old needed')}\b", "name the thing"),
    Rule("headless", r"\bwho (?:wants?|needs?|has|likes?)\b|\bwhoever\b", "to do X, ..."),
    Rule("headless", r"\bthose (?:that|which|who)\b", "name the things"),
    Rule("private word", rf"\b{_ONE_OF} pass(?:es)?{_AFTER_PASS}|\bpass(?:es)? over (?:the|all)\b", "epoch"),
    Rule("private word", rf"\b{_any('which each every fast(?:er|est)? slow(?:er)? reference native gemm compiled')} ways?\b", "backend; path"),
    Rule("private word", rf"\b{_any('an? one another each every this that same killed interrupted resumed')} training{_AFTER_TRAINING}", "training run"),
    Rule("private word", r"\btrainings\b", "training runs"),
    Rule("private word", r"\bfinite numbers\b|\b(?:leav(?:e|es|ing)|left) the finite\b", "diverges; is not finite"),
    Rule("private word", r"\bby heart\b", "overfits; memorizes"),
    Rule("private word", r"\bslips?\b", "erratum; error"),
    Rule("private word", r"\bbeside\b", "next to; compared with"),
    Rule("if not given", r"\b(?:if|when|where) (?:it is |they are )?not given\b", "default: ..."),
    Rule("if not given", r"\bunless (?:it is |one is |they are )?given\b", "default: ..."),
    Rule("fragment", r"^(?:Of (?!course|the\b|these|those|\d)|Where (?:to|from)\b|With what\b|To what\b)", "a phrase: Random seed. Output path.", flags=0),
    Rule("a / an", rf"\ba [`:~]*(?:\w+:`)?{_SPELLED_WITH_A_VOWEL}\b", "an", raw=True, flags=0),
    Rule("a / an", rf"\ba (?!{_LIKE_YOU}|{_any('and are also into equals over')}\b)[aeiou][a-z]{{2,}}", "an", flags=0),
    Rule("a / an", rf"\ban (?!{_AFTER_AN}\b)(?:[bcdfgjklmnpqrstvwyz][a-z]{{2,}}|{_LIKE_YOU})", "a", flags=0),
    Rule("count", rf"(?<![\w.,-])1 {_PLURALS}\b", "a singular: 1 epoch, 1 axis"),
]  # fmt: skip

NAMES = {
    "refuses": "unsupported_reason",
    "slopes": "gradient",
    "wishes": "stop_flags",
    "let_rates_fall": "update_learning_rate",
    "add_up": "all_reduce",
}


class Text(NamedTuple):
    """A piece of prose of a file, and the line where it begins."""

    line: int
    content: str


class Finding(NamedTuple):
    """A phrase to replace."""

    line: int
    habit: str
    phrase: str
    instead: str

    def __str__(self) -> str:
        return f"{self.line}: {self.habit}: {self.phrase!r} -> {self.instead}"


# -- prose of a file --------------------------------------------------------------------------------


def comments(source: str) -> Iterator[Text]:
    """Yield the comments of Python code, consecutive lines of comments as one text."""
    block: list[str] = []
    start = last = column = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        content = token.string.lstrip("#").strip()
        alone = not token.line[: token.start[1]].strip()
        if block and token.start[0] == last + 1 and token.start[1] == column and alone:
            block.append(content)
        else:
            if block:
                yield Text(start, "\n".join(block))
            block, (start, column) = [content], token.start
        last = token.start[0]
    if block:
        yield Text(start, "\n".join(block))


def strings(source: str) -> Iterator[Text]:
    """Yield the string literals of Python code; the values of an f-string are written as {}."""
    tree = ast.parse(source)
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield Text(node.lineno, "".join(str(v.value) if isinstance(v, ast.Constant) else "{}" for v in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield Text(node.lineno, node.value)


def c_comments(source: str) -> Iterator[Text]:
    """Yield the comments of C code."""
    for match in re.finditer(r"/\*.*?\*/|//[^\n]*(?:\n[ \t]*//[^\n]*)*", source, re.DOTALL):
        yield Text(source.count("\n", 0, match.start()) + 1, re.sub(r"(?m)^\s*(?://+|\*)|/\*|\*/", "", match[0]))


def pages(source: str) -> Iterator[Text]:
    """Yield a page of Markdown, without blocks of code, formulas and comments, whose lines are left blank."""
    blocks = re.compile(
        r"^(`{3,})(?!\{(?:note|tip|warning|admonition))[^\n]*\n.*?^\1$|\$\$.*?\$\$|<!--.*?-->", re.M | re.S
    )
    text = blocks.sub(lambda match: "\n" * match[0].count("\n"), source)
    text = re.sub(r"\$[^$\n]+\$|(?<=\])\([^)\n]*\)", lambda match: "`" * len(match[0]), text)
    start = 1
    for paragraph in re.split(r"(\n(?:[ \t]*\n|(?=[|#>*-])))", text):  # rows of tables and items are texts of their own
        if paragraph.strip():
            yield Text(start, paragraph)
        start += paragraph.count("\n")


def prose(path: Path, source: str) -> Iterator[Text]:
    """Yield the texts of a file that people read."""
    if path.suffix in (".c", ".h"):
        yield from c_comments(source)
        return
    if path.suffix == ".md":
        yield from pages(source)
        return
    yield from comments(source)
    yield from (text for text in strings(source) if " " in text.content.strip())


def without_code(text: str) -> str:
    """Blank out words in backticks and lines of examples, so that offsets stay as they are."""
    text = re.sub(r"`+[^`]*`+", lambda match: re.sub(r"[^\s`]", "`", match[0]), text)
    return re.sub(r"(?m)^\s*(?:>>>|\.\.\.).*$", lambda match: re.sub(r"\S", "`", match[0]), text)


# -- rules ------------------------------------------------------------------------------------------

_COMPILED = [(rule, re.compile(rule.pattern.replace(" ", r"\s+"), rule.flags)) for rule in RULES]


def phrases(text: str) -> Iterator[tuple[int, Rule, str]]:
    """Yield offset, rule and phrase of everything that a rule finds in a text."""
    plain = without_code(text)
    found: list[tuple[str, int, int]] = []
    for rule, expression in _COMPILED:
        for match in expression.finditer(text if rule.raw else plain):
            if not any(
                habit == rule.habit and start < match.end() and match.start() < end for habit, start, end in found
            ):
                found.append((rule.habit, *match.span()))
                yield match.start(), rule, " ".join(match[0].split())


def names(source: str) -> Iterator[Finding]:
    """Yield the definitions for whose name there is a better word."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and (better := NAMES.get(node.name.strip("_"))):
            yield Finding(node.lineno, "name", node.name, better)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and re.search(r"[A-Z]S_AN?_[A-Z]", node.id):
            yield Finding(node.lineno, "name", node.id, "X_PER_Y")


def findings(path: Path, source: str) -> list[Finding]:
    """Return everything to replace in a file, in the order of its lines."""
    found = set(names(source)) if path.suffix == ".py" else set()
    for text in prose(path, source):
        for offset, rule, phrase in phrases(text.content):
            line = text.line + text.content.count("\n", 0, offset)
            found.add(Finding(line, rule.habit, phrase, rule.instead))
    return sorted(found)


def files(paths: list[Path]) -> Iterator[Path]:
    """Yield the files of code and the pages under some paths."""
    for path in paths:
        found = [path] if path.is_file() else sorted(path.rglob("*"))
        for file in found:
            built = "__pycache__" in file.parts or (path.name == "docs" and file.relative_to(path).parts[0] in BUILT)
            if (
                file.suffix in (".py", ".c", ".h", ".md")
                and not built
                and (file.suffix != ".md" or path.name != "benchmarks")
            ):
                yield file


def main(arguments: list[str] | None = None) -> int:
    """Check files and print what to change."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "paths", nargs="*", type=Path, help="files or folders; default: all code and pages of the project"
    )
    options = parser.parse_args(arguments)
    count = 0
    for file in files(options.paths or [ROOT / folder for folder in FOLDERS]):
        place = file.resolve()
        shown = place.relative_to(ROOT).as_posix() if place.is_relative_to(ROOT) else str(file)
        if shown in OWN_FILES:
            continue
        for finding in findings(file, file.read_text(encoding="utf-8")):
            print(f"{shown}:{finding}")
            count += 1
    print(f"plain English: {count} to change", file=sys.stderr)
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
