"""The target's side of a round: its forwards, its inputs, its cache."""
