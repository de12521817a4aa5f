"""What runs where, and why: pure functions from a cluster's state to decisions and explanations."""
