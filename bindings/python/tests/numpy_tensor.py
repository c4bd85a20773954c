"""A stand-in for a tensor of torch."""

from __future__ import annotations

from typing import Any

import numpy as np


class Tensor(np.ndarray[Any, Any]):
    """A numpy array with what the connector reads of a torch tensor."""

    def data_ptr(self) -> int:
        return int(self.ctypes.data)

    def element_size(self) -> int:
        return self.itemsize

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.itemsize for step in self.strides)
