"""One mutually authenticated HTTP/2 stream between a node's agent and the control plane."""
