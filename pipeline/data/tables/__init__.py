"""Tables of numbers and categories, from CSV and Parquet files."""
