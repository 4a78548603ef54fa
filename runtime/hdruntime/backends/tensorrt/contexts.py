"""Execution contexts: one per profile and one per CUDA graph, all in one arena of scratch memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hdruntime.backends.tensorrt.engine import LoadedEngine
from hdruntime.errors import BackendError
from hdruntime.gpu.cuda import Device
from hdruntime.gpu.layout import Layout, ShapeChoice
from hdruntime.gpu.memory import Block


class ExecutionContext:
    """A context of one profile, which is given by its number. All contexts enqueue on one stream, so they can share the
    scratch memory `arena`, which grows to the needs of a shape."""

    def __init__(self, loaded: LoadedEngine, device: Device, profile: int, stream: Any, arena: Block) -> None:
        self._loaded, self._stream, self._arena = loaded, int(stream), arena
        self._context = loaded.new_context()
        self._prepared: tuple[ShapeChoice, int] | None = None
        doing = f"TensorRT cannot create an execution context for profile {profile}"
        if self._context is None:
            raise loaded.error(doing)
        try:
            self._context.set_optimization_profile_async(profile, self._stream)
        except RuntimeError as error:  # unlike other calls, which return False
            raise loaded.error(doing) from error
        device.call("cuStreamSynchronize", stream)

    def prepare(self, choice: ShapeChoice) -> None:
        """Set the shape, and allocate scratch memory for it."""
        if self._prepared == (choice, self._arena.moves):
            return
        self._prepared = None
        inputs, outputs = self._loaded.layouts(choice.shape)
        for name, place in inputs.places.items():
            if not self._context.set_input_shape(name, place.shape):
                raise self._loaded.error(f"TensorRT rejects a batch of {_named(choice)}")
        self._check_outputs(choice, outputs)
        # Always after the shapes are set: they determine how TensorRT divides the memory.
        self._loaded.log.take_errors()  # of earlier calls
        needed = int(self._context.update_device_memory_size_for_shapes())
        # 0 stands for a failure, too, which only the log tells from an engine that needs no memory.
        if not needed and (error := self._loaded.logged_error(f"TensorRT cannot size a batch of {_named(choice)}")):
            raise error
        self._arena.ensure(needed)
        self._context.set_device_memory(self._arena.address, self._arena.size)
        self._prepared = (choice, self._arena.moves)

    def enqueue(self, choice: ShapeChoice, addresses: Mapping[str, int]) -> None:
        """Start a batch on the stream; the addresses of all inputs and outputs are multiples of 256."""
        self.prepare(choice)
        for name, address in addresses.items():
            if not self._context.set_tensor_address(name, address):
                raise self._loaded.error(f"TensorRT rejects the address {address:#x} of {name}")
        self.enqueue_again(choice)

    def enqueue_again(self, choice: ShapeChoice) -> None:
        """Start a batch of the shape and the addresses of the last :meth:`enqueue`."""
        if not self._context.execute_async_v3(self._stream):
            # The context's state is unknown: the shape is set again before the next batch.
            self._prepared = None
            raise self._loaded.error(f"TensorRT failed on a batch of {_named(choice)}")
        # A plugin's exception does not always reach the caller of TensorRT.
        if error := self._loaded.plugin_errors(f"A plugin failed on a batch of {_named(choice)}"):
            raise error

    def is_capturable(self) -> bool:
        """Whether the stream can be captured into a CUDA graph; only TensorRT-RTX knows in advance."""
        is_capturable = getattr(self._context, "is_stream_capturable", None)
        return is_capturable is None or bool(is_capturable(self._stream))

    def close(self) -> None:
        """Release TensorRT's object, even while something (an error's traceback) still refers to this one."""
        self._context = None

    def _check_outputs(self, choice: ShapeChoice, layout: Layout) -> None:
        # TensorRT writes outputs of its own shapes, whatever memory they get.
        for name, place in layout.places.items():
            shape = tuple(self._context.get_tensor_shape(name))
            if shape != place.shape:
                raise BackendError(
                    f"The engine's output {name} has shape {list(shape)} for a batch of {_named(choice)}; by the "
                    f"manifest it is {list(place.shape)}.",
                    hint="Rebuild the bundle.",
                )


def _named(choice: ShapeChoice) -> str:
    memory = f" after {choice.shape.memory} in the memory cache" if choice.shape.memory else ""
    return f"{choice.shape.batch} x {choice.shape.tokens} tokens{memory} (profile {choice.profile})"
