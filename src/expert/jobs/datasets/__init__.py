"""expert dataset and find-datasets: check rows, find and gather data sets."""
