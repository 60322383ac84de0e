"""One model at a time: waiting for empty memory, its deadline, the monitor and its evidence."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from support.polling import eventually
from tipbench.errors import OllamaUnavailable, ResidencyError
from tipbench.generate.residency import (
    Evidence,
    Monitor,
    Resident,
    ensure_empty,
    wait_until_empty,
    wait_until_gone,
)

OURS = Resident("ours:1b", "sha-ours")
FOREIGN = Resident("theirs:7b", "sha-theirs")
Listing = tuple[Resident, ...] | None


class ScriptedMemory:
    """Returns the given listings in turn, then always the last one."""

    def __init__(self, listings: Sequence[Listing]) -> None:
        self._listings = list(listings)
        self.unloaded: list[str] = []

    def resident(self) -> Listing:
        return self._listings.pop(0) if len(self._listings) > 1 else self._listings[0]

    def unload(self, name: str) -> None:
        self.unloaded.append(name)
        self._listings = [()]


def test_waiting_ends_when_the_list_is_empty() -> None:
    wait_until_empty(ScriptedMemory([(FOREIGN,), None, ()]), wait_s=5)


def test_waiting_for_our_model_to_unload_ends_even_if_another_stays() -> None:
    memory = ScriptedMemory([(OURS, FOREIGN), None, (OURS,), (FOREIGN,)])
    assert wait_until_gone(memory, OURS.digest, timeout_s=5) == (FOREIGN,)


def test_a_missing_response_does_not_count_as_empty() -> None:
    with pytest.raises(OllamaUnavailable, match="did not report what is in memory"):
        wait_until_gone(ScriptedMemory([None]), OURS.digest, timeout_s=0.1)
    with pytest.raises(ResidencyError, match="has not reported"):
        wait_until_empty(ScriptedMemory([None]), wait_s=0.1)


def test_a_model_that_does_not_unload_ends_the_wait_at_the_deadline() -> None:
    with pytest.raises(ResidencyError, match=r"ours:1b is still in memory .* unloading hangs\. Restart"):
        wait_until_gone(ScriptedMemory([(OURS,)]), OURS.digest, timeout_s=0.1)


def test_a_foreign_model_that_stays_is_named() -> None:
    with pytest.raises(ResidencyError, match=r"theirs:7b is still in memory .* another client"):
        wait_until_empty(ScriptedMemory([(FOREIGN,)]), wait_s=0.1)


def test_an_empty_server_is_accepted_at_the_start() -> None:
    memory = ScriptedMemory([()])
    ensure_empty(memory, leftover_digest=None, evict=False, wait_s=1)
    assert not memory.unloaded


def test_a_foreign_model_at_the_start_needs_evict() -> None:
    memory = ScriptedMemory([(FOREIGN,)])
    with pytest.raises(ResidencyError, match=r"theirs:7b .* must be empty at the start.*--evict"):
        ensure_empty(memory, leftover_digest=None, evict=False, wait_s=1)
    assert not memory.unloaded
    ensure_empty(memory, leftover_digest=None, evict=True, wait_s=1)
    assert memory.unloaded == ["theirs:7b"]


def test_weights_left_by_a_dead_collect_are_unloaded_without_evict() -> None:
    memory = ScriptedMemory([(OURS,)])
    ensure_empty(memory, leftover_digest=OURS.digest, evict=False, wait_s=1)
    assert memory.unloaded == ["ours:1b"]


def test_a_foreign_model_next_to_a_leftover_is_refused() -> None:
    memory = ScriptedMemory([(OURS, FOREIGN)])
    with pytest.raises(ResidencyError, match="theirs:7b"):
        ensure_empty(memory, leftover_digest=OURS.digest, evict=False, wait_s=1)
    assert not memory.unloaded


def test_the_monitor_reports_a_foreign_model_once_and_marks_its_time() -> None:
    reported: list[str] = []
    monitor = Monitor(
        ScriptedMemory([(OURS,), (OURS, FOREIGN), (OURS, FOREIGN), (OURS,)]).resident, report_foreign=reported.append
    )
    monitor.expect(OURS)
    monitor.sample()
    before = time.monotonic()
    assert not monitor.foreign_between(before - 1, before)
    monitor.sample()
    monitor.sample()
    monitor.sample()
    assert reported == ["theirs:7b"]
    assert monitor.foreign_between(before, time.monotonic())
    assert not monitor.foreign_between(time.monotonic() + 10, time.monotonic() + 11)
    evidence = monitor.evidence()
    assert (evidence.samples, evidence.most_resident, evidence.foreign) == (4, 2, ("theirs:7b",))


def test_a_model_that_is_unloading_is_not_foreign() -> None:
    reported: list[str] = []

    def list_resident() -> Listing:
        monitor.expect(None)  # the handover happens before the response arrives
        return (OURS,)

    monitor = Monitor(list_resident, report_foreign=reported.append)
    monitor.expect(OURS)
    monitor.sample()
    assert not reported


def test_a_tag_moved_in_mid_run_is_detected() -> None:
    monitor = Monitor(ScriptedMemory([(OURS,), (Resident("Ours:1b", "sha-other"),)]).resident, report_foreign=print)
    monitor.expect(OURS)
    monitor.sample()
    assert not monitor.tag_moved
    monitor.sample()
    assert monitor.tag_moved


def test_a_sample_without_an_answer_is_unknown_and_widens_the_gap() -> None:
    monitor = Monitor(ScriptedMemory([(), None, None, ()]).resident, report_foreign=print, interval_s=0.05)
    monitor.start()
    assert eventually(lambda: monitor.evidence().samples >= 2)
    monitor.stop()
    evidence = monitor.evidence()
    assert evidence.unknown_samples == 2
    assert evidence.largest_gap_s >= 0.1


def test_the_evidence_reads_as_one_sentence() -> None:
    evidence = Evidence(samples=412, most_resident=1, largest_gap_s=0.31, handovers=4)
    assert evidence.sentence() == (
        "most models resident at once: 1; 412 samples, largest gap 0.3 s; 4 handovers with memory confirmed free"
    )
