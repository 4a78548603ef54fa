"""Common parts of the classes with the interface of sentence-transformers: a session, a tokenizer and its limit."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from hdruntime.arrays import AnyArray
from hdruntime.backends.precision import Precision
from hdruntime.backends.registry import needs_gpu
from hdruntime.bundle.manifest import Backend
from hdruntime.bundle.reader import Bundle
from hdruntime.errors import InputError, Setting
from hdruntime.gpu.options import GpuOptions
from hdruntime.inference.inputs import inputs_of_texts
from hdruntime.session import load
from hdruntime.tasks.encode_options import EncodeOptions
from hdruntime.tasks.task import Text, TextTask
from hdruntime.tasks.text_inference import answers_of
from hdruntime.text.checks import checked_texts, plain_name
from hdruntime.text.lengths import MaxSeqLength, Role
from hdruntime.text.prompts import chosen_prompt, prompts_of
from hdruntime.text.tokenization import Encoding, Overflow, TextTokenizer

if TYPE_CHECKING:
    from typing import Self


logger = logging.getLogger(__name__)

Method = TypeVar("Method", bound=Callable[..., Any])


def also_named(**names: str) -> Callable[[Method], Method]:
    """Take arguments by other names of sentence-transformers, too: ``also_named(sentences="inputs")``."""

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def by_either_name(*arguments: Any, **options: Any) -> Any:
            return method(*arguments, **{names.get(name, name): value for name, value in options.items()})

        return cast(Method, by_either_name)

    return decorate


class TorchDevice(str):
    """The name of a device as PyTorch spells and takes it: ``cpu``, ``cuda:0``; it equals that string."""

    @property
    def type(self) -> str:
        """The name without the number."""
        return self.partition(":")[0]

    @property
    def index(self) -> int | None:  # type: ignore[override]
        """The number; None without one."""
        number = self.partition(":")[2]
        return int(number) if number.isdecimal() else None


class BundleModel:
    """A loaded bundle with a tokenizer; also a context manager. Unpickling loads the bundle again in the new process.

    Args:
        bundle: the result of :func:`open_bundle`.
        max_seq_length: see the property; None for its default.
        backend, threads, precision, device, gpu: as :func:`hdruntime.load` has them.

    Attributes:
        prompts: name -> the text before a text; by default the model's own.
        default_prompt_name: the prompt of texts for which none is asked for; None for no prompt.
        model_card_data: takes the reports of sentence-transformers' evaluators, and keeps nothing of them.
        training: False.

    Raises:
        BackendError: the backend cannot run here, or not this bundle.
        InputError: the bundle has no tokenizer, or an option does not fit.
    """

    training = False

    _length_argument = "max_seq_length"
    _progress_name = "Encoding"

    _has_pairs = False

    def __init__(
        self,
        bundle: Bundle,
        *,
        max_seq_length: int | MaxSeqLength | None,
        backend: Backend | str,
        threads: int | None,
        precision: Precision | str,
        device: str | None,
        gpu: GpuOptions | None,
    ) -> None:
        if bundle.manifest.tokenizer is None:
            raise InputError(
                f"The bundle {bundle.path} has no tokenizer.", hint="Use hdruntime.load, and give it input_ids."
            )
        self.prompts, self.default_prompt_name = prompts_of(bundle.manifest)
        self.model_card_data = _NoModelCard()
        self._path = bundle.path
        self._load = functools.partial(
            load, backend=backend, threads=threads, precision=precision, device=device, gpu=gpu
        )
        self._session = self._load(bundle)
        asked = TorchDevice(device or "").index
        self._gpu_number = (gpu or GpuOptions()).device if asked is None else asked
        # Token vectors are of plain texts in sessions, and of written ones in encoders.
        settings = bundle.manifest.sentence
        self._template = None if settings is None else settings.text_template
        try:
            self._tokenizer = self._tokenizer_for(max_seq_length, name=self._length_argument)
        except BaseException:
            self.close()
            raise

    @property
    def max_seq_length(self) -> int:
        """Tokens to which a text is truncated, special tokens included; the first truncated text causes a warning.

        The default is the value of ``hdexport build --max-len``, or else the model's own length. Set it to another
        number, to ``"model"`` for the model's own length, or to ``"bundle"`` for the longest that the bundle runs.

        Raises:
            InputError: when set to more than the bundle serves, or to so few that no token of a text has room.
        """
        return self._tokenizer.max_len

    @max_seq_length.setter
    def max_seq_length(self, tokens: int | MaxSeqLength) -> None:
        self._tokenizer = self._tokenizer_for("model" if tokens is None else tokens, name="max_seq_length")

    @property
    def tokenizer(self) -> Any:
        """The bundle's ``tokenizers.Tokenizer``, which neither cuts nor pads."""
        return self._tokenizer.whole

    @property
    def device(self) -> TorchDevice:
        """Where the bundle runs: ``cpu`` or ``cuda:0``, a string with PyTorch's ``type`` and ``index``.

        Results are in the CPU's memory all the same, and so are those of a backend's other devices, which are
        ``cpu`` here.
        """
        return TorchDevice(f"cuda:{self._gpu_number}" if needs_gpu(self._session.backend) else "cpu")

    def to(self, device: object = None, dtype: object = None, non_blocking: bool = False) -> Self:
        """The encoder itself, where it is on that device already.

        Raises:
            InputError: the device is another, or a type is asked for.
        """
        asked = device if type(device).__name__ == "dtype" else dtype
        if asked is not None:
            raise InputError(
                f"dtype is {asked}; the dtype of a bundle is chosen when it is built.",
                hint=(
                    "Build with ",
                    Setting("fp16", True, command="build"),
                    " or ",
                    Setting("bf16", True, command="build"),
                    ", or load with precision='bfloat16' on a CPU.",
                ),
            )
        self._check_device(device)
        return self

    def cpu(self) -> Self:
        """As :meth:`to`."""
        return self.to("cpu")

    def cuda(self, device: object = None) -> Self:
        """As :meth:`to`."""
        return self.to("cuda" if device is None else device)

    def eval(self) -> Self:
        """The encoder itself, which never trains."""
        return self

    def train(self, mode: bool = True) -> Self:
        """The encoder itself for a ``mode`` of False.

        Raises:
            InputError: for True.
        """
        if mode:
            raise InputError(
                "mode is True; a bundle cannot be trained.",
                hint="Train the checkpoint with sentence-transformers, and build it again: hdexport build CHECKPOINT",
            )
        return self

    @property
    def modalities(self) -> list[str]:
        """``text`` alone."""
        return ["text"]

    def supports(self, modality: object) -> bool:
        """Whether it is one of `modalities`."""
        return modality in self.modalities

    def get_backend(self) -> str:
        """The backend that runs the bundle, by its name in :class:`hdruntime.Backend`."""
        return str(self._session.backend)

    def get_max_seq_length(self) -> int:
        """The value of `max_seq_length`."""
        return self.max_seq_length

    def preprocess(self, inputs: Iterable[Any], prompt: str | None = None) -> dict[str, AnyArray]:
        """The tokens of texts, or of pairs in a `CrossEncoder`, as graphs take them: ``session(**tokens)``.

        Args:
            inputs: any number of them.
            prompt: the text before every text; None for none.

        Returns:
            ``input_ids``, ``attention_mask`` and what else the bundle has as an input, int64 [inputs, tokens]: cut to
            `max_seq_length`, and padded on the right. Of no inputs no arrays.

        Raises:
            InputError: an input is not a text.
        """
        texts, pairs = self._texts_and_pairs(inputs)
        if not texts:
            return {}
        encodings = self._tokenizer.encode(texts, pairs, overflow=Overflow.TRUNCATE, prompt=prompt or "")
        return self._arrays(encodings)

    def tokenize(self, texts: Iterable[Any], prompt: str | None = None) -> dict[str, AnyArray]:
        """As :meth:`preprocess`."""
        return self.preprocess(texts, prompt)

    def __getstate__(self) -> dict[str, Any]:
        """All attributes but the session: another process loads the bundle again, from the directory where it lies."""
        return {name: value for name, value in vars(self).items() if name != "_session"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._session = self._load(self._path)

    def close(self) -> None:
        """Free the backend's memory; later calls raise BackendError."""
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _texts_and_pairs(self, inputs: object) -> tuple[list[str], list[str] | None]:
        """The texts that `preprocess` was given, and the second texts of pairs; None where they are no pairs."""
        return checked_texts(inputs, name="inputs"), None

    def _arrays(self, encodings: Sequence[Encoding]) -> dict[str, AnyArray]:
        """The inputs of the graphs, padded."""
        manifest = self._session.manifest
        return inputs_of_texts(encodings, manifest, memory=manifest.min_memory)

    def _tokenizer_for(
        self, tokens: int | MaxSeqLength | None, *, name: str, role: Role | None = None
    ) -> TextTokenizer:
        """The tokenizer of texts of a role; `name` is the argument or property that sets the length."""
        return self._session.tokenizer_of(
            tokens, role=role, name=name, has_pairs=self._has_pairs, template=self._template
        )

    def _answers(
        self,
        task: TextTask,
        texts: Sequence[Text],
        encode_options: EncodeOptions,
        *,
        prompt: str,
        name: str,
        shown: bool | None,
        tokenizer: TextTokenizer | None = None,
        length: str | None = None,
        into: Any = None,
    ) -> Any:
        """The task's answers to texts, in order.

        A bar shows the progress; None: where the encoder's module logs at INFO or DEBUG. `length` is the argument that
        sets the tokens to which a `tokenizer` of such texts cuts them.
        """
        tokenizer = tokenizer or self._tokenizer
        with _progress(len(texts), self._progress_name, shown=shown, module=type(self).__module__) as advance:
            return answers_of(
                self._session,
                task,
                texts,
                encode_options,
                prompt=prompt,
                tokenizer=tokenizer,
                name=name,
                length=f"{type(self).__name__}'s argument {length or self._length_argument}",
                on_done=advance,
                into=into,
            )

    def _prompt(self, name: str | None, prompt: str | None) -> str:
        return chosen_prompt(self.prompts, self.default_prompt_name, name=name, prompt=prompt)

    def _check_call(self, batch_size: int | None, device: object, pool: object = None) -> None:
        if pool is not None:
            raise InputError(
                f"pool is of type {type(pool).__name__}; it must be None. One encoder uses all cores.",
                hint="For several GPUs or machines: hdexport run BUNDLE TEXTS -o EMBEDDINGS --ray",
            )
        if batch_size is not None and batch_size < 1:
            raise InputError(
                parameter="batch_size", value=batch_size, accepted="1 or more", hint="Leave it out for the fastest."
            )
        self._check_device(device)

    def _check_device(self, device: object) -> None:
        """Refuse another device than the bundle's; None is any, and a number that of a GPU."""
        here = self.device
        asked = TorchDevice(f"cuda:{device}" if isinstance(device, int) else device)
        if device is None or (asked.type == here.type and asked.index in (None, here.index or 0)):
            return
        there = "cpu" if asked.type == "cpu" else asked if asked.type == "cuda" else None
        load = f", or load the bundle there: {type(self).__name__}(bundle, device={str(there)!r})" if there else "."
        raise InputError(
            f"device is {str(device)!r:.60}, and the bundle was loaded on {here} ({self._session.backend}).",
            hint=f"Leave it out{load}",
        )


def evaluate(self: BundleModel, evaluator: Callable[..., Any], output_path: str | None = None) -> Any:
    """The result of an evaluator of sentence-transformers.

    Args:
        evaluator: called with the encoder and the folder.
        output_path: a folder for its files, which is made; None for no files.
    """
    if output_path is not None:
        Path(output_path).mkdir(parents=True, exist_ok=True)
    return evaluator(self, output_path)


class _NoModelCard:
    def set_evaluation_metrics(self, *arguments: object, **options: object) -> None:
        """Keep nothing."""


class TwoSidedModel(BundleModel):
    """A loaded bundle whose texts are queries and documents, which prompts tell apart."""

    encode: Callable[..., Any]
    _similarity_fn_name: str

    @property
    def similarity_fn_name(self) -> str:
        """The name of the function that :meth:`similarity` computes.

        It may be set to a member of sentence-transformers' ``SimilarityFunction``.
        """
        return self._similarity_fn_name

    @similarity_fn_name.setter
    def similarity_fn_name(self, name: Enum | str) -> None:
        self._similarity_fn_name = plain_name(name)

    @also_named(sentences="inputs")
    def encode_query(
        self,
        inputs: str | Iterable[str],
        prompt_name: str | None = None,
        prompt: str | None = None,
        *arguments: Any,
        **options: Any,
    ) -> Any:
        """As :meth:`encode` of queries, with the prompt ``query`` unless another is asked for."""
        return self._encode_side("query", inputs, prompt_name, prompt, *arguments, **options)

    @also_named(sentences="inputs")
    def encode_document(
        self,
        inputs: str | Iterable[str],
        prompt_name: str | None = None,
        prompt: str | None = None,
        *arguments: Any,
        **options: Any,
    ) -> Any:
        """As :meth:`encode` of documents, with the prompt ``document`` unless another is asked for."""
        return self._encode_side("document", inputs, prompt_name, prompt, *arguments, **options)

    def _encode_side(
        self, side: str, inputs: object, prompt_name: str | None, prompt: str | None, *arguments: Any, **options: Any
    ) -> Any:
        if prompt_name is None and prompt is None:
            prompt_name = self._prompt_of(side)
        return self.encode(inputs, prompt_name, prompt, *arguments, **self._options_of_side(side), **options)

    def _encoded(
        self,
        task: TextTask,
        texts: Sequence[str],
        *,
        prompt_name: str | None,
        prompt: str | None,
        batch_size: int | None,
        **options: Any,
    ) -> Any:
        """The task's answers to texts that are cut to the model's length; `options` are those of `_answers`."""
        found = [Text(text=text) for text in texts]
        encode_options = EncodeOptions(overflow=Overflow.TRUNCATE, batch_size=batch_size)
        return self._answers(task, found, encode_options, prompt=self._prompt(prompt_name, prompt), **options)

    def _prompt_of(self, side: str) -> str | None:
        """Name of the prompt of queries or documents; None for the default."""
        return side

    def _options_of_side(self, side: str) -> dict[str, Any]:
        """Options of `encode` for queries or documents beside their prompt."""
        return {}


@contextlib.contextmanager
def _progress(total: int, description: str, *, shown: bool | None, module: str) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, which advances by the number that its function is given.

    ``shown`` None is for where the module's logger is at INFO or DEBUG.
    """
    level = logging.getLogger(module).getEffectiveLevel()
    if not (level in (logging.INFO, logging.DEBUG) if shown is None else shown):
        yield lambda steps: None
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress

    with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task(description, total=total)
        yield lambda steps: bar.advance(task, steps)
