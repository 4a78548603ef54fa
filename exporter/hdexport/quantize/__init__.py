"""Graphs whose matmuls with weights are int8: calibration on texts, rounding of weights, and the graph pass."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Int8Options:
    """How a bundle's int8 graphs are made.

    Attributes:
        calibrate: a file or folder of texts, as `hdexport.support.texts.read_texts` reads them; None for the English
            texts that ship with Python.
    """

    calibrate: Path | None = None

    def check(self) -> None:
        """Reject texts that cannot be read, before the work that comes ahead of the calibration.

        Raises:
            InputError: there is no such file or folder, or something in it cannot be read.
        """
        from hdexport.quantize.texts import check_source

        check_source(self.calibrate)
