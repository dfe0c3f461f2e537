"""What commands have in common: usage texts, and arguments that ask something of texts."""
