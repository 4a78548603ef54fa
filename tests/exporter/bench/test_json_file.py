"""bench.json holds a result exactly, is written whole, and what does not fit is named."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from hdexport.bench.results import result as results
from hdexport.bench.results.files import read_result, write_result
from hdexport.bench.results.result import SCHEMA_VERSION, Ratio, RunStatus
from hdexport.bench.write import write_results
from hdruntime.errors import HdexportError, InputError
from support.sample_results import sample_result

DOCS = Path(__file__).parents[3] / "docs" / "bench.md"


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "bench.json"
    write_result(path, sample_result())
    return path


def edit(path: Path, change: Callable[[dict], object]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def test_a_result_reads_back_as_it_was_written(written: Path) -> None:
    result = sample_result()
    assert {case.status for case in result.cases} == set(RunStatus)
    assert read_result(written) == result
    assert read_result(written.parent) == result
    assert next(iter(json.loads(written.read_text()))) == "schema_version"


def test_json_holds_no_nan_and_what_was_there_stays(written: Path) -> None:
    result = sample_result()
    before = written.read_bytes()
    for number in (float("nan"), float("inf")):
        broken = dataclasses.replace(result.cases[0], tokens_per_s=number)
        with pytest.raises(ValueError, match="JSON compliant"):
            write_result(written, dataclasses.replace(result, cases=(broken,)))
        assert written.read_bytes() == before, number
        assert [path.name for path in written.parent.iterdir()] == ["bench.json"], number


def test_no_file_names_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a bundle's directory, nor a script of a child's traceback, nor a GPU that a variable chose."""
    result = sample_result()
    failed = dataclasses.replace(result.cases[0], reason='File "/opt/python/site-packages/torch/x.py", line 3')
    result = dataclasses.replace(
        result,
        environment={"CUDA_VISIBLE_DEVICES": "GPU-53178a4d-4725-4fe0-8f3c-f1f4e91b33d4"},
        series=tuple(dataclasses.replace(each, bundle="/data/bundles/tiny") for each in result.series),
        cases=(failed, *result.cases[1:]),
    )
    # Other tests draw charts.
    monkeypatch.setattr("hdexport.bench.page.html.charts", lambda result, batch: {})
    write_results(tmp_path, result, png=False)
    for file in ("bench.json", "bench.html"):
        written = (tmp_path / file).read_text(encoding="utf-8")
        assert not [word for word in ("/opt/python", "/data/bundles", "53178a4d") if word in written], file
    assert {each.bundle for each in read_result(tmp_path).series} == {"tiny"}
    assert read_result(tmp_path).cases[0].status is failed.status


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "bench.json").mkdir()
    with pytest.raises(HdexportError, match=r"bench.json cannot be written: .*\n.*-o"):
        write_results(tmp_path, sample_result(), png=False)
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data["cases"][3].pop("tokens"), r"bench\.cases\[3\]\.tokens is missing"),
        (lambda data: data["cases"][2].update(series="other"), r"bench\.cases\[2\]\.series is 'other', which"),
        (lambda data: data.update(schema_version=SCHEMA_VERSION + 1), r"reads version \d+\.\nUpdate hdexport\."),
        (lambda data: data.update(schema_version=1), r"has schema version 1; .*\nMeasure again with: hdexport bench"),
        (lambda data: data.pop("schema_version"), r"is not a result of hdexport bench.*\n.*measure again"),
    ],
)
def test_what_does_not_fit_is_named(written: Path, change: Callable[[dict], object], message: str) -> None:
    edit(written, change)
    with pytest.raises(InputError, match=message) as error:
        read_result(written)
    assert str(written) in str(error.value)


def test_an_invalid_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    for text in ("{", "[]", "[" * 100_000):
        path.write_text(text)
        with pytest.raises(InputError, match=r"is not a result of hdexport bench"):
            pytest.fail(f"{text[:9]!r} gives {read_result(path)}")


def test_keys_of_later_versions_are_ignored_and_those_that_came_later_have_defaults(written: Path) -> None:
    edit(written, lambda data: (data.update(later=1), data["cases"][0].update(later=1), data.pop("notes")))
    assert read_result(written) == dataclasses.replace(sample_result(), notes=())


def test_the_ratio_is_that_of_the_medians_and_its_range_that_of_the_rounds() -> None:
    result = sample_result()
    assert result.first_series is not None
    first, other = (result.case(name, 1, 1024) for name in (result.first_series, "torch"))
    assert first is not None
    assert first.latency is not None
    assert other is not None
    assert other.latency is not None
    ratio = result.ratio_to_first(other)
    rounds = [b / a for a, b in zip(first.latency.rounds_p50_ms, other.latency.rounds_p50_ms, strict=True)]
    assert ratio == Ratio(value=other.latency.p50_ms / first.latency.p50_ms, min=min(rounds), max=max(rounds))
    assert result.ratio_to_first(first) == Ratio(value=1, min=1, max=1)
    failed = next(case for case in result.cases if case.latency is None)
    assert result.ratio_to_first(failed) is None


IN_THE_FILE = [
    each
    for each in vars(results).values()
    if dataclasses.is_dataclass(each) and each.__module__ == results.__name__ and each is not results.Ratio
]
"""The dataclasses of the schema; a ratio is computed from them."""


def fields_in_docs(text: str, name: str) -> list[str]:
    """The first column of the table under a heading."""
    section = re.search(rf"^### `{name}`\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)
    assert section, f"docs/bench.md has no heading for {name}"
    return re.findall(r"^\| `(\w+)` \|", section[1], re.MULTILINE)


def test_the_page_describes_every_field_and_invents_none() -> None:
    text = DOCS.read_text()
    for cls in IN_THE_FILE:
        names = [field.name for field in dataclasses.fields(cls)]
        assert fields_in_docs(text, cls.__name__) == names, cls.__name__
