"""Usage texts that commands show, and arguments that ask something of texts."""
