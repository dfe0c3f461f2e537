"""Sources of data, which are components of kind "dataset". A module has one family of sources."""
