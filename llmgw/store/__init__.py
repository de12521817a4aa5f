"""What the control plane must remember."""
