"""Sessions of a server: whose history is kept, and for how long."""

import time

from robopolicy.client.protocol import Limits
from robopolicy.core.spec import STATE, Field, PolicySpec
from robopolicy.serving.sessions import Sessions


def test_a_session_that_asked_for_nothing_begins_an_episode_with_its_next_request():
    spec = PolicySpec({STATE: Field((1,))}, Field((1,)), 2, 1, 1, 0, fps=10.0)
    sessions = Sessions(spec, Limits(), {}, expiry=0.05)
    first = sessions.take(0, {})
    assert sessions.take(0, {}) is first
    time.sleep(0.1)
    assert sessions.take(0, {}) is not first
    assert len(sessions) == 1
