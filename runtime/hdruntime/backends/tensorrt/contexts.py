"""Execution contexts: one a profile for batches of any shape, one a CUDA graph, all in one arena of scratch memory."""

from __future__ import annotations

__all__ = ["ExecutionContext"]

from collections.abc import Mapping
from typing import Any

from hdruntime.backends.tensorrt.engine import LoadedEngine
from hdruntime.backends.tensorrt.layout import layout_of
from hdruntime.backends.tensorrt.memory import Block
from hdruntime.backends.tensorrt.shapes import Choice
from hdruntime.errors import BackendError
from hdruntime.gpu.cuda import Device


class ExecutionContext:
    """A context of one profile. All contexts enqueue on one stream, which is why they can share scratch memory.

    Args:
        loaded: the engine.
        device: its GPU.
        profile: number of the profile.
        stream: what everything is enqueued on.
        arena: scratch memory, which grows to what a shape needs.

    Raises:
        BackendError: TensorRT refuses.
        OutOfMemoryError: there is too little memory.
    """

    def __init__(self, loaded: LoadedEngine, device: Device, profile: int, stream: Any, arena: Block) -> None:
        self._loaded, self._stream, self._arena = loaded, int(stream), arena
        self._context = loaded.engine.create_execution_context(loaded.config)
        self._prepared: tuple[Choice, int] | None = None
        if self._context is None or not self._context.set_optimization_profile_async(profile, self._stream):
            raise loaded.error(f"TensorRT does not make an execution context for profile {profile}")
        device.call("cuStreamSynchronize", stream)

    def prepare(self, choice: Choice) -> None:
        """Tell the shape, and have scratch memory for it.

        Raises:
            BackendError: TensorRT refuses the shape.
            OutOfMemoryError: there is too little memory.
        """
        if self._prepared == (choice, self._arena.moves):
            return
        self._prepared = None
        for name, place in layout_of(self._loaded.inputs, choice.shape).places.items():
            if not self._context.set_input_shape(name, place.shape):
                raise self._loaded.error(f"TensorRT refuses a batch of {_named(choice)}")
        self._check_outputs(choice)
        # Always after the shapes are told: the memory is divided up for them.
        self._arena.ensure(int(self._context.update_device_memory_size_for_shapes()))
        self._context.set_device_memory(self._arena.address, self._arena.size)
        self._prepared = (choice, self._arena.moves)

    def enqueue(self, choice: Choice, addresses: Mapping[str, int]) -> None:
        """Start a batch on the stream.

        Args:
            choice: the shape, of this context's profile.
            addresses: of all inputs and outputs; multiples of 256.

        Raises:
            BackendError: TensorRT or a plugin failed.
            OutOfMemoryError: there is too little memory.
        """
        self.prepare(choice)
        for name, address in addresses.items():
            if not self._context.set_tensor_address(name, address):
                raise self._loaded.error(f"TensorRT refuses the address {address:#x} of {name}")
        self.enqueue_again(choice)

    def enqueue_again(self, choice: Choice) -> None:
        """Start a batch of the shape and the addresses that :meth:`enqueue` had last."""
        if not self._context.execute_async_v3(self._stream):
            # Whatever state it is in, the shape is told again before the next batch.
            self._prepared = None
            raise self._loaded.error(f"TensorRT failed on a batch of {_named(choice)}")
        # A plugin's exception does not always reach the caller of TensorRT.
        if error := self._loaded.plugin_errors(f"A plugin failed on a batch of {_named(choice)}"):
            raise error

    def is_capturable(self) -> bool:
        """Whether the stream can be captured into a CUDA graph; only TensorRT-RTX knows in advance."""
        asked = getattr(self._context, "is_stream_capturable", None)
        return True if asked is None else bool(asked(self._stream))

    def close(self) -> None:
        """Let go of TensorRT's object, whoever still holds this one (an error's traceback does)."""
        self._context = None

    def _check_outputs(self, choice: Choice) -> None:
        # TensorRT writes as much as its own shapes say.
        for name, place in layout_of(self._loaded.outputs, choice.shape).places.items():
            found = tuple(self._context.get_tensor_shape(name))
            if found != place.shape:
                raise BackendError(
                    f"The engine's output {name} is {list(found)} for a batch of {_named(choice)}, and by the manifest "
                    f"{list(place.shape)}.\nRebuild the bundle."
                )


def _named(choice: Choice) -> str:
    return f"{choice.shape.batch} x {choice.shape.tokens} tokens (profile {choice.profile})"
