"""Randomness and logits processing as vanilla does them."""
