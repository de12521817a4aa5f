"""The settings as they hold, every default filled in, in the shape in which they are written. Pure."""

from __future__ import annotations

from typing import Any

from llmgw.settings.convert import strict_converter
from llmgw.settings.document import Settings

_CONVERTER = strict_converter()


def plain(settings: Settings) -> dict[str, Any]:
    """The document as plain values: models by name."""
    made: dict[str, Any] = _CONVERTER.unstructure(settings)
    models = {model["name"]: {k: v for k, v in model.items() if k != "name"} for model in made.pop("models")}
    return {"models": models, **made}
