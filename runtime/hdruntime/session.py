"""A bundle that is loaded and answers."""

from __future__ import annotations

__all__ = ["Encoding", "Session", "load"]

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from hdruntime.backends import Runner, open_runner
from hdruntime.batching import pack_by_tokens, padded
from hdruntime.bundle import Backend, Bundle, Manifest, open_bundle
from hdruntime.errors import BackendError, InputError, NonFiniteOutputError
from hdruntime.global_attention import check_questions
from hdruntime.inputs import check_text_lengths, checked_inputs
from hdruntime.pooling import mean_over_tokens
from hdruntime.tokenization import Encoding, Overflow, TextTokenizer

_MOST_THREADS = 1024
"""More than any one machine has cores; a backend would try to start as many as it is told."""

FloatArray = npt.NDArray[np.float32]


def load(bundle: Path | str | Bundle, backend: Backend | str = "auto", *, threads: int | None = None) -> Session:
    """Load a bundle.

    Args:
        bundle: its directory, or what :func:`open_bundle` returned.
        backend: ``onnxruntime``, ``tensorrt`` or ``tensorrt_rtx``, which runs or raises; ``auto`` takes the
            first that can run here and logs which and why.
        threads: CPU threads of one run; None leaves it to the backend.

    Raises:
        BundleError: there is no bundle, or it is damaged or too new.
        BackendError: the backend cannot run here, or not this bundle.
        InputError: no backend of that name, or ``threads`` is not 1 to 1024.
    """
    if threads is not None and not 1 <= threads <= _MOST_THREADS:
        raise InputError(
            f"threads is {threads}; it must be 1 to {_MOST_THREADS}.\nLeave it out for what suits the backend."
        )
    opened = bundle if isinstance(bundle, Bundle) else open_bundle(Path(bundle))
    return Session(opened, open_runner(opened, backend, threads=threads))


class Session:
    """A loaded bundle, made by :func:`load`. Safe to call from several threads; also a context manager."""

    def __init__(self, bundle: Bundle, runner: Runner) -> None:
        self._bundle = bundle
        self._runner: Runner | None = runner
        self._backend = runner.backend
        info = bundle.manifest.tokenizer
        self._tokenizer = TextTokenizer(bundle.file(info.file), max_len=bundle.manifest.max_len) if info else None

    @property
    def manifest(self) -> Manifest:
        """What the bundle says about itself."""
        return self._bundle.manifest

    @property
    def backend(self) -> Backend:
        """What runs the bundle."""
        return self._backend

    @property
    def batch_tokens(self) -> int:
        """Tokens of a batch, padding included, that suit the backend: :meth:`embed` and :meth:`infer` default to it.

        Raises:
            BackendError: the session is closed.
        """
        return self._open_runner().batch_tokens

    def __call__(self, **inputs: npt.ArrayLike | None) -> dict[str, FloatArray]:
        """Run one batch as it is given.

        Args:
            input_ids: [batch, tokens], any integers; nested lists will do.
            attention_mask: [batch, tokens], 1 for real tokens, 0 for padding; default ones.
            token_type_ids: [batch, tokens], default zeros; only if the bundle has this input.
            global_attention_mask: [batch, tokens], 1 for global tokens; only if the bundle has this input. The default
                is the first real token of a row, or, where the task is question answering, its tokens before the
                first separator. Marks on padding are ignored.

        Returns:
            output name -> float32 array of the shape in the manifest. Padded positions hold 0.

        Raises:
            InputError: an input does not fit.
            NonFiniteOutputError: a real token's output is NaN or infinite.
            BackendError: the backend failed, or the session is closed.
        """
        return self._run(checked_inputs(inputs, self.manifest), self._output_names)

    def tokenize(
        self,
        texts: Sequence[str],
        pairs: Sequence[str] | None = None,
        *,
        overflow: Overflow | str = Overflow.ERROR,
    ) -> list[Encoding]:
        """Encode texts, or pairs, with the bundle's tokenizer; see :meth:`TextTokenizer.encode`.

        Raises:
            InputError: the bundle has no tokenizer, or a text does not fit.
        """
        if self._tokenizer is None:
            raise InputError(f"The bundle {self._bundle.path} has no tokenizer; give it input_ids.")
        return self._tokenizer.encode(texts, pairs, overflow=overflow)

    def infer(
        self,
        encodings: Sequence[Encoding],
        *,
        batch_tokens: int | None = None,
        outputs: Sequence[str] | None = None,
    ) -> list[dict[str, FloatArray]]:
        """Run texts of different lengths, batched by length inside.

        Args:
            encodings: what :meth:`tokenize` returned.
            batch_tokens: most tokens a batch; a longer text goes alone. None: what suits the backend.
            outputs: names of the outputs wanted, default all.

        Returns:
            a dict a text, in the order given: output name -> float32 array without the batch axis, its
            tokens axis as long as the text.

        Raises:
            InputError: a text is too long, an id is not in the vocabulary, there is no such output, or the bundle
                marks questions as global and a text has none, or one of too many tokens.
            NonFiniteOutputError: a result is NaN or infinite; rows are named as numbered in ``encodings``.
            BackendError: the backend failed, or the session is closed.
        """
        names = self._checked_output_names(outputs)
        results: list[dict[str, FloatArray]] = [{} for _ in encodings]
        for rows, _, batch in self._batches(encodings, batch_tokens, names):
            for index, row in enumerate(rows):
                length = len(encodings[row])
                for name, values in batch.items():
                    results[row][name] = values[index, :length] if self._has_tokens_axis(name) else values[index]
        return results

    def embed(
        self,
        texts: Sequence[str],
        *,
        batch_tokens: int | None = None,
        overflow: Overflow | str = Overflow.ERROR,
    ) -> FloatArray:
        """One vector a text: the bundle's ``sentence_embedding``, else the mean of its token vectors.

        Args:
            texts: an empty string is a text, too.
            batch_tokens: most tokens a batch; a longer text goes alone. None: what suits the backend.
            overflow: what to do with a text of too many tokens, ``error`` or ``truncate``.

        Returns:
            float32 [texts, dimensions], in the order given.

        Raises:
            InputError: the bundle's task gives no embeddings, it has no tokenizer, or a text does not fit.
            NonFiniteOutputError: an embedding is NaN or infinite.
            BackendError: the backend failed, or the session is closed.
        """
        name = self._embedding_output()
        encodings = self.tokenize(texts, overflow=overflow)
        embeddings: FloatArray | None = None
        for rows, attention_mask, batch in self._batches(encodings, batch_tokens, [name]):
            values = batch[name]
            if self._has_tokens_axis(name):
                values = mean_over_tokens(values, attention_mask)
            if embeddings is None:
                embeddings = np.empty((len(texts), values.shape[1]), dtype=np.float32)
            embeddings[rows] = values
        if embeddings is None:
            return np.empty((0, self._embedding_size(name)), dtype=np.float32)
        return embeddings

    def close(self) -> None:
        """Free the backend's memory; what is called afterwards raises BackendError."""
        self._runner = None

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def _output_names(self) -> list[str]:
        return [spec.name for spec in self.manifest.outputs]

    def _checked_output_names(self, names: Sequence[str] | None) -> list[str]:
        for name in names or ():
            if name not in self._output_names:
                raise InputError(f"No output {name!r}; this bundle has {', '.join(self._output_names)}.")
        return self._output_names if names is None else list(names)

    def _has_tokens_axis(self, name: str) -> bool:
        return any(spec.name == name and spec.shape[1:2] == ("tokens",) for spec in self.manifest.outputs)

    def _embedding_output(self) -> str:
        for name in ("sentence_embedding", "last_hidden_state"):
            if name in self._output_names:
                return name
        raise InputError(
            f"This bundle's task is {self.manifest.task}, which gives no embeddings.\n"
            "Rebuild it with --task feature-extraction or --task sentence-similarity."
        )

    def _embedding_size(self, name: str) -> int:
        size = next(spec.shape[-1] for spec in self.manifest.outputs if spec.name == name)
        return size if isinstance(size, int) else self.manifest.hidden_size

    def _batches(
        self, encodings: Sequence[Encoding], batch_tokens: int | None, outputs: Sequence[str]
    ) -> Iterator[tuple[list[int], npt.NDArray[np.int64], dict[str, FloatArray]]]:
        """Run encodings batch by batch: yields indices of rows, their mask [batch, tokens], their outputs."""
        lengths = [len(encoding) for encoding in encodings]
        check_text_lengths(lengths, self.manifest.max_len)
        if self.manifest.global_attention is not None:
            check_questions([encoding.input_ids for encoding in encodings], self.manifest.global_attention)
        runner = self._open_runner()
        batches = pack_by_tokens(
            lengths,
            batch_tokens=self.batch_tokens if batch_tokens is None else batch_tokens,
            equal_length=runner.prefers_equal_lengths,
        )
        for rows in batches:
            inputs = self._inputs([encodings[row] for row in rows])
            yield rows, inputs["attention_mask"], self._run(inputs, outputs, rows if len(encodings) > 1 else None)

    def _inputs(self, encodings: Sequence[Encoding]) -> dict[str, npt.NDArray[np.int64]]:
        tokenizer = self.manifest.tokenizer
        values = {
            "input_ids": padded(
                [encoding.input_ids for encoding in encodings],
                value=tokenizer.pad_token_id if tokenizer else 0,
            ),
            "attention_mask": padded([[1] * len(encoding) for encoding in encodings], value=0),
            "token_type_ids": padded([encoding.token_type_ids for encoding in encodings], value=0),
        }
        accepted = {spec.name for spec in self.manifest.inputs}
        return checked_inputs({k: v for k, v in values.items() if k in accepted}, self.manifest)

    def _open_runner(self) -> Runner:
        runner = self._runner
        if runner is None:
            raise BackendError("The session is closed; load the bundle again.")
        return runner

    def _run(
        self,
        inputs: Mapping[str, npt.NDArray[np.int64]],
        outputs: Sequence[str],
        rows: Sequence[int] | None = None,
    ) -> dict[str, FloatArray]:
        results = self._open_runner().run(inputs, outputs)
        for name, values in results.items():
            # Padded positions hold 0 whatever the model made of them, so this sees real tokens only.
            wrong = np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(axis=1)).tolist()
            if wrong:
                numbers = [rows[row] for row in wrong] if rows else wrong
                raise self._non_finite_error(name, numbers if rows or len(values) > 1 else [])
        return results

    def _non_finite_error(self, name: str, rows: Sequence[int]) -> NonFiniteOutputError:
        shown = ", ".join(map(str, rows[:10])) + (", ..." if len(rows) > 10 else "")
        where = f" in rows {shown}" if rows else ""
        advice = (
            "float16 may overflow in this model: rebuild with --bf16, or without --fp16."
            if self.manifest.dtype == "float16"
            else f"Compare the bundle with its checkpoint: hdexport verify {self._bundle.path}"
        )
        return NonFiniteOutputError(f"The output {name} holds NaN or infinity{where}.\n{advice}")
