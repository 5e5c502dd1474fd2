"""How Sphinx builds the documentation: `make docs`, pages below docs/_build/html. Warnings are errors."""

import sys
from pathlib import Path

from sphinx.application import Sphinx

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import results_table  # noqa: E402  beside this file
from generated import docstring_as_rst, with_links, write_reference  # noqa: E402  beside this file

from robopolicy import __version__  # noqa: E402

project, author, release = "robopolicy", "the robopolicy authors", __version__
copyright = "2026, the robopolicy authors. Apache-2.0"  # noqa: A001  Sphinx reads this name
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "sphinx_copybutton", "sphinx_design"]
exclude_patterns = ["_build"]
templates_path: list[str] = []

myst_enable_extensions = ["colon_fence", "dollarmath", "deflist"]
myst_heading_anchors = 3
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": False}
copybutton_exclude = ".linenos, .gp, .go"

html_theme, html_title = "furo", f"robopolicy {__version__}"
html_theme_options = {"navigation_with_keys": True}
html_static_path, html_css_files = ["../assets/pictures", "static"], ["wide.css"]
linkcheck_ignore = [r"http://(127\.0\.0\.1|localhost).*"]


def setup(app: Sphinx) -> None:
    """Write pages from code and figures first; adapt links to files, and docstrings, which are plain text."""
    results_table.write()
    app.connect("builder-inited", lambda app: write_reference(Path(app.srcdir) / "reference"))
    app.connect("source-read", adapt_links)
    app.connect("autodoc-process-docstring", docstring_as_rst)


def adapt_links(app: Sphinx, page: str, source: list[str]) -> None:
    """Lead links to files of the repository to pages of the documentation, as far as there is one."""
    folder = (Path(app.srcdir) / page).parent
    source[0] = with_links(source[0], folder, folder)
