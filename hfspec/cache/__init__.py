"""Caches: the one we write ourselves, and whether a model's or a user's can be rolled back."""
