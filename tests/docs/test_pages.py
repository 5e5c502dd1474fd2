"""The documentation is built: every page, every link between pages; a warning is an error, as in `make docs`."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long
pytest.importorskip("sphinx", reason="make .venv/.docs installs what builds the documentation")

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(600)
def test_the_documentation_is_built_without_a_warning(tmp_path):
    options = ("--fail-on-warning", "--keep-going", "--quiet", "-b", "html", "-d", str(tmp_path / "doctrees"))
    command = [sys.executable, "-m", "sphinx", *options, str(ROOT / "docs"), str(tmp_path / "html")]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    pages = {path.relative_to(tmp_path / "html").as_posix() for path in (tmp_path / "html").rglob("*.html")}
    assert {"index.html", "results.html", "guides/recipes.html", "reference/results_tables.html"} <= pages
    results = (tmp_path / "html" / "results.html").read_text()
    anchors = set(re.findall(r'href="reference/results_tables.html#([\w-]+)"', results))
    tables = (tmp_path / "html" / "reference" / "results_tables.html").read_text()
    assert len(anchors) > 15 and all(f'id="{anchor}"' in tables for anchor in anchors)
    for page in pages:
        if not page.startswith(("_", "genindex", "py-modindex", "search")):
            text = (tmp_path / "html" / page).read_text()
            assert "](" not in re.sub(r"<(pre|script)\b.*?</\1>", "", text, flags=re.DOTALL), f"{page}: a raw link"
