"""What hfspec takes for granted about transformers and torch: the host is tested here, not hfspec."""
