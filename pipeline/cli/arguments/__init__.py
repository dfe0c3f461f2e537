"""Arguments that ask something of texts."""
