"""Performer, with model classes of its own, which read state dicts of lucidrains' performer-pytorch."""
