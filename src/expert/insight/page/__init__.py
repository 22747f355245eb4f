"""The report: one HTML file that needs nothing else, and the same in Markdown."""
