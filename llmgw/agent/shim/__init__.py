"""The parent of one engine; :mod:`llmgw.agent.shim.main` says what it does. Standard library only."""
