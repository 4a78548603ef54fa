"""FAVOR+, attention of random features: a Performer's own, or in place of dense attention."""
