"""Recordings of a server: one dataset per policy, and one at the rate of decisions for robots that report no steps."""

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from robopolicy.core.errors import ServingError
from robopolicy.core.spec import TASK, Observation
from robopolicy.serving.recording import RecordedStep, RobotRecorder
from robopolicy.serving.sessions import Answer, RobotSession
from robopolicy.serving.telemetry import Log


class Recordings:
    """Records the sessions of a server in `folder`, if set: those of policy NAME in `folder`-NAME, and robots that
    report no executed steps, one step per request, the first of the plan, in a folder ending in -decisions.

    limit: bytes of a folder; described: metadata of every policy by name. Raises ServingError when the folder contains
    something else.
    """

    def __init__(self, folder: Path | None, limit: float, described: Mapping[str, Mapping[str, Any]], log: Log):
        self.folder, self._limit = folder, limit
        self._described, self._log = described, log
        self._recorders: dict[tuple[str, bool], RobotRecorder] = {}
        self._said: set[str] = set()
        is_new = folder is None or not folder.exists() or (folder / "meta" / "info.json").is_file()
        if folder is not None and not is_new and (not folder.is_dir() or any(folder.iterdir())):
            raise ServingError(f"{folder} is neither empty nor a LeRobotDataset: set serve.record=FOLDER to another.")

    @property
    def active(self) -> bool:
        """Whether anything is recorded."""
        return self.folder is not None

    def decided(self, session: RobotSession, observation: Observation, answer: Answer) -> None:
        """Record an answer to a robot that reports no steps."""
        if not session.reports:
            frames = {key: value[0, -1] for key, value in observation.items() if key != TASK}
            step = RecordedStep(frames, answer.actions[0], plan_step=0, time=time.time(), **session.decision())
            self._step(session, step)

    def executed(self, session: RobotSession, step: Mapping[str, Any]) -> None:
        """Record a step that a robot reports, under the plan that it was given last."""
        self._step(session, RecordedStep(**step, **session.decision()))

    def end(self, session: RobotSession) -> None:
        """End the episode of a session."""
        if (recorder := self._recorders.get((session.policy_name, session.reports))) is not None:
            recorder.end(session.key)

    def _step(self, session: RobotSession, step: RecordedStep) -> None:
        recorder = self._recorder(session.policy_name, session.reports)
        recorder.step(session.key, step, session.task)
        trouble = recorder.error or ("its limit (serve.record_limit) is reached" if recorder.state["full"] else "")
        trouble = trouble or ("the disk or processor is too slow" if recorder.dropped else "")
        if trouble and trouble not in self._said:
            self._said.add(trouble)
            self._log("steps not recorded", logging.ERROR, folder=str(recorder.folder), reason=trouble)

    def _recorder(self, name: str, reports: bool) -> RobotRecorder:
        """Return the recorder of a policy, started when it is first needed."""
        recorder = self._recorders.get((name, reports))
        if recorder is None:
            assert self.folder is not None
            described = dict(self._described[name])
            if not reports:
                described["fps"] = described["fps"] / described["chunk"]
            suffix = (f"-{name}" if name else "") + ("" if reports else "-decisions")
            folder = Path(f"{self.folder}{suffix}")
            recorder = self._recorders[name, reports] = RobotRecorder(folder, described, limit=self._limit)
        return recorder

    def figures(self) -> dict[str, float]:
        """Return the values for /metrics."""
        recorders = list(self._recorders.values())
        if self.folder is None:
            return {}
        return {
            "recorded_steps": sum(each.state["steps"] for each in recorders),
            "recorded_bytes": sum(each.state["bytes"] for each in recorders),
            "record_dropped_steps": sum(each.dropped for each in recorders),
            "record_failing": float(any(each.error or each.state["full"] for each in recorders)),
        }

    def close(self) -> None:
        """End all episodes; the writing processes end by themselves once everything is written."""
        for each in self._recorders.values():
            each.close(0.0)
