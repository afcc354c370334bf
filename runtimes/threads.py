"""Whether ONNX Runtime sessions of this process have threads of their own or share them. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass

from specstream.models.errors import UserError


@dataclass
class _Pool:
    wanted: bool = False
    size: int | None = None  # once ONNX Runtime has made it


_pool = _Pool()


def share_threads() -> None:
    """Let all bundles that are opened from now on in this process run on one pool of threads. To be called once, before the first.

    A bundle has two graphs, and each is a session of ONNX Runtime. With threads of its own each must stop them after a call, or they
    would take the cores from the next call, which is the other's; and to wake a thread takes long where cores are virtual. Threads that
    are shared wait awake between calls. The command ``specstream`` does this for `generate`, `chat`, `verify`, `bench` and `tune`.

    ONNX Runtime has one such pool in a process, of a size that cannot be changed. So bundles must all be opened with the same number of
    threads, and a program that makes sessions of its own afterwards must set ``use_per_session_threads = False`` in their options, or
    ONNX Runtime refuses. That is why it has to be asked for.
    """
    _pool.wanted = True


def sharing() -> bool:
    """Whether bundles opened now share threads."""
    return _pool.wanted


def join_pool(threads: int) -> bool:
    """Whether a session with so many threads is to run on the shared pool, which is made when it is not there yet.

    Raises:
        UserError: there is a pool of another size.
    """
    if _pool.size is None and (not _pool.wanted or threads == 1):
        return False  # one thread is the caller's own
    if _pool.size is None:
        import onnxruntime as ort

        ort.set_global_thread_pool_sizes(threads, 1)
        _pool.size = threads
    if _pool.size != threads:
        raise UserError(
            f"threads: {threads} given, but bundles of this process share {_pool.size}; open all with as many, or leave share_threads() out"
        )
    return True
