"""The live page: which runs there are and in what state, a report that grows, several runs beside one another."""

import json
import re

import pytest
from made_runs import log, make_run

from robopolicy.core import status
from robopolicy.core.errors import ConfigError
from robopolicy.runs import lock_run_folder
from robopolicy.watching import pages as pages_module
from robopolicy.watching.comparison import names, open_runs, table
from robopolicy.watching.listing import Listing
from robopolicy.watching.pages import Pages


@pytest.fixture
def pages(tmp_path):
    return Pages(Listing(tmp_path))


def run_of(pages, name):
    run = pages.listing.run(f"finetune/{name}/0")
    assert run is not None
    return run


def test_every_run_is_listed_with_its_state_and_success(tmp_path, pages):
    make_run(tmp_path, "done", share=0.9)
    make_run(tmp_path, "dead")
    make_run(tmp_path, "damaged").path.joinpath("result.json").write_text("[1")
    going = make_run(tmp_path, "going")
    lock_run_folder(going.path)
    status.begin(going.path)
    failed = make_run(tmp_path, "failed")
    with pytest.raises(ConfigError), status.end_on_error():
        status.begin(failed.path)
        status.end(going.path)  # another run of the same process, which has ended
        raise ConfigError("No space left.")
    status.begin(going.path)
    runs = {run.name: run for run in pages.listing.runs()}
    states = {name: run.state for name, run in runs.items()}
    expected = {"done": "finished", "dead": "killed", "damaged": "damaged", "going": "running", "failed": "failed"}
    assert states == expected
    assert runs["done"].outcome.text == "90.0% [78.6%, 95.7%]" and runs["done"].outcome.policy == "tuned"
    assert runs["dead"].outcome.text == "40.0% [30.0%, 50.0%]" and not runs["dead"].outcome.final
    assert runs["failed"].reason == "No space left." and runs["done"].task == "push_cube"
    page = pages.all_runs("")
    assert "No space left." in page and "1 running" in page and 'class="state killed"' in page
    status.end(going.path)


def test_runs_in_runs_are_found_and_links_and_parts_are_not_followed(tmp_path, pages):
    root = tmp_path / "root"
    outside = make_run(tmp_path / "outside", "secret", share=1.0)
    make_run(root / "demo" / "push_t" / "0", "inner")
    make_run(root / "train" / "x" / "0" / "checkpoint", "no_run")
    (root / "finetune").mkdir()
    (root / "finetune" / "linked").symlink_to(outside.path.parent)
    (root / "linked").symlink_to(outside.path)
    listing = Listing(root)
    assert [run.identifier for run in listing.runs()] == ["demo/push_t/0/finetune/inner/0"]
    assert listing.run("../outside/finetune/secret/0") is None and listing.run("linked") is None


def test_a_run_itself_can_be_the_root(tmp_path):
    folder = make_run(tmp_path, "one", share=0.5)
    (run,) = Listing(folder.path).runs()
    assert (run.identifier, run.verb, run.name, run.seed) == ("", "finetune", "one", "0")


def test_what_others_named_is_escaped(tmp_path, pages):
    folder = make_run(tmp_path, "<script>alert(1)</script>$x$")
    make_run(tmp_path, "_hidden")
    status.begin(folder.path)
    status.note("<img src=x onerror=alert(2)>")
    with pytest.raises(ConfigError), status.end_on_error():
        raise ConfigError("<b>bold</b>")
    run = next(run for run in pages.listing.runs() if run.name != "_hidden")
    for page in (pages.all_runs(""), pages.one_run(run), pages.comparison([run, run_of(pages, "_hidden")], [])):
        assert "<script>alert" not in page and "<img" not in page and "<b>bold" not in page
        assert "&lt;script&gt;" in page


def test_a_curve_grows_with_its_run_and_is_drawn_again_only_then(tmp_path, pages, monkeypatch):
    monkeypatch.setattr(pages_module, "SHARE", 0)
    folder = make_run(tmp_path, "x")
    drawn = []
    real = pages_module.report_of
    monkeypatch.setattr(pages_module, "report_of", lambda *given: drawn.append(given) or real(*given))
    before = pages.one_run(run_of(pages, "x"))
    assert pages.one_run(run_of(pages, "x")) == before and len(drawn) == 1
    log(folder, 3)
    after = pages.one_run(run_of(pages, "x"))
    assert len(drawn) == 2

    def points(page):
        return max(line.count("L") for line in re.findall(r'<path d="([^"]*)" clip-path', page))

    assert points(after) > points(before)


def test_a_page_is_not_drawn_at_every_line_of_a_fast_run(tmp_path, pages, monkeypatch):
    monkeypatch.setattr(pages_module, "SHARE", 1e9)
    monkeypatch.setattr(pages_module, "LONGEST_WAIT", 1e9)
    folder = make_run(tmp_path, "x")
    before = pages.one_run(run_of(pages, "x"))
    log(folder, 3)
    part = re.compile(r"<svg.*?</svg>", re.DOTALL)
    assert part.findall(pages.one_run(run_of(pages, "x"))) == part.findall(before)


def test_two_runs_are_compared_on_the_seeds_that_both_played(tmp_path, pages):
    for name, share, options in (
        ("low", 0.5, {}),
        ("high", 0.9, {"rate": 3e-4}),
        ("other", 0.9, {"seeds": range(100, 150)}),
        ("elsewhere", 0.9, {"world": "push_t"}),
        ("going", None, {}),
    ):
        make_run(tmp_path, name, share=share, **options)
    runs = [run_of(pages, name) for name in ("low", "high", "other", "elsewhere", "going")]
    page = pages.comparison(runs, [])
    assert "+40.0 points" in page and "not paired" in page and "different worlds" in page
    assert "not evaluated yet" in page
    rows = {row[0]: row[1:] for row in table(open_runs(runs[:2])).rows}
    assert rows["success"] == ["50.0% [36.6%, 63.4%]", "90.0% [78.6%, 95.7%]"]
    assert rows["difference to low"][1].startswith("+40.0 points [") and rows["p (McNemar)"][1] == "1.9e-06"
    assert "finetune.learning_rate" in page and "world.name" in page
    svg = re.findall(r"<svg.*?</svg>", page, re.DOTALL)[0]
    assert "deterministic success" in svg and "high" in svg and "env steps" in svg


def test_any_metric_can_be_chosen(tmp_path, pages):
    make_run(tmp_path, "x")
    page = pages.comparison([run_of(pages, "x")], ["kl", "no_such"])
    svg = re.findall(r"<svg.*?</svg>", page, re.DOTALL)[0]
    assert ">kl</text>" in svg and "success" not in svg
    assert 'class="on">kl</a>' in page and "metric=kl&amp;metric=success" in page


def test_the_list_is_sorted_by_any_column(tmp_path, pages):
    for name, share in (("a", 0.5), ("b", 0.9), ("c", None)):
        make_run(tmp_path, name, share=share)

    def order(sort):
        return re.findall(r">(\w) / 0</a>", pages.all_runs(sort))

    assert order("success") == ["b", "a", "c"] and order("run") == ["a", "b", "c"] and order("-run") == ["c", "b", "a"]
    assert sorted(order("no_such_column")) == ["a", "b", "c"]


def test_runs_are_told_apart_by_what_differs(tmp_path, pages):
    make_run(tmp_path, "a")
    make_run(tmp_path, "b")
    make_run(tmp_path / "again", "a")
    runs = pages.listing.runs()
    assert set(names([run for run in runs if run.identifier.startswith("finetune")])) == {"a", "b"}
    assert "again/finetune/a/0" in names(runs)


def test_a_folder_without_runs_says_how_to_begin(pages):
    assert "No runs yet" in pages.all_runs("")


def test_a_status_of_another_kind_is_no_reason_to_fail(tmp_path, pages):
    folder = make_run(tmp_path, "x")
    status.status_file(folder.path).write_text(json.dumps({"state": "running", "phases": [{"no": 1}], "began": "x"}))
    (run,) = pages.listing.runs()
    assert run.state == "damaged" and run.reason
    assert "damaged" in pages.all_runs("")
