"""What a node is made of: pure types and the arithmetic on them."""
