"""Every error is written by Python, the command line and the server, each in its own words, from one raise."""

import inspect
import pickle
from enum import Enum

import pytest

from hdexport.cli.flags import flag
from hdruntime import errors
from hdruntime.errors import HdexportError, InputError, Setting, joined
from hdruntime.serve.admission import OverloadedError
from hdruntime.serve.request_keys import request_key, request_message
from hdruntime.text.checks import RejectedTextsError


class _Choice(Enum):
    TRUNCATE = "truncate"


def _classes(base: type[HdexportError] = HdexportError) -> list[type[HdexportError]]:
    return [base, *(each for child in base.__subclasses__() for each in _classes(child))]


CLASSES = sorted(set(_classes()), key=lambda kind: kind.__name__)


def test_that_every_class_is_walked():
    own = {kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, HdexportError)}
    assert own <= set(CLASSES)
    assert {RejectedTextsError, OverloadedError} <= set(CLASSES)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    ("writer", "written"),
    [
        (str, "overflow='truncate', max_len=4096, normalize=True"),
        (flag, "--overflow truncate, --max-len 4096, --normalize"),
        (request_key, '"truncate": "end", --max-len 4096, "normalize": true'),
    ],
    ids=["python", "command line", "server"],
)
def test_that_each_interface_writes_its_own_words(kind, writer, written):
    settings = [Setting("overflow", _Choice.TRUNCATE), Setting("max_len", 4096, command="build")]
    hint = (settings[0], ", ", settings[1], ", ", Setting("normalize", True))
    error = kind("The text has 9 tokens.", hint=hint)
    assert error.message(writer) == f"The text has 9 tokens.\n{written}"
    assert str(error) == error.message(str)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_that_fields_make_the_problem(kind):
    if "__init__" in vars(kind) and kind is not HdexportError:
        return  # a class with fields of its own, of which none is a parameter
    error = kind(parameter="stride", value=-1, accepted="0 to 511", hint="Leave it out.")
    assert str(error) == "stride is -1; it must be 0 to 511.\nLeave it out."
    assert error.message(flag) == "--stride is -1; it must be 0 to 511.\nLeave it out."
    assert error.message(request_key) == '"stride" is -1; it must be 0 to 511.\nLeave it out.'


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_that_errors_pass_between_processes(kind):
    error = kind("A problem with ", Setting("stride", -1), hint=("Use ", Setting("stride", 0)))
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), copy.message(flag)) == (kind, "A problem with --stride -1\nUse --stride 0")


def test_that_flags_are_words_of_a_shell():
    assert flag(Setting("id_column", "")) == "--id-column ''"
    assert flag(Setting("prompt", "query: x")) == "--prompt 'query: x'"
    assert flag(Setting("normalize", False)) == "--no-normalize"
    assert flag(Setting("output")) == "-o"


def test_that_messages_join():
    stride = Setting("stride")
    assert joined("a", ("b", stride), stride) == ("a", "b", stride, stride)


def test_that_the_error_of_a_text_names_what_the_caller_can_set():
    from hdruntime.text.checks import check_text_lengths

    with pytest.raises(InputError) as caught:
        check_text_lengths([7], 5)
    assert "(overflow='truncate')" in str(caught.value)
    assert "--" not in str(caught.value)
    assert "(--overflow truncate)" in caught.value.message(flag)
    assert "--max-len 7" in caught.value.message(flag)


def test_that_a_client_gets_no_hint_at_what_neither_it_nor_the_operator_can_set():
    for setting, written in (
        (Setting("overflow", "truncate"), 'Use "truncate": "end".'),
        (Setting("timeout", command="serve"), "Use --timeout."),
        (Setting("max_seq_length", "bundle"), "Use --max-seq-length bundle."),
        (Setting("prompt"), None),
    ):
        error = InputError("A problem.", hint=("Use ", setting, "."))
        assert request_message(error) == "\n".join(filter(None, ("A problem.", written)))
