"""The class for LangChain: one of its own where it is installed, lists for lists, and an error for anything else.

`make test` puts langchain-core in a folder of its own: the other tests run without it.
"""

from __future__ import annotations

import asyncio
import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from hdruntime import SentenceEncoder
from hdruntime.errors import InputError
from hdruntime.langchain_embeddings import LangChainEmbeddings
from support.comparators import named_case

LANGCHAIN = Path(sys.prefix) / "langchain"

OURS = "from hdruntime.langchain_embeddings import LangChainEmbeddings"
THEIRS = "from langchain_core.embeddings import Embeddings"

RECOGNISED = """
import pydantic

class Filter(pydantic.BaseModel, arbitrary_types_allowed=True):
    embeddings: Embeddings  # as LangChain's own parts declare it

ours = LangChainEmbeddings(None)
assert isinstance(ours, Embeddings)
assert Filter(embeddings=ours).embeddings is ours
assert not isinstance(object(), Embeddings)
methods = [name for name in vars(Embeddings) if "embed" in name]
assert sorted(methods) == ["aembed_documents", "aembed_query", "embed_documents", "embed_query"]
assert all(callable(getattr(ours, name)) for name in methods)
"""


@pytest.fixture
def embeddings(bundle_path: Path) -> Iterator[LangChainEmbeddings]:
    with SentenceEncoder(bundle_path) as encoder:
        yield LangChainEmbeddings(encoder)


@pytest.mark.skipif(not LANGCHAIN.is_dir(), reason=f"{LANGCHAIN} is missing: `make test` fills it")
@pytest.mark.parametrize("imports", [(OURS, THEIRS), (THEIRS, OURS)], ids=["ours first", "theirs first"])
def test_langchain_recognises_the_class_in_any_order_of_imports(imports: tuple[str, str]) -> None:
    first, second = imports
    lines = ["import sys", f"sys.path.append({str(LANGCHAIN)!r})", "import hdruntime"]
    lines += ["assert not [name for name in sys.modules if name.startswith('langchain')]", first, second, RECOGNISED]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def imported_again(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delitem(sys.modules, "hdruntime.langchain_embeddings")
    return importlib.import_module("hdruntime.langchain_embeddings")


def test_the_class_works_without_langchain(bundle_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "langchain_core", None)  # importing it raises
    ours = imported_again(monkeypatch).LangChainEmbeddings
    with SentenceEncoder(bundle_path) as encoder:
        assert len(ours(encoder).embed_documents(["read"])[0]) == encoder.get_embedding_dimension()


def test_a_langchain_that_cannot_be_imported_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "langchain_core"
    package.mkdir()
    (package / "__init__.py").write_text("import a_package_that_is_not_there\n")
    for name in [name for name in sys.modules if name.partition(".")[0] == "langchain_core"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
        imported_again(monkeypatch)


def test_lists_of_texts_are_taken_as_everywhere(embeddings: LangChainEmbeddings) -> None:
    texts = ["long documents", "read", ""]
    expected = embeddings.embed_documents(texts)
    assert [type(vector) for vector in expected] == [list] * 3
    for given in (tuple(texts), iter(texts), np.array(texts), pd.Series(texts, index=[2, 1, 0])):
        with named_case(type(given).__name__):
            assert embeddings.embed_documents(given) == expected  # type: ignore[arg-type]
    assert embeddings.embed_documents([]) == []
    assert asyncio.run(embeddings.aembed_documents(texts)) == expected
    assert asyncio.run(embeddings.aembed_query("read")) == embeddings.embed_query("read")


NO_LISTS: list[tuple[Any, str]] = [
    ("read", r"texts is one string; it must be a list of strings: \[text\]"),
    (b"read", r"texts is of type bytes; .*\nDecode it"),
    (None, "texts is of type NoneType; it must be a list of strings"),
    ({"read": 1}, "texts is of type dict, which has keys or columns"),
    ({"read"}, "texts is of type set, which has no order"),
    (["read", None], r"texts\[1\] is None, of type NoneType; it must be a string"),
]

NO_STRINGS: list[tuple[Any, str]] = [
    (["read"], r"text is of type list; it must be one string\.\nFor several queries: \[embeddings\.embed_query"),
    (None, "text is of type NoneType; it must be one string"),
    (b"read", "text is of type bytes; it must be one string"),
    (np.array(["read"]), "text is of type ndarray; it must be one string"),
]


def test_what_is_no_list_or_no_string_is_refused(embeddings: LangChainEmbeddings) -> None:
    calls: list[tuple[Callable[[Any], Any], Callable[[Any], Any], list[tuple[Any, str]]]] = [
        (embeddings.embed_documents, embeddings.aembed_documents, NO_LISTS),
        (embeddings.embed_query, embeddings.aembed_query, NO_STRINGS),
    ]
    for call, in_a_thread, cases in calls:
        for given, message in cases:
            with named_case(message):
                with pytest.raises(InputError, match=message):
                    call(given)
                with pytest.raises(InputError, match=message):
                    asyncio.run(in_a_thread(given))
