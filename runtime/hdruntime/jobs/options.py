"""Options of a job: how rows are read, run and written."""

from __future__ import annotations

from dataclasses import dataclass, field

from hdruntime.backends.precision import Precision
from hdruntime.errors import InputError, Setting
from hdruntime.jobs.input_files import RowFormat
from hdruntime.jobs.rows import Columns
from hdruntime.jobs.vectors import VectorOptions
from hdruntime.tasks.encode_options import EncodeOptions
from hdruntime.tasks.task import TaskOptions, TextTask
from hdruntime.text.encoding import Overflow
from hdruntime.text.prompts import chosen_prompt, prompts_of

_MINIMA = {"batch_tokens": 1, "batch_size": 1, "stride": 0, "max_active_dims": 1, "overlap": 0}
"""Option -> its least value."""


def _add(setting: Setting) -> tuple[str | Setting, ...]:
    return ("Add ", setting, ", or leave it out.")


@dataclass(frozen=True, kw_only=True)
class RowOptions(TaskOptions, EncodeOptions):
    """How shards are run, and the form of their results.

    Attributes:
        prompt: the prompt itself, in place of a `prompt_name`.
        overlap: tokens that consecutive macro chunks of a text share, with late chunking; None: 256, or a quarter of
            the session's tokens if that is less.
    """

    prompt: str | None = None
    overlap: int | None = None

    def check(self) -> None:
        """Raise for invalid options.

        Raises:
            InputError: an option is out of range, or does not fit another.
        """
        self._check_ranges()
        if self.stride and self.overflow is not Overflow.SPLIT:
            raise InputError(
                Setting("stride"), " is for texts that are split.", hint=_add(Setting("overflow", Overflow.SPLIT))
            )
        if self.segment is not None and self.overflow is not Overflow.RECUR:
            raise InputError(
                Setting("segment"), " is for texts that are streamed.", hint=_add(Setting("overflow", Overflow.RECUR))
            )
        if self.prompt is not None and self.prompt_name is not None:
            raise InputError(
                *(Setting("prompt"), " and ", Setting("prompt_name"), " both define the prompt."),
                hint="Leave one of them out.",
            )
        if self.late_chunking is not None and self.overflow is not Overflow.ERROR:
            raise InputError(
                *(Setting("overflow", self.overflow), " and ", Setting("late_chunking"), " contradict each other: "),
                "late chunking reads long texts whole, in macro chunks.",
                hint=("Leave out ", Setting("overflow"), "; ", Setting("overlap"), " sets what macro chunks share."),
            )
        if self.answers is not None:
            self.answers.check()
        if self.overlap is not None and self.late_chunking is None:
            raise InputError(
                Setting("overlap"),
                " is for late chunking.",
                hint=(
                    *("Add ", Setting("late_chunking", "tokens:256"), ", or set "),
                    *(Setting("overflow", Overflow.SPLIT), " and ", Setting("stride"), "."),
                ),
            )

    def _check_ranges(self) -> None:
        for name, minimum in _MINIMA.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise InputError(parameter=name, value=value, accepted=f"{minimum} or more")

    def chosen_prompt(self, task: TextTask) -> str:
        """The prompt before every text.

        Raises:
            InputError: the bundle has no prompt with that name, or the task has no prompts.
        """
        if (self.prompt or self.prompt_name) and not task.prompts:
            raise InputError(
                "Prompts are for texts that are embedded or classified; these rows are not.", hint="Leave it out."
            )
        name = task.role if self.prompt_name is None else self.prompt_name
        return chosen_prompt(*prompts_of(task.manifest), name=name, prompt=self.prompt)


@dataclass(frozen=True, kw_only=True)
class JobOptions(RowOptions):
    """How a job reads, batches and writes.

    Attributes:
        columns: columns of the inputs.
        input_format: format of all inputs; None: by the suffixes of their names.
        vectors: how vectors are written.
        skip_failed: leave failed rows out of the output.
        force: replace the output if it exists.
        restart: discard the rows that an unfinished job has kept, instead of continuing it.
        precision: precision of the session that runs the job, as it was passed to :func:`hdruntime.load`. A job is not
            continued in another precision.
        max_wait_ms: milliseconds that a row of the standard input waits for others before it is run, if results go to
            the standard output: rows are run while the standard input stays open. None: it is read to its end first.
    """

    columns: Columns = field(default_factory=Columns)
    input_format: RowFormat | None = None
    vectors: VectorOptions = field(default_factory=VectorOptions)
    skip_failed: bool = False
    force: bool = False
    restart: bool = False
    precision: Precision = Precision.AUTO
    max_wait_ms: int | None = None

    def check(self) -> None:
        super().check()
        if self.max_wait_ms is not None and self.max_wait_ms < 0:
            raise InputError(parameter="max_wait_ms", value=self.max_wait_ms, accepted="0 or more")
