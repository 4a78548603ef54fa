"""What tasks share: tokens, pieces of long texts, poolings, and scores."""
