"""What hfspec knows about transformers: its releases, its architectures, what it hands over, and what follows."""
