"""What hardware a node has, read from the machine or from a folder that stands in for one."""
