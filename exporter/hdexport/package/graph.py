"""A bundle's graph for any reader of ONNX: standard operators only, an older opset, weights inside.

`onnx.inliner` replaces calls of functions by their nodes, and `onnx.version_converter` lowers the opset. What they lack
is here: outputs for readers that pool themselves, an input that a reader insists on, float32 arithmetic.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hdplugins.op_builder import OpBuilder
from hdruntime.bundle.manifest import Fill, Role
from hdruntime.bundle.reader import Bundle
from hdruntime.errors import ExportError, InputError, Setting

if TYPE_CHECKING:
    import onnx
    import onnx_ir

Dtype = Literal["float32", "float16", "int8"]

OPSETS = range(17, 21)
IR_VERSIONS = range(8, 11)
_GELU = ("", "Gelu")
_GELU_OPSET = 20
_REDUCTIONS_OPSET = 18
"""The first opset in which reductions take their axes as an input, and of which Pad and Split have more than before."""

_PAD_INPUTS = 3
"""Inputs of a Pad before opset 18, in which it got axes."""

_AS_IT_IS = "hdexport.unconverted"

_SINGLE_FILE_BYTES = 2**31 - 2**20
"""The largest message of protobuf, less what the nodes take."""

_TOKEN_TYPES = "token_type_ids"
_STATES, _EMBEDDING = "last_hidden_state", "sentence_embedding"


class Outputs(StrEnum):
    """Outputs of the graph.

    BUNDLE: the outputs of the bundle.
    POOLED: the pooled embedding alone, ``[batch, hidden]``.
    POOLED_TOKENS: the pooled embedding in place of each token's state, ``[batch, tokens, hidden]``, so that a reader's
        own pooling, whichever it is, gives the embedding.
    """

    BUNDLE = "bundle"
    POOLED = "pooled"
    POOLED_TOKENS = "pooled-tokens"


@dataclass(frozen=True, kw_only=True)
class GraphOptions:
    """Options of a graph for another system.

    Attributes:
        opset: opset of the standard operators, 17 to 20.
        ir_version: version of ONNX's file format, 8 to 10; older runtimes read older versions only.
        dtype: ``float32`` or ``float16`` arithmetic, with weights as the bundle stores them; ``int8`` for 8-bit weights
            and matmuls (`hdexport.package.int8`); None for the bundle's arithmetic.
        token_type_ids: whether the graph has this input, which it ignores if the model has none.
        outputs: which outputs the graph has.
        single_file: whether weights are inside the file; None for up to 2 GB.
        weights_file: name of the file of weights that are outside.
    """

    opset: int = 18
    ir_version: int = 8
    dtype: Dtype | None = None
    token_type_ids: bool = False
    outputs: Outputs = Outputs.BUNDLE
    single_file: bool | None = None
    weights_file: str = "model.onnx.data"

    def check(self) -> None:
        """Reject versions that are not supported.

        Raises:
            InputError: an option is out of range.
        """
        for name, value, accepted in (
            ("opset", self.opset, OPSETS),
            ("ir_version", self.ir_version, IR_VERSIONS),
        ):
            if value not in accepted:
                raise InputError(parameter=name, value=value, accepted=f"{accepted[0]} to {accepted[-1]}")


def write_graph(
    bundle: Bundle, path: Path, options: GraphOptions, finish: Callable[[onnx_ir.Model], None] | None = None
) -> None:
    """Write a bundle's graph into a file.

    Args:
        bundle: an opened bundle.
        path: file to write; its directory exists.
        options: see `GraphOptions`.
        finish: changes the graph before it is written.

    Raises:
        InputError: the bundle has inputs that are not computed of ids and mask, or no pooled embedding, or its weights
            are too large for one file.
    """
    import onnx_ir as ir

    from hdexport.graph.bundle_graph import read_portable_graph
    from hdexport.graph.passes.fold_default_inputs import FoldDefaultInputs
    from hdexport.graph.passes.upcast_to_float32 import UpcastToFloat32
    from hdexport.package.int8 import quantized

    options.check()
    model = read_portable_graph(bundle)
    FoldDefaultInputs(bundle.manifest)(model)
    if options.dtype in ("float32", "int8"):
        UpcastToFloat32()(model)
    elif options.dtype == "float16" and bundle.manifest.dtype != "float16":
        raise InputError(
            f"{bundle.path} has the dtype {bundle.manifest.dtype}; float16 arithmetic needs a float16 bundle.",
            hint=("Build the bundle with ", Setting("fp16", True, command="build"), "."),
        )
    if options.token_type_ids:
        _add_token_types(model)
    _set_outputs(model, options.outputs, bundle)
    # The weights stay in their files while the graph is rewritten: a message of protobuf is at most 2 GB.
    directory = bundle.path
    standard = ir.from_proto(_with_standard_operators(ir.to_proto(model), options))
    ir.external_data.set_base_dir(standard.graph, directory)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        if options.dtype == "int8":
            standard = quantized(standard, Path(folder))
        if finish is not None:
            finish(standard)
        _save(standard, path, options, bundle)


def _save(model: onnx_ir.Model, path: Path, options: GraphOptions, bundle: Bundle) -> None:
    import onnx_ir as ir

    size = sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value)
    fits = size < _SINGLE_FILE_BYTES
    if options.single_file and not fits:
        raise InputError(
            f"The weights of {bundle.path} take {size / 2**30:.2f} GiB; one file of ONNX holds at most 2 GiB.",
            hint=("Leave out ", Setting("single_file"), "."),
        )
    if options.single_file or (options.single_file is None and fits):
        ir.save(ir.external_data.load_to_model(model), path)
    else:
        ir.save(model, path, external_data=options.weights_file)


def check_inputs(bundle: Bundle) -> None:
    """Reject a bundle with an input that is not computed of the ids and the attention mask.

    Raises:
        InputError: the question of question-answering has global attention, and its length a limit, which a graph
            cannot check.
    """
    mask = bundle.manifest.input_of(Role.GLOBAL_ATTENTION_MASK)
    if mask is not None and mask.default.fill is Fill.UNTIL_TOKEN:
        raise InputError(
            f"The tokens of a question have global attention in {bundle.path} ({mask.name}), at most {mask.bound} of "
            "them: a graph cannot reject a longer question, and would give a wrong answer.",
            hint="Run the bundle itself: hdexport run, hdexport serve, or hdruntime.load.",
        )


def _add_token_types(model: onnx_ir.Model) -> None:
    """Add an input that no node reads, for readers that always feed it."""
    import onnx_ir as ir

    inputs = model.graph.inputs
    if any(value.name == _TOKEN_TYPES for value in inputs):
        return
    ids = inputs[0]
    inputs.append(ir.Value(name=_TOKEN_TYPES, type=ir.TensorType(ir.DataType.INT64), shape=ids.shape))


def _set_outputs(model: onnx_ir.Model, outputs: Outputs, bundle: Bundle) -> None:
    if outputs is Outputs.BUNDLE:
        return
    import onnx_ir as ir

    graph = model.graph
    embedding = next((value for value in graph.outputs if value.name == _EMBEDDING), None)
    if embedding is None:
        raise InputError(
            f"{bundle.path} has no {_EMBEDDING}: its task is {bundle.manifest.task}.",
            hint=("Build it with ", Setting("task", "sentence-similarity", command="build"), "."),
        )
    if outputs is Outputs.POOLED:
        graph.outputs[:] = [embedding]
        return
    states = next(value for value in graph.outputs if value.name == _STATES)
    states.name = f"{_STATES}.model"
    ids = graph.inputs[0]
    op = OpBuilder.append(graph)
    shape = op.Concat(op.Shape(ids), op.Shape(embedding, start=1), axis=0)
    expanded = op.Expand(op.Unsqueeze(embedding, [1]), shape)
    expanded.name, expanded.type = _STATES, embedding.type
    expanded.shape = ir.Shape([*(ids.shape or ()), *(embedding.shape or ())[1:]])
    graph.outputs[:] = [expanded]


def _with_standard_operators(model: onnx.ModelProto, options: GraphOptions) -> onnx.ModelProto:
    """The graph without functions, at the opset and the version of the format that were asked for."""
    import onnx
    from onnx import helper, inliner, version_converter

    model = inliner.inline_local_functions(model)
    if options.opset < _GELU_OPSET:
        model = inliner.inline_selected_functions(model, [_GELU], inline_schema_functions=True)
    opset = next(each.version for each in model.opset_import if each.domain == "")
    del model.opset_import[:]
    model.opset_import.append(helper.make_opsetid("", opset))
    try:
        if options.opset != opset:
            if options.opset < _REDUCTIONS_OPSET:
                _set_domains(model.graph, "", _AS_IT_IS, if_=_is_plain)
                model.opset_import.append(helper.make_opsetid(_AS_IT_IS, 1))
            model = version_converter.convert_version(model, options.opset)
            _set_domains(model.graph, _AS_IT_IS, "")
            del model.opset_import[1:]
    except RuntimeError as error:
        raise ExportError(
            f"onnx {onnx.__version__} cannot convert the graph from opset {opset} to {options.opset}: {error}.",
            hint=("Choose a higher ", Setting("opset"), f", up to {OPSETS[-1]}."),
        ) from error
    if options.opset < _REDUCTIONS_OPSET:
        _finish_reductions(model.graph)
    # tract 0.23 takes the names of two axes in them for sizes that differ.
    del model.graph.value_info[:]
    model.ir_version = options.ir_version
    return model


def _is_plain(node: onnx.NodeProto) -> bool:
    """Whether a Pad or a Split is what opset 17 has, too; onnx 1.23.2 has no conversion of any to it."""
    if node.op_type == "Split":
        # Without sizes, opset 17 makes as many equal parts as there are outputs.
        _remove_attribute(node, "num_outputs")
        return True
    return (
        node.op_type == "Pad" and len(node.input) <= _PAD_INPUTS and all(each.s != b"wrap" for each in node.attribute)
    )


def _set_domains(
    graph: onnx.GraphProto, domain: str, new_domain: str, if_: Callable[[onnx.NodeProto], bool] = lambda node: True
) -> None:
    """Change the domain of nodes, which the converter leaves as they are if it does not know it."""
    for node in graph.node:
        for attribute in node.attribute:
            for each in (attribute.g, *attribute.graphs):
                _set_domains(each, domain, new_domain, if_)
        if node.domain == domain and if_(node):
            node.domain = new_domain


def _finish_reductions(graph: onnx.GraphProto) -> None:
    """Remove an attribute that opset 18 brought, and that onnx 1.23.2's converter leaves behind."""
    for node in graph.node:
        if node.op_type.startswith("Reduce") and node.op_type != "ReduceSum":
            _remove_attribute(node, "noop_with_empty_axes")


def _remove_attribute(node: onnx.NodeProto, name: str) -> None:
    kept = [each for each in node.attribute if each.name != name]
    del node.attribute[:]
    node.attribute.extend(kept)
