"""Pages and pictures: templates, a style and charts that all commands share."""
