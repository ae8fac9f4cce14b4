"""One signature per operation; `load_ops` is the one place that chooses a backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drumline.core.errors import ConfigError

if TYPE_CHECKING:
    from drumline.ops.base import Ops


def load_ops(backend: str, device: str, threads: int | None = None) -> Ops:
    """The backend of that name on that device. ``threads`` for operations that are not torch's;
    None: as many as torch has. Raises `ConfigError` if there is none."""
    if backend == "reference":
        from drumline.ops.reference import ReferenceOps

        return ReferenceOps(device)
    if backend == "native":
        from drumline.ops.native import NativeOps

        return NativeOps(device, threads=threads)
    raise ConfigError("ops_backend", backend, "must be reference or native")


__all__ = ["load_ops"]
