"""The gate's answer for machines that read builds: JUnit XML, and the annotations GitHub shows beside a change."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

from tipbench.compare.gate import GateResult, Outcome

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_DATA = {"%": "%25", "\r": "%0D", "\n": "%0A"}
_PROPERTY = {**_DATA, ":": "%3A", ",": "%2C"}


def junit_xml(experiment: str, result: GateResult, *, strict: bool = False) -> str:
    """One test case: failed when worse, skipped when undecided (failed if strict), in error when unknown."""
    verdict = _verdict(result, strict=strict)
    counts = {
        "tests": "1",
        "failures": str(int(verdict == "failure")),
        "errors": str(int(verdict == "error")),
        "skipped": str(int(verdict == "skipped")),
        "time": "0",
    }
    root = ET.Element("testsuites", {"name": "tipbench gate", **counts})
    suite = ET.SubElement(root, "testsuite", {"name": _xml(experiment), **counts})
    name = f"{result.candidate} is not worse than {result.baseline} by more than {result.margin:g}"
    case = ET.SubElement(
        suite, "testcase", {"classname": _xml(f"tipbench.gate.{experiment}"), "name": _xml(name), "time": "0"}
    )
    if verdict is not None:
        attributes = {"message": _xml(result.reason)} | ({} if verdict == "skipped" else {"type": str(result.outcome)})
        ET.SubElement(case, verdict, attributes).text = _xml(result.reason)
    else:
        ET.SubElement(case, "system-out").text = _xml(result.reason)
    ET.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ET.tostring(root, encoding="unicode")}\n'


def annotation(experiment: str, result: GateResult, *, strict: bool = False) -> str:
    """One workflow command: error, warning (undecided, or cells of the candidate are missing) or notice."""
    level = "error" if result.exit_code(strict=strict) else "warning"
    if result.outcome is Outcome.NOT_WORSE and not (result.evidence and result.evidence.unfinished):
        level = "notice"
    title = f"tipbench gate: {result.candidate} against {result.baseline} in {experiment}"
    return f"::{level} title={_escaped(title, _PROPERTY)}::{_escaped(result.reason, _DATA)}"


def _verdict(result: GateResult, *, strict: bool) -> str | None:
    if result.outcome is Outcome.UNDECIDED and not strict:
        return "skipped"
    return {Outcome.NOT_WORSE: None, Outcome.UNKNOWN: "error"}.get(result.outcome, "failure")


def _xml(text: str) -> str:
    """Without what XML cannot hold at all, escaped or not; the rest is escaped on writing."""
    return _NOT_XML.sub("\ufffd", text)


def _escaped(text: str, table: dict[str, str]) -> str:
    return "".join(table.get(char, char if char.isprintable() else " ") for char in text)
