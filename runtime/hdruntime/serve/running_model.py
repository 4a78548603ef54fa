"""A bundle that is served: its sessions, its queue of texts, and whether it can answer."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hdruntime.bundle.reader import Bundle
from hdruntime.errors import BackendError, InputError, Message, NonFiniteOutputError, Setting, joined, write
from hdruntime.inference.scheduling import PaddingCount
from hdruntime.serve.embedding_types import ranges_of_server
from hdruntime.serve.health import SessionHealth
from hdruntime.serve.interface import Answers, Interface, ServedModel
from hdruntime.serve.interfaces import interfaces, served_task
from hdruntime.serve.options import ServeOptions
from hdruntime.serve.queue import TextQueue
from hdruntime.serve.request_body import RequestBody
from hdruntime.serve.request_keys import request_key
from hdruntime.session import Session
from hdruntime.tasks.encode_options import EncodeOptions
from hdruntime.tasks.task import Text, TextTask
from hdruntime.tasks.text_inference import TextInference, TextItem
from hdruntime.text.encoding import Overflow
from hdruntime.text.lengths import Role
from hdruntime.text.prompts import chosen_prompt, prompts_of
from hdruntime.text.tokenization import TextTokenizer

logger = logging.getLogger(__name__)

_KEPT_TOKENIZERS = 8
"""Maximum tokenizers with the limits of requests, which share the model."""

_KEPT_INFERENCES = 64
"""Maximum combinations of a task, a treatment of long texts and a prompt that are kept; requests make tasks."""


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A bundle to serve, and what runs it.

    Attributes:
        bundle: the bundle of the sessions.
        sessions: one or more; a batch runs in whichever is free.
        names: names by which requests choose the model; the first one is shown. Empty: the name in the manifest.
        ranges: file with the minimum and maximum of each dimension, by which int8 and uint8 embeddings are scaled: see
            `hdruntime.text.ranges.read_ranges`. None: requests for these types are rejected.
    """

    bundle: Bundle
    sessions: list[Session]
    names: Sequence[str] = ()
    ranges: str | None = None

    @property
    def name(self) -> str:
        """The name that is shown."""
        return self.all_names[0]

    @property
    def all_names(self) -> Sequence[str]:
        """The names, and the one in the manifest, by which requests may choose the model unless several have it."""
        return list(dict.fromkeys([*self.names, self.bundle.manifest.name]))


class RunningModel:
    """A model with a queue, whose batches run while the server runs.

    Args:
        model: the bundle and its sessions.
        options: the server's options.
        max_queue_tokens: tokens that its queue holds.
        on_batch: called with the texts and the tokens of each batch.

    Attributes:
        name: the name that is shown.
        served: what interfaces see of the model.
        interfaces: the APIs that answer for it.
        health: whether its sessions work.
        queue: its texts that wait.
    """

    def __init__(
        self,
        model: LoadedModel,
        options: ServeOptions,
        *,
        max_queue_tokens: int,
        on_batch: Callable[[int, int], None],
    ) -> None:
        self.name, self._sessions = model.name, model.sessions
        self._manifest, self._task = model.bundle.manifest, served_task(model.bundle)
        if options.truncate == "split" and not self._task.splits:
            accepted = f"error or end: texts of {self._manifest.task} are not split"
            raise InputError(parameter="truncate", value=options.truncate, accepted=accepted)
        self._inferences: dict[tuple[TextTask, Overflow, str], TextInference] = {}
        self._queue_task: asyncio.Task[None] | None = None
        self._has_ended = False
        first = model.sessions[0]
        self._tokenizer = first.tokenizer.bounded(options.max_text_characters)
        self._max_text_characters = options.max_text_characters
        self._tokenizer_of = functools.cache(self._new_tokenizer)
        self._limited = functools.lru_cache(_KEPT_TOKENIZERS)(TextTokenizer.limited)
        self.served = ServedModel(
            names=model.all_names,
            task=self._task,
            session=first,
            options=options,
            max_queue_tokens=max_queue_tokens,
            max_response_bytes=options.max_response_bytes(),
            tokenizer=self._tokenizer,
            ranges=ranges_of_server(model.ranges, self._manifest),
        )
        self.interfaces: list[Interface] = [interface(self.served) for interface in interfaces()]
        self.health = SessionHealth(model.sessions, self._task)
        self.queue = TextQueue(
            batch_tokens=min(session.batch_tokens for session in model.sessions),
            max_tokens=max_queue_tokens,
            max_wait_s=options.max_wait_ms / 1000,
            sessions=model.sessions,
            on_batch=on_batch,
        )

    def waiting(self) -> int:
        return self.queue.tokens

    def padding(self) -> PaddingCount:
        """The tokens that the sessions have computed."""
        counts = [session.padding for session in self._sessions]
        return PaddingCount(
            tokens=sum(count.tokens for count in counts),
            padded_tokens=sum(count.padded_tokens for count in counts),
        )

    def unavailable_reason(self) -> str:
        """Why this process can answer no request to the model; empty if it can."""
        try:
            for session in self._sessions:
                _ = session.batch_tokens
        except BackendError as error:
            return write(error.problem, request_key)
        if self._has_ended or (self._queue_task is not None and self._queue_task.done()):
            return "The queue of texts has ended; start the server again."
        return ""

    def close(self) -> None:
        self._has_ended = True
        if self._queue_task is not None:
            self._queue_task.cancel()
        self.queue.close()

    async def answers(
        self,
        body: RequestBody,
        texts: Sequence[Text],
        *,
        client: str,
        within_s: float,
        task: TextTask | None = None,
        overflow: Overflow | None = None,
        stride: int = 0,
        prompt_name: str | None = None,
        max_tokens_each: tuple[int | None, int | None] = (None, None),
    ) -> Answers:
        """See `ServeRequest.answers`.

        Args:
            client: client that sent the request.
            within_s: seconds that the request has.
        """
        overflow = body.overflow if overflow is None else overflow
        _check_splits(task or self._task, overflow)
        prompt = ""
        if (task or self._task).prompts:
            prompt = chosen_prompt(*prompts_of(self._manifest), name=prompt_name, prompt=None)
        if texts[0].input_ids is not None:
            if prompt and prompt_name is not None:
                raise InputError(
                    f"prompt_name or input_type asks for the prompt {prompt_name!r}, and the input is ids.",
                    hint="Send texts, or ids that begin with the prompt's, without these keys.",
                )
            prompt = ""
        is_pair = texts[0].text_pair is not None
        whole = self._tokenizer_of((task or self._task).role)
        tokenizer = self._request_tokenizer(whole, body, overflow, max_tokens_each, is_pair=is_pair)
        inference = self._inference(task or self._task, overflow, stride, prompt, tokenizer)
        # Started here: an application in which this application is mounted does not run its lifespan.
        if self._queue_task is None:
            self._queue_task = asyncio.create_task(self.queue.run())
            self._queue_task.add_done_callback(_log_failure)
        items = await self.queue.answer(inference, task or self._task, texts, client=client, within_s=within_s)
        _raise_errors(items, overflow, splits=(task or self._task).splits)
        encodings = [item.encoding.whole for item in items if item.encoding is not None]
        truncated = {number: encoding for number, encoding in enumerate(encodings) if encoding.is_truncated}
        return Answers([item.answer for item in items], sum(map(len, encodings)), truncated)

    def _inference(
        self, task: TextTask, overflow: Overflow, stride: int, prompt: str, tokenizer: TextTokenizer | None
    ) -> TextInference:
        """What runs the texts of a request; kept for other requests unless the request has a tokenizer of its own."""
        key = (task, overflow, prompt)
        if tokenizer is None and key in self._inferences:
            return self._inferences[key]
        options = EncodeOptions.of(overflow=overflow, stride=stride)
        inference = TextInference(
            self._sessions[0], task, options, prompt=prompt, tokenizer=tokenizer or self._tokenizer_of(task.role)
        )
        if tokenizer is None:
            if len(self._inferences) >= _KEPT_INFERENCES:
                self._inferences.pop(next(iter(self._inferences)))
            self._inferences[key] = inference
        return inference

    def _new_tokenizer(self, role: Role | None) -> TextTokenizer:
        """The tokenizer of texts of a role, with the server's limits."""
        if role is None:
            return self._tokenizer
        return self._sessions[0].tokenizer_of(role=role).bounded(self._max_text_characters)

    def _request_tokenizer(
        self,
        tokenizer: TextTokenizer,
        body: RequestBody,
        overflow: Overflow,
        max_tokens_each: tuple[int | None, int | None],
        *,
        is_pair: bool,
    ) -> TextTokenizer | None:
        """The tokenizer with a request's own limits, or None if the request has no limits."""
        max_tokens = body.token_limit(tokenizer, is_pair=is_pair)
        limits = [
            None if limit is None or (limit >= max_tokens and overflow is Overflow.TRUNCATE) else limit
            for limit in max_tokens_each
        ]
        if any(limit is not None and limit < 1 for limit in limits):
            raise InputError("max_tokens_per_doc and max_tokens_per_query must be 1 or more, or 0 for no limit.")
        if (max_tokens, limits, body.side) == (tokenizer.max_len, [None, None], None):
            return None
        return self._limited(tokenizer, max_tokens, text=limits[0], pair=limits[1], side=body.side)


def _check_splits(task: TextTask, overflow: Overflow) -> None:
    if overflow is Overflow.SPLIT and not task.splits:
        raise InputError(
            f"The bundle's task is {task.manifest.task}, whose texts are not split.",
            hint=("Truncate them: send ", Setting("overflow", Overflow.TRUNCATE), "."),
        )


def _raise_errors(items: Sequence[TextItem], overflow: Overflow, *, splits: bool) -> None:
    """Raise the error of the first text that does not fit, or of all texts whose outputs are not finite."""
    for number, item in enumerate(items):
        if isinstance(item.error, InputError):
            hint = _too_long_hint(item, overflow, splits) if item.error.names("overflow") else item.error.hint
            raise InputError(f"input[{number}]: ", *joined(item.error.problem), hint=hint)
        if item.error is not None and not isinstance(item.error, NonFiniteOutputError):
            raise item.error
    failed = [(number, item.error) for number, item in enumerate(items) if item.error is not None]
    if failed:
        names = ", ".join(f"input[{number}]" for number, _ in failed)
        rest = f" Send the others without {'it' if len(failed) == 1 else 'them'}." if len(items) > len(failed) else ""
        raise NonFiniteOutputError(f"{names}: ", *joined(failed[0][1].problem), rest)


def _too_long_hint(item: TextItem, overflow: Overflow, splits: bool) -> Message:
    """What a client can do about a text of too many tokens; ids cannot be split, nor texts of some tasks."""
    truncate = ("Truncate it: send ", Setting("overflow", Overflow.TRUNCATE))
    if item.text.input_ids is not None or not splits:
        return (*truncate, ".")
    if overflow is Overflow.ERROR:
        return (*truncate, ", or run it in chunks: send ", Setting("overflow", Overflow.SPLIT), ".")
    return ""


def _log_failure(queue: asyncio.Task[None]) -> None:
    """Log why the queue of texts has ended, unless it was cancelled."""
    if not queue.cancelled() and (fault := queue.exception()) is not None:
        logger.error("the queue of texts has ended", exc_info=fault)
