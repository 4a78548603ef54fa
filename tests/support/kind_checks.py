"""What holds for every kind of attention, of hdexport or of another package."""

from __future__ import annotations

import dataclasses

from hdexport.attention.kind import AttentionRecord
from hdexport.attention.kinds import attention_from_spec, kind_named, kinds


def assert_kinds_conform() -> None:
    """Names and forms are of one kind each, records say which, and examples are understood."""
    names = [kind.name for kind in kinds()]
    assert len(set(names)) == len(names)
    words = [word for kind in kinds() for word in kind.forms]
    assert len(set(words)) == len(words)
    for kind in kinds():
        assert kind_named(kind.name) is kind
        assert issubclass(kind.record_type, AttentionRecord)
        first = dataclasses.fields(kind.record_type)[0]
        assert (first.name, first.default) == ("kind", kind.name)
        for word, form in kind.forms.items():
            assert form.example.partition(":")[0] == word
            assert list(attention_from_spec(form.example)) == [kind.name]
