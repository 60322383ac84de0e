"""Parsing answers into tips: the requested format, other formats, and hostile input."""

from __future__ import annotations

import json
import time

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tipbench.generate.parsing import MAX_TIPS, Answer, Tip, is_overlong, parse_answer, tips_json

TWO = [
    {"tip": "Set a timer for ten minutes and open the invoice.", "rationale": "A start beats a plan."},
    {"tip": "Ring Petra before the shift.", "rationale": "She answers early."},
]
TEXTS = [entry["tip"] for entry in TWO]
EXACT = json.dumps(TWO)

clean_text = (
    st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=40).map(str.strip).filter(bool)
)
tip_sets = st.lists(
    st.builds(Tip, clean_text, clean_text),
    min_size=1,
    max_size=6,
    unique_by=lambda tip: " ".join(tip.tip.split()).casefold(),
)
prose = st.text("abc deABC.,!-\n'’", max_size=40).filter(lambda text: not text.strip().startswith(("-", "'")))
any_text = st.text(st.characters(), max_size=200) | st.text("[]{}\":,'`tip \\\nu0d8<>/think1.-*“”", max_size=200)


def tip_texts(raw: str, n_tips: int = 2) -> list[str]:
    return [tip.tip for tip in parse_answer(raw, n_tips).tips]


def as_json(tips: list[Tip], indent: int | None = None, ascii_only: bool = False) -> str:
    return json.dumps([vars(tip) for tip in tips], ensure_ascii=ascii_only, indent=indent)


# Exact answers


@settings(deadline=None)
@given(tip_sets, st.sampled_from([None, 1]), st.booleans(), st.sampled_from(["", "\n", " \t\r\n"]))
def test_an_exact_answer_is_parsed_completely(
    tips: list[Tip], indent: int | None, ascii_only: bool, space: str
) -> None:
    raw = space + as_json(tips, indent, ascii_only) + space
    assert parse_answer(raw, len(tips)) == Answer(tuple(tips), format_ok=True)


@settings(deadline=None)
@given(tip_sets)
def test_recorded_tips_are_an_exact_answer_themselves(tips: list[Tip]) -> None:
    assert parse_answer(tips_json(tips), len(tips)) == Answer(tuple(tips), format_ok=True)


def test_anything_but_the_requested_array_loses_format_ok() -> None:
    for raw in [
        json.dumps(TWO[:1]),
        json.dumps([*TWO, TWO[0]]),
        json.dumps([TWO[0], TWO[0]]),
        json.dumps([TWO[0], {**TWO[0], "tip": TWO[0]["tip"].upper() + " "}]),
        json.dumps([{**entry, "minutes": "5"} for entry in TWO]),
        json.dumps([TWO[0], {"tip": "x"}]),
        json.dumps([TWO[0], {"tip": "x", "rationale": ""}]),
        json.dumps([TWO[0], {"tip": " ", "rationale": "x"}]),
        json.dumps([TWO[0], {"tip": "x", "rationale": 5}]),
        json.dumps([TWO[0], {"tip": "x", "rationale": None}]),
        json.dumps([TWO[0], {"tip": "\u0000", "rationale": "x"}]),
        json.dumps([TWO[0], ["tip", "rationale"]]),
        json.dumps([TWO[0], {"Tip": "x", "rationale": "y"}]),
        '[{"tip":"a","rationale":"b"},{"tip":"c","tip":"c","rationale":"d"}]',
        '[{"tip":"a","rationale":"b"},{"tip":"c","rationale":NaN}]',
        '[{"tip":"a","rationale":"b"},{"tip":"c","rationale":"line\nbreak"}]',
        EXACT[:-1] + ",]",
        EXACT + "\n.",
        "\ufeff" + EXACT,
        "```json\n" + EXACT + "\n```",
        json.dumps({"tips": TWO}),
        "",
        "null",
        "[]",
    ]:
        assert not parse_answer(raw, 2).format_ok


# Everything else


@settings(max_examples=100, deadline=None)
@given(any_text, st.integers(-1, 60))
@example("\ud800", 1)
@example('[{"tip": "\\ud800", "rationale": "\\udc00"}]', 1)
def test_no_text_raises_and_every_tip_can_be_stored(raw: str, n_tips: int) -> None:
    answer = parse_answer(raw, n_tips)
    assert all(tip.tip == tip.tip.strip() != "" for tip in answer.tips)
    assert json.loads(tips_json(answer.tips)) == [vars(tip) for tip in answer.tips]


@settings(deadline=None)
@given(tip_sets, prose, prose, st.sampled_from([None, 2]))
def test_prose_around_the_array_loses_the_format_and_keeps_the_tips(
    tips: list[Tip], before: str, after: str, indent: int | None
) -> None:
    answer = parse_answer(f"Sure: {before}\n{as_json(tips, indent)}\n{after} Bye.", len(tips))
    assert answer == Answer(tuple(tips), format_ok=False)


@settings(deadline=None)
@given(
    tip_sets, st.sampled_from(["```json\n{}\n```", "```\n{}```", "Here:\n\n```JSON\n{}\n```\nEnjoy!", '{{"tips": {}}}'])
)
def test_fences_and_wrappers_lose_the_format_and_keep_the_tips(tips: list[Tip], frame: str) -> None:
    answer = parse_answer(frame.format(as_json(tips)), len(tips))
    assert answer == Answer(tuple(tips), format_ok=False)


@settings(deadline=None)
@given(tip_sets)
def test_json_lines_keep_the_tips(tips: list[Tip]) -> None:
    raw = "\n".join(json.dumps(vars(tip)) for tip in tips)
    assert parse_answer(raw, len(tips) + 1) == Answer(tuple(tips), format_ok=False)


@settings(deadline=None)
@given(tip_sets, st.data(), st.sampled_from([None, 1]), st.sampled_from(["", "Sure, here you are:\n", "```json\n"]))
def test_a_cut_answer_keeps_a_prefix_of_its_tips(
    tips: list[Tip], data: st.DataObject, indent: int | None, before: str
) -> None:
    raw = before + as_json(tips, indent, ascii_only=data.draw(st.booleans()))
    cut = raw[: data.draw(st.integers(0, len(raw) - 1))]
    found = parse_answer(cut, len(tips))
    assert not found.format_ok
    assert [tip.tip for tip in found.tips] == [tip.tip for tip in tips][: len(found.tips)]
    complete = found.tips[:-1]
    assert list(complete) == tips[: len(complete)]
    assert len(found.tips) >= cut.count("}") - sum(f"{tip.tip}{tip.rationale}".count("}") for tip in tips)


def test_a_cut_off_last_object_counts_only_if_its_tip_is_complete() -> None:
    first, second = json.dumps(TWO[0]), json.dumps(TWO[1])
    assert tip_texts(f"[{first}, {second[:15]}") == TEXTS[:1]
    assert parse_answer(f"[{first}, {second[:-8]}", 2).tips[1] == Tip(TEXTS[1], "")


def test_the_same_two_tips_are_found_in_every_shape() -> None:
    for raw in [
        EXACT + "\n\nAnd again:\n" + EXACT,
        json.dumps([TWO[0]]) + "\n" + json.dumps([TWO[1]]),
        json.dumps({"answer": {"morning": [TWO[0]], "evening": [TWO[1]]}}),
        json.dumps({"title": "Two tips for you today", "description": "As asked.", "tips": TWO}),
        json.dumps([{"Tip": TEXTS[0], "Reason": "x"}, {"ADVICE": TEXTS[1], "why": "y"}]),
        json.dumps([{"id": 1, "text": TEXTS[0]}, {"id": 2, "description": TEXTS[1], "type": "tip"}]),
        json.dumps([{"title": TEXTS[0], "rationale": "x"}, {"title": "Tip 2", "description": TEXTS[1]}]),
        json.dumps({"tip1": TEXTS[0], "rationale1": "x", "tip2": TEXTS[1], "rationale2": "y"}),
        json.dumps({"1": TEXTS[0], "why": "x"}) + json.dumps({"2": TEXTS[1]}),
        f'{{"tip": "{TEXTS[0]}", "rationale": "x", "tip": "{TEXTS[1]}", "rationale": "y"}}',
        json.dumps(TEXTS),
        json.dumps({"tips": TEXTS}),
        json.dumps([f"Tip {n}: {text}" for n, text in enumerate(TEXTS, 1)]),
        json.dumps([TEXTS[0], "Rationale: because.", TEXTS[1], "Rationale: so."]),
        repr(TWO),
        EXACT.replace('"', "“").replace("“:", "”:").replace("“,", "”,").replace("“}", "”}"),
        EXACT.replace("}", ",}").replace("]", ",]"),
        EXACT.replace("}, {", "} {").replace('", "', '"\n"'),
        EXACT.replace('"tip"', "tip").replace('"rationale"', "rationale"),
        EXACT.replace("]", ""),
        EXACT.replace("}]", "]"),
        json.dumps([{"tip": {"text": text}, "rationale": "x"} for text in TEXTS]),
        json.dumps([{**entry, "minutes": 10**5, "steps": ["Sit down first.", "Breathe in and out."]} for entry in TWO]),
        EXACT.replace("[", "[" * 70),
        f"1. {TEXTS[0]}\n2. {TEXTS[1]}",
        f"1) {TEXTS[0]}\r\n\r\n2) {TEXTS[1]}\r\n",
        f"Here are two tips:\n\n- {TEXTS[0]}\n- {TEXTS[1]}\n\nGood luck with your day!",
        f"• {TEXTS[0]}\n  Some more about it.\n• {TEXTS[1]}",
        f"1️⃣ {TEXTS[0]}\n2️⃣ {TEXTS[1]}",
        f'1. "{TEXTS[0]}"\n2. “{TEXTS[1]}”',
        f"**Tip 1:** {TEXTS[0]}\n**Rationale:** x\n\n**Tip 2:** {TEXTS[1]}\n**Rationale:** y",
        f"### Tip 1\n{TEXTS[0]}\n### Tip 2\n{TEXTS[1]}".replace("Tip 1", "Tip 1:").replace("Tip 2", "Tip 2:"),
        f"1. Tip: {TEXTS[0]}\n   - Rationale: x\n2. Tip: {TEXTS[1]}\n   - Rationale: y",
        f"- tip: {TEXTS[0]}\n  rationale: x\n- tip: {TEXTS[1]}\n  rationale: y",
        f"1. {TEXTS[0]} (Rationale: it helps)\n2. {TEXTS[1]} Why: she is up.",
        f"1. {TEXTS[0]}\n   - a detail of it\n2. {TEXTS[1]}\n   - another detail",
        f'<think>\nMaybe [{{"tip": "No", "rationale": "no"}}]?\n1. No\n</think>\n{EXACT}',
        f"First I thought of 1. nothing\n</think>{EXACT}",
        f"{EXACT}<think>was that right? 1. Do not know",
        EXACT.replace("timer", "ti\x00mer\x1b".replace("\x00", "\\u0000")),
    ]:
        assert tip_texts(raw) == TEXTS
        assert not parse_answer(raw, 2).format_ok


def test_a_text_without_a_tip_gives_none() -> None:
    for raw in [
        "",
        " \n\t ",
        "I'm sorry, but I can't help with that.",
        "Take a break when you can. Drink water. Plan your day the evening before.",
        "You could start with the invoice [the overdue one] and then {maybe} rest.",
        "The tip of the day was: rest!",
        "Tips:",
        "1.\n2.\n3.",
        "- \n- \n",
        "1. Sure:\n\n",
        "<think>1. Do this thing now\n2. Do that thing now",
        "[]",
        "{}",
        "[1, 2, 3]",
        '{"tip": 5, "rationale": null}',
        '[{"tip": "cut off in the',
        '{"error": "no tips today", "code": "E5"}',
        '{"name": "Maya", "role": "designer"}',
        "09:00 Get up\n10:00 Go to work",
        "2019. It was a good year.",
    ]:
        assert parse_answer(raw, 2) == Answer((), format_ok=False)


def test_the_rationale_is_found_next_to_its_tip() -> None:
    for raw, rationale in [
        ('[{"rationale": "first", "tip": "Do it now"}]', "first"),
        ('{"tip": {"title": "Do it now"}, "reasoning": "beside"}', "beside"),
        ('["Do it now", "rationale": "in an array"]', "in an array"),
        ("1. Do it now.\n   It is quick.", "It is quick."),
        ("Tip: Do it now.\n- a detail\n* Rationale: said so", "said so"),
        ("Tip: Do it now.\nRationale:\nbelow", "below"),
        ("Do: 1\n1. Do it now. Rationale: inline", "inline"),
    ]:
        (tip,) = parse_answer(raw, 2).tips
        assert (tip.tip.rstrip("."), tip.rationale) == ("Do it now", rationale)


def test_quotes_inside_a_string_need_not_be_escaped() -> None:
    assert tip_texts('[{"tip": "Write "done" on it, then stop", "rationale": "x"}]') == [
        'Write "done" on it, then stop'
    ]
    assert tip_texts("[{'tip': 'Finish the students' work, it's late', 'rationale': 'x'}]") == [
        "Finish the students' work, it's late"
    ]


def test_a_headline_and_the_lines_below_make_one_tip() -> None:
    assert tip_texts("1. **Plan ahead**\n   Write three lines.\n2. **Rest:**\n   - Sit for five minutes.") == [
        "Plan ahead: Write three lines.",
        "Rest: Sit for five minutes.",
    ]
    assert tip_texts('[{"title": "Plan ahead", "description": "Write three lines."}]') == [
        "Plan ahead: Write three lines."
    ]


def test_a_tip_given_twice_counts_once_in_any_case_and_spacing() -> None:
    assert tip_texts("1. Open the file\n2. open  the FILE\n3. Close the file") == ["Open the file", "Close the file"]


def test_control_characters_leave_the_tip_and_line_breaks_stay() -> None:
    raw = json.dumps([{"tip": "\x00a\x1b[31m\tb\r\nc\x7f\x9b", "rationale": "\x07d"}])
    assert parse_answer(raw, 1) == Answer((Tip("a[31m\tb\nc", "d"),), format_ok=True)


def test_lone_surrogates_are_kept_and_can_be_written_as_json() -> None:
    (tip,) = parse_answer('Sure: [{"tip": "a \\ud800 b \\ud83d\\ude42", "rationale": "x"}]', 1).tips
    assert tip.tip == "a \ud800 b 🙂"
    assert tips_json([tip]) == '[{"tip":"a \ud800 b 🙂","rationale":"x"}]'


def test_fifty_tips_are_all_kept_and_a_thousand_are_not() -> None:
    many = [{"tip": f"Do thing {n}", "rationale": "x"} for n in range(1000)]
    assert len(parse_answer(json.dumps(many[:50]), 5).tips) == 50
    assert len(parse_answer(json.dumps(many), 5).tips) == MAX_TIPS
    assert len(parse_answer("\n".join(f"{n}. Do thing {n}" for n in range(1000)), 5).tips) == MAX_TIPS
    assert parse_answer(json.dumps(many), 1000).format_ok


# Answers of SmolLM2 135M to prompts such as ours, shortened

TINY_MODEL_ANSWERS = {
    "a label in chatter": """
Ri: Vanilla toppings on vegan sandwich. Chocolate is my favorite!
Tip: Vanilla topping: Vegan cheese cake.

Note: You can find this JSON in a specific folder named "test-json".
""",
    "backticks and a missing brace": """
Here's how you can implement the JSON array:
```json
{
  "tips": {
    "title": "Tip 1",
    "description": `In my dream plan I was going to visit a friend`, "rationale": "It's fine.", "no due date"
}
```""",
    "a timetable": """
When creating a digital product, it's all about finding that perfect moment.
1. 20:15:00 PM: Finish onboarding mock-ups
2. 16:58:00 PM: Booking a dentist""",
    "numbers and labels in bold": """
Question: What happens? Here's a JSON list of 10 tips to help:

1. **TIP 2: Provide multiple options.** This is crucial!

2. **TIP 3: Offer exceptional service.** This means all times.

""",
    "a quote that is never closed": """
json_tasks = {
  "Tip": ["1],
  "Rationale": [
    ['Reminder', 'Futility'],
    ['Portion of the budget, but it was a bonus!', 3.5]
  ]
}""",
    "a list, then JSON without tips": """
* Tip: Prepare for a trip to Hawaii.*
- A note on a trip planning to Hawaii.
* Rationale: "To prepare yourself."

[
  {
    "tip_id": "37658",
    "rationales": [
      {
        "TipId": "1004889, TipType: 'Meal', TipDate: "2022-01-22T11:30:00Z" },
""",
    "an object, an array, another object": """
Searched how to make your recipe easier to follow:
{
  "tip": "Share your plans with friends.",
  "reasoning": "Enjoy a healthy breakfast."
}

In this example of a JSON array:
[
{"title": "Coffee and Fudge", "description":"I love making coffee.", "type":"tip"},
 {"name": "Santa Ana Sour Cream", "rating": "3.5"}],
{
  "type":"rationale,"
  "reasoning:" {
    "date_created":"2019-08-30T05:47:36.30Z","updated":{"date_modified":"2020-02-29T11:21:32H"}},
}
""",
    "headings with details below": """
Here are the 3 tips for the tip:

1. **Tip: Avoiding Overconsumption of Caffeine**
   - This tip is based on a fact.
2. **Rationale: Using Smart Optometry Services**
   - In the context of hiring.

3. **Tip: Not Failing to Provide the Best**
   - In reality, not.""",
    "two arrays with the tips as values": """
[{"type":"Tip","value":"Set a timer; stop when it rings.", "id":4,"category":"tips"}]
json: [
    {
        "type":"Tip",
        "value":"Use 2 minutes to draft.",
        "label":"Short tips, Reward Tomorrow"
    }
]""",
    "bare keys and arrays that never end": """
[{"type":"json","name":"tips_15-minute", "value":{tip:["Set a timer for 15 minutes.", rationale:"A short start."}},
 {"type":"json","description":{tip:["Draft the second paragraph.", rationale:"A short start."}, {"
""",
    "strings, then a program": """
["TIP #1: Set a timer and write.", "Rationale: A short start beats waiting."]
```python
import json
tips = [
    {
        "tip": {
            "title": "Tip #1",
            "description": "A simple tip. Try a few of these.",
        },
        "rationale": "Set a timer."
    }
]
```""",
    "a sales pitch": """
On this day we celebrate the success of your work!
The tip of the day was: "10% off your next sale starts tomorrow!" We think that’s pretty sweet!""",
}
TINY_MODEL_TIPS = {
    "a label in chatter": ["Vanilla topping: Vegan cheese cake."],
    "backticks and a missing brace": ["In my dream plan I was going to visit a friend"],
    "a timetable": ["20:15:00 PM: Finish onboarding mock-ups", "16:58:00 PM: Booking a dentist"],
    "numbers and labels in bold": [
        "Provide multiple options. This is crucial!",
        "Offer exceptional service. This means all times.",
    ],
    "a quote that is never closed": [],
    "a list, then JSON without tips": ["Prepare for a trip to Hawaii."],
    "an object, an array, another object": [
        "Share your plans with friends.",
        "Coffee and Fudge: I love making coffee.",
    ],
    "headings with details below": ["Avoiding Overconsumption of Caffeine", "Not Failing to Provide the Best"],
    "two arrays with the tips as values": ["Set a timer; stop when it rings.", "Use 2 minutes to draft."],
    "bare keys and arrays that never end": ["Set a timer for 15 minutes.", "Draft the second paragraph."],
    "strings, then a program": ["Set a timer and write.", "A simple tip. Try a few of these."],
    "a sales pitch": [],
}


def test_answers_of_a_tiny_model_are_parsed_as_a_person_reads_them() -> None:
    for name, raw in TINY_MODEL_ANSWERS.items():
        assert tip_texts(raw) == TINY_MODEL_TIPS[name], name


# Cost

REPEATED_TEXTS = [
    *[
        "[",
        "{",
        '"',
        "'",
        "`",
        '\\"',
        '["',
        "{'",
        '{"a":',
        '[{"tip":"',
        "[“a ",
        "]",
        "}{",
        "```",
        "\\",
        "\ud800",
        "\x00",
    ],
    *["1. do x\n", "- a:\nb\n", "1. a\nB\n", "Tip 1: ", "** ", "*", "rationale: ", "(why", "\n", " ", "\r", "# ", "> "],
    *["<think>", "</think>", "<think></think>", '[{"tip": "a"}, ', '{"tip": "a", "rationale": "b"}\n', '"tip": "x", '],
    *["1", "[1e999, ", "[NaN, ", "9" * 50, "\\u00e9"],
]


def test_a_long_repetition_is_parsed_in_linear_time() -> None:
    def cpu_seconds(raw: str) -> float:
        start = time.process_time()
        assert len(parse_answer(raw, 5).tips) <= MAX_TIPS
        return time.process_time() - start

    for number, unit in enumerate(REPEATED_TEXTS):
        for before in ("", ('[{"tip": "', "1. ")[number % 2]):
            short, long = (before + unit * (chars // len(unit)) for chars in (10_000, 100_000))
            small = min(cpu_seconds(short) for _ in range(2))
            # Ten times the length takes a hundred times as long if it is quadratic. A single run may include a pause,
            # such as a garbage collection; five in a row do not.
            assert any(cpu_seconds(long) < 40 * small + 0.1 for _ in range(5)), (before, unit)


def test_a_megabyte_of_repetition_is_read() -> None:
    for unit in ["[", '{"a":', '[{"tip": "Do it", "rationale": "x"}, ', "1. Do it\n", '"', "na "]:
        assert len(parse_answer(unit * (1_000_000 // len(unit)), 5).tips) <= 1


def test_deep_nesting_does_not_reach_the_recursion_limit() -> None:
    for opening in ["[", '{"a":', '[{"a":']:
        closing = opening.replace('"a":', "")[::-1].translate(str.maketrans("[{", "]}"))
        assert tip_texts(opening * 100_000) == []
        assert tip_texts(opening * 100_000 + "1" + closing * 100_000 + EXACT) in ([], TEXTS)


def test_a_number_too_long_for_python_is_ignored() -> None:
    assert tip_texts(json.dumps(TWO)[:-2] + ', "n": ' + "9" * 100_000 + "}]") == TEXTS


# Length


def test_a_tip_is_overlong_beyond_the_limit_of_words() -> None:
    for tip, limit, overlong in [
        ("one two three", 3, False),
        ("one two three four", 3, True),
        ("", 0, False),
        ("one – two • three!", 3, False),
    ]:
        assert is_overlong(tip, limit) is overlong
