"""What is wrong with a node and how to put it right: facts that were read once, and checks that judge them."""
