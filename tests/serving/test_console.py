"""The console: who may use it, what it can order, and what a browser makes of it with eight robots."""

import json
import time
import urllib.error
import urllib.request
from http.cookiejar import CookieJar
from typing import Any

import numpy as np
import pytest
from browser import browser
from console_robots import WalkingRobots
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from robopolicy.core.errors import ConfigError, ServingError
from robopolicy.operators.shared_control import Mode
from robopolicy.serving.configuration import ConsoleConfig
from robopolicy.serving.console.site import Console

KEY = "correct horse battery staple"


def ask(address: str, data: bytes | None = None, **headers: str) -> tuple[int, str, Any]:
    """Return status, text and headers of an answer, without following redirects."""

    class Stay(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *arguments):
            return None

    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), Stay, urllib.request.HTTPCookieProcessor(CookieJar())
    )
    try:
        answer = opener.open(urllib.request.Request(address, data, headers), timeout=20)
    except urllib.error.HTTPError as error:
        answer = error
    with answer:
        return answer.status, answer.read().decode(), answer.headers


def live(console: Console, **headers: str) -> Any:
    return connect(console.address.replace("http", "ws") + "live", additional_headers=headers, proxy=None)


def test_without_a_key_only_this_machine_under_its_own_name_sees_it():
    robots = WalkingRobots(2)
    with Console(robots.fleet, ConsoleConfig(port=0)) as console:
        status, text, headers = ask(console.address)
        assert status == 200 and "Stop all" in text and "frame-ancestors 'none'" in headers["Content-Security-Policy"]
        assert ask(console.address, Host="evil.example")[0] == 421
        assert ask(console.address + "../../etc/passwd")[0] == ask(console.address + "fleet.py")[0] == 404
        assert ask(console.address + "console.js")[2]["Content-Type"].startswith("text/javascript")
        with pytest.raises(InvalidStatus, match="403"):
            live(console, Origin="http://evil.example")
    with pytest.raises(ServingError, match="lets anyone on the network control your robots"):
        Console(robots.fleet, ConsoleConfig(port=0, host="0.0.0.0"))
    with pytest.raises(ConfigError, match="port=70000"):
        ConsoleConfig(port=70000)
    with Console(robots.fleet, ConsoleConfig(port=0)) as console:
        port = int(console.address.split(":")[2].strip("/"))
        with pytest.raises(ServingError, match="cannot listen"):
            Console(robots.fleet, ConsoleConfig(port=port))


def test_with_a_key_it_shows_nothing_to_others():
    robots = WalkingRobots(2)
    with Console(robots.fleet, ConsoleConfig(port=0, api_key=KEY)) as console:
        for path in ("", "live", "console.js", "console.html"):
            status, text, _ = ask(console.address + path)
            assert status == 401 and "robot" not in text and "Stop" not in text
        with pytest.raises(InvalidStatus, match="401"):
            live(console)
        with pytest.raises(InvalidStatus, match="401"):
            live(console, Cookie="robopolicy_console=guess")
        assert "not the key" in ask(console.address + "login", b"key=wrong")[1]
        right = b"key=" + KEY.replace(" ", "+").encode()
        assert ask(console.address + "login", right, Origin="http://evil.example")[0] == 403
        status, _, headers = ask(console.address + "login", right)
        cookie = headers["Set-Cookie"]
        assert status == 303 and "HttpOnly" in cookie and "SameSite=Strict" in cookie and KEY not in cookie
        assert ask(console.address, Cookie=cookie.split(";")[0])[0] == 200
        assert ask(console.address, Authorization=f"Api-Key {KEY}")[0] == 200
        with live(console, Cookie=cookie.split(";")[0]) as socket:
            assert json.loads(socket.recv())["about"]["axes"] == ["x_velocity", "y_velocity", "gripper"]
        ask(console.address, Authorization="Api-Key wrong")
        for _ in range(10):  # within ten seconds, however slow this machine is
            console.access._door.wrong_key("127.0.0.1")
        assert "Too many wrong keys" in ask(console.address + "login", b"key=wrong")[1]
        assert ask(console.address + "login", right)[0] == 303  # the right key is always accepted


def test_people_take_one_robot_and_leave_it_waiting_when_they_go():
    robots = WalkingRobots(3)
    fleet, control = robots.fleet, robots.assistance.control
    first, second = fleet.join(), fleet.join()
    robots.step()
    assert fleet.order(first, {"do": "take", "robot": 0}) == ""
    assert "is operated by browser 1" in fleet.order(second, {"do": "take", "robot": 0})
    assert "You operate robot 1" in fleet.order(first, {"do": "take", "robot": 1})
    assert "You do not operate robot 1" in fleet.order(second, {"do": "hand_back", "robot": 0})
    assert fleet.order(first, {"do": "axes", "axes": [0.5, 0, 0]}) == ""
    robots.step()
    assert robots.actions[0, :2].tolist() == [0.5, 0.0]
    assert fleet.state(first)["mine"] == 0 and fleet.state(second)["robots"][0]["operator"] == first
    assert fleet.state(first)["robots"][0]["reached_ms"] >= 0
    assert fleet.order(second, {"do": "ask", "robot": 2}) == "" and "asks for nothing" in fleet.order(
        second, {"do": "dismiss", "robot": 1}
    )
    robots.step()
    assert control.modes[2] is Mode.WAITING and fleet.state(first)["robots"][2]["place"] == 1
    assert fleet.order(second, {"do": "dismiss", "robot": 2}) == ""
    fleet.leave(first)
    robots.step()
    assert control.modes == [Mode.WAITING, Mode.AUTONOMOUS, Mode.AUTONOMOUS]
    assert robots.actions[0, :2].tolist() == [0.0, 0.0]
    fleet.order(second, {"do": "stop"})
    robots.step()
    assert set(control.modes) == {Mode.STOPPED} and not robots.actions[:, :2].any()
    assert "All robots are stopped" in fleet.order(second, {"do": "take", "robot": 1})
    fleet.order(second, {"do": "release"})
    robots.step()
    assert set(control.modes) == {Mode.AUTONOMOUS}
    for wrong in (
        {},
        {"do": "take"},
        {"do": "take", "robot": 9},
        {"do": "axes", "axes": ["a"]},
        {"do": "jump", "robot": 0},
    ):
        assert fleet.order(second, wrong)
    events = fleet.state(second)["events"]
    assert events[0]["mode"] == "operated" and abs(events[-1]["time"] - time.time()) < 600


def test_a_socket_receives_states_and_frames_and_survives_nonsense():
    robots = WalkingRobots(2)
    with Console(robots.fleet, ConsoleConfig(port=0)) as console, live(console) as socket:
        robots.step()
        for text in ("no JSON", "[1]", '{"do": "take", "robot": true}'):
            socket.send(text)
        frames, problems, states = [], [], 0
        while len(frames) < 2 or len(problems) < 3 or states < 2:
            message = socket.recv(timeout=20)
            if isinstance(message, bytes):
                frames.append(message)
                continue
            content = json.loads(message)
            problems += [content["problem"]] if "problem" in content else []
            if "state" in content:
                states += 1
                socket.send("shown")
        assert {frame[:8] for frame in frames} == {b"\x00\x00\x05front", b"\x00\x01\x05front"}
        assert frames[0][8:10] == b"\xff\xd8"  # JPEG
        with pytest.raises(TimeoutError):  # what is not shown is not followed by more
            for _ in range(2 + len(robots.fleet.robots)):
                socket.recv(timeout=1)
    assert robots.fleet.watched == 0 and robots.assistance.control.operators == ()


CLICK = "[...document.querySelectorAll('.robot')][{}].querySelector('{}').click()"


@pytest.mark.long
def test_eight_robots_in_a_browser(tmp_path, capsys):
    config = ConsoleConfig(port=0, api_key=KEY)
    with WalkingRobots(8) as robots, Console(robots.fleet, config) as console, browser(tmp_path / "profile") as page:
        control = robots.assistance.control
        page.open(console.address)
        assert page.value("document.body.innerText").count("robot") == 0 and not page.value(
            "typeof state !== 'undefined'"
        )
        page.value(f"document.querySelector('#key').value = '{KEY}'; document.querySelector('form').submit()")
        page.until("document.querySelectorAll('.robot').length === 8")
        page.until("document.querySelectorAll('.robot img[src^=blob]').length === 8")
        before = page.value("state.robots[0].steps")
        page.until(f"state.robots[0].steps > {before} + 5")  # it updates
        taken = []
        for robot in range(5):
            page.value(CLICK.format(robot, ".take"))
            page.until(f"state.mine === {robot} && state.robots[{robot}].reached_ms !== null")
            taken.append((page.value("measured.takeover"), page.value(f"state.robots[{robot}].reached_ms")))
            page.until("!document.querySelector('#operate').hidden")
            page.value("document.querySelector('#back').click()")
            page.until("state.mine === null")
        page.value(CLICK.format(2, ".take"))
        page.until("state.mine === 2")
        page.command("Input.dispatchKeyEvent", type="keyDown", key="d", text="d")
        page.until("state.robots[2].action[0] > 0.5 && state.robots[2].action[1] === 0")
        page.command("Input.dispatchKeyEvent", type="keyUp", key="d")
        page.until("state.robots[2].action[0] === 0")
        robots.alarms = [(4, "detector", None), (5, "detector", None)]
        page.until("document.querySelectorAll('#queue li[data-mode=waiting]').length === 2")
        page.value("document.querySelector('#stop').click()")
        page.until("state.robots.every((robot) => robot.mode === 'stopped')")
        assert set(control.modes) == {Mode.STOPPED} and not robots.actions[:, :2].any()
        place = robots._place.copy()
        stopped = page.value("measured.stop"), page.value("state.robots[0].reached_ms")
        page.until(f"state.robots[0].steps > {page.value('state.robots[0].steps')} + 4")
        assert np.array_equal(robots._place, place)
        page.value("document.querySelector('#release').click()")
        page.until("state.robots.every((robot) => robot.mode === 'autonomous')")
    with capsys.disabled():
        clicks, reached = zip(*taken, strict=True)
        text = (
            f"takeover {np.median(reached):.0f} ms to the robot's step (largest of {len(reached)}: {max(reached):.0f})"
        )
        print(
            f"\nAt 20 Hz: {text}, {np.median(clicks):.0f} ms to the page; stop {stopped[1]:.0f} and {stopped[0]:.0f} ms"
        )
