"""What a model's own files say of its size; the parsers are in :mod:`llmgw.engines.weight_files`.

Here, because the settings' check, the scheduler and the agent count with the same values.
"""

from __future__ import annotations

from attrs import frozen


@frozen
class CacheShape:
    """What the model keeps of each token.

    ``layers`` are those with attention, of ``all_layers``; ``window_layers`` of them keep the last ``window`` tokens
    only. A token takes ``kv_heads * (key_dim + value_dim)`` elements in a layer, or ``latent_dim`` where it is kept
    compressed (MLA). ``dtype`` is what the files ask for, empty for the engine's choice.
    """

    layers: int
    all_layers: int
    kv_heads: int
    key_dim: int
    value_dim: int
    latent_dim: int = 0
    window_layers: int = 0
    window: int = 0
    dtype: str = ""


@frozen
class WeightFacts:
    """What is known of the weights that profiles call ``name``.

    ``weights_bytes`` is how large they are in the files and ``source`` what said so. ``dtype`` and ``quantization`` are
    the files' words. ``context_length`` is the longest that the model was made for. What they do not say is ``None``.
    """

    name: str
    weights_bytes: int | None = None
    source: str = ""
    parameters: int | None = None
    dtype: str = ""
    quantization: str = ""
    cache: CacheShape | None = None
    context_length: int | None = None
