"""Base of the encoders with the interface of sentence-transformers: loading, devices, lengths, prompts and batches."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Self, TypedDict, TypeVar, Unpack, cast

from hdruntime.arrays import AnyArray
from hdruntime.backends.precision import Precision
from hdruntime.backends.registry import needs_gpu
from hdruntime.bundle.manifest import Backend
from hdruntime.bundle.reader import Bundle
from hdruntime.errors import InputError, Setting
from hdruntime.gpu.options import GpuOptions
from hdruntime.hub import opened_bundle
from hdruntime.inference.inputs import inputs_of_texts
from hdruntime.optional import require
from hdruntime.session import load
from hdruntime.tasks.encode_options import EncodeOptions
from hdruntime.tasks.task import Text, TextTask
from hdruntime.tasks.text_inference import answers_of
from hdruntime.text.checks import checked_texts, plain_name
from hdruntime.text.encoding import Encoding, Overflow
from hdruntime.text.lengths import MaxSeqLength, Role
from hdruntime.text.prompts import chosen_prompt, prompts_of
from hdruntime.text.tokenization import TextTokenizer

logger = logging.getLogger(__name__)

Method = TypeVar("Method", bound=Callable[..., Any])


def also_named(**names: str) -> Callable[[Method], Method]:
    """Accept aliases that sentence-transformers has for parameters: ``also_named(sentences="inputs")``."""

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def by_either_name(*arguments: Any, **options: Any) -> Any:
            return method(*arguments, **{names.get(name, name): value for name, value in options.items()})

        return cast(Method, by_either_name)

    return decorate


class TorchDevice(str):
    """The name of a device in PyTorch, such as ``cpu`` or ``cuda:0``, with the attributes of ``torch.device``."""

    @property
    def type(self) -> str:
        """Device type: the name without the index."""
        return self.partition(":")[0]

    @property
    def index(self) -> int | None:  # type: ignore[override]
        number = self.partition(":")[2]
        return int(number) if number.isdecimal() else None


class EncoderOptions(TypedDict, total=False):
    """Options of :func:`hdruntime.load` that every encoder accepts."""

    backend: Backend | str
    threads: int | None
    precision: Precision | str
    device: str | None
    gpu: GpuOptions | None


def open_for(bundle: Path | str | Bundle, options: EncoderOptions) -> Bundle:
    """Open a bundle by its path or its name on the Hugging Face Hub, with the files that the options need."""
    return opened_bundle(bundle, options.get("backend", "auto"), options.get("precision", Precision.AUTO))


class BundleModel:
    """A loaded bundle with the interface of a sentence-transformers model; also a context manager.

    Safe to use from several threads. Unpickling loads the bundle again in the new process.

    Args:
        bundle: path of a bundle, its name on the Hugging Face Hub, or the result of :func:`open_bundle`.
        max_seq_length: see the property; None for its default.
        load_options: ``backend``, ``threads``, ``precision``, ``device`` and ``gpu`` of :func:`hdruntime.load`.

    Attributes:
        prompts: name -> text before every input; by default the model's prompts.
        default_prompt_name: name of the prompt of inputs without another prompt; None for no prompt.
        model_card_data: accepts the reports of sentence-transformers' evaluators and discards them.
        training: False.

    Raises:
        BundleError: there is no bundle, or it is damaged or of another format version.
        BackendError: the backend cannot run here, or cannot run this bundle.
        InputError: the class does not support the bundle's task, the bundle has no tokenizer, or an option is invalid.
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
        **load_options: Unpack[EncoderOptions],
    ) -> None:
        if bundle.manifest.tokenizer is None:
            raise InputError(
                f"The bundle {bundle.path} has no tokenizer.", hint="Use hdruntime.load, and pass input_ids."
            )
        self.prompts, self.default_prompt_name = prompts_of(bundle.manifest)
        self.model_card_data = _NoModelCard()
        self._path = bundle.path
        self._load = functools.partial(load, **load_options)
        self._session = self._load(bundle)
        index = TorchDevice(load_options.get("device") or "").index
        self._gpu_number = (load_options.get("gpu") or GpuOptions()).device if index is None else index
        # Sessions apply this template to sentence embeddings only; encoders apply it to token embeddings, too.
        settings = bundle.manifest.sentence
        self._template = None if settings is None else settings.text_template
        try:
            self._tokenizer = self._tokenizer_for(max_seq_length, name=self._length_argument)
        except BaseException:
            self.close()
            raise

    @property
    def max_seq_length(self) -> int:
        """Maximum tokens of a text, special tokens included; longer texts are truncated, the first one with a warning,
        unless a call has another ``overflow``.

        The default is the value of ``hdexport build --max-len``, or without one the model's length. May be set to a
        number, to ``"model"`` for the model's length, or to ``"bundle"`` for the bundle's maximum.

        Raises:
            InputError: the number is more than the bundle's maximum, or leaves no room for a token of a text.
        """
        return self._tokenizer.max_len

    @max_seq_length.setter
    def max_seq_length(self, tokens: int | MaxSeqLength) -> None:
        self._tokenizer = self._tokenizer_for("model" if tokens is None else tokens, name="max_seq_length")

    @property
    def tokenizer(self) -> Any:
        """The bundle's ``tokenizers.Tokenizer``, without truncation and padding."""
        return self._tokenizer.whole

    @property
    def device(self) -> TorchDevice:
        """Device of the bundle, ``cpu`` or ``cuda:N``: a string with the attributes of ``torch.device``.

        Devices of OpenVINO are ``cpu``. Results are in CPU memory for every device.
        """
        return TorchDevice(f"cuda:{self._gpu_number}" if needs_gpu(self._session.backend) else "cpu")

    def to(self, device: object = None, dtype: object = None, non_blocking: bool = False) -> Self:
        """Return the encoder, if the device is its device.

        Raises:
            InputError: the device is another one, or there is a dtype.
        """
        dtype = device if type(device).__name__ == "dtype" else dtype
        if dtype is not None:
            raise InputError(
                f"dtype is {dtype}; the dtype of a bundle is chosen when it is built.",
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
        """Call :meth:`to`."""
        return self.to("cpu")

    def cuda(self, device: object = None) -> Self:
        """Call :meth:`to`."""
        return self.to("cuda" if device is None else device)

    def eval(self) -> Self:
        """Return the encoder, which is always in evaluation mode."""
        return self

    def train(self, mode: bool = True) -> Self:
        """Return the encoder if ``mode`` is False.

        Raises:
            InputError: ``mode`` is True.
        """
        if mode:
            raise InputError(
                "mode is True; a bundle cannot be trained.",
                hint="Train the checkpoint with sentence-transformers, and build it again: hdexport build CHECKPOINT",
            )
        return self

    @property
    def modalities(self) -> list[str]:
        """Accepted modalities: ``text``."""
        return ["text"]

    def supports(self, modality: object) -> bool:
        """Whether a modality is one of `modalities`."""
        return modality in self.modalities

    def get_backend(self) -> str:
        """Value of the session's :class:`hdruntime.Backend`."""
        return str(self._session.backend)

    def get_max_seq_length(self) -> int:
        """The value of `max_seq_length`."""
        return self.max_seq_length

    def preprocess(self, inputs: Iterable[Any], prompt: str | None = None) -> dict[str, AnyArray]:
        """Tokenize texts, or the pairs of a `CrossEncoder`, for the graphs: ``session(**encoder.preprocess(texts))``.

        Args:
            inputs: any number of texts or pairs.
            prompt: text before every text; None for no prompt.

        Returns:
            name of each input of the graphs -> int64 [inputs, tokens], truncated to `max_seq_length` and padded on the
            right; an empty dict without inputs.

        Raises:
            InputError: an input is not a text.
        """
        texts, pairs = self._texts_and_pairs(inputs)
        if not texts:
            return {}
        encodings = self._tokenizer.encode(texts, pairs, overflow=Overflow.TRUNCATE, prompt=prompt or "")
        return self._arrays(encodings)

    def tokenize(self, texts: Iterable[Any], prompt: str | None = None) -> dict[str, AnyArray]:
        """Call :meth:`preprocess`."""
        return self.preprocess(texts, prompt)

    def evaluate(self, evaluator: Callable[..., Any], output_path: str | None = None) -> Any:
        """Run an evaluator of sentence-transformers.

        Args:
            evaluator: called with the encoder and the folder.
            output_path: folder for the evaluator's files, created if missing; None for no files.
        """
        if output_path is not None:
            Path(output_path).mkdir(parents=True, exist_ok=True)
        return evaluator(self, output_path)

    def __getstate__(self) -> dict[str, Any]:
        """All attributes except the session: another process loads the bundle again from its path."""
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
        """The first texts, and the second texts of pairs or None, of the inputs of `preprocess`."""
        return checked_texts(inputs, name="inputs"), None

    def _arrays(self, encodings: Sequence[Encoding]) -> dict[str, AnyArray]:
        """The padded inputs of the graphs."""
        manifest = self._session.manifest
        return inputs_of_texts(encodings, manifest, memory=manifest.min_memory)

    def _tokenizer_for(
        self, tokens: int | MaxSeqLength | None, *, name: str, role: Role | None = None
    ) -> TextTokenizer:
        """The tokenizer for texts of a role; `name` is the parameter or property with the length."""
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
        """The task's outputs for texts, in order.

        `shown` is whether a progress bar is shown; None shows it if the encoder's module logs at INFO or DEBUG.
        `length` is the parameter with the maximum length of `tokenizer`, for the warning about truncation.
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

    def _check_call(self, batch_size: int | None, device: object, pool: object) -> None:
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
        """Reject a device other than the bundle's; None is any device, and a number is the index of a GPU."""
        own = self.device
        other = TorchDevice(f"cuda:{device}" if isinstance(device, int) else device)
        if device is None or (other.type == own.type and other.index in (None, own.index or 0)):
            return
        name = "cpu" if other.type == "cpu" else other if other.type == "cuda" else None
        load = f", or load the bundle there: {type(self).__name__}(bundle, device={str(name)!r})" if name else "."
        raise InputError(
            f"device is {str(device)!r:.60}, and the bundle was loaded on {own} ({self._session.backend}).",
            hint=f"Leave it out{load}",
        )


def conversion(*, to_tensor: bool, to_numpy: bool) -> Callable[[Any], Any]:
    """How an array is returned: as it is, as a PyTorch tensor, or, with neither option, as a list of tensors."""
    if to_numpy and not to_tensor:
        return lambda array: array
    from_numpy = require("torch").from_numpy
    return from_numpy if to_tensor else lambda array: list(from_numpy(array))


class _NoModelCard:
    def set_evaluation_metrics(self, *arguments: object, **options: object) -> None:
        """Keep nothing."""


class EmbeddingModel(BundleModel):
    """A loaded bundle that encodes queries and documents, by default with a prompt for each."""

    encode: Callable[..., Any]
    _similarity_fn_name: str

    @property
    def similarity_fn_name(self) -> str:
        """Function of :meth:`similarity`; may be set to a member of sentence-transformers' ``SimilarityFunction``."""
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
        """Encode queries as :meth:`encode` does, by default with the prompt ``query``."""
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
        """Encode documents as :meth:`encode` does, by default with the prompt ``document``."""
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
        encode_options: EncodeOptions,
        **options: Any,
    ) -> Any:
        """The task's outputs for texts; `options` are those of `_answers`."""
        prompt = self._prompt(prompt_name, prompt)
        return self._answers(task, [Text(text=text) for text in texts], encode_options, prompt=prompt, **options)

    def _prompt_of(self, side: str) -> str | None:
        """Name of the default prompt of queries or documents; None for `default_prompt_name`."""
        return side

    def _options_of_side(self, side: str) -> dict[str, Any]:
        """Options of `encode` for queries or documents, except the prompt."""
        return {}


@contextlib.contextmanager
def _progress(total: int, description: str, *, shown: bool | None, module: str) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr; yields the function that advances it. See `BundleModel._answers` for `shown`."""
    level = logging.getLogger(module).getEffectiveLevel()
    if not (level in (logging.INFO, logging.DEBUG) if shown is None else shown):
        yield lambda steps: None
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress

    with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task(description, total=total)
        yield lambda steps: bar.advance(task, steps)
