"""Several processes of one run: starting them, finding one's place among them, ending them."""
