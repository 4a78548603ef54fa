"""The Open Inference Protocol of KServe and Triton, version 2, over HTTP: strings in, float32 out.

https://github.com/kserve/open-inference-protocol/blob/main/specification/protocol/inference_rest.md. The tensors are
those of a bundle in Triton; answers that differ in length are strings of JSON. The binary extension is not there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from hdruntime.errors import InputError
from hdruntime.serve.embedding_types import FLOAT_VALUE_BYTES, made_beside_the_loop
from hdruntime.serve.interface import Interface, Route, ServedModel, ServeRequest
from hdruntime.serve.interfaces.pipelines import arrays_of, shown_answer
from hdruntime.serve.request_body import PromptedBody
from hdruntime.serve.row_tensors import TEXT, TEXT_PAIR, row_of, row_tensor
from hdruntime.tasks.embedding import Embedding
from hdruntime.tasks.task import Pairs, Text
from hdruntime.tasks.text_classification import TextClassification
from hdruntime.tasks.token_similarity import Side, TokenVectors
from hdruntime.text.checks import checked_choice
from hdruntime.text.embeddings import normalized

_STRINGS, _FLOATS = "BYTES", "FP32"
_ANSWER = "answer"
"""The output of a task whose answers differ in length: [texts], each the JSON that ``POST /`` answers to the text."""

_BINARY = ("binary_data", "binary_data_output", "binary_data_size")
"""Parameters of the binary extension."""

_CONTENT = ("content_type", "str")
"""The parameter of a tensor of texts that clients of MLServer send, and its value."""


class InputTensor(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tensor of a request; `data` is flat, or a list for each row."""

    name: str
    shape: list[int]
    datatype: str
    data: list[Any]
    parameters: dict[str, Any] = {}

    def strings(self) -> list[str]:
        """The texts of a tensor [texts] or [texts, 1]."""
        entries = [value for row in self.data for value in (row if isinstance(row, list) else [row])]
        is_column = len(self.shape) in (1, 2) and self.shape[1:] in ([], [1])
        if not is_column or math.prod(self.shape) != len(entries):
            raise InputError(
                f"{self.name} has the shape {self.shape} and {len(entries)} values.",
                hint="Give a value for each text, with the shape [texts] or [texts, 1].",
            )
        if self.datatype != _STRINGS or not all(isinstance(value, str) for value in entries):
            raise InputError(
                f"{self.name} has the datatype {self.datatype}, or a value that is no string.",
                hint=f"Send strings, as {_STRINGS}.",
            )
        return entries


class RequestedOutput(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An output that a request asks for."""

    name: str
    parameters: dict[str, Any] = {}


class InferBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /v2/models/NAME/infer``; `model_name` is KServe's client's, which repeats the path's."""

    inputs: list[InputTensor]
    id: str | None = None
    outputs: list[RequestedOutput] = []
    parameters: dict[str, Any] = {}
    model_name: str | None = None


class TextParameters(PromptedBody, kw_only=True):
    """`parameters` of a request."""


class EmbeddingParameters(TextParameters, kw_only=True):
    """`parameters` of a request for embeddings."""

    dimensions: int | None = None
    normalize: bool = False


class ScoreParameters(TextParameters, kw_only=True):
    """`parameters` of a request for scores."""

    raw_scores: bool = False


class KServeInterface(Interface):
    """The paths below ``/v2``."""

    def __init__(self, model: ServedModel) -> None:
        super().__init__(model)
        self._tensor = row_tensor(model.task)
        self._pairs = model.task.pairs if self._tensor is None else self._tensor.pairs
        is_of_tokens, manifest = isinstance(model.task, TokenVectors), model.session.manifest
        self._sides = {side: TokenVectors(manifest, side) for side in Side} if is_of_tokens else {}
        self._output = _ANSWER if self._tensor is None else self._tensor.name

    def routes(self) -> Sequence[Route]:
        model = "/v2/models/{model:path}"
        return [
            Route("/v2", None, self._server, error=_error, is_of_server=True),
            Route("/v2/health/live", None, self._live, is_open=True, error=_error, is_of_server=True),
            Route("/v2/health/ready", None, self._ready, is_open=True, error=_error, is_of_server=True),
            Route("/v2/models", None, self._models, error=_error, is_of_server=True),
            # The last one that fits is taken.
            Route(model, None, self._metadata, error=_error),
            Route(f"{model}/ready", None, self._model_ready, is_open=True, error=_error),
            Route(f"{model}/infer", InferBody, self._infer, error=_error),
        ]

    async def _server(self, request: ServeRequest, body: None) -> object:
        from hdruntime import __version__

        return {"name": "hdexport", "version": __version__, "extensions": []}

    async def _live(self, request: ServeRequest, body: None) -> object:
        request.check_alive()
        return {"live": True}

    async def _ready(self, request: ServeRequest, body: None) -> object:
        await request.check_ready()
        return {"ready": True}

    async def _models(self, request: ServeRequest, body: None) -> object:
        return {"models": [model.name for model in request.models]}

    async def _model_ready(self, request: ServeRequest, body: None) -> object:
        self.model.check_name(request)
        await request.check_ready()
        return {"name": self.model.name, "ready": True}

    async def _metadata(self, request: ServeRequest, body: None) -> object:
        self.model.check_name(request)
        inputs = {TEXT} if self._pairs is Pairs.REJECTED else {TEXT, TEXT_PAIR}
        return {
            "name": self.model.name,
            "versions": [],
            "platform": f"hdexport_{self.model.session.backend}",
            "inputs": [{"name": name, "datatype": _STRINGS, "shape": [-1]} for name in sorted(inputs)],
            "outputs": [self._described([-1])],
        }

    def _described(self, shape: list[int]) -> dict[str, object]:
        """The output tensor of so many texts, without its data."""
        task, tensor = self.model.task, self._tensor
        if tensor is None:
            return {"name": _ANSWER, "datatype": _STRINGS, "shape": shape}
        metadata: dict[str, object] = {"name": tensor.name, "datatype": _FLOATS, "shape": [*shape, tensor.size]}
        if isinstance(task, TextClassification):
            # A parameter is a string, a number or a boolean.
            metadata["parameters"] = {"labels": msgspec.json.encode(task.labels).decode()}
        return metadata

    async def _infer(self, request: ServeRequest, body: InferBody) -> object:
        self.model.check_name(request)
        name, task, of_path = self.model.name, self.model.task, request.path_parameters["model"]
        if body.model_name not in (None, of_path):
            raise InputError(
                f"model_name is {body.model_name!r}, and the path names {of_path!r}.", hint="Send one name."
            )
        _check_parameters(body)
        if any(output.name != self._output for output in body.outputs):
            raise InputError(f"There is no such output; the model has {self._output}.", hint="Leave out outputs.")
        texts = self._texts(request, body.inputs)
        parameters = request.body(body.parameters, self._parameters_type())
        prompt_name, of_side = parameters.chosen_prompt_name(task.manifest), None
        if prompt_name is not None and not task.prompts:
            raise InputError("The model has no prompts.", hint="Leave out prompt_name and input_type.")
        if self._sides:
            prompt_name = checked_choice(Side, prompt_name or Side.DOCUMENT, option="prompt_name")
            of_side = self._sides[prompt_name]
            self.model.check_size_of_tokens(request, parameters, texts, of_side.dimensions, FLOAT_VALUE_BYTES)
        answers = await request.answers(parameters, texts, task=of_side, prompt_name=prompt_name)
        output = await made_beside_the_loop(
            lambda: self._output_of(texts, answers.answers, parameters), arrays_of(answers.answers)
        )
        response: dict[str, object] = {"model_name": name, "outputs": [output]}
        if body.id is not None:
            response["id"] = body.id
        if answers.truncated:
            response["parameters"] = {"truncated_inputs": ",".join(map(str, sorted(answers.truncated)))}
        return response

    def _parameters_type(self) -> type[TextParameters]:
        if isinstance(self.model.task, Embedding):
            return EmbeddingParameters
        return ScoreParameters if isinstance(self.model.task, TextClassification) else TextParameters

    def _texts(self, request: ServeRequest, inputs: Sequence[InputTensor]) -> list[Text]:
        accepted = [TEXT] if self._pairs is Pairs.REJECTED else [TEXT, TEXT_PAIR]
        by_name = {each.name: each for each in inputs}
        needed = accepted if self._pairs is Pairs.REQUIRED else [TEXT]
        if len(by_name) < len(inputs) or not set(needed) <= set(by_name) <= set(accepted):
            raise InputError(
                f"The inputs are {', '.join(each.name for each in inputs) or 'none'}.",
                hint=f"Send {' and '.join(needed)}, and no other than {' and '.join(accepted)}, once each.",
            )
        texts = by_name[TEXT].strings()
        request.check_number(len(texts))
        seconds: Sequence[str | None] = by_name[TEXT_PAIR].strings() if TEXT_PAIR in by_name else [None] * len(texts)
        if len(seconds) != len(texts):
            raise InputError(f"{TEXT} has {len(texts)} values and {TEXT_PAIR} has {len(seconds)}.", hint="Send pairs.")
        return [Text(text=text, text_pair=second) for text, second in zip(texts, seconds, strict=True)]

    def _output_of(
        self, texts: Sequence[Text], answers: Sequence[Any], parameters: TextParameters
    ) -> dict[str, object]:
        """The output tensor; its data are JSON already."""
        task, tensor = self.model.task, self._tensor
        if tensor is None:
            shown = [shown_answer(task, text, answer) for text, answer in zip(texts, answers, strict=True)]
            strings = [msgspec.json.encode(each).decode() for each in shown]
            return self._described([len(texts)]) | {"data": msgspec.Raw(msgspec.json.encode(strings))}
        is_raw = isinstance(parameters, ScoreParameters) and parameters.raw_scores
        rows = np.array([answer if is_raw else row_of(task, answer) for answer in answers], np.float32)
        if isinstance(task, Embedding) and isinstance(parameters, EmbeddingParameters):
            rows = task.truncated(rows, parameters.dimensions)
            rows = normalized(rows) if parameters.normalize else rows
        rows = rows.reshape(len(texts), -1)
        data = msgspec.Raw(msgspec.json.encode(rows.ravel().tolist()))
        return self._described([len(texts)]) | {"shape": list(rows.shape), "data": data}


INTERFACE = KServeInterface


def _error(status: int, message: str) -> object:
    return {"error": message}


def _check_parameters(body: InferBody) -> None:
    """Reject requests of the binary extension, whose answers are no JSON, and parameters of tensors."""
    tensors: list[InputTensor | RequestedOutput] = [*body.inputs, *body.outputs]
    for parameters in (body.parameters, *(each.parameters for each in tensors)):
        for name in _BINARY:
            if parameters.pop(name, None):
                raise InputError(
                    f"The parameter {name} asks for the binary extension, which the server does not have.",
                    hint="Send and ask for JSON: binary_data=False for each input and each output.",
                )
    for tensor in tensors:
        for name, value in tensor.parameters.items():
            if value is not None and (name, value) != _CONTENT:
                raise InputError(
                    f"The tensor {tensor.name} has the parameter {name}: {msgspec.json.encode(value).decode():.100}.",
                    hint="Leave it out; parameters of the request have the keys for texts.",
                )
