"""Sentences by rules: of many scripts, with common abbreviations, and no character lost."""

from __future__ import annotations

import random

from hdruntime.text.sentences import sentence_spans
from support.comparators import named_case


def sentences(text: str) -> list[str]:
    return [text[start:end] for start, end in sentence_spans(text)]


WITH_SPACES = [
    ["One."],
    ["No final mark"],
    ["One.", "Two!", "Three?", "Four\N{HORIZONTAL ELLIPSIS}", "Five"],
    ["He said 'No.'", "She asked (why?)", "It was \u201cYes!\u201d"],
    ["Pi is 3.14 e.g. in v2.0.", "See www.example.org/a.b now."],
    ["Dr. J. Smith of the U.S. met Prof. Ito at 5 p.m. on Monday.", "They left."],
    ["It is approx. five, vs. six... or so.", "Yahoo! is a name.", "Done?!", "Yes."],
    ["It was in 2024.", "Then 1999 came."],
    ["Écoute\N{NO-BREAK SPACE}!", "Ça va ?", "Überall.", "Élan."],
]


def test_sentences_between_spaces() -> None:
    for expected in WITH_SPACES:
        with named_case(expected):
            for space in (" ", "  ", "\n", "\t\n "):
                assert sentences(f"{space}{space.join(expected)}{space}") == expected


WITHOUT_SPACES = [
    ["\u4eca\u5929\u4e0b\u96e8\u3002", "\u771f\u7684\u5417\uff1f", "\u662f\uff01\uff01"],
    ["\u300c\u884c\u304f\u3002\u300d", "\u7d42\u308f\u308a"],
    ["\u092f\u0939 \u0918\u0930 \u0939\u0948\u0964", "\u0935\u0939 \u0906\u092f\u093e\u0965"],
]


def test_sentences_without_spaces() -> None:
    for expected in WITHOUT_SPACES:
        with named_case(expected):
            assert sentences("".join(expected)) == sentences(" ".join(expected)) == expected


def test_a_blank_line_ends_a_sentence_and_a_line_break_does_not() -> None:
    text = "A heading\n\nfirst line\nof two. Next\n \t \nlast"
    assert sentences(text) == ["A heading", "first line\nof two.", "Next", "last"]


def test_the_number_of_a_list_item_is_no_sentence() -> None:
    assert sentences("1. Read it.\n 12. Run it.\nIt was in May 12. Run!") == [
        "1. Read it.",
        "12. Run it.",
        "It was in May 12.",
        "Run!",
    ]


def test_what_the_rules_do_not_know_is_what_the_page_says() -> None:
    assert sentences("See Fig. 3 there. Am 3. Oktober.") == ["See Fig.", "3 there.", "Am 3.", "Oktober."]


def test_white_space_has_no_sentence() -> None:
    for text in ["", " \n\t\n\n ", "\N{IDEOGRAPHIC SPACE}"]:
        assert sentence_spans(text) == []


def test_every_character_is_in_one_sentence() -> None:
    chosen = random.Random(7)
    for _ in range(300):
        text = "".join(chosen.choices("aB1.?!\u3002\uff01\"')\u00bb \n\u2026\N{GRINNING FACE}", k=40))
        places = [place for start, end in sentence_spans(text) for place in range(start, end)]
        assert places == sorted(set(places))
        assert {text[place] for place in set(range(len(text))) - set(places)} <= {" ", "\n"}


def test_long_runs_take_linear_time() -> None:
    """With anything quadratic this would take many minutes."""
    for run in (
        "." * 10**5,
        ". " * 10**5,
        ")" * 10**5,
        "!" + ")" * 10**5,
        "\n" + " " * 10**5 + "x",
        "." + "\n" * 10**5,
    ):
        assert sentence_spans(f"a{run}b")[-1][1] == len(run) + 2
