"""The tests. `models` has the tiny models and the oracle that all of them share."""
