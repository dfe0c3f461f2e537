"""Choice of lowerings by measurement, and files of the results."""
