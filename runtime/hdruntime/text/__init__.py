"""What tasks share: tokens, chunks of long texts, poolings, and scores."""
