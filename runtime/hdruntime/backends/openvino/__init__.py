"""OpenVINO, on CPUs and on Intel's GPUs and NPUs."""

from typing import Final

OPENVINO_LOWERING: Final = "openvino"
"""``GraphFile.lowering`` of the graph for any batch; a bundle has it if it was built for that target."""

OPENVINO_UNPADDED_LOWERING: Final = "openvino_unpadded"
"""``GraphFile.lowering`` of the graph that takes no padding: its attention has no mask, and is faster. Only bundles
whose attention is so have it, beside `OPENVINO_LOWERING`."""
