"""A bundle as a model of Triton's Python backend: it takes texts and returns vectors or scores. See docs/triton.md."""

from __future__ import annotations

import importlib
import json
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hdruntime.bundle.reader import Bundle, open_bundle
from hdruntime.errors import HdexportError, InputError, write
from hdruntime.serve.interfaces import served_task
from hdruntime.serve.request_body import OVERFLOWS
from hdruntime.serve.request_keys import request_key, request_message
from hdruntime.serve.row_tensors import TEXT, TEXT_PAIR, TRUNCATED, RowTensor, row_of, row_tensor
from hdruntime.session import load
from hdruntime.tasks.encode_options import EncodeOptions
from hdruntime.tasks.task import Text
from hdruntime.tasks.text_inference import TextInference, TextItem
from hdruntime.text.encoding import Overflow
from hdruntime.text.prompts import chosen_prompt, prompts_of

BUNDLE_FOLDER = "bundle"
"""The bundle, in the directory of the model's version."""

_PARAMETERS = ("truncate", "prompt_name")


def tensors_of(bundle: Bundle) -> RowTensor:
    """The tensor of a bundle's model; a bundle whose answers differ in length is rejected."""
    tensor = row_tensor(served_task(bundle))
    if tensor is None:
        raise InputError(
            f"The bundle's task is {bundle.manifest.task}, whose answers differ in length; Triton batches equal ones.",
            hint=f"Serve it with: hdexport serve {shlex.quote(str(bundle.path))}",
        )
    return tensor


class _Request(NamedTuple):
    """Texts of a request, each with its answer or its error, what runs them, and the outputs that the client wants."""

    inference: TextInference
    items: list[TextItem]
    outputs: Collection[str]

    @property
    def error(self) -> str | None:
        for number, item in enumerate(self.items):
            if item.error is not None:
                return f"TEXT[{number}]: {write(item.error.problem, request_key)}"
        return None


class TritonPythonModel:
    """The class that Triton's Python backend calls, in a process for each instance of a model.

    The texts of all requests that Triton hands over run together, sorted by length. A request that cannot be answered
    gets its error, and the others their answers.
    """

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the bundle beside the model's file; `args` are Triton's."""
        bundle = open_bundle(Path(args["model_repository"]) / args["model_version"] / BUNDLE_FOLDER)
        parameters = json.loads(args["model_config"]).get("parameters", {})
        backend = parameters.get("backend", {}).get("string_value", "auto")
        has_gpu = args["model_instance_kind"] == "GPU"
        device = f"cuda:{args['model_instance_device_id']}" if has_gpu else "cpu"
        self._tensor, self._task = tensors_of(bundle), served_task(bundle)
        length = parameters.get("max_seq_length", {}).get("string_value")
        self._session = load(
            bundle, backend, device=device, max_seq_length=int(length) if length and length.isdecimal() else length
        )
        self._inferences: dict[tuple[Overflow, str], TextInference] = {}

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """The response to each request, in order, by the parameters ``truncate`` (``error``, ``end`` or ``split``) and
        ``prompt_name``: the tensor of `tensors_of`, and `TRUNCATED` if the model's configuration has that output."""
        triton = importlib.import_module("triton_python_backend_utils")
        read = [self._read(triton, request) for request in requests]
        items: dict[TextInference, list[TextItem]] = {}
        for each in read:
            # A request with an error is not answered in part.
            if isinstance(each, _Request) and each.error is None:
                items.setdefault(each.inference, []).extend(each.items)
        for inference, some in items.items():
            inference.warn_of_truncation(some, "The parameter max_seq_length of the model's configuration")
            inference.run(some)
        return [self._response(triton, each) for each in read]

    def finalize(self) -> None:
        """Free the session."""
        self._session.close()

    def _read(self, triton: Any, request: Any) -> _Request | str:
        """A request's texts, or why there are none."""
        try:
            parameters = json.loads(request.parameters() or "{}")
            unknown = [name for name in parameters if name not in _PARAMETERS]
            if unknown:
                raise InputError(f"There is no parameter {unknown[0]!r}; there are {', '.join(_PARAMETERS)}.")
            overflow = OVERFLOWS.get(parameters.get("truncate", "error"))
            if overflow is None:
                raise InputError(f"truncate is {parameters['truncate']!r}; it is error, end or split.")
            prompt = ""
            if self._task.prompts:
                prompts = prompts_of(self._session.manifest)
                prompt = chosen_prompt(*prompts, name=parameters.get("prompt_name"), prompt=None)
            elif "prompt_name" in parameters:
                raise InputError("The model has no prompts.")
            texts, pairs = (self._texts(triton, request, name) for name in (TEXT, TEXT_PAIR))
            if texts is None:
                raise InputError("The request has no TEXT.")
            seconds: Sequence[str | None] = pairs or [None] * len(texts)
            items = [Text(text=text, text_pair=pair) for text, pair in zip(texts, seconds, strict=True)]
            inference = self._inference(overflow, prompt)
            return _Request(inference, inference.encode(items), request.requested_output_names())
        except HdexportError as error:
            return request_message(error)
        except UnicodeDecodeError as error:
            return str(error)

    @staticmethod
    def _texts(triton: Any, request: Any, name: str) -> list[str] | None:
        tensor = triton.get_input_tensor_by_name(request, name)
        return None if tensor is None else [text.decode() for text in tensor.as_numpy().reshape(-1)]

    def _inference(self, overflow: Overflow, prompt: str) -> TextInference:
        key = (overflow, prompt)
        if key not in self._inferences:
            encode_options = EncodeOptions.of(overflow=overflow)
            self._inferences[key] = TextInference(self._session, self._task, encode_options, prompt=prompt)
        return self._inferences[key]

    def _response(self, triton: Any, request: _Request | str) -> Any:
        error = request if isinstance(request, str) else request.error
        if isinstance(request, str) or error is not None:
            return triton.InferenceResponse(output_tensors=[], error=triton.TritonError(error))
        answers = [row_of(self._task, item.answer) for item in request.items]
        rows = np.array(answers, np.float32).reshape(len(answers), self._tensor.size)
        tensors = [triton.Tensor(self._tensor.name, rows)]
        # A configuration that was written before the output existed lacks it.
        if TRUNCATED in request.outputs:
            flags = [item.encoding is not None and item.encoding.whole.is_truncated for item in request.items]
            tensors.append(triton.Tensor(TRUNCATED, np.array(flags, bool).reshape(len(flags), 1)))
        return triton.InferenceResponse(tensors)
