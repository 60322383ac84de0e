"""The policies against VowpalWabbit and MABWiser, the policy server against the smallest ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from decisions import request_body, reward_for
from policy_servers import CANDIDATES
from report import Claim, NotMeasured, Result, Size, count_rounds, say
from tipbench.serve.policy import POLICIES
from tipbench.serve.service import PolicyService
from tipbench.serve.tallies import Tallies

CANDIDATE_COUNTS = (5, 50)
MIN_HTTP_RATIO = 0.7  # of the smallest application's requests per CPU-second
CONNECTIONS = 32
BATCHES = 20
MIN_REWARDS_PER_S = 10_000
MAX_P99_MS = 10.0
MAX_SCORE_US = 60.0


def measure(size: Size) -> Result:
    """Measure all programs in turn in each round, then the memory once."""
    requests, users = (1000, 5000) if size.quick else (8000, 100_000)
    rounds: list[dict[str, Any]] = []
    for _ in count_rounds("serving", size.rounds):
        values: dict[str, Any] = {}
        for k in CANDIDATE_COUNTS:
            for name, program in PROGRAMS.items():
                values[f"{name} K={k}"] = program(k, 400 if name == "mabwiser" else 2000)
        values["score"] = _score_us()
        values |= {f"http {name}": load for name, load in _http(requests).items()}
        values["service"] = _service(requests)
        rounds.append(values)
    memory = _memory(users)
    return Result("serving", tuple(_claims(rounds, memory, users)), [*rounds, {"memory": memory}])


def _claims(rounds: Sequence[Mapping[str, Any]], memory: float, users: int) -> Iterator[Claim]:
    for k in CANDIDATE_COUNTS:
        own_rates = [each[f"tipbench K={k}"] for each in rounds]
        for other in ("vowpalwabbit", "mabwiser"):
            other_rates = [each[f"{other} K={k}"] for each in rounds]
            ratios = tuple(theirs / own for theirs, own in zip(other_rates, own_rates, strict=True))
            text = f"{_rate(own_rates)} against {_rate(other_rates)} decisions and rewards/s"
            yield Claim(f"score + learn at K = {k}, {other}", 1.0, "×", ratios, text)
    scored = tuple(each["score"] for each in rounds)
    text = f"{statistics.median(scored):.0f} µs from the raw request"
    yield Claim("features and score of egreedy/v3 at K = 10, CPU time", MAX_SCORE_US, "µs", scored, text)
    own_loads = [each["http tipbench"] for each in rounds]
    smallest_loads = [each["http smallest"] for each in rounds]
    own_rates, smallest_rates = ([load.per_cpu_s for load in loads] for loads in (own_loads, smallest_loads))
    ratios = tuple(theirs / own for theirs, own in zip(smallest_rates, own_rates, strict=True))
    text = f"{_rate(own_rates)} against {_rate(smallest_rates)} requests per CPU-second"
    yield Claim(f"HTTP at K = {CANDIDATES}, logged and awaited", round(1 / MIN_HTTP_RATIO, 3), "×", ratios, text)
    own_p99, smallest_p99 = (tuple(load.p99_s * 1000 for load in loads) for loads in (own_loads, smallest_loads))
    text = f"{statistics.median(own_p99):.1f} ms; the smallest application {statistics.median(smallest_p99):.1f} ms"
    yield Claim("HTTP, p99 at a quarter of the full rate", MAX_P99_MS, "ms", own_p99, text)
    rates, per_cpu_s = zip(*(each["service"] for each in rounds), strict=True)
    slow = tuple(MIN_REWARDS_PER_S / rate for rate in rates)
    text = f"{_rate(rates)} rewards/s, {_rate(per_cpu_s)} per CPU-second"
    yield Claim("rewards in process, group commit, ≥ 10,000/s", 1.0, "×", slow, text)
    yield Claim(f"memory with {users:,} users", 1.0, "GB", (memory / 1e9,), f"{memory / 1e6:.0f} MB")


def _rate(values: Sequence[float]) -> str:
    return f"{statistics.median(values):,.0f}"


# In process


def _tipbench(size: int, rounds: int) -> float:
    """egreedy/v3: features from the raw request, the decision with its probabilities, the update."""
    policy, requests = POLICIES["egreedy/v3"], [request_body(size, seed) for seed in range(64)]
    moments = [datetime.fromisoformat(request["at"]) for request in requests]
    ridge, tallies, rng = policy.ridge(), Tallies(), random.Random(1)
    began = time.perf_counter()
    for number in range(rounds):
        request, at = requests[number % 64], moments[number % 64]
        x = policy.features.matrix(request, request["candidates"], at, tallies)
        decision = policy.decide(x, ridge, rng.random())
        chosen = x[decision.chosen]
        ridge.update(chosen, reward_for(chosen, rng))
    return rounds / (time.perf_counter() - began)


def _score_us(rounds: int = 5000) -> float:
    """CPU time of a decision among ten candidates, from the raw request."""
    policy, requests = POLICIES["egreedy/v3"], [request_body(10, seed) for seed in range(64)]
    ridge, tallies, rng = policy.ridge(), Tallies(), random.Random(1)
    began = time.process_time()
    for number in range(rounds):
        request = requests[number % 64]
        at = datetime.fromisoformat(request["at"])
        policy.decide(policy.features.matrix(request, request["candidates"], at, tallies), ridge, rng.random())
    return (time.process_time() - began) / rounds * 1e6


def _vectors(size: int) -> list[Any]:
    requests = [request_body(size, seed) for seed in range(64)]
    features = POLICIES["egreedy/v3"].features
    return [
        features.matrix(each, each["candidates"], datetime.fromisoformat(each["at"]), Tallies()) for each in requests
    ]


def _vowpalwabbit(size: int, rounds: int) -> float:
    """Contextual bandit with action features; its text format is prepared outside the measured time."""
    import vowpalwabbit

    matrices, rng = _vectors(size), random.Random(1)
    names = POLICIES["egreedy/v3"].features.names
    texts = [[_vw_line(names, row) for row in matrix] for matrix in matrices]
    workspace = vowpalwabbit.Workspace("--cb_explore_adf --epsilon 0.1 --quiet --random_seed 1")
    began = time.perf_counter()
    for number in range(rounds):
        lines = texts[number % 64]
        probabilities = workspace.predict(lines)
        chosen = rng.choices(range(size), probabilities)[0]
        cost = -reward_for(matrices[number % 64][chosen], rng)
        labelled = [
            f"0:{cost}:{probabilities[chosen]} {line}" if at == chosen else line for at, line in enumerate(lines)
        ]
        workspace.learn(labelled)
    took = time.perf_counter() - began
    workspace.finish()
    return rounds / took


def _vw_line(names: Sequence[str], row: Any) -> str:
    return "| " + " ".join(f"{name}:{value:.6f}" for name, value in zip(names, row, strict=True))


def _mabwiser(size: int, rounds: int) -> float:
    """Linear ε-greedy; MABWiser has one model per arm and one context per decision."""
    from mabwiser.mab import MAB, LearningPolicy

    matrices, rng = _vectors(size), random.Random(1)
    bandit = MAB(list(range(size)), LearningPolicy.LinGreedy(epsilon=0.1), seed=1)
    bandit.fit(list(range(size)), [0.0] * size, [matrices[0][0].tolist()] * size)
    began = time.perf_counter()
    for number in range(rounds):
        context = [matrices[number % 64][0].tolist()]
        arm = bandit.predict(context)
        bandit.partial_fit([arm], [reward_for(np.array(context[0]), rng)], context)
    return rounds / (time.perf_counter() - began)


PROGRAMS: dict[str, Callable[[int, int], float]] = {
    "tipbench": _tipbench,
    "vowpalwabbit": _vowpalwabbit,
    "mabwiser": _mabwiser,
}


def _service(count: int) -> tuple[float, float]:
    """Rewards learned in process, per second and per CPU-second; all are committed at the end."""
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(PolicyService(Path(folder))) as service:
        request: Any = request_body(5, 1)
        events = []
        for number in range(count):
            request["user_id"] = f"u{number % 500}"
            scored = service.score("egreedy/v3", request.copy())
            events.append((f"u{number % 500}", scored.body["event_id"]))
            if number % 4000 == 3999:
                service.log.wait()
        service.log.wait()
        began, cpu = time.perf_counter(), time.process_time()
        for number, (user, event) in enumerate(events):
            service.reward("egreedy/v3", {"user_id": user, "event_id": event, "action": "completed", "dwell_ms": 42e3})
            if number % 4000 == 3999:
                service.log.wait()
        service.log.wait()
        return count / (time.perf_counter() - began), count / (time.process_time() - cpu)


def _memory(users: int) -> float:
    """The peak memory in bytes of a process that learned once from each of `users` users."""
    code = f"""
import contextlib, tempfile, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from decisions import request_body
from tipbench.serve.service import PolicyService
with tempfile.TemporaryDirectory() as folder, contextlib.closing(PolicyService(Path(folder))) as service:
    request = request_body(2, 1)
    for number in range({users}):
        user = f"u{{number}}"
        event = service.score("egreedy/v3", {{**request, "user_id": user}}).body["event_id"]
        service.reward("egreedy/v3", {{"user_id": user, "event_id": event, "reward": 1.0}})
        if number % 2000 == 0:
            service.log.wait()
    status = Path("/proc/self/status").read_text()
    print(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])
"""
    say(f"  memory with {users:,} users …")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NotMeasured(f"the memory of {users} users: {done.stderr[-2000:]}")
    return float(done.stdout.split()[-1]) * 1024


# HTTP


@dataclass(frozen=True)
class Load:
    """The measured values of a server under load."""

    per_cpu_s: float  # requests per CPU-second of the server
    p99_s: float  # at a quarter of the full rate


@contextlib.contextmanager
def _server(name: str) -> Iterator[tuple[int, int, list[bytes]]]:
    """Start a server as a process; yields its pid, its port and requests for it."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(__file__).with_name("policy_servers.py")), name, folder]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            line = process.stdout.readline() if process.stdout else ""
            if not line:
                raise NotMeasured(f"the server {name} did not start: {process.communicate()[1][-2000:]}")
            port, token = line.split()
            bodies = [_message(json.dumps(request_body(CANDIDATES, seed)).encode(), token) for seed in range(256)]
            yield process.pid, int(port), bodies
        finally:
            process.terminate()
            process.communicate()


def _http(requests: int) -> dict[str, Load]:
    """Load both servers in turn, in small batches, so that other work on the machine slows both alike."""
    batch = max(1, requests // BATCHES)
    cpu_s, took_s = {"smallest": 0.0, "tipbench": 0.0}, {"smallest": 0.0, "tipbench": 0.0}
    with _server("smallest") as smallest, _server("tipbench") as tipbench:
        servers = {"smallest": smallest, "tipbench": tipbench}
        for number in range(1 + BATCHES):
            for name in sorted(servers, reverse=number % 2 == 1):
                pid, port, bodies = servers[name]
                cpu, began = _cpu_s(pid), time.perf_counter()
                asyncio.run(_load(port, bodies, batch))
                if number > 0:  # the first batch is not counted: it creates users and fills caches
                    cpu_s[name] += _cpu_s(pid) - cpu
                    took_s[name] += time.perf_counter() - began
        loads = {}
        for name, (_, port, bodies) in servers.items():
            count = batch * BATCHES
            gaps = np.random.default_rng(1).exponential(4 * took_s[name] / count, size=min(requests, 2000))
            times = asyncio.run(_arrivals(port, bodies, gaps.cumsum().tolist()))
            loads[name] = Load(count / cpu_s[name], float(np.percentile(times, 99)))
    return loads


def _message(body: bytes, token: str) -> bytes:
    head = f"POST /recommend HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\nContent-Type: application/json\r\n\r\n" + body


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _request(connection: Connection, message: bytes) -> None:
    reader, writer = connection
    writer.write(message)
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise NotMeasured(f"the server returned {head[:200]!r}")
    await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]))


async def _load(port: int, messages: Sequence[bytes], count: int) -> None:
    """Send `count` requests over a fixed number of connections, each after the response to the one before."""
    numbers = iter(range(count))

    async def send() -> None:
        connection = await asyncio.open_connection("127.0.0.1", port)
        for number in numbers:
            await _request(connection, messages[number % len(messages)])
        connection[1].close()

    await asyncio.gather(*(send() for _ in range(CONNECTIONS)))


async def _arrivals(port: int, messages: Sequence[bytes], moments: Sequence[float]) -> list[float]:
    """Send requests at these moments, as independent users do; returns the seconds from each moment to its response.

    Connections that wait for their own responses would send in bursts, and measure the burst.
    """
    idle: asyncio.Queue[Connection] = asyncio.Queue()
    for _ in range(CONNECTIONS):
        idle.put_nowait(await asyncio.open_connection("127.0.0.1", port))
    times: list[float] = []
    began = time.perf_counter()

    async def send(number: int, moment: float) -> None:
        connection = await idle.get()
        await _request(connection, messages[number % len(messages)])
        times.append(time.perf_counter() - began - moment)
        idle.put_nowait(connection)

    async with asyncio.TaskGroup() as requests:
        for number, moment in enumerate(moments):
            await asyncio.sleep(max(0.0, moment - (time.perf_counter() - began)))
            requests.create_task(send(number, moment))
    while not idle.empty():
        idle.get_nowait()[1].close()
    return times


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
