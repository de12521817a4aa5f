"""Jobs of this node: weights that are fetched and engines that are installed, each in a process of its own."""
