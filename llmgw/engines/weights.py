"""What a profile's ``weights`` mean: a path, or a repository on a hub.

* ``/models/llama`` is that path, ``./llama``, ``llama`` and anything that ends in ``.gguf`` are below the node's
  ``weights_dir``; none may lead out of it;
* ``hf:org/name@revision`` is fetched by the agent before the engine is started (:mod:`llmgw.settings.sources`): by then
  it is a path;
* ``org/name`` is a repository, which the engine finds in its cache or fetches (llama.cpp takes files only: there it is
  a path as well).
"""

from __future__ import annotations

import re

from attrs import frozen

from llmgw.errors import OperatorError
from llmgw.settings.catalog import EngineKind
from llmgw.settings.paths import below
from llmgw.settings.sources import PREFIX

_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")


@frozen
class Weights:
    """Where the weights are: ``name`` is what the engine is told, ``local`` whether that is a path."""

    name: str
    local: bool


def weights_of(text: str, kind: EngineKind, weights_dir: str) -> Weights:
    """Resolve a profile's ``weights``. Raises :class:`OperatorError` when they lead out of ``weights_dir``."""
    if text.startswith(PREFIX):
        raise OperatorError(f"weights {text}", "are not on this node", "let the agent fetch them first")
    repository = not text.startswith("/") and _REPOSITORY.fullmatch(text) and not text.endswith(".gguf")
    if repository and kind is not EngineKind.LLAMACPP:
        return Weights(text, False)
    return Weights(_within(text, weights_dir, "weights"), True)


def adapter_path(text: str, weights_dir: str) -> str:
    """Where an adapter is: always a path. Raises :class:`OperatorError` when it leads out of ``weights_dir``."""
    path = _within(text, weights_dir, "adapter")
    if any(c in path for c in " ,="):
        raise OperatorError(f"adapter {path}", "has a space, comma or = in its path", "move it, or its weights_dir")
    return path


def _within(text: str, weights_dir: str, what: str) -> str:
    path = below(text, weights_dir)
    if path is None:
        raise OperatorError(f"{what} {text}", f"leads out of {weights_dir}", "name a path below it")
    return path
