"""Dense attention: every query sees every real token."""
