"""Names of array types, one for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

AnyArray = npt.NDArray[Any]

FloatArray = npt.NDArray[np.float32]

FloatingArray = npt.NDArray[np.floating[Any]]
"""An array of float32, float16 or float64, whichever the caller has."""

IntArray = npt.NDArray[np.int64]

WideArray = npt.NDArray[np.float64]

Inputs = Mapping[str, AnyArray]
"""The inputs of a batch by name."""

Outputs = dict[str, FloatArray]
"""The outputs of a batch by name."""
