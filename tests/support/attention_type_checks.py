"""What holds for every attention type."""

from __future__ import annotations

import dataclasses

from hdexport.attention.attention_type import AttentionRecord
from hdexport.attention.registry import attention_from_spec, attention_type_named, attention_types


def assert_attention_types_conform() -> None:
    """Names and syntaxes are unique, records have the type's name, and examples can be parsed."""
    names = [type_.name for type_ in attention_types()]
    assert len(set(names)) == len(names)
    words = [word for type_ in attention_types() for word in type_.syntaxes]
    assert len(set(words)) == len(words)
    for type_ in attention_types():
        assert attention_type_named(type_.name) is type_
        assert issubclass(type_.record_type, AttentionRecord)
        first = dataclasses.fields(type_.record_type)[0]
        assert (first.name, first.default) == ("type", type_.name)
        for word, syntax in type_.syntaxes.items():
            assert syntax.example.partition(":")[0] == word
            assert list(attention_from_spec(syntax.example)) == [type_.name]
