"""Reading a job's server-sent events as a browser does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx


@dataclass(frozen=True)
class Frame:
    """One event; a comment has the name `:`."""

    event: str
    data: Any
    id: int | None


class EventReader:
    """The events of an open response, in order."""

    def __init__(self, response: httpx.Response) -> None:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        self.response = response
        self._lines = response.iter_lines()

    def next(self) -> Frame | None:
        """Return the next event; None if the server has closed the stream."""
        fields: dict[str, str] = {}
        for line in self._lines:
            if line.startswith(":"):
                fields["event"] = ":"
            elif line:
                name, _, value = line.partition(": ")
                assert name in ("id", "event", "data", "retry"), line
                fields[name] = value
            elif fields:
                data = json.loads(fields["data"]) if "data" in fields else None
                return Frame(fields["event"], data, int(fields["id"]) if "id" in fields else None)
        return None

    def read_until(self, event: str, limit: int = 2000) -> list[Frame]:
        """Return all events up to the first with that name."""
        found: list[Frame] = []
        for _ in range(limit):
            frame = self.next()
            assert frame is not None, f"closed before {event}: {found[-3:]}"
            found.append(frame)
            if frame.event == event:
                return found
        raise AssertionError(f"no {event} among {limit}")

    def read_rest(self, limit: int = 2000) -> list[Frame]:
        """Return all events until the server closes the stream."""
        found: list[Frame] = []
        for _ in range(limit):
            frame = self.next()
            if frame is None:
                return found
            found.append(frame)
        raise AssertionError(f"more than {limit}")


@contextmanager
def read_events(client: httpx.Client, job_id: str, query: str = "", **headers: str) -> Iterator[EventReader]:
    """Open the event stream of a job."""
    with client.stream("GET", f"/api/bench/jobs/{job_id}/events{query}", headers=headers) as response:
        yield EventReader(response)


def done_counts(frames: list[Frame]) -> list[int]:
    """Return the number of finished cells in each event of a finished cell."""
    return [frame.data["done"] for frame in frames if frame.event == "cell_finished"]
