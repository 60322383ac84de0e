"""Metrics in the Prometheus text format. Labels have few values, so memory use is bounded."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BUCKETS_S = (0.005, 0.025, 0.1, 0.3, 1.0, 3.0, 10.0)
_KNOWN_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

Labels = tuple[tuple[str, str], ...]  # names with values
ReadValues = Callable[[], Mapping[Labels, float]]


def labels(**values: str) -> Labels:
    """Return labels, for example `labels(state="queued")`."""
    return tuple(values.items())


class Metrics:
    """Request counts and durations by route, plus registered metrics. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, str, int]] = Counter()  # by method, route and status
        self._buckets: dict[str, list[int]] = {}  # number of requests in each bucket, by route
        self._seconds: defaultdict[str, float] = defaultdict(float)  # sum of durations, by route
        self._registered: dict[str, tuple[str, str, ReadValues]] = {}  # kind, description and callback, by name

    def observe(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request; `route` is the route template, not the path."""
        method = method if method in _KNOWN_METHODS else "other"
        with self._lock:
            self._requests[method, route, status] += 1
            buckets = self._buckets.setdefault(route, [0] * (len(BUCKETS_S) + 1))
            buckets[bisect_left(BUCKETS_S, seconds)] += 1
            self._seconds[route] += seconds

    def register(self, name: str, kind: str, description: str, read_values: ReadValues) -> None:
        """Register a gauge or counter; `read_values` returns its values by labels, and is called on every scrape."""
        self._registered[name] = (kind, description, read_values)

    def text(self) -> str:
        """Return all metrics."""
        requests, durations = "tipbench_http_requests_total", "tipbench_http_request_seconds"
        lines = _header(requests, "counter", "Number of requests.")
        with self._lock:
            for (method, route, status), count in sorted(self._requests.items()):
                lines.append(f"{requests}{_format(labels(method=method, route=route, status=str(status)))} {count}")
            lines += _header(durations, "histogram", "Time to the start of the response.")
            for route, buckets in sorted(self._buckets.items()):
                total = 0  # Prometheus' buckets are cumulative
                for bound, count in zip((*BUCKETS_S, "+Inf"), buckets, strict=True):
                    total += count
                    lines.append(f"{durations}_bucket{_format(labels(route=route, le=str(bound)))} {total}")
                lines.append(f"{durations}_sum{_format(labels(route=route))} {self._seconds[route]:.6f}")
                lines.append(f"{durations}_count{_format(labels(route=route))} {total}")
        for name, (kind, description, read_values) in self._registered.items():
            lines += _header(name, kind, description)
            lines += [f"{name}{_format(key)} {value:g}" for key, value in sorted(read_values().items())]
        return "\n".join(lines) + "\n"


def _header(name: str, kind: str, description: str) -> list[str]:
    return [f"# HELP {name} {description}", f"# TYPE {name} {kind}"]


def _format(names_and_values: Labels) -> str:
    escapes = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    inside = ",".join(f'{name}="{value.translate(escapes)}"' for name, value in names_and_values)
    return "{" + inside + "}" if inside else ""
