"""Draft sources: whatever proposes tokens."""
