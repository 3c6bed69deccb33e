"""Sphinx: figures of the repository's results in the text, as tables, and names that are imported elsewhere.

{measured}`name` writes one number of `tools.measured`, and the directive {measured-table} one of its tables, with its
file and the command that measures it. Nothing is typed by hand: a page follows its JSON files.
"""

import importlib

from docutils import nodes
from sphinx.util.docutils import SphinxDirective, SphinxRole

from tools import measured


def depend_on_results(env):
    """Let Sphinx read the page again when any result changes."""
    for pattern in (
        "results/*/*.json",
        "benchmarks/*/*.json",
        "tools/measured.py",
    ):
        for path in measured.ROOT.glob(pattern):
            env.note_dependency(str(path))


class Measured(SphinxRole):
    def run(self):
        depend_on_results(self.env)
        try:
            return [nodes.Text(measured.value(self.text))], []
        except (KeyError, OSError) as error:
            message = self.inliner.reporter.error(
                f"no measured value {self.text!r}: {error!r}",
                line=self.lineno,
            )
            return [], [message]


class MeasuredTable(SphinxDirective):
    required_arguments = 1

    def run(self):
        depend_on_results(self.env)
        try:
            table = measured.table(self.arguments[0])
        except FileNotFoundError:
            self.env.note_reread()
            return self.parse_text_to_nodes("*Not measured yet.*")
        return self.parse_text_to_nodes(table.markdown())


def resolve_alias(app, env, node, contnode):
    """Find `mvrbm.units.Bernoulli` where `mvrbm.Bernoulli` is documented: both are one object."""
    target = node.get("reftarget", "")
    if node.get("refdomain") != "py" or not target.startswith("mvrbm."):
        return None
    parts = target.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
            break
        except ImportError:
            continue
    for part in parts[cut:]:
        found = getattr(found, part, None)
    if found is None or not hasattr(found, "__qualname__"):
        return None
    domain = env.get_domain("py")
    for name in (
        f"{found.__module__}.{found.__qualname__}",
        f"mvrbm.{found.__qualname__}",
    ):
        if name != target:
            kind = node.get("reftype", "obj")
            if link := domain.resolve_xref(
                env,
                node["refdoc"],
                app.builder,
                kind,
                name,
                node,
                contnode,
            ):
                return link
    return None


def setup(app):
    app.add_role("measured", Measured())
    app.add_directive("measured-table", MeasuredTable)
    app.connect("missing-reference", resolve_alias)
    return {"parallel_read_safe": True}
