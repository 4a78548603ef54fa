"""The prompt that an input type of a client stands for."""

from __future__ import annotations

import pytest

from hdruntime.errors import InputError
from hdruntime.text.prompts import INPUT_TYPES, prompt_name_of

NONE = {"query": "", "document": ""}
"""The prompts of a model that defines none."""

MODELS = {
    "without prompts": (NONE, {"query": "query", "search_document": "document", "clustering": None}),
    "e5": (
        NONE | {"query": "query: ", "passage": "passage: "},
        {"search_query": "query", "document": "passage", "search_document": "passage", "classification": None},
    ),
    "nomic": (
        NONE | {"search_query": "search_query: ", "search_document": "search_document: ", "clustering": "clustering: "},
        {"query": "search_query", "document": "search_document", "clustering": "clustering", "classification": None},
    ),
    "embeddinggemma": (
        {
            "query": "task: search result | query: ",
            "document": "title: none | text: ",
            "Clustering": "task: clustering",
        },
        {
            "search_query": "query",
            "search_document": "document",
            "clustering": "Clustering",
            "Clustering": "Clustering",
        },
    ),
    "both words": (
        {"query": "a", "search_query": "b", "document": "c", "search_document": "d"},
        {name: name for name in ("query", "search_query", "document", "search_document")},
    ),
}


@pytest.mark.parametrize("model", MODELS)
def test_an_input_type_is_the_models_own_prompt_for_it(model: str) -> None:
    prompts, expected = MODELS[model]
    assert {name: prompt_name_of(prompts, name) for name in expected} == expected


def test_an_unknown_input_type_is_rejected_with_those_that_there_are() -> None:
    with pytest.raises(InputError, match="input_type is 'image'; it must be one of") as error:
        prompt_name_of(NONE | {"own": "own: "}, "image")
    assert all(repr(name) in str(error.value) for name in [*INPUT_TYPES, "own"])
