"""`OnDevice`: modules built on a device, in a dtype. `with OnDevice(torch.bfloat16, "meta"): model = Model()`"""

from __future__ import annotations

from types import TracebackType

import torch


class OnDevice:
    """Context: tensors are made on `device`, and floating-point ones in `dtype`, unless the code says otherwise.

    Built on torch's own default device and dtype. With "meta" nothing is allocated.
    """

    def __init__(self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> None:
        self._dtype = dtype
        self._device = torch.device(device)
        self._enabled = enabled
        self._previous: torch.dtype | None = None

    def __enter__(self) -> OnDevice:
        if self._enabled:
            self._previous = torch.get_default_dtype()
            torch.set_default_dtype(self._dtype)
            self._device.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._previous is not None:
            self._device.__exit__(kind, error, trace)
            torch.set_default_dtype(self._previous)
            self._previous = None
