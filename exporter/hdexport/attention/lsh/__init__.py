"""LSH attention: tokens attend to those whose hashes are alike; and the local attention of its chunks."""
