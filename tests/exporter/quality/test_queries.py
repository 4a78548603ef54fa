"""Queries: sentences of prose, taken out of the texts that they ask for."""

from __future__ import annotations

from hdexport.quality.queries import collection_of, prose_sentences, unread_from

TEXT = """Loud titles
***********

A "loud" title is followed by a line of stars, and this
is not the first sentence: a colon ends one, too. Short one.

   >>> This is an example, which is no prose but looks like it does.

```
This is fenced, so that it is an example, too.
```

Later there is a second sentence of prose with many more words.
"""


def sentences_of(text: str) -> list[str]:
    return [" ".join(text[start:end].split()) for start, end in prose_sentences(text)]


def test_sentences_are_of_prose() -> None:
    assert sentences_of(TEXT) == [
        'A "loud" title is followed by a line of stars, and this is not the first sentence:',
        "Later there is a second sentence of prose with many more words.",
    ]


def test_a_sentence_without_its_beginning_is_none() -> None:
    whole = "Another one has a capital where it begins, as sentences have."
    assert sentences_of(f"and this goes on about Paris, where it did not begin. {whole}") == [whole]


def test_sentences_may_be_of_other_scripts() -> None:
    german = "Übrigens beginnt auch dieser Satz mit einem Umlaut, wie viele."
    assert sentences_of(f"{german} nein. {german}") == [german] * 2
    japanese = "\u65e5\u672c\u8a9e\u306e\u6587\u306f\u5206\u304b\u3061\u66f8\u304d\u3057\u306a\u3044\u3002"
    assert sentences_of(japanese * 2) == [japanese] * 2


def words(number: int) -> str:
    return " ".join(["word"] * number)


def test_sentences_are_taken_out_of_the_one_document_that_they_ask_for() -> None:
    first, twice = f"First of the {words(9)}.", f"Repeated {words(9)}."
    later = [f"Sentence {number} of what {words(9)}." for number in ("one", "two", "three", "four", "five")]
    texts = [
        " ".join([twice, first, f"{words(40)}.", *later]),
        f"{twice} {first.replace('First', 'Other')}",
        f"{twice} {words(60)}. Unique {words(9)} here.",
        f"Nobody asks for {words(9)}.",
    ]
    unread = [texts[0].index("Sentence one"), None, texts[2].index("Unique"), len(texts[3])]
    found = collection_of(texts, unread=unread, names=["a topic", "no", None, "A TOPIC"], sentences=2)
    assert found.queries["name"].texts == []  # two have this one
    assert (found.queries["first"].texts, found.queries["first"].answers) == ([first, texts[3]], [0, 3])
    assert found.queries["later"].texts == [later[0], later[4], f"Unique {words(9)} here."]
    assert found.queries["later"].answers == [0, 0, 2]
    assert found.documents[0].split() == " ".join([twice, f"{words(40)}.", *later[1:4]]).split()
    assert found.documents[1] == texts[1]
    assert found.documents[3] == ""
    again = collection_of(texts, unread=unread, names=["a topic", "no", None, "b"], sentences=10)
    assert (again.queries["name"].texts, again.queries["name"].answers) == (["a topic", "b"], [0, 3])
    assert again.queries["later"].texts == [later[0], later[2], later[4], f"Unique {words(9)} here."]


def test_the_unread_part_begins_at_the_token_that_makes_room_for_the_last_special_one() -> None:
    offsets = [[(0, 0), (0, 2), (3, 5), (6, 8), (0, 0)], [(0, 0), (0, 2), (3, 5), (0, 0)]]
    assert unread_from(offsets, 4) == [6, None]
