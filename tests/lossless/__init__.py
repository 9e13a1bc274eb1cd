"""Same tokens: the oracle is always the same call on the unpatched model."""
