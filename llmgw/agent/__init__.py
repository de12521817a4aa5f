"""The node's daemon: starts, watches and stops engines, and reports them."""
