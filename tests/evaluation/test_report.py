"""Plots contain their data; a report stands alone, says what was measured and escapes what it is given."""

import json
from html.parser import HTMLParser

import pytest

from robopolicy.core.errors import DataError
from robopolicy.core.run import RunFolder
from robopolicy.evaluation import plots
from robopolicy.evaluation.plots import Rate
from robopolicy.evaluation.report import Card, Report, Section, render, report_for_run

RECORDS = [
    {"iteration": 0, "env_steps": 0, "deterministic_success": 0.25, "stochastic_success": 0.2},
    {"iteration": 1, "env_steps": 512, "success": 0.4, "deterministic_success": 0.75, "stochastic_success": 0.6},
]


class Balanced(HTMLParser):
    """Counts tags that are not closed, and collects addresses."""

    VOID = frozenset({"meta", "link", "br", "img", "hr", "input", "source", "path", "use", "rect", "line"})

    def __init__(self, page: str):
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "action") and value]

    def handle_startendtag(self, tag, attrs):
        self.addresses += [value for name, value in attrs if name in ("src", "href") and value]

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open, f"</{tag}> closes nothing"
            assert self.open.pop() == tag


def test_plots_name_what_they_show():
    curve = plots.learning_curve(RECORDS, Rate("base", 0.25, 0.2, 0.3))
    for text in ("environment steps", "success", "deterministic", "stochastic", "during collection"):
        assert f">{text}<" in curve
    bars = plots.success_bars([Rate("base", 0.25, 0.2, 0.3), Rate("tuned", 0.95, 0.9, 0.98)])
    assert ">25%<" in bars
    assert ">95%<" in bars
    rates = {name: Rate(name, value, value, value) for name, value in (("weak", 0.1), ("middling", 0.5), ("good", 0.9))}
    scatter = plots.ranking_scatter(rates, rates)
    assert all(f">{name}<" in scatter for name in rates)
    losses = plots.loss_curves([{"step": 1, "denoising": 1.0}, {"step": 2, "denoising": 0.5}])
    assert ">denoising<" in losses


def test_points_move_with_their_data():
    low, high = (plots.success_bars([Rate("tuned", value, 0.1, 0.9)]) for value in (0.3, 0.6))
    assert low != high
    assert plots.success_bars([Rate("tuned", 0.3, 0.1, 0.9)]).count("<path") == low.count("<path")


def test_a_page_stands_alone_and_escapes_its_texts():
    report = Report(
        title="<b>bold</b> & run",
        cards=[Card("success <script>", "95%", "over 200")],
        sections=[
            Section("Rates", svg=plots.success_bars([Rate("a<b", 0.5, 0.4, 0.6)])),
            Section("Table", header=["name", "count"], rows=[["x&y", "1"]]),
        ],
    )
    page = render(report)
    assert "<b>bold</b>" not in page
    assert "<script" not in page
    assert "x&amp;y" in page
    parsed = Balanced(page)
    assert not parsed.open
    assert all(address.startswith(("data:", "#")) for address in parsed.addresses)


def test_a_runs_report_agrees_with_its_figures(tmp_path):
    folder = RunFolder(tmp_path)
    folder.describe("run: {seed: 3}\n", 3)
    for record in RECORDS:
        folder.log(record)
    verdict = {"success_rate": 0.75, "low": 0.6, "high": 0.85, "episodes": 40, "successes": 30}
    result = {"policy": {"deterministic": verdict, "stochastic": verdict}}
    (tmp_path / "result.json").write_text(json.dumps(result))
    page = report_for_run(tmp_path)
    text = page.read_text()
    assert "75%" in text
    assert "<svg" in text
    assert json.loads((tmp_path / "report.json").read_text())["figures"] == result
    assert not Balanced(text).open


@pytest.mark.parametrize("changed", [{"success_rate": 7}, {"low": -0.1}, {"high": float("nan")}])
def test_a_rate_that_is_no_share_is_not_drawn(tmp_path, changed):
    verdict = {"success_rate": 0.75, "low": 0.6, "high": 0.85, "episodes": 40, "successes": 30, **changed}
    (tmp_path / "result.json").write_text(json.dumps({"policy": {"deterministic": verdict, "stochastic": verdict}}))
    with pytest.raises(DataError, match=r"must lie between 0 and 1|NaN"):
        report_for_run(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_a_folder_without_a_run_is_told(tmp_path):
    with pytest.raises(DataError, match="contains no run"):
        report_for_run(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("steps", "said"), [(0, "No episodes were played in the real environment"), (1234, "took 1,234 steps")]
)
def test_a_gates_report_says_whether_the_world_was_played(tmp_path, steps, said):
    verdict = {"accepted": False, "reasons": ["not significantly better"], "env_steps": steps}
    (tmp_path / "result.json").write_text(json.dumps({"rounds": [{"round": 1, "verdict": verdict}], "accepted": 0}))
    page = report_for_run(tmp_path).read_text()
    assert said in page and "not significantly better" in page and "0 of 1" in page


def test_wide_tables_wrap_their_cells_and_others_do_not():
    cells = [f"{number} of a hundred seeds" for number in range(9)]
    page = render(Report("a", sections=[Section("x", header=cells, rows=[cells])]))
    assert 'class="wide"' in page and 'class="short"' not in page
    page = render(Report("a", sections=[Section("x", header=cells[:3], rows=[cells[:3]])]))
    assert 'class="wide"' not in page and page.count('class="short"') == 3
