"""What a worker does for each method."""
