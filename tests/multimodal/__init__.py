"""Calls that are more than a text: images, sounds, and the encoder behind a decoder."""
