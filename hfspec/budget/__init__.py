"""How many tokens to draft: what rounds cost, what they bring, and the choice."""
