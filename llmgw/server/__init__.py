"""The control plane's daemon: wiring, the reconcile loop and the service that agents talk to."""
