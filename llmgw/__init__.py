"""llmgw: one OpenAI-compatible address in front of a fleet of GPU machines."""

__version__ = "0.1.0"
