"""LSH attention: tokens attend to tokens whose hashes are alike; and the local attention of its chunks."""
