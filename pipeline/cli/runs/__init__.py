"""Commands about runs that are done."""
