"""Learning from a teacher's distribution over the next token: divergences, their teacher columns and their loss."""
