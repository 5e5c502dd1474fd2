"""`robopolicy watch` in a process of its own: what it answers, to whom, and what a browser shows of runs that live."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from browser import browser
from made_runs import log, make_run

from robopolicy.cli import main

pytestmark = pytest.mark.long

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@contextmanager
def served(root: Path):
    """Serve the runs below `root`; yields the address."""
    command = [sys.executable, "-m", "robopolicy.cli", "watch", str(root), "watch.port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as server:
        try:
            assert server.stdout is not None
            match = re.search(r"http://127\.0\.0\.1:\d+", server.stdout.readline())
            assert match is not None
            yield match[0]
        finally:
            server.send_signal(signal.SIGINT)
            assert server.wait(timeout=60) == 0


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder of runs, one with a film, beside which a secret lies, and its address."""
    folder = tmp_path_factory.mktemp("watched")
    (folder / "secret.mp4").write_bytes(b"secret")
    root = folder / "runs"
    done = make_run(root, "done", share=0.9).path
    (done / "base_and_tuned.mp4").write_bytes(bytes(range(100)))
    (done / "linked.mp4").symlink_to(folder / "secret.mp4")
    make_run(root, "other", share=0.5)
    with served(root) as address:
        yield root, address


@pytest.fixture(scope="module")
def client(made):
    with httpx.Client(base_url=made[1], trust_env=False, timeout=60) as http_client:
        yield http_client


def test_pages_are_served_with_headers_that_keep_others_out(client):
    for path in ("/", "/run/finetune/done/0", "/compare?run=finetune/done/0&run=finetune/other/0", "/refresh.js"):
        answer = client.get(path)
        assert answer.status_code == 200, path
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "unsafe-eval" not in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert "<script>" not in client.get("/").text


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.", "192.168.1.2", "", "["])
def test_a_request_that_names_another_host_is_refused(client, host):
    answer = client.get("/", headers={"Host": host})
    assert answer.status_code in (400, 421) and "done" not in answer.text


@pytest.mark.parametrize("host", ["localhost:8600", "127.0.0.1", "[::1]:80", "LOCALHOST"])
def test_this_machine_may_be_called_by_any_of_its_names(client, host):
    assert client.get("/", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_written(client, method):
    for path in ("/", "/run/finetune/done/0", "/film"):
        assert client.request(method, path).status_code == 405


@pytest.mark.parametrize(
    "path",
    [
        "/run/" + quote("..", safe="").replace(".", "%2e"),
        "/run/" + quote("../../secret.mp4", safe=""),
        "/run//etc",
        "/run/%2e%2e/%2e%2e/etc/passwd",
        "/run/finetune/done/0/config.yaml",
        "/film?of=finetune/done/0&name=" + quote("../../../../secret.mp4", safe=""),
        "/film?of=finetune/done/0&name=linked.mp4",
        "/film?of=finetune/done/0&name=config.yaml",
        "/film?of=..&name=secret.mp4",
        "/film?of=/&name=secret.mp4",
        "/film",
        "/compare?run=../..",
        "/config.yaml",
        "/run/%00",
    ],
)
def test_no_path_is_served_but_runs_and_their_films(client, path):
    answer = client.get(path)
    assert answer.status_code == 404 and "secret" not in answer.text


def test_a_film_is_served_in_ranges(client):
    match = re.search(r'src="(/film[^"]+)"', client.get("/run/finetune/done/0").text)
    assert match is not None
    address = match[1].replace("&amp;", "&")
    assert client.get(address).content == bytes(range(100))
    part = client.get(address, headers={"Range": "bytes=10-19"})
    assert part.status_code == 206 and part.content == bytes(range(10, 20))


def test_it_listens_on_this_machine_alone(made):
    port = int(made[1].rpartition(":")[2])
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = [line[1].split(":")[0] for line in lines if line[1].endswith(f":{port:04X}") and line[3] == "0A"]
    assert listening == ["0100007F"]


def test_a_taken_port_and_a_folder_that_is_none_are_sentences(tmp_path, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["watch", str(tmp_path), f"watch.port={taken.getsockname()[1]}"]) == 2
    assert "is in use: choose another" in " ".join(capsys.readouterr().err.split())
    assert main(["watch", f"watch.path={tmp_path / 'none'}"]) == 2
    assert "is not a folder of runs" in " ".join(capsys.readouterr().err.split())


def test_the_only_run_of_a_folder_is_shown_at_once(made):
    root, _ = made
    with served(root / "finetune" / "done" / "0") as address, httpx.Client(trust_env=False, timeout=60) as client:
        answer = client.get(address, follow_redirects=True)
        assert answer.url.path == "/run/" and "finetune: done" in answer.text


def test_a_browser_shows_a_curve_that_grows_without_being_told(made, tmp_path):
    root, address = made
    folder = make_run(root, "growing")
    with browser(tmp_path / "profile") as page:
        page.open(f"{address}/run/finetune/growing/0")
        points = "Math.max(...[...document.querySelectorAll('figure path[clip-path]')].map((each) => \
            each.getAttribute('d').split('L').length))"
        before = page.value(points)
        page.value("window.same = document.querySelector('nav'); 1")
        log(folder, 3)
        log(folder, 4)
        page.until(f"{points} > {before}")
        assert page.value("window.same === document.querySelector('nav')")  # the page was not loaded anew


def test_a_browser_shows_a_run_that_is_killed_and_compares_two(made, root, tmp_path):
    """A real fine-tuning, its phases, its end by SIGKILL; and the form that compares."""
    watched, address = made
    policy = root / "train" / "reach_planar" / "0" / "checkpoint"
    settings = ["run.threads=1", f"run.root={watched}", "run.name=real", f"finetune.policy={policy}"]
    long = ["finetune.iterations=100000", "finetune.num_envs=8", "finetune.rollout_length=4", "finetune.videos=0"]
    often = ["finetune.evaluate_every=1", "finetune.evaluate_episodes=8", "finetune.target_success=null"]
    command = [sys.executable, "-m", "robopolicy.cli", "finetune", "world=reach_planar", *settings, *long, *often]
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ENVIRONMENT)
    try:
        with browser(tmp_path / "profile") as page:
            page.open(f"{address}/")
            row = "[...document.querySelectorAll('tbody tr')].find((each) => each.textContent.includes('real / 0'))"
            page.until(f"{row}?.querySelector('.running') && {row}.textContent.includes('Fine-tuning')", 120)
            page.until(f"{row}.textContent.includes('validation')")  # a first success
            page.value("document.querySelector('input[value=\"finetune/done/0\"]').checked = true")
            run.kill()
            run.wait()
            page.until(f"{row}.querySelector('.killed')")
            assert page.value("document.querySelector('input[value=\"finetune/done/0\"]').checked")  # still chosen
            page.value("document.querySelector('input[value=\"finetune/other/0\"]').click()")
            page.value("document.querySelector('form button').click()")
            page.until("location.pathname === '/compare' && document.querySelector('figure svg')")
            text = page.value("document.querySelector('main').innerText")
            assert re.search(r"[+-]40\.0 points", text) and "50.0% [36.6%, 63.4%]" in text
            drawn = page.value("document.querySelector('figure svg').textContent")
            assert "done" in drawn and "other" in drawn
    finally:
        run.kill()
        run.wait()


def test_a_page_says_when_its_server_is_gone(tmp_path):
    make_run(tmp_path / "runs", "x")
    with browser(tmp_path / "profile") as page:
        with served(tmp_path / "runs") as address:
            page.open(f"{address}/")
            assert not page.value("document.body.classList.contains('lost')")
            time.sleep(0.1)
        page.until("document.body.classList.contains('lost')")
        assert "does not answer" in page.value("document.body.innerText")
