"""Stores of the network, and the bounded cache that a node keeps of them."""
