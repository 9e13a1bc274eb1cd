"""The verdict: which draft tokens the target takes over."""
