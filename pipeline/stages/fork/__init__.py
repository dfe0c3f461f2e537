"""Fork: a run that begins with the state of another run at one of its steps."""
