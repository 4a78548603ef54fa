"""Runs texts: encodes them, whole or in pieces, and batches them by length."""

from __future__ import annotations

__all__ = ["TextRunner"]

from collections.abc import Iterator, Sequence
from itertools import islice

from hdruntime.arrays import FloatArray
from hdruntime.bundle.reader import Bundle
from hdruntime.errors import InputError
from hdruntime.inference.failures import raise_failures
from hdruntime.inference.marks import check_texts_for_marks
from hdruntime.inference.scheduling import BatchResult, Scheduler
from hdruntime.inference.streaming import Streams
from hdruntime.inference.text_inputs import inputs_of_texts
from hdruntime.text.checks import check_text_lengths
from hdruntime.text.splitting import SplitEncoding, in_one_piece, split_encodings
from hdruntime.text.tokenization import Encoding, Overflow, TextTokenizer


class TextRunner:
    """The common parts of a session's methods that take texts.

    Options and errors are the ones of the session's methods.

    Args:
        bundle: the bundle to run.
        scheduler: runs its batches.
        max_len: most tokens of a text, or of a piece.

    Attributes:
        bundle, max_len: as above.
        manifest: of the bundle.
        streams: run texts of any number of tokens in segments.
    """

    def __init__(self, bundle: Bundle, scheduler: Scheduler, *, max_len: int) -> None:
        self.bundle = bundle
        self.manifest = bundle.manifest
        self.max_len = max_len
        self._scheduler = scheduler
        self._has_tokens_axis = {spec.name: spec.has_tokens_axis for spec in bundle.manifest.outputs}
        self._answers = [spec.name for spec in bundle.manifest.answers]
        has_tokenizer, template = bundle.manifest.tokenizer is not None, bundle.manifest.pair_template
        self._tokenizer = TextTokenizer.of(bundle, max_len=max_len, template=template) if has_tokenizer else None
        self.streams = Streams(
            scheduler,
            bundle.manifest,
            max_len=max_len,
            encode=lambda text: self.tokenize([text], overflow=Overflow.RECUR)[0],
        )

    @property
    def tokenizer(self) -> TextTokenizer:
        """The bundle's tokenizer.

        Raises:
            InputError: the bundle has no tokenizer.
        """
        if self._tokenizer is None:
            raise InputError(f"The bundle {self.bundle.path} has no tokenizer; give it input_ids.")
        return self._tokenizer

    def tokenize(
        self,
        texts: Sequence[str],
        pairs: Sequence[str] | None = None,
        *,
        overflow: Overflow | str,
        prompt: str = "",
    ) -> list[Encoding]:
        """One encoding per text, or pair."""
        if overflow == Overflow.SPLIT:
            raise InputError(
                "tokenize returns one encoding per text, so it cannot split.\n"
                "Use session.split(texts, stride=...), or session.embed(texts, overflow='split')."
            )
        return self.tokenizer.encode(texts, pairs, overflow=overflow, prompt=prompt)

    def split(
        self, texts: Sequence[str], pairs: Sequence[str] | None = None, *, stride: int, prompt: str = ""
    ) -> list[SplitEncoding]:
        """The pieces of every text, or pair."""
        encodings = self.tokenizer.encode(texts, pairs, overflow=Overflow.SPLIT, prompt=prompt)
        return split_encodings(encodings, max_len=self.max_len, stride=stride, is_pair=pairs is not None)

    def pieces(
        self,
        texts: Sequence[str],
        pairs: Sequence[str] | None = None,
        *,
        overflow: Overflow | str,
        stride: int,
        prompt: str = "",
    ) -> list[SplitEncoding]:
        """The pieces of every text; one, where texts are not split."""
        if overflow == Overflow.SPLIT:
            return self.split(texts, pairs, stride=stride, prompt=prompt)
        if stride:
            raise InputError(f"stride is {stride}, but only overflow='split' has a stride.")
        return [in_one_piece(each) for each in self.tokenize(texts, pairs, overflow=overflow, prompt=prompt)]

    def checked_outputs(self, names: Sequence[str] | None) -> list[str]:
        """Names of requested outputs, by default all but a recurrent model's memories."""
        for name in names or ():
            if name not in self._has_tokens_axis:
                raise InputError(f"No output {name!r}; this bundle has {', '.join(self._has_tokens_axis)}.")
        return list(self._answers if names is None else names)

    def run_batches(
        self,
        encodings: Sequence[Encoding],
        *,
        batch_tokens: int | None = None,
        batch_size: int | None = None,
        outputs: Sequence[str] | None = None,
    ) -> Iterator[BatchResult]:
        """Batches of encodings as they are finished."""
        lengths = [len(encoding) for encoding in encodings]
        check_text_lengths(lengths, self.max_len)
        check_texts_for_marks([encoding.input_ids for encoding in encodings], self.manifest)
        return self._scheduler.run(
            lengths,
            lambda rows: inputs_of_texts(
                [encodings[row] for row in rows], self.manifest, memory=self.manifest.least_memory
            ),
            outputs=self.checked_outputs(outputs),
            batch_tokens=batch_tokens,
            batch_size=batch_size,
        )

    def good_batches(
        self,
        encodings: Sequence[Encoding],
        numbers: Sequence[int],
        *,
        batch_tokens: int | None,
        outputs: Sequence[str] | None,
    ) -> Iterator[BatchResult]:
        """As :meth:`run_batches`; the first failed row raises, and is named by its number in ``numbers``."""
        for result in self.run_batches(encodings, batch_tokens=batch_tokens, outputs=outputs):
            raise_failures(self.bundle, result, numbers)
            yield result

    def outputs_of(
        self,
        encodings: Sequence[Encoding],
        numbers: Sequence[int],
        *,
        batch_tokens: int | None,
        outputs: Sequence[str] | None,
    ) -> list[dict[str, FloatArray]]:
        """The outputs of each encoding, without padding; errors use the encodings' ``numbers``."""
        results: list[dict[str, FloatArray]] = [{} for _ in encodings]
        for result in self.good_batches(encodings, numbers, batch_tokens=batch_tokens, outputs=outputs):
            for index, row in enumerate(result.rows):
                length = len(encodings[row])
                for name, values in result.outputs.items():
                    results[row][name] = values[index, :length] if self._has_tokens_axis[name] else values[index]
        return results

    def outputs_of_pieces(
        self, splits: Sequence[SplitEncoding], outputs: Sequence[str], *, batch_tokens: int | None
    ) -> list[list[dict[str, FloatArray]]]:
        """[texts][pieces], the outputs of each piece."""
        pieces = [piece for split in splits for piece in split.pieces]
        numbers = [text for text, split in enumerate(splits) for _ in split.pieces]
        found = iter(self.outputs_of(pieces, numbers, batch_tokens=batch_tokens, outputs=outputs))
        return [list(islice(found, len(split.pieces))) for split in splits]
