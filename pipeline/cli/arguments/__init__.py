"""The table of commands, usage texts, and arguments that ask something of texts."""
