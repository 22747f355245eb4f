"""What was asked: reads, checks, migrates and explains manifests of every layout."""
